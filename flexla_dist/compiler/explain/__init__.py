"""What the compiler makes of a spec: `explain(spec, ...)` prints, and writes a page."""

from flexla_dist.compiler.explain.explanation import Explanation, PassView, explain

__all__ = ["Explanation", "PassView", "explain"]

"""What is computed: specs, domain operators, the package's variants and their oracles."""

from flexla_dist.spec.spec import InputSpec, LinearAttentionSpec, LogScaled
from flexla_dist.spec.values import Values

__all__ = ["InputSpec", "LinearAttentionSpec", "LogScaled", "Values"]

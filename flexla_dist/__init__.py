"""Linear attention from three chunk callables, compiled, and sharded over the sequence.

    op = flexla_dist.compile(LinearAttentionSpec(...))   # an operator with a derived backward
    print(flexla_dist.explain(op))                       # its graphs, plans and kernels
    SequenceParallelLA(layer, mesh["cp"])                # a layer on a part of a sequence

Public names are imported when they are first used: `import flexla_dist` itself imports nothing, not
even torch. `ops` and `layers` are modules; `functional` is `flexla_dist.spec.functional`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexla_dist import layers, ops
    from flexla_dist.compiler.explain import explain
    from flexla_dist.ops.op import LinearAttentionOp, compile
    from flexla_dist.parallel import (
        SequenceParallelLA,
        SequenceParallelOp,
        global_token_count,
        mean_loss,
        parallelize_sequence,
        sequence_context,
        sequence_loss,
        shard_sequence,
        shift_labels,
        unshard_sequence,
    )
    from flexla_dist.spec import LinearAttentionSpec, LogScaled, functional

__version__ = "0.1.0"

_HOMES = {
    "LinearAttentionOp": "flexla_dist.ops.op",
    "LinearAttentionSpec": "flexla_dist.spec",
    "LogScaled": "flexla_dist.spec",
    "SequenceParallelLA": "flexla_dist.parallel",
    "compile": "flexla_dist.ops.op",
    "explain": "flexla_dist.compiler.explain",
    "parallelize_sequence": "flexla_dist.parallel",
    "sequence_context": "flexla_dist.parallel",
    "sequence_loss": "flexla_dist.parallel",
    "shard_sequence": "flexla_dist.parallel",
    "unshard_sequence": "flexla_dist.parallel",
    "SequenceParallelOp": "flexla_dist.parallel",
    "global_token_count": "flexla_dist.parallel",
    "mean_loss": "flexla_dist.parallel",
    "shift_labels": "flexla_dist.parallel",
}
_MODULES = {
    "functional": "flexla_dist.spec.functional",
    "layers": "flexla_dist.layers",
    "ops": "flexla_dist.ops",
}

__all__ = [
    "LinearAttentionOp",
    "LinearAttentionSpec",
    "LogScaled",
    "SequenceParallelLA",
    "SequenceParallelOp",
    "__version__",
    "compile",
    "explain",
    "functional",
    "global_token_count",
    "layers",
    "mean_loss",
    "ops",
    "parallelize_sequence",
    "sequence_context",
    "sequence_loss",
    "shard_sequence",
    "shift_labels",
    "unshard_sequence",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

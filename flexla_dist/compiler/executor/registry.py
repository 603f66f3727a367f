"""Executors by name, and which one a device gets when none is named.

Contract: nothing falls back. An executor that cannot run here is an ExecutorError that says what is
missing; Triton is imported only when its executor is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flexla_dist.compiler.executor.torch_executor import TorchExecutor
from flexla_dist.compiler.pipeline import Graphs
from flexla_dist.errors import ExecutorError
from flexla_dist.shapes import nearest
from flexla_dist.spec.spec import LinearAttentionSpec

NAMES = ("torch", "triton")


def default_executor(
    spec: LinearAttentionSpec, device: torch.device | None, dtype: torch.dtype | None = None
) -> str:
    """The executor of a call that names none.

    `triton` on CUDA devices for plain states computed in float32; `torch` elsewhere, for
    log-scaled states, and for calls computed in float64, which the kernels do not have.
    """
    on_cuda = device is not None and device.type == "cuda"
    plain = spec.log_scaled is None and dtype != torch.float64
    return "triton" if on_cuda and plain else "torch"


def make_executor(name: str, graphs: Graphs, tuned: Path | None = None) -> Any:
    """The executor called `name` for compiled graphs; `tuned`: the tuning database that the triton
    executor reads in place of the user's own."""
    if not isinstance(name, str):
        raise ExecutorError(f"executor is {name!r}; expected one of the names: {', '.join(NAMES)}")
    if name == "torch":
        return TorchExecutor(graphs)
    if name == "triton":
        try:
            from flexla_dist.compiler.executor.choosing import Tuned
            from flexla_dist.compiler.executor.triton_executor import TritonExecutor
        except ImportError as missing:
            raise ExecutorError(
                f"executor 'triton' needs the package triton>=3.6 ({missing}); install it with "
                "pip install 'triton>=3.6', or choose executor='torch'"
            ) from missing
        return TritonExecutor(graphs, Tuned(tuned))
    raise ExecutorError(
        f"executor {name!r} does not exist{nearest(name, NAMES)}; "
        f"expected one of: {', '.join(NAMES)}"
    )

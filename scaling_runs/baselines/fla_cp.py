"""FLA's own context parallelism, where FLA is installed: gated delta rule and KDA on CUDA."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scaling_runs.baselines.shard import Refused, Sharding, Values

FUNCTIONS = {
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
}


@dataclass(eq=False)
class FlaAttend:
    """A callable (inputs, params, scalars) -> output on this rank's shard.

    FLA takes one packed row; a batch of B rows is B calls, and B times its collectives.
    """

    op: Any
    sharding: Sharding
    _context: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_variant(self.op.spec.name)
        self._function = _load(*FUNCTIONS[self.op.spec.name])
        if not self.sharding.equal:
            raise Refused(
                f"fla_cp cuts a sequence in equal parts, got shards of {self.sharding.lengths} "
                "tokens; give every rank the same number"
            )

    def __call__(self, inputs: Values, params: Values, scalars: Mapping[str, float]) -> Tensor:
        """The output [B, T_local, HV, V]."""
        first = next(iter(inputs.values()))
        if first.device.type != "cuda":
            raise Refused(
                f"fla_cp runs on CUDA tensors, got {first.device}: its kernels are Triton's"
            )
        context = self._made(first.device)
        rows = []
        for row in range(first.shape[0]):
            some = {name: x[row : row + 1] for name, x in inputs.items()}
            rows.append(self._function(**some, **scalars, cp_context=context)[0])
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _made(self, device: torch.device) -> Any:
        if self._context is None:
            build = _load("fla.ops.cp", "build_cp_context")
            starts = torch.tensor([0, sum(self.sharding.lengths)], dtype=torch.int64)
            self._context = build(
                starts.to(device), group=self.sharding.ranks.group, cu_seqlens_cpu=starts
            )
        return self._context


def check_variant(name: str) -> None:
    """Raises Refused for a variant that FLA does not shard."""
    if name not in FUNCTIONS:
        raise Refused(
            f"fla_cp has no context parallelism for {name}; it has it for {', '.join(FUNCTIONS)}"
        )


def _load(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as missing:
        raise Refused(
            f"fla_cp needs flash-linear-attention ({missing}); install it with "
            "pip install 'flash-linear-attention>=0.6.0'"
        ) from missing

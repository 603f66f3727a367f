"""A call by its shapes alone.

Contract: tensors without memory (device "meta"), checked as those of a real call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexla_dist.compiler.executor.bind import bind
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.trace.stages import dim_names
from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, nearest
from flexla_dist.spec.spec import LinearAttentionSpec


def describe(
    spec: LinearAttentionSpec,
    *,
    batch: int,
    tokens: int,
    heads: int,
    value_heads: int,
    sizes: Mapping[str, int],
    other: int,
    dtype: torch.dtype,
    cu_seqlens: Sequence[int] | None,
    chunk_size: int | None,
) -> Problem:
    """The call; dims that `sizes` does not name have the size `other`, parameters are float32."""
    known = dim_names(spec)
    for name in sizes:
        if name not in (*known, "K", "V") or name == TOKEN_DIM:
            dims = [dim for dim in known if dim != TOKEN_DIM]
            raise ArgumentError(
                f"{spec.name} has no dim {name!r}{nearest(name, dims)}; its dims are "
                f"{', '.join(dims)}"
            )
    numbers = {"B": batch, "T": tokens, "H": heads, "HV": value_heads, **sizes}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(f"{name} is {value!r}; expected a whole number")
        if value < 1:
            raise ArgumentError(f"{name} is {value}; expected at least 1")

    def size(dim: str) -> int:
        return 1 if dim == UNIT_DIM else sizes.get(dim, other)

    def empty(kind: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    inputs = {
        name: empty(
            dtype,
            batch,
            tokens,
            value_heads if item.group is None else heads,
            *map(size, item.dims[1:]),
        )
        for name, item in spec.input_specs.items()
    }
    params = {
        name: empty(torch.float32, value_heads, *map(size, item.dims))
        for name, item in spec.param_specs.items()
    }
    scalars = {name: 1.0 if value is None else value for name, value in spec.scalars.items()}
    return bind(spec, inputs, params, scalars, cu_seqlens, chunk_size)

"""Heads, documents and states of a call, as the reference evaluators see them.

Contract: reads shapes and names and raises ArgumentError; computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.shapes import nearest
from flexla_dist.spec.spec import LinearAttentionSpec

States = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """Batch, tokens, state heads HV, documents N and the sizes of the named dims of one call."""

    batch: int
    tokens: int
    heads: int
    documents: int
    packed: bool
    sizes: Mapping[str, int]
    device: torch.device

    @staticmethod
    def of(
        spec: LinearAttentionSpec,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        cu_seqlens: Tensor | None,
    ) -> Layout:
        """Layout of a call; raises ArgumentError on names and shapes that do not fit."""
        _check_names(spec, "input", spec.inputs, inputs)
        _check_names(spec, "parameter", spec.params, params)
        first = next(iter(inputs.values()))
        batch, tokens = first.shape[:2]
        heads = max(x.shape[2] for x in inputs.values())
        sizes: dict[str, int] = {}
        for name, item in spec.input_specs.items():
            x = inputs[name]
            _check_shape(spec, name, x, 3 + len(item.dims) - 1)
            if x.shape[:2] != (batch, tokens) or heads % x.shape[2]:
                raise ArgumentError(
                    f"{spec.name}: input {name!r} is {list(x.shape)}; expected [B, T, heads, ...] "
                    f"with B = {batch}, T = {tokens} and heads dividing {heads}"
                )
            _take_sizes(spec, name, sizes, item.dims[1:], x.shape[3:])
        for name, item in spec.param_specs.items():
            _check_shape(spec, name, params[name], 1 + len(item.dims))
            if params[name].shape[0] != heads:
                raise ArgumentError(
                    f"{spec.name}: parameter {name!r} is {list(params[name].shape)}; "
                    f"expected [HV, ...] with HV = {heads}"
                )
            _take_sizes(spec, name, sizes, item.dims, params[name].shape[1:])
        packed = cu_seqlens is not None
        if packed and batch != 1:
            raise ArgumentError(f"{spec.name}: cu_seqlens means B = 1, got B = {batch}")
        documents = batch if cu_seqlens is None else len(cu_seqlens) - 1
        return Layout(batch, tokens, heads, documents, packed, sizes, first.device)


def _check_names(
    spec: LinearAttentionSpec, kind: str, known: Mapping[str, str], got: Mapping[str, Tensor]
) -> None:
    for name in got:
        if name not in known:
            raise ArgumentError(
                f"{spec.name}: no {kind} named {name!r}{nearest(name, known)}; "
                f"expected {', '.join(known) or 'none'}"
            )
    missing = [name for name in known if name not in got]
    if missing:
        raise ArgumentError(f"{spec.name}: {kind} {', '.join(missing)} missing")


def _check_shape(spec: LinearAttentionSpec, name: str, x: Tensor, ndim: int) -> None:
    if x.ndim != ndim:
        raise ArgumentError(f"{spec.name}: {name!r} needs {ndim} dims, got {list(x.shape)}")


def _take_sizes(
    spec: LinearAttentionSpec,
    name: str,
    sizes: dict[str, int],
    dims: tuple[str, ...],
    shape: torch.Size,
) -> None:
    for dim, size in zip(dims, shape, strict=True):
        if sizes.setdefault(dim, size) != size:
            raise ArgumentError(
                f"{spec.name}: {name!r} has {dim} = {size}, elsewhere {dim} = {sizes[dim]}"
            )


def scalar_values(spec: LinearAttentionSpec, scalars: Mapping[str, float]) -> dict[str, float]:
    """Run-time numbers, defaults filled in; raises ArgumentError for unknown or missing ones."""
    for name in scalars:
        if name not in spec.scalars:
            raise ArgumentError(f"{spec.name}: no scalar named {name!r}")
    values = {name: scalars.get(name, default) for name, default in spec.scalars.items()}
    for name, value in values.items():
        if value is None:
            raise ArgumentError(f"{spec.name}: scalar {name!r} has no default and must be given")
    return {name: float(value) for name, value in values.items() if value is not None}


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """`[B, T, H, ...]` read at head `h // (heads / H)`: `[B, T, heads, ...]`."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def document_spans(
    layout: Layout, cu_seqlens: Tensor | None
) -> Iterator[tuple[slice, slice, int, int]]:
    """(batch rows, documents, first token, end) of the runs that are evaluated together."""
    if cu_seqlens is None:
        yield slice(None), slice(None), 0, layout.tokens
        return
    bounds = cu_seqlens.tolist()
    for n in range(layout.documents):
        yield slice(0, 1), slice(n, n + 1), bounds[n], bounds[n + 1]


def named_states(
    spec: LinearAttentionSpec, layout: Layout, initial: States | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """States `[N, HV, ...]` by name, zeros by default; for a log-scaled spec also `m` (-inf)."""
    names = [*spec.state_dims, *(["m"] if spec.log_scaled is not None else [])]
    shapes = {
        name: (layout.documents, layout.heads, *(layout.sizes.get(dim, 1) for dim in dims))
        for name, dims in {**spec.state_dims, "m": ()}.items()
    }
    if initial is None:
        return {
            name: torch.full(
                shapes[name], -torch.inf if name == "m" else 0.0, dtype=dtype, device=layout.device
            )
            for name in names
        }
    values = initial if isinstance(initial, tuple | list) else (initial,)
    if len(values) != len(names):
        raise ArgumentError(
            f"{spec.name}: initial_state has {len(values)} tensors, expected {len(names)}: "
            f"{', '.join(names)}"
        )
    for name, value in zip(names, values, strict=True):
        if not value.is_floating_point():
            raise ArgumentTypeError(
                f"{spec.name}: initial state {name!r} has dtype {value.dtype}; expected a floating "
                "type such as float32: convert it with .float()"
            )
        if tuple(value.shape) != shapes[name]:
            raise ArgumentError(
                f"{spec.name}: initial state {name!r} is {list(value.shape)}, "
                f"expected {list(shapes[name])}"
            )
    return {name: value.to(dtype) for name, value in zip(names, values, strict=True)}


def ordered_states(states: Mapping[str, Tensor]) -> States:
    """One tensor for a single state, else a tuple in declared order (m last)."""
    values = tuple(states.values())
    return values[0] if len(values) == 1 else values

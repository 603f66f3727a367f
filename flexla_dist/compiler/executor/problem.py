"""One call of a compiled operator: its tensors, checked against the spec.

Contract: `bind` turns keyword tensors into a `Problem` or raises ArgumentError /
ArgumentTypeError that name the argument, what was got, what was expected and the fix. Nothing
here computes or synchronises a device, except reading `cu_seqlens` when it lives on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexla_dist.compiler.executor.layout import ChunkLayout, fitting_chunk_size, make_layout
from flexla_dist.compiler.trace.stages import LOG_SCALE
from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims, nearest
from flexla_dist.spec.spec import InputSpec, LinearAttentionSpec

DEFAULT_CHUNK_SIZE = 64
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Problem:
    """Checked arguments of one call.

    `heads` is HV. `sizes` maps every dim but C to its size. `compute_dtype` is float64 for float64
    inputs, else float32; states have it. `num_sequences` is the N of initial and final states.
    """

    spec: LinearAttentionSpec
    inputs: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    scalars: Mapping[str, float]
    layout: ChunkLayout
    heads: int
    sizes: Mapping[str, int]
    device: torch.device
    compute_dtype: torch.dtype
    output_dtype: torch.dtype

    @property
    def batch(self) -> int:
        """B."""
        return self.layout.batch

    @property
    def tokens(self) -> int:
        """T."""
        return self.layout.tokens

    @property
    def num_sequences(self) -> int:
        """N: B unpacked, the number of documents packed."""
        return self.layout.documents

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors in order; a log-scaled spec has `m` last."""
        names = tuple(self.spec.state_dims)
        return (*names, LOG_SCALE) if self.spec.log_scaled is not None else names

    def state_shape(self, name: str, documents: int | None = None) -> tuple[int, ...]:
        """[N, HV, *dims] of a state."""
        dims: Dims = () if name == LOG_SCALE else self.spec.state_dims[name]
        count = self.num_sequences if documents is None else documents
        return (count, self.heads, *(self.size(dim) for dim in dims))

    def size(self, dim: str) -> int:
        """Size of a dim other than C."""
        return 1 if dim == UNIT_DIM else self.sizes[dim]

    def output_shape(self) -> tuple[int, ...]:
        """[B, T, HV, ...] of the output."""
        dims = self.spec.output_dims[1:]
        return (self.batch, self.tokens, self.heads, *(self.size(dim) for dim in dims))

    def zero_state(self) -> tuple[Tensor, ...]:
        """States before the first token: zeros, and -inf for the log scale."""
        return tuple(
            torch.full(
                self.state_shape(name),
                -torch.inf if name == LOG_SCALE else 0.0,
                dtype=self.compute_dtype,
                device=self.device,
            )
            for name in self.state_names
        )

    def entry_state(self, initial: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """The given initial state checked and in the compute dtype, or zeros."""
        if initial is None:
            return self.zero_state()
        names = self.state_names
        given = (initial,) if isinstance(initial, Tensor) else tuple(initial)
        if len(given) != len(names):
            raise ArgumentError(
                f"{self.spec.name}: initial_state has {len(given)} tensor(s); expected "
                f"{len(names)}: ({', '.join(names)})"
            )
        for name, state in zip(names, given, strict=True):
            self._check_state(name, state)
        return tuple(state.to(self.compute_dtype) for state in given)

    def _check_state(self, name: str, state: Tensor) -> None:
        if not isinstance(state, Tensor):
            raise ArgumentTypeError(
                f"{self.spec.name}: initial state {name!r} is {type(state).__name__}, not a tensor"
            )
        expected = self.state_shape(name)
        if tuple(state.shape) != expected:
            dims = self.spec.state_dims.get(name, ())
            letters = ", ".join(("N", "HV", *dims))
            raise ArgumentError(
                f"{self.spec.name}: initial state {name!r} has shape {tuple(state.shape)}; expected "
                f"{expected} = [{letters}], one state a document"
            )
        if state.device != self.device:
            raise ArgumentError(
                f"{self.spec.name}: initial state {name!r} is on {state.device}, the inputs on {self.device}"
            )


def bind(
    spec: LinearAttentionSpec,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    scalars: Mapping[str, float],
    cu_seqlens: Tensor | Sequence[int] | None = None,
    chunk_size: int | None = None,
) -> Problem:
    """Check the arguments of a call and describe it."""
    _check_tensors(spec, "input", inputs, spec.inputs)
    _check_tensors(spec, "parameter", params, spec.params)
    batch, tokens, device = _leading(spec, inputs)
    heads = _heads(spec, inputs)
    sizes = _sizes(spec, inputs, params, heads)
    offsets = None if cu_seqlens is None else _offsets(spec, cu_seqlens, batch, tokens)
    longest = (
        tokens
        if offsets is None
        else max((b - a for a, b in zip(offsets, offsets[1:], strict=False)), default=0)
    )
    limit = DEFAULT_CHUNK_SIZE if chunk_size is None else chunk_size
    size = limit if longest >= limit else fitting_chunk_size(longest, limit)
    double = any(x.dtype == torch.float64 for x in (*inputs.values(), *params.values()))
    return Problem(
        spec=spec,
        inputs=dict(inputs),
        params=dict(params),
        scalars=_scalars(spec, scalars),
        layout=make_layout(batch, tokens, size, offsets),
        heads=heads,
        sizes=sizes,
        device=device,
        compute_dtype=torch.float64 if double else torch.float32,
        output_dtype=_output_dtype(spec, inputs),
    )


# -- checks ---------------------------------------------------------------------------------------


def _check_tensors(
    spec: LinearAttentionSpec, kind: str, given: Mapping[str, Tensor], declared: Mapping[str, str]
) -> None:
    for name in given:
        if name not in declared:
            raise ArgumentError(
                f"{spec.name}: unexpected {kind} {name!r}{nearest(name, declared)}; "
                f"expected {', '.join(declared) or 'none'}"
            )
    for name in declared:
        if name not in given or given[name] is None:
            raise ArgumentError(
                f"{spec.name}: {kind} {name!r} is missing; expected {', '.join(declared)}"
            )
        value = given[name]
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"{spec.name}: {kind} {name!r} is {type(value).__name__}; expected a tensor"
            )
        if value.dtype not in FLOAT_TYPES:
            raise ArgumentTypeError(
                f"{spec.name}: {kind} {name!r} has dtype {value.dtype}; expected float16, bfloat16, "
                "float32 or float64"
            )


def _letters(item: InputSpec) -> str:
    heads = "HV" if item.group is None else "H"
    return "[" + ", ".join(("B", "T", heads, *item.dims[1:])) + "]"


def _leading(
    spec: LinearAttentionSpec, inputs: Mapping[str, Tensor]
) -> tuple[int, int, torch.device]:
    first_name, first = next((n, inputs[n]) for n in spec.inputs)
    for name, item in spec.input_specs.items():
        x = inputs[name]
        if x.dim() != 2 + len(item.dims):
            raise ArgumentError(
                f"{spec.name}: input {name!r} has shape {tuple(x.shape)}; expected "
                f"{2 + len(item.dims)} dims {_letters(item)}"
            )
        if x.shape[:2] != first.shape[:2]:
            raise ArgumentError(
                f"{spec.name}: input {name!r} has [B, T] = {tuple(x.shape[:2])}, {first_name!r} has "
                f"{tuple(first.shape[:2])}; the layout is [B, T, heads, ...], tokens before heads"
            )
        if x.device != first.device:
            raise ArgumentError(
                f"{spec.name}: input {name!r} is on {x.device}, {first_name!r} on {first.device}"
            )
    return int(first.shape[0]), int(first.shape[1]), first.device


def _heads(spec: LinearAttentionSpec, inputs: Mapping[str, Tensor]) -> int:
    found: dict[str | None, tuple[str, int]] = {}
    for name, item in spec.input_specs.items():
        heads = int(inputs[name].shape[2])
        known = found.setdefault(item.group, (name, heads))
        if known[1] != heads:
            raise ArgumentError(
                f"{spec.name}: input {name!r} has {heads} heads, {known[0]!r} has {known[1]}; inputs "
                "of one head group must agree"
            )
    value_heads = found[None][1] if None in found else max(h for _, h in found.values())
    for group, (name, heads) in found.items():
        if heads == 0 or value_heads % heads:
            raise ArgumentError(
                f"{spec.name}: input {name!r} of head group {group!r} has {heads} heads, which must "
                f"divide the {value_heads} heads of the state"
            )
    return value_heads


def _sizes(
    spec: LinearAttentionSpec,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    heads: int,
) -> dict[str, int]:
    found: dict[str, tuple[str, int]] = {}

    def learn(name: str, dims: Dims, shape: Sequence[int]) -> None:
        for dim, size in zip(dims, shape, strict=True):
            if dim == TOKEN_DIM:
                continue
            if dim == UNIT_DIM:
                known = ("the spec", 1)
            else:
                known = found.setdefault(dim, (name, int(size)))
            if known[1] != size:
                raise ArgumentError(
                    f"{spec.name}: dim {dim} is {size} in {name!r} and {known[1]} in {known[0]!r}"
                )

    for name, item in spec.input_specs.items():
        learn(name, item.dims[1:], inputs[name].shape[3:])
    for name, item in spec.param_specs.items():
        shape = tuple(params[name].shape)
        if len(shape) != 1 + len(item.dims) or shape[0] != heads:
            letters = ", ".join(("HV", *item.dims))
            raise ArgumentError(
                f"{spec.name}: parameter {name!r} has shape {shape}; expected [{letters}] with "
                f"HV = {heads}"
            )
        learn(name, item.dims, shape[1:])
    return {dim: size for dim, (_, size) in found.items()}


def _scalars(spec: LinearAttentionSpec, given: Mapping[str, float]) -> dict[str, float]:
    for name in given:
        if name not in spec.scalars:
            raise ArgumentError(
                f"{spec.name}: unexpected scalar {name!r}{nearest(name, spec.scalars)}; "
                f"expected {', '.join(spec.scalars) or 'none'}"
            )
    out = {}
    for name, default in spec.scalars.items():
        value = given.get(name, default)
        value = default if value is None else value
        if value is None:
            raise ArgumentError(f"{spec.name}: scalar {name!r} has no default and must be given")
        if isinstance(value, Tensor | bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(
                f"{spec.name}: scalar {name!r} is {type(value).__name__}; expected a Python number. "
                "For a learned number declare a parameter"
            )
        out[name] = float(value)
    return out


def _offsets(
    spec: LinearAttentionSpec, cu_seqlens: Tensor | Sequence[int], batch: int, tokens: int
) -> tuple[int, ...]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
            raise ArgumentTypeError(
                f"{spec.name}: cu_seqlens is {cu_seqlens.dtype} with shape {tuple(cu_seqlens.shape)}; "
                "expected int32 or int64 with shape [N + 1]"
            )
        offsets = tuple(cu_seqlens.tolist())
    else:
        offsets = tuple(int(x) for x in cu_seqlens)
    if batch != 1:
        raise ArgumentError(
            f"{spec.name}: cu_seqlens packs documents along T and needs B = 1, got B = {batch}; "
            "reshape [B, T] to [1, B * T]"
        )
    wrong = [a for a, b in zip(offsets, offsets[1:], strict=False) if b < a]
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != tokens or wrong:
        raise ArgumentError(
            f"{spec.name}: cu_seqlens = {_shorten(offsets)}; expected non-decreasing offsets from 0 "
            f"to T = {tokens}"
        )
    return offsets


def _shorten(offsets: Sequence[int]) -> str:
    shown = list(offsets)
    return str(shown) if len(shown) <= 12 else f"{shown[:6]} ... {shown[-3:]}"


def _output_dtype(spec: LinearAttentionSpec, inputs: Mapping[str, Tensor]) -> torch.dtype:
    last = spec.output_dims[-1]
    for name, item in spec.input_specs.items():
        if item.dims[-1] == last and not item.log_decay:
            return inputs[name].dtype
    return next(iter(inputs.values())).dtype

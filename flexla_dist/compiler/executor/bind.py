"""Checks the arguments of a call against the spec.

Contract: `bind` turns keyword tensors into a `Problem` or raises ArgumentError / ArgumentTypeError
that name the argument, what was got, what was expected and the fix. Nothing here computes or
synchronises a device, except reading `cu_seqlens` when it lives on one. `outline` reads no
numbers at all: under a compiler B, T and N stay symbolic in it, heads and sizes become constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexla_dist.compiler.executor.layout import fitting_chunk_size, make_layout
from flexla_dist.compiler.executor.problem import Outline, Problem
from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims, nearest, whole_numbers
from flexla_dist.spec.spec import InputSpec, LinearAttentionSpec

DEFAULT_CHUNK_SIZE = 64
WIDE_CHUNK_SIZE = 32  # where the rows of a chunk and a tile of the state would fill shared memory
WIDE_ROW_BYTES = 512
MOST_KNOWN = 256  # calls of an operator that are not checked again; the oldest goes
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def bind(
    spec: LinearAttentionSpec,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    scalars: Mapping[str, float],
    cu_seqlens: Tensor | Sequence[int] | None = None,
    chunk_size: int | None = None,
) -> Problem:
    """Check the arguments of a call and describe it."""
    offsets = None if cu_seqlens is None else read_offsets(spec, cu_seqlens)
    known = outline(spec, inputs, params, None if offsets is None else len(offsets) - 1, chunk_size)
    longest = known.tokens
    if offsets is not None:
        _check_offsets(spec, offsets, known.tokens)
        longest = max(b - a for a, b in pairwise(offsets))
    size = fitting_chunk_size(longest, known.longest_chunk)
    return Problem(
        **vars(known),
        inputs=dict(inputs),
        params=dict(params),
        scalars=_scalars(spec, scalars),
        layout=make_layout(known.batch, known.tokens, size, offsets),
    )


class Binder:
    """`bind` for calls again and again: arguments of shapes, dtypes and documents that were checked
    before are not checked again, and their problems are of one family."""

    def __init__(self, spec: LinearAttentionSpec, chunk_size: int | None = None):
        self.spec, self.chunk_size = spec, chunk_size
        self._known: dict[Any, Problem] = {}  # without tensors

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        scalars: Mapping[str, float],
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> Problem:
        """Check the arguments of a call and describe it; raises what `bind` raises."""
        spec = self.spec
        offsets = None if cu_seqlens is None else read_offsets(spec, cu_seqlens)
        key = _signature(inputs, params, offsets)
        known = None if key is None else self._known.get(key)
        if known is not None:
            return known.with_tensors(dict(inputs), dict(params), _scalars(spec, scalars))
        made = bind(spec, inputs, params, scalars, offsets, self.chunk_size)
        if key is not None:
            if len(self._known) >= MOST_KNOWN:
                self._known.pop(next(iter(self._known)), None)
            self._known[key] = made.with_tensors({}, {})
        return made


def _signature(
    inputs: Mapping[str, Tensor], params: Mapping[str, Tensor], offsets: tuple[int, ...] | None
) -> tuple[Any, ...] | None:
    """What the checks of a call look at; None for what is no tensor or has symbolic shapes."""
    out: list[Any] = [offsets]
    for kind in (inputs, params):
        for name, x in kind.items():
            if not isinstance(x, Tensor):
                return None
            out += (name, x.shape, x.dtype, x.device)
        out.append(None)
    try:
        hash(key := tuple(out))
    except TypeError:
        return None
    return key


def outline(
    spec: LinearAttentionSpec,
    inputs: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    documents: int | None = None,
    chunk_size: int | None = None,
) -> Outline:
    """Check shapes and dtypes; `documents` is the N of a packed call."""
    _check_tensors(spec, "input", inputs, spec.inputs)
    _check_tensors(spec, "parameter", params, spec.params)
    batch, tokens, device = _leading(spec, inputs)
    heads = _heads(spec, inputs)
    sizes = _sizes(spec, inputs, params, heads)
    _check_mix(spec, {**inputs, **params})
    if documents is not None and batch != 1:
        raise ArgumentError(
            f"{spec.name}: cu_seqlens packs documents along T and needs B = 1, got B = {batch}; "
            "reshape [B, T] to [1, B * T]"
        )
    output_dtype = _output_dtype(spec, inputs)
    limit = chunk_size or _usual_chunk_size(spec, sizes, output_dtype)
    double = any(x.dtype == torch.float64 for x in (*inputs.values(), *params.values()))
    return Outline(
        spec=spec,
        batch=batch,
        tokens=tokens,
        num_sequences=batch if documents is None else documents,
        packed=documents is not None,
        longest_chunk=1 if tokens == 1 else limit,
        heads=heads,
        sizes=sizes,
        device=device,
        compute_dtype=torch.float64 if double else torch.float32,
        output_dtype=output_dtype,
    )


def _usual_chunk_size(
    spec: LinearAttentionSpec, sizes: Mapping[str, int], dtype: torch.dtype
) -> int:
    """Tokens of a chunk where the user leaves it open; the same on every device and executor."""
    widest = max((sizes.get(d, 1) for d in _held_dims(spec)), default=1)
    wide = dtype == torch.float32 and widest * dtype.itemsize > WIDE_ROW_BYTES
    return WIDE_CHUNK_SIZE if wide else DEFAULT_CHUNK_SIZE


def _held_dims(spec: LinearAttentionSpec) -> set[str]:
    """Dims of states that are matrices: their rows are held whole."""
    return {dim for dims in spec.state_dims.values() if len(dims) > 1 for dim in dims}


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
                f"{spec.name}: {kind} {name!r} has dtype {value.dtype}; expected float16, "
                "bfloat16, float32 or float64"
            )


def _check_mix(spec: LinearAttentionSpec, tensors: Mapping[str, Tensor]) -> None:
    """Refuse float64 beside anything else, which would widen all silently, and bfloat16 beside
    float16, of which neither holds the other's values; float32 may stand beside one of them."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, x in tensors.items():
        kinds.setdefault(x.dtype, []).append(name)
    if len(kinds) == 1:
        return
    listed = "; ".join(
        f"{str(kind).removeprefix('torch.')}: {', '.join(names)}" for kind, names in kinds.items()
    )
    if torch.float64 in kinds:
        raise ArgumentTypeError(
            f"{spec.name}: float64 is mixed with other dtypes ({listed}); give all tensors in "
            "float64, which is then computed in, or none: x.double() or x.float()"
        )
    if torch.float16 in kinds and torch.bfloat16 in kinds:
        raise ArgumentTypeError(
            f"{spec.name}: bfloat16 and float16 are mixed ({listed}); cast to one of them. "
            "float32 may stand beside either"
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
                f"{spec.name}: input {name!r} has [B, T] = {tuple(x.shape[:2])}, {first_name!r} "
                f"has {tuple(first.shape[:2])}; the layout is [B, T, heads, ...], "
                "tokens before heads"
            )
        if x.device != first.device:
            raise ArgumentError(
                f"{spec.name}: input {name!r} is on {x.device}, {first_name!r} on {first.device}"
            )
    return first.shape[0], first.shape[1], first.device


def _heads(spec: LinearAttentionSpec, inputs: Mapping[str, Tensor]) -> int:
    found: dict[str | None, tuple[str, int]] = {}
    for name, item in spec.input_specs.items():
        heads = int(inputs[name].shape[2])
        known = found.setdefault(item.group, (name, heads))
        if known[1] != heads:
            raise ArgumentError(
                f"{spec.name}: input {name!r} has {heads} heads, {known[0]!r} has {known[1]}; "
                "inputs of one head group must agree"
            )
    value_heads = found[None][1] if None in found else max(h for _, h in found.values())
    for group, (name, heads) in found.items():
        if heads == 0 or value_heads % heads:
            which = f"input {name!r}" if group is None else f"input {name!r} of group {group!r}"
            raise ArgumentError(
                f"{spec.name}: {which} has {heads} heads, which must divide the {value_heads} "
                "heads of the state"
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
        device = next(iter(inputs.values())).device
        if params[name].device != device:
            raise ArgumentError(
                f"{spec.name}: parameter {name!r} is on {params[name].device}, the inputs on "
                f"{device}"
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
                f"{spec.name}: scalar {name!r} is {type(value).__name__}; expected a Python "
                "number. For a learned number declare a parameter"
            )
        out[name] = float(value)
    return out


def read_offsets(spec: LinearAttentionSpec, cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Document bounds as numbers: the one place that waits for a device."""
    if not isinstance(cu_seqlens, Tensor):
        offsets = whole_numbers(f"{spec.name}: cu_seqlens", cu_seqlens, ArgumentTypeError)
    else:
        check_offset_type(spec, cu_seqlens)
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                f"{spec.name}: cu_seqlens is on {cu_seqlens.device} while a CUDA graph is "
                "captured, but its numbers shape the launches; give it on the CPU, or as a list"
            )
        offsets = tuple(cu_seqlens.tolist())
    if len(offsets) < 2:
        raise ArgumentError(
            f"{spec.name}: cu_seqlens = {list(offsets)}; expected the offsets [N + 1] of at least "
            "one document"
        )
    return offsets


def check_offset_type(spec: LinearAttentionSpec, cu_seqlens: Tensor) -> None:
    """Raise unless document bounds are whole numbers of one dim."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ArgumentTypeError(
            f"{spec.name}: cu_seqlens is {cu_seqlens.dtype} with shape "
            f"{tuple(cu_seqlens.shape)}; expected int32 or int64 with shape [N + 1]"
        )


def _check_offsets(spec: LinearAttentionSpec, offsets: tuple[int, ...], tokens: int) -> None:
    wrong = any(b < a for a, b in pairwise(offsets))
    if offsets[0] != 0 or offsets[-1] != tokens or wrong:
        raise ArgumentError(
            f"{spec.name}: cu_seqlens = {_shorten(offsets)}; expected non-decreasing offsets "
            f"from 0 to T = {tokens}"
        )


def _shorten(offsets: Sequence[int]) -> str:
    shown = list(offsets)
    return str(shown) if len(shown) <= 12 else f"{shown[:6]} ... {shown[-3:]}"


def _output_dtype(spec: LinearAttentionSpec, inputs: Mapping[str, Tensor]) -> torch.dtype:
    last = spec.output_dims[-1]
    for name, item in spec.input_specs.items():
        if item.dims[-1] == last and not item.log_decay:
            return inputs[name].dtype
    return next(iter(inputs.values())).dtype

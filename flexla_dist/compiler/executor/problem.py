"""One call of a compiled operator: its tensors, checked against the spec.

Contract: plain data with the shapes that follow from it; made by
`flexla_dist.compiler.executor.bind`. An `Outline` is what is known before the numbers of
`cu_seqlens` are read: B, T and N may be symbolic there. A `Problem` is the whole call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexla_dist.compiler.executor.layout import ChunkLayout
from flexla_dist.compiler.executor.tables import device_zeros
from flexla_dist.compiler.trace.stages import LOG_SCALE
from flexla_dist.errors import ArgumentError, ArgumentTypeError
from flexla_dist.shapes import UNIT_DIM, Dims
from flexla_dist.spec.spec import LinearAttentionSpec


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Shapes of one call.

    `batch`, `tokens` and `num_sequences` are B, T and N (of initial and final states: B unpacked,
    the documents packed). `longest_chunk` is the most that C can be: a compiled graph serves all
    lengths below it, so C itself (`ChunkLayout.chunk_size`) is not known here. `heads` is HV.
    `sizes` maps every dim but C to its size. `compute_dtype` is float64 if an input or parameter
    is, else float32; states have it.
    """

    spec: LinearAttentionSpec
    batch: int
    tokens: int
    num_sequences: int
    packed: bool
    longest_chunk: int
    heads: int
    sizes: Mapping[str, int]
    device: torch.device
    compute_dtype: torch.dtype
    output_dtype: torch.dtype

    @property
    def most_chunks(self) -> int:
        """Chunks of a lane: exactly unpacked, at most packed."""
        if self.packed:
            return self.tokens // self.longest_chunk + self.num_sequences
        return -(-self.tokens // self.longest_chunk)

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
        if not isinstance(initial, Tensor | tuple | list):
            raise ArgumentTypeError(
                f"{self.spec.name}: initial_state is {type(initial).__name__}; expected a tensor "
                "or a tuple of tensors"
            )
        names = self.state_names
        given = (initial,) if isinstance(initial, Tensor) else tuple(initial)
        if len(given) != len(names):
            raise ArgumentError(
                f"{self.spec.name}: initial_state has {len(given)} tensor(s); expected "
                f"{len(names)}: ({', '.join(names)})"
            )
        for name, state in zip(names, given, strict=True):
            self._check_state(name, state)
        return tuple(state.to(self.compute_dtype).contiguous() for state in given)

    def _check_state(self, name: str, state: Tensor) -> None:
        if not isinstance(state, Tensor):
            raise ArgumentTypeError(
                f"{self.spec.name}: initial state {name!r} is {type(state).__name__}, not a tensor"
            )
        if not state.is_floating_point():
            raise ArgumentTypeError(
                f"{self.spec.name}: initial state {name!r} has dtype {state.dtype}; expected a "
                "floating type such as float32: convert it with .float()"
            )
        expected = self.state_shape(name)
        if tuple(state.shape) != expected:
            dims = self.spec.state_dims.get(name, ())
            letters = ", ".join(("N", "HV", *dims))
            raise ArgumentError(
                f"{self.spec.name}: initial state {name!r} has shape {tuple(state.shape)}; "
                f"expected {expected} = [{letters}], one state a document"
            )
        if state.device != self.device:
            raise ArgumentError(
                f"{self.spec.name}: initial state {name!r} is on {state.device}, "
                f"the inputs on {self.device}"
            )


@dataclass(frozen=True, eq=False)
class Family:
    """Problems of equal shapes, dtypes and documents on one device; equal only to itself.

    `sizes` is what problems of other B and T have in common with it, `states` the shapes of the
    states if those before the first token are zeros that may be shared.
    """

    sizes: tuple[object, ...]
    states: tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem(Outline):
    """Checked arguments of one call; `family` is made unless it is given."""

    inputs: Mapping[str, Tensor]
    params: Mapping[str, Tensor]
    scalars: Mapping[str, float]
    layout: ChunkLayout
    family: Family = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.family is None:
            heads = (self.heads, *(x.shape[2] for x in self.inputs.values()))
            sizes = (tuple(self.sizes.items()), heads, self.output_dtype, self.device)
            own = self.spec.log_scaled is not None or not self.layout.chunks
            states = None if own else tuple(self.state_shape(name) for name in self.state_names)
            object.__setattr__(self, "family", Family(sizes, states))

    def entry_state(self, initial: Tensor | Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """The given initial state checked and in the compute dtype, or zeros.

        Zeros are shared: nobody may write to them. Without tokens, where states may pass through
        as they are, they are not.
        """
        if initial is None and self.family.states is not None:
            dtype, device = self.compute_dtype, self.device
            return tuple([device_zeros(shape, dtype, device) for shape in self.family.states])
        return super().entry_state(initial)

    def with_tensors(
        self,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        scalars: Mapping[str, float] | None = None,
    ) -> Problem:
        """A problem of the same family: tensors of the same shapes, dtypes and device."""
        made = object.__new__(Problem)
        made.__dict__.update(self.__dict__)
        made.__dict__["inputs"], made.__dict__["params"] = inputs, params
        if scalars is not None:
            made.__dict__["scalars"] = scalars
        return made

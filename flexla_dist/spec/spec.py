"""What a linear-attention variant is: names, dims and three chunk-level callables.

Contract: a `LinearAttentionSpec` is frozen and checked when built; every mistake in names, dims or
heads is a `SpecError` that names the field. It computes nothing; `flexla_dist.compile` turns it
into an operator. Torch is needed only by the callables themselves.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from flexla_dist.errors import SpecError, SpecPicklingError
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims
from flexla_dist.spec.names import NAME, check_fields, check_names, check_numbers, is_number

ChunkMode = Callable[[Any, Any], Mapping[str, Any]]
DecayMode = Callable[[Any, Any], Any]
MergeMode = Callable[[Any, Any], Any]
TokenMode = Callable[[Any, Any], Mapping[str, Any]]
Recurrence = Callable[[Any, Any, Any], tuple[Any, Any]]

CALLABLES = ("chunk_mode", "decay_mode", "merge_mode", "token_mode", "recurrence")
_RESERVED_LOCALS = ("carry", "fresh", "m")


@dataclass(frozen=True)
class InputSpec:
    """One declared tensor: dims of a single chunk of a single head, its head group, its sign.

    `log_decay` is true for an input declared `<=0`: a natural-log decay that never is positive.
    """

    name: str
    dims: Dims
    group: str | None = None
    log_decay: bool = False


@dataclass(frozen=True)
class LogScaled:
    """Names two scalar locals of `chunk_mode` that make the states log-scaled (mLSTM).

    With `decay=b` and `weight=mu` the true state is `S = exp(m) * S~` and one chunk does `m' =
    max(m + b, mu)`, `S~' = exp(m + b - m') * S~ + exp(mu - m') * X`. The two factors reach
    `decay_mode` as `c.carry` and `c.fresh`, the entering `m` reaches `merge_mode` as `c.m`. `m`
    starts at -inf and has no gradient, because outputs depend on `exp(m) * S~` only; for the same
    reason the local named by `weight` is a constant to differentiation, wherever it is used.
    """

    decay: str
    weight: str


def parse_dims(text: str, what: str) -> InputSpec:
    """Read `"C K @qk <=0"` into dims, head group and sign.

    Raises SpecError naming `what` when a word is neither a dim, nor `@group`, nor `<=0`.
    """
    if not isinstance(text, str):
        raise SpecError(f"{what}: dims must be text such as 'C K', got {type(text).__name__}")
    dims: list[str] = []
    group, log_decay = None, False
    for word in text.replace("<= 0", "<=0").split():
        if word == "<=0":
            log_decay = True
        elif word.startswith("@") and NAME.match(word[1:]):
            if group is not None:
                raise SpecError(f"{what}: two head groups in {text!r}; an input has at most one")
            group = word[1:]
        elif NAME.match(word) or word == UNIT_DIM:
            dims.append(word)
        else:
            raise SpecError(
                f"{what}: {word!r} in {text!r} is no dim name; expected letters such as K, 1, "
                "'@group' for a head group, or '<=0' for a natural-log decay"
            )
    return InputSpec(what, tuple(dims), group, log_decay)


@dataclass(frozen=True)
class LinearAttentionSpec:
    """A linear-attention variant as three callables over one chunk of one head.

    The state obeys `S_n = decay_mode(S_{n-1}, chunk_mode(x_n, p))`, the output of chunk n is
    `merge_mode(S_{n-1}, chunk_mode(x_n, p))`. `decay_mode` must be affine in the state.

    Args:
        name: identifier used in messages and generated code.
        inputs: per-token tensors, name to dims of one chunk: `"C K @qk"` is [C, K] with the
            heads of group `qk`; `"C <=0"` is a natural-log decay, finite and not positive, which is
            trusted and not checked. `C` (tokens of a chunk) comes first.
        chunk_mode: `(x, p) -> dict` of chunk-local values; sees no state.
        decay_mode: `(state, c) -> next state`.
        merge_mode: `(state entering the chunk, c) -> output`.
        params: learned per-head tensors, name to dims without `C` (`""` is one number a head).
        scalars: run-time numbers, name to default; None means that each call must give it.
        state: dims of the state, or a dict of them for several states.
        output: dims of the output.
        token_mode: optional `(x, p) -> dict` of inputs replaced before chunking, elementwise over
            tokens, for gates such as `-exp(A_log) * softplus(dt + bias)`.
        padding: value given to the padded tokens of a ragged last chunk, after `token_mode`
            (default 0 for every input).
        log_scaled: see `LogScaled`.
        recurrence: optional independent token form `(S, x, p) -> (S, o)` over [B, HV, ...], the
            float64 oracle: `compile(spec, check=True)` compares the chunk form with it, and
            `flexla_dist.spec.oracle.run_recurrence` runs it on tensors of one's own.
    """

    name: str
    inputs: Mapping[str, str]
    chunk_mode: ChunkMode
    decay_mode: DecayMode
    merge_mode: MergeMode
    params: Mapping[str, str] = field(default_factory=dict)
    scalars: Mapping[str, float | None] = field(default_factory=dict)
    state: str | Mapping[str, str] = "K V"
    output: str = "C V"
    token_mode: TokenMode | None = None
    padding: Mapping[str, float] = field(default_factory=dict)
    log_scaled: LogScaled | None = None
    recurrence: Recurrence | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("inputs", "params", "scalars", "padding"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if not isinstance(self.state, str):
            object.__setattr__(self, "state", MappingProxyType(dict(self.state)))
        check_names(self)
        check_numbers(self)
        self._check_padding()
        self._check_dims()
        self._check_callables()

    # -- copies ---------------------------------------------------------------------------------

    def __copy__(self) -> LinearAttentionSpec:
        """Itself: it cannot be changed."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearAttentionSpec:
        """Itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Its fields, the callables by module and name. Raises SpecPicklingError for one that has
        none, such as a lambda."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in CALLABLES:
            try:
                pickle.dumps(values[name])
            except Exception as error:
                raise SpecPicklingError(
                    f"{self.name}.{name} cannot be pickled ({error}); pickle stores functions by "
                    "module and name: define it with def at the top of an imported module, not as "
                    "a lambda or inside a function"
                ) from None
        plain = {k: dict(v) if isinstance(v, MappingProxyType) else v for k, v in values.items()}
        return _load, (plain,)

    # -- parsed views -------------------------------------------------------------------------

    @property
    def single_state(self) -> bool:
        """True when the callables see the state itself instead of a namespace of states."""
        return isinstance(self.state, str)

    @property
    def input_specs(self) -> dict[str, InputSpec]:
        """Declared inputs by name, parsed."""
        return {name: self._parse("input", name, text) for name, text in self.inputs.items()}

    @property
    def param_specs(self) -> dict[str, InputSpec]:
        """Declared per-head parameters by name, parsed."""
        return {name: self._parse("parameter", name, text) for name, text in self.params.items()}

    @property
    def state_dims(self) -> dict[str, Dims]:
        """Dims of every state; a single state is called `S`."""
        states = {"S": self.state} if isinstance(self.state, str) else self.state
        return {name: self._plain_dims("state", name, text) for name, text in states.items()}

    @property
    def output_dims(self) -> Dims:
        """Dims of the output, `C` first."""
        return self._plain_dims("output", "output", self.output)

    # -- checks -------------------------------------------------------------------------------

    def _parse(self, kind: str, name: str, text: str) -> InputSpec:
        parsed = parse_dims(text, f"{self.name}: {kind} {name!r}")
        return InputSpec(name, parsed.dims, parsed.group, parsed.log_decay)

    def _plain_dims(self, kind: str, name: str, text: str) -> Dims:
        """Dims of what has neither a head group nor a sign."""
        parsed = self._parse(kind, name, text)
        if parsed.group is not None or parsed.log_decay:
            raise SpecError(
                f"{self.name}: {kind} {name!r} is {text!r}; '@group' and '<=0' belong to inputs, "
                f"write {' '.join(parsed.dims)!r}"
            )
        return parsed.dims

    def _check_padding(self) -> None:
        for name, value in self.padding.items():
            if name not in self.inputs:
                raise SpecError(
                    f"{self.name}: padding for {name!r}, which is no input; "
                    f"inputs are {', '.join(self.inputs)}"
                )
            if not is_number(value) or math.isnan(value):
                raise SpecError(f"{self.name}: padding of {name!r} is {value!r}; expected a number")

    def _check_dims(self) -> None:
        known: set[str] = set()
        for item in self.input_specs.values():
            if item.dims[:1] != (TOKEN_DIM,) or item.dims.count(TOKEN_DIM) != 1:
                raise SpecError(
                    f"{self.name}: input {item.name!r} has dims {' '.join(item.dims)!r}; the token "
                    f"dim {TOKEN_DIM} must come first and once, for example 'C K'"
                )
            known.update(item.dims)
        for kind, items in (("parameter", self.param_specs.values()),):
            for item in items:
                if TOKEN_DIM in item.dims or item.group is not None:
                    raise SpecError(
                        f"{self.name}: {kind} {item.name!r} is learned per head: it has "
                        f"neither {TOKEN_DIM} nor a head group; got {self.params[item.name]!r}"
                    )
                known.update(item.dims)
        for name, dims in self.state_dims.items():
            if TOKEN_DIM in dims or not dims or len(dims) > 2:
                raise SpecError(
                    f"{self.name}: state {name!r} has dims {' '.join(dims)!r}; expected one or two "
                    f"dims without {TOKEN_DIM}, such as 'K V' or 'K'"
                )
            self._require_known(f"state {name!r}", dims, known)
        out = self.output_dims
        if out[:1] != (TOKEN_DIM,):
            raise SpecError(
                f"{self.name}: output has dims {' '.join(out)!r}; {TOKEN_DIM} must come first"
            )
        if len(out) == 1:
            raise SpecError(
                f"{self.name}: output has dims {self.output!r}; expected a dim beside "
                f"{TOKEN_DIM}, such as 'C V', or 'C 1' for one number a token"
            )
        if len(set(out)) != len(out):
            raise SpecError(
                f"{self.name}: output has dims {' '.join(out)!r}; each dim comes once: an output "
                "has one row a token"
            )
        self._require_known("output", out, known)
        for item in (*self.input_specs.values(), *self.param_specs.values()):
            if len(set(item.dims)) != len(item.dims):
                raise SpecError(f"{self.name}: {item.name!r} names a dim twice: {item.dims}")

    def _require_known(self, what: str, dims: Dims, known: set[str]) -> None:
        for dim in dims:
            if dim not in known and dim != UNIT_DIM:
                raise SpecError(
                    f"{self.name}: {what} uses dim {dim!r}, which no input or parameter has; "
                    f"known dims: {', '.join(sorted(known))}"
                )

    def _check_callables(self) -> None:
        for name in CALLABLES:
            value = getattr(self, name)
            optional = name in ("token_mode", "recurrence")
            if value is None and optional:
                continue
            if not callable(value):
                raise SpecError(f"{self.name}: {name} must be callable, got {type(value).__name__}")
        if self.log_scaled is not None and not isinstance(self.log_scaled, LogScaled):
            raise SpecError(
                f"{self.name}: log_scaled must be LogScaled(decay=..., weight=...), "
                f"got {type(self.log_scaled).__name__}"
            )
        if self.log_scaled is not None:
            for field_name in ("decay", "weight"):
                local = getattr(self.log_scaled, field_name)
                if not isinstance(local, str):
                    raise SpecError(
                        f"{self.name}: log_scaled {field_name} is {local!r}; expected the name of "
                        "a local value of chunk_mode"
                    )


def _load(values: dict[str, Any]) -> LinearAttentionSpec:
    """A pickled spec."""
    return LinearAttentionSpec(**values)


RESERVED_LOCALS = _RESERVED_LOCALS

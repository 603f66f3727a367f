"""Which names and plain fields a spec may have.

Contract: raises SpecError that names the field, what was got and what to write. Names end in
generated code: as arguments of kernels, beside the sizes and positions of the dims, and in the name
of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from flexla_dist.errors import SpecError
from flexla_dist.shapes import TOKEN_DIM

if TYPE_CHECKING:
    from flexla_dist.spec.spec import LinearAttentionSpec

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
LONGEST_NAME = 100  # of a spec: files and kernels are named after it
KINDS = {"inputs": "an input", "params": "a parameter", "scalars": "a scalar"}
_CALL_KEYWORDS = ("initial_state", "output_final_state", "cu_seqlens", "executor", "self")
_GRAPH_NAMES = ("sizes", "valid", "shift", "fresh", "m", "output", "grad_output", "log_decay")
_KERNEL_PREFIXES = ("at", "size", "tile")  # of a dim
_STATE_PREFIXES = (
    "state",
    "next",
    "prev",
    "local",
    "decay",
    "matrix",
    "map",
    "adjoint",
    "grad_next",
)


def check_fields(spec: LinearAttentionSpec) -> None:
    """Raise for fields that are no mapping or no text, before anything reads them."""
    if not isinstance(spec.name, str) or not NAME.match(spec.name):
        raise SpecError(f"name must be an identifier, got {spec.name!r}")
    if len(spec.name) > LONGEST_NAME:
        raise SpecError(
            f"name has {len(spec.name)} letters; expected at most {LONGEST_NAME}, because files "
            f"are named after it: {spec.name[:20]}..."
        )
    for field, of in (*KINDS.items(), ("padding", "an input")):
        value = getattr(spec, field)
        if not isinstance(value, Mapping):
            raise SpecError(
                f"{spec.name}: {field} is {value!r}; expected a dict by name of {of}"
                + (", or {} for none" if field != "inputs" else ", such as {'q': 'C K'}")
            )
    if not isinstance(spec.state, str | Mapping):
        raise SpecError(
            f"{spec.name}: state is {spec.state!r}; expected dims such as 'K V', or a dict of them"
        )
    if not isinstance(spec.output, str):
        raise SpecError(f"{spec.name}: output is {spec.output!r}; expected dims such as 'C V'")


def check_names(spec: LinearAttentionSpec) -> None:
    """Raise for names of arguments and states that are no identifiers or taken."""
    for field, one in (("inputs", "input"), ("state_dims", "state")):
        if not getattr(spec, field):
            raise SpecError(f"{spec.name}: a spec needs at least one {one}")
    seen: dict[str, str] = dict.fromkeys(_CALL_KEYWORDS, "a keyword of the compiled operator")
    seen |= dict.fromkeys(_graph_names(spec), "a name of the compiler's own values")
    seen |= dict.fromkeys(_kernel_names(spec), "a name of the kernels")
    for kind in KINDS:
        for name in getattr(spec, kind):
            if not isinstance(name, str) or not NAME.match(name) or iskeyword(name):
                raise SpecError(
                    f"{spec.name}: {kind} name {name!r} is not an identifier, or a Python keyword"
                )
            taken = seen.get(name)
            if kind == "scalars" and name.endswith("_ptr"):
                taken = "a name of the kernels"
            if taken is not None:
                raise SpecError(f"{spec.name}: {name!r} in {kind} is already {taken}; rename it")
            seen[name] = KINDS[kind]
    for name in spec.state_dims:
        if not isinstance(name, str) or not NAME.match(name):
            raise SpecError(f"{spec.name}: state name {name!r} is not an identifier")
        if name == "m":
            raise SpecError(f"{spec.name}: state name 'm' is taken by the log scale; rename it")


def check_numbers(spec: LinearAttentionSpec) -> None:
    """Raise for defaults of scalars that are no numbers."""
    for name, value in spec.scalars.items():
        if value is not None and not is_number(value):
            raise SpecError(
                f"{spec.name}: the default of scalar {name!r} is {value!r}; expected a number, or "
                "None if each call gives it. For a learned number declare a parameter"
            )


def is_number(value: Any) -> bool:
    """Whether a value is a plain number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _graph_names(spec: LinearAttentionSpec) -> Iterable[str]:
    """Names that graphs use for values beside the user's."""
    of_states = [f"{prefix}_{s}" for prefix in _STATE_PREFIXES for s in spec.state_dims]
    given = (*spec.inputs, *spec.params)
    return [*_GRAPH_NAMES, "log_weight", *of_states, *(f"grad_{name}" for name in given)]


def _kernel_names(spec: LinearAttentionSpec) -> Iterable[str]:
    """Names of the sizes and positions of dims and groups, and of what kernels call."""
    items = [*spec.input_specs.values(), *spec.param_specs.values()]
    dims = {TOKEN_DIM, *(dim for item in items for dim in item.dims)}
    groups = {item.group for item in items if item.group is not None}
    of_dims = [f"{prefix}_{dim}" for prefix in _KERNEL_PREFIXES for dim in dims]
    return ["range", *of_dims, *(f"heads_{group}" for group in groups)]

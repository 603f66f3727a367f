"""What the user's callables see instead of tensors.

Contract: a `Traced` stands for one value of one chunk of one head and records every operation into
the graph. It has dims, not sizes; `DimSize` is what `x.shape[i]` gives. Anything that would need a
number that is known only at run time (a branch, a loop, `float(x)`, a comparison of sizes) is
refused at the user's line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from flexla_dist.errors import TraceError
from flexla_dist.shapes import format_dims

if TYPE_CHECKING:
    from flexla_dist.compiler.trace.tracer import Tracer

_NO_DEVICE = torch.device("meta")


class DimSize(int):
    """The size of a named dim while tracing; a stand-in that must not be looked at."""

    name: str
    tracer: Tracer

    def __new__(cls, value: int, name: str, tracer: Tracer) -> DimSize:
        self = super().__new__(cls, value)
        self.name, self.tracer = name, tracer
        return self

    def _refuse(self, *_: Any) -> NoReturn:
        raise self.tracer.error(
            f"a branch on the size of dim {self.name}; one graph must serve every size. "
            "Select with torch.where, or write two specs"
        )

    def _same(self, other: Any) -> bool:
        """True for the same dim, whatever its size; what else is compared decides by sizes."""
        return (isinstance(other, DimSize) and other.name == self.name) or self._refuse()

    def _other(self, other: Any) -> bool:
        return not self._same(other)

    __eq__ = __le__ = __ge__ = _same  # type: ignore[assignment]
    __ne__ = __lt__ = __gt__ = _other  # type: ignore[assignment]
    __bool__ = _refuse  # type: ignore[assignment]
    __hash__ = int.__hash__

    def _value(self) -> Traced:
        return self.tracer.size(self.name)

    def __pow__(self, other: Any, mod: Any = None) -> Any:
        return self._value() ** other if mod is None else self._no_integer()

    def __rpow__(self, other: Any, mod: Any = None) -> Any:
        return other ** self._value() if mod is None else self._no_integer()

    def __mul__(self, other: Any) -> Any:
        return self._value() * other

    def __truediv__(self, other: Any) -> Any:
        return self._value() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self._value()

    def __add__(self, other: Any) -> Any:
        return self._value() + other

    def __sub__(self, other: Any) -> Any:
        return self._value() - other

    def __rsub__(self, other: Any) -> Any:
        return other - self._value()

    def __neg__(self) -> Any:
        return self.tracer.call("neg", self._value())

    def _no_integer(self, *_: Any) -> NoReturn:
        raise self.tracer.error(
            f"integer arithmetic on the size of dim {self.name}; slices and reshapes of a chunk "
            "are not supported. Write the operation on whole dims"
        )

    def _no_number(self) -> NoReturn:
        raise self.tracer.error(
            f"a Python number made from the size of dim {self.name} (math.sqrt, float). Compute "
            "with the size itself, `x.q.shape[-1] ** -0.5`, or declare a scalar"
        )

    __float__ = _no_number
    __floordiv__ = __mod__ = __rfloordiv__ = __rmod__ = _no_integer  # type: ignore[assignment]
    __divmod__ = __rdivmod__ = __lshift__ = __rlshift__ = _no_integer  # type: ignore[assignment]
    __rshift__ = __rrshift__ = __and__ = __rand__ = _no_integer  # type: ignore[assignment]
    __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _no_integer  # type: ignore[assignment]
    __abs__ = __round__ = __floor__ = __ceil__ = __trunc__ = _no_integer  # type: ignore[assignment]
    bit_length = bit_count = to_bytes = as_integer_ratio = _no_integer  # type: ignore[assignment]
    __radd__, __rmul__ = __add__, __mul__


class _Shape(tuple[int, ...]):
    """The shape of a value; what it has no dim for is refused at the user's line."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            known = [size for size in self if isinstance(size, DimSize)]
            if not known:
                raise
            message = f"shape[{index}] of a value with {len(self)} dims; they count from 0 or -1"
            raise known[0].tracer.error(message) from None


class Traced:
    """A value being traced. Supports operators, the usual tensor methods and torch functions."""

    __slots__ = ("node", "tracer")
    __array_ufunc__ = None  # numpy leaves operators to us

    def __init__(self, node: fx.Node, tracer: Tracer):
        object.__setattr__(self, "node", node)
        object.__setattr__(self, "tracer", tracer)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _first_traced((args, kwargs or {}))
        return first.tracer.torch_function(func, args, kwargs or {})

    # -- facts --------------------------------------------------------------------------------

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the dims."""
        return self.node.meta["dims"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes by dim, as stand-ins."""
        return _Shape(self.tracer.dim_size(dim) for dim in self.dims)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.dims)

    @property
    def T(self) -> Traced:
        """Transpose of a matrix."""
        if len(self.dims) > 2:
            raise self.tracer.error(
                f".T of {len(self.dims)} dims reverses them all; write .mT or permute"
            )
        return self.tracer.call("mT", self)

    @property
    def mT(self) -> Traced:
        """Transpose of the last two dims."""
        return self.tracer.call("mT", self)

    @property
    def dtype(self) -> torch.dtype:
        """A floating type; a stand-in that differs between the two traces of a spec."""
        return torch.bool if self.node.meta["mask"] else self.tracer.dtype

    @property
    def device(self) -> torch.device:
        """A stand-in."""
        return _NO_DEVICE

    def __repr__(self) -> str:
        return f"Traced({self.node.name}{format_dims(self.dims)})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.tracer.method(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise self.tracer.error(f"assigning .{name} on a value of the chunk is not supported")

    # -- refused ------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise self.tracer.error(
            "a branch on a value of the chunk (data-dependent `if`, `while`, `and`, `or`). "
            "Use torch.where, &, |, ~ instead"
        )

    def _number(self) -> NoReturn:
        raise self.tracer.error(
            "a Python number was asked of a value of the chunk (float(), int(), .item()). "
            "Keep it a tensor"
        )

    __float__ = __int__ = __index__ = __complex__ = _number  # type: ignore[assignment]

    def _loop(self) -> NoReturn:
        raise self.tracer.error(
            "a Python loop over a dim of the chunk. Use whole-chunk operations: torch.cumsum, a "
            "matrix product, flexla_dist.spec.functional.decay_scan"
        )

    def __iter__(self) -> Iterator[Any]:
        self._loop()

    def __len__(self) -> int:
        self._loop()

    def __setitem__(self, *_: Any) -> None:
        raise self.tracer.error(
            "in-place assignment to part of a value. Use torch.where or build the value whole"
        )

    def __getitem__(self, index: Any) -> Traced:
        return self.tracer.call("getitem", self, index)


def _first_traced(tree: Any) -> Traced:
    stack = [tree]
    while stack:
        item = stack.pop()
        if isinstance(item, Traced):
            return item
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    raise TraceError("internal: no traced value among the arguments")


def _binary(name: str, swap: bool = False) -> Any:
    def method(self: Traced, other: Any) -> Any:
        operands = (other, self) if swap else (self, other)
        return self.tracer.call(name, *operands)

    return method


_DUNDERS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "div",
    "matmul": "matmul",
    "pow": "pow",
    "and": "logical_and",
    "or": "logical_or",
    "xor": "logical_xor",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "divmod": "remainder",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
for _python, _name in _DUNDERS.items():
    setattr(Traced, f"__{_python}__", _binary(_name))
    setattr(Traced, f"__r{_python}__", _binary(_name, swap=True))
for _name in ("ge", "gt", "le", "lt", "eq", "ne"):
    setattr(Traced, f"__{_name}__", _binary(_name))
Traced.__hash__ = object.__hash__  # type: ignore[method-assign]


def _unary(name: str) -> Any:
    return lambda self, *_: self.tracer.call(name, self)


_UNARY_DUNDERS = {
    "neg": "neg",
    "invert": "logical_not",
    "abs": "abs",
    "round": "round",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
}
for _python, _name in _UNARY_DUNDERS.items():
    setattr(Traced, f"__{_python}__", _unary(_name))

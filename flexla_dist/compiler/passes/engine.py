"""The one engine that runs rewrite rules, and how a rule is written.

Contract: a `Rule` is data: a pattern over operators and a replacement. `rewrite` re-emits a cell
through the builder; at every node the rules of the pass are tried in order, until no rule fires any
more. A pass never changes what the cell computes; `verify` runs after each. Patterns see nodes of
the new graph, whose operands are already rewritten, so rules compose bottom-up in one sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from flexla_dist.compiler.ir.graph import Builder, Cell, Operand, dims_of

MAX_SWEEPS = 12


@dataclass(frozen=True)
class Any_:
    """Matches any operand, bound to `name`; the same name twice must be the same operand."""

    name: str
    where: Callable[[Operand], bool] | None = None


@dataclass(frozen=True)
class Call:
    """Matches an operator with operand patterns; attributes are bound to `name` as a dict.

    `attrs` holds required attribute values. A number in `operands` matches that number.
    `commutes` also tries the two operands in the other order.
    """

    fn: Callable[..., Any]
    operands: tuple[Any, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    name: str | None = None
    commutes: bool = False


@dataclass
class Match:
    """Operands and attributes that a pattern bound."""

    bound: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]


Replacement = Callable[[Builder, Match], Operand | None]


@dataclass(frozen=True)
class Rule:
    """One rewrite; the replacement may decline by returning None."""

    name: str
    pattern: Call
    replacement: Replacement


def any_(name: str, where: Callable[[Operand], bool] | None = None) -> Any_:
    """Pattern for any operand."""
    return Any_(name, where)


def call(fn: Callable[..., Any], *operands: Any, name: str | None = None, **attrs: Any) -> Call:
    """Pattern for an operator; operands are patterns or numbers."""
    return Call(fn, operands, tuple(attrs.items()), name)


def either(fn: Callable[..., Any], a: Any, b: Any, name: str | None = None) -> Call:
    """Pattern for a commutative operator, operands in either order."""
    return Call(fn, (a, b), (), name, commutes=True)


def match(pattern: Any, operand: Operand, found: dict[str, Any]) -> dict[str, Any] | None:
    """Bindings that make `pattern` equal `operand`, extending `found`; None if there are none."""
    if isinstance(pattern, Any_):
        return _match_any(pattern, operand, found)
    if isinstance(pattern, Call):
        return _match_call(pattern, operand, found)
    same = not isinstance(operand, fx.Node) and float(operand) == float(pattern)
    return found if same else None


def _match_any(pattern: Any_, operand: Operand, found: dict[str, Any]) -> dict[str, Any] | None:
    if pattern.name in found:
        return found if found[pattern.name] is operand else None
    if pattern.where is not None and not pattern.where(operand):
        return None
    return {**found, pattern.name: operand}


def _match_call(pattern: Call, operand: Operand, found: dict[str, Any]) -> dict[str, Any] | None:
    if not isinstance(operand, fx.Node) or operand.target is not pattern.fn:
        return None
    if any(operand.kwargs.get(key) != value for key, value in pattern.attrs):
        return None
    if pattern.name is not None:
        found = {**found, pattern.name: operand}
    orders = [tuple(operand.args)]
    if pattern.commutes:
        orders.append(tuple(reversed(operand.args)))
    for operands in orders:
        state: dict[str, Any] | None = found
        for sub, value in zip(pattern.operands, operands, strict=True):
            state = match(sub, value, state)  # type: ignore[arg-type]
            if state is None:
                break
        if state is not None:
            return state
    return None


@dataclass
class Rewriter:
    """Emits nodes and applies the first rule that fits each; counts what fired."""

    builder: Builder
    rules: Sequence[Rule]
    fired: dict[str, int] = field(default_factory=dict)

    def emit(self, fn: Callable[..., Any], *operands: Operand, **attrs: Any) -> Operand:
        node = self.builder.emit(fn, *operands, **attrs)
        for rule in self.rules:
            if rule.pattern.fn is not node.target:
                continue
            found = match(rule.pattern, node, {})
            if found is None:
                continue
            new = rule.replacement(self.builder, Match(found))
            if new is not None and new is not node:
                self.fired[rule.name] = self.fired.get(rule.name, 0) + 1
                return self._fit(new, node)
        return node

    def _fit(self, new: Operand, old: fx.Node) -> Operand:
        """A replacement may be a number or narrower; consumers rely on the dims of the old one."""
        if dims_of(new) == old.meta["dims"] and isinstance(new, fx.Node):
            return new
        return self.builder.expand(new, old.meta["dims"])


def rewrite(cell: Cell, rules: Sequence[Rule]) -> tuple[Cell, dict[str, int]]:
    """Apply rules until none fires; returns the new cell and how often each rule fired."""
    fired: dict[str, int] = {}
    for _ in range(MAX_SWEEPS):
        builder = Builder()
        rewriter = Rewriter(builder, rules)
        results = cell.copy_into(builder, emit=rewriter.emit)
        dims = {name: node.meta["dims"] for name, node in cell.outputs.items()}
        cell = builder.finish({n: builder.expand(x, dims[n]) for n, x in results.items()})
        if not rewriter.fired:
            return cell, fired
        for name, count in rewriter.fired.items():
            fired[name] = fired.get(name, 0) + count
    raise RuntimeError(f"rules do not settle after {MAX_SWEEPS} sweeps: {sorted(fired)}")

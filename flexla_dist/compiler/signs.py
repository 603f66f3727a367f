"""Proves that no exponential can overflow.

Contract: `analyse_signs` runs after the substitution of domain operators. Every exponent must be
proved to be at most `LIMIT` wherever it is computed, which a decay (at most zero) and a clamped
value are; the gates of a domain operator must decay on the region that it reads. What cannot be
proved is a NumericsWarning with the user's line and the fix, or a NumericsError when strict. A
selection after the exponential does not make it safe: the branch not taken still has a gradient of
zero times infinity.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass

from torch import fx

from flexla_dist.compiler.exponents import Prover
from flexla_dist.compiler.forms import Bound, Form, View, form, plus, view, whole
from flexla_dist.compiler.intervals import ALL, Interval, exp, interval
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell, dims_of
from flexla_dist.errors import NumericsError, NumericsWarning, SourceLine
from flexla_dist.shapes import Dims
from flexla_dist.spec.spec import LinearAttentionSpec

LIMIT = 80.0  # exp of it is finite in float32 and bfloat16
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
EXPONENTIALS = (ops.exp, ops.expm1)
LEARNED = ("param", "scalar", "sizes")
PAIRS = {ops.decay_scores: 2, ops.decay_rows: 2, ops.decay_cols: 2}


@dataclass(frozen=True)
class SignFact:
    """What is known of one exponential: `bound` is the proved maximum of its exponent.

    `learned` tells that the exponent reads parameters and scalars only, such as `A_log.exp()`:
    numbers that training keeps small, where nothing accumulates over tokens.
    """

    operator: str
    exponent: str
    bound: float
    stage: str
    origin: SourceLine | None
    learned: bool = False

    @property
    def proved(self) -> bool:
        """Whether the exponential cannot overflow."""
        return self.bound <= LIMIT or self.learned

    def __str__(self) -> str:
        what = "not bounded" if self.bound > LIMIT else f"<= {self.bound:g}"
        what = "a parameter" if self.learned and self.bound > LIMIT else what
        where = f" {self.origin.file.rsplit('/', 1)[-1]}:{self.origin.line}" if self.origin else ""
        return f"{self.operator}({self.exponent}): exponent {what}   # {self.stage}{where}"


def analyse_signs(
    cell: Cell, spec: LinearAttentionSpec, strict: bool = False
) -> tuple[SignFact, ...]:
    """Facts of all exponentials of a cell; warns of what is not proved, or raises when strict."""
    analysis = _Analysis(cell)
    facts = analysis.run()
    found: dict[str, NumericsError] = {}
    for fact, fix in zip(facts, analysis.fixes, strict=True):
        if fact.proved:
            continue
        error = NumericsError(
            f"{fact.operator} of {fact.exponent} can overflow: the exponent is not proved to be "
            f"<= 0 wherever it is computed. Fix: {fix}",
            spec=spec.name,
            stage=fact.stage,
            origin=fact.origin,
        )
        if strict:
            raise error
        found.setdefault(str(error), error)
    if found:
        _warn(list(found.values()))
    return facts


def _warn(errors: list[NumericsError]) -> None:
    """One warning a spec, at the caller's line: the first exponential whole, the others' lines."""
    first, *others = errors
    text = str(first)
    if others:
        lines = dict.fromkeys(str(x.origin).splitlines()[0] for x in others if x.origin)
        text += f"\n  and {len(others)} more, which may have the same reason: {'; '.join(lines)}"
    warnings.warn(NumericsWarning(text), stacklevel=2 + _own_frames())


def _own_frames() -> int:
    """Frames of the package between here and the user's line."""
    frame, count = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, count = frame.f_back, count + 1
    return count - 1


class _Analysis:
    """Intervals in the order of the graph; the facts of exponentials sharpen them on the way."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.intervals: dict[fx.Node, Interval] = {}
        outputs = cell.outputs
        decay = outputs.get("log_decay")
        log_decay = form(whole(decay), deep=True) if decay is not None else None
        self.prover = Prover(self.intervals, log_decay)
        self.facts: list[SignFact] = []
        self.fixes: list[str] = []
        self.of_tokens: set[fx.Node] = set()

    def run(self) -> tuple[SignFact, ...]:
        for node in self.cell.graph.nodes:
            self.intervals[node] = interval(node, self.intervals)
            reads = node.op == "placeholder" and node.meta["role"] not in LEARNED
            if reads or any(x in self.of_tokens for x in node.all_input_nodes):
                self.of_tokens.add(node)
            if node.op != "call_function":
                continue
            if node.target in EXPONENTIALS:
                self._exponential(node)
            elif node.target is ops.decay_matrix:
                self._decay_matrix(node)
            elif node.target in PAIRS:
                self._decay_pairs(node)
            elif node.target in (ops.decay_scan, ops.decay_scan_reverse):
                self._record(node, form(whole(node.args[0]), deep=True), dims_of(node), ())
        return tuple(self.facts)

    # -- operators ----------------------------------------------------------------------------

    def _exponential(self, node: fx.Node) -> None:
        x: fx.Node = node.args[0]
        bound = self._record(node, form(whole(x), deep=True), dims_of(x), ())
        low, high = self.intervals[node]
        top = exp(bound) - (1.0 if node.target is ops.expm1 else 0.0)
        self.intervals[node] = (low, min(high, top))

    def _decay_matrix(self, node: fx.Node) -> None:
        rows, cols = node.args
        bound = self._gate(node, rows, cols, _gap(node), ())
        self.intervals[node] = (0.0, exp(bound))

    def _decay_pairs(self, node: fx.Node) -> None:
        """Both gates decay, and the columns' gate is the reference between blocks of tokens."""
        rows, cols = node.args[PAIRS[node.target] :][:2]
        bound = self._gate(node, rows, cols, _gap(node), (2,))
        if bound <= LIMIT and rows is not cols:
            self._gate(node, cols, cols, 0, (2,))

    def _gate(
        self, node: fx.Node, rows: fx.Node, cols: fx.Node, gap: int, rest: tuple[int, ...]
    ) -> float:
        at_row, at_col = view(rows, (0, *rest)), view(cols, (1, *rest))
        exponent = plus(form(at_row, deep=True), form(at_col, deep=True), -1.0)
        dims = (dims_of(rows)[0], dims_of(cols)[0], *dims_of(rows)[1:])
        return self._record(node, exponent, dims, (Bound(0, 1, gap),))

    # -- facts --------------------------------------------------------------------------------

    def _record(self, node: fx.Node, exponent: Form, dims: Dims, known: tuple[Bound, ...]) -> float:
        bound = self.prover.upper(exponent, dims, known)
        fact = SignFact(
            node.target.__name__,
            _text(exponent, dims),
            bound,
            node.meta["stage"],
            node.meta["origin"],
            learned=node not in self.of_tokens,
        )
        self.facts.append(fact)
        self.fixes.append("" if fact.proved else self._fix(node, exponent))
        return bound

    def _fix(self, node: fx.Node, exponent: Form) -> str:
        groups, plain = self.prover.grouped(exponent)
        undeclared = self._undeclared([*groups, *plain])
        if undeclared:
            names = ", ".join(repr(name) for name in undeclared)
            return (
                f"if {names} is a natural-log decay, declare it '... <=0' in inputs; otherwise "
                "make it one in token_mode (-softplus(x), logsigmoid(x)), subtract its maximum, "
                "or clamp it"
            )
        if node.target in EXPONENTIALS and groups:
            return (
                "write decays as differences before exp, later less earlier, and mask the exponent "
                "instead of the result: (b[-1] - b).exp(), decay_matrix(b, b), "
                "decay_scores(q, k, b, b)"
            )
        return (
            "subtract the maximum (x - x.amax(-1, keepdim=True)), clamp the exponent "
            "(x.clamp(max=60)), or use a log-scaled state"
        )

    def _undeclared(self, monomials: list[tuple[View, ...]]) -> list[str]:
        """Inputs that grow a decay because their sign is not declared."""
        names: list[str] = []
        for monomial in monomials:
            if self.prover.step_sign(monomial) != 0:
                continue
            for v in monomial:
                node = v.node
                while node.target is ops.where:
                    node = node.args[1]
                known = self.intervals.get(v.node, ALL) != ALL
                if node.op == "placeholder" and node.meta["role"] == "input" and not known:
                    names.append(node.meta["key"])
        return list(dict.fromkeys(names))


def _gap(node: fx.Node) -> int:
    return int(bool(node.kwargs.get("strict", False)))


def _text(exponent: Form, dims: Dims) -> str:
    """The exponent for people, `b[r] - b[s]`."""
    letters = "rst"
    parts = []
    for monomial, value in exponent.items():
        factors = []
        for v in monomial:
            places = [p if not isinstance(p, int) else _letter(p, dims, letters) for p in v.at]
            shown = ", ".join(str(p) for p in places if p is not None)
            factors.append(f"{_name(v.node)}[{shown}]" if shown else _name(v.node))
        number = "" if abs(value) == 1.0 and factors else f"{abs(value):g}"
        sign = "-" if value < 0 else "+"
        parts.append(f"{sign} {'*'.join([number] * bool(number) + factors)}")
    text = " ".join(parts)
    return text.removeprefix("+ ") if not text.startswith("- ") else f"-{text[2:]}"


def _letter(axis: int, dims: Dims, letters: str) -> str:
    repeated = dims.count(dims[axis]) > 1
    return letters[axis] if repeated and axis < len(letters) else dims[axis]


def _name(node: fx.Node) -> str:
    if node.meta.get("label"):
        return str(node.meta["label"])
    if node.target is ops.cumsum:
        return f"cumsum({_name(node.args[0])})"
    return str(node)

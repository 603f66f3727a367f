"""M of every state in words.

Contract: what `Transition.kind` means for the dims at hand, with the expressions of M and S_hat and
the bytes that a rank sends to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.explain.statements import Names, Statement, cell_listing
from flexla_dist.compiler.pipeline import Graphs
from flexla_dist.compiler.transition import Transition
from flexla_dist.errors import SourceLine
from flexla_dist.shapes import Dims


@dataclass(frozen=True)
class StateFacts:
    """One state: its dims, what M is, how it is made, and its bytes over all heads of a document.

    `rule` is the affine form in the user's names; `origin` the line that gives the next state.
    """

    name: str
    dims: Dims
    kind: str
    words: str
    rule: str
    decay: str
    matrix: str
    local: str
    bytes: int
    origin: SourceLine | None


def state_facts(graphs: Graphs, problem: Problem) -> tuple[StateFacts, ...]:
    """Facts of every state in declared order."""
    cell = graphs.cell
    listing = cell_listing(cell, Names(cell))
    by_name = {statement.name: statement for statement in listing.statements}

    def made(result: str) -> str:
        name = listing.results.get(result, "")
        statement = by_name.get(name)
        return statement.text if statement is not None else name

    out = []
    for name, dims in graphs.spec.state_dims.items():
        transition = graphs.transitions[name]
        numbers = problem.heads * problem.compute_dtype.itemsize
        for dim in dims:
            numbers *= problem.size(dim)
        following: Statement | None = by_name.get(listing.results.get(f"next_{name}", ""))
        log = graphs.spec.log_scaled is not None
        out.append(
            StateFacts(
                name=name,
                dims=dims,
                kind="log-scaled" if log else transition.kind,
                words=_log_words() if log else _words(transition, dims),
                rule=_rule(transition, name, log),
                decay=made(f"decay_{name}"),
                matrix=made(f"matrix_{name}"),
                local=made(f"local_{name}"),
                bytes=numbers,
                origin=following.origin if following is not None else None,
            )
        )
    return tuple(out)


def _rule(transition: Transition, name: str, log: bool) -> str:
    if log:
        return f"{name} <- carry * {name} + fresh * S_hat,  m <- max(m + log_decay, log_weight)"
    parts = []
    if transition.has_matrix:
        factor = "(decay + matrix)" if transition.has_decay else "matrix"
        parts.append(f"{factor} @ {name}")
    else:
        parts.append(f"decay * {name}" if transition.has_decay else name)
    return f"{name} <- {parts[0]} + S_hat"


def _log_words() -> str:
    return (
        "one factor a chunk and head, kept as a logarithm: the true state is exp(m) S, and m moves "
        "with the largest weight so that nothing overflows"
    )


def _words(transition: Transition, dims: Dims) -> str:
    first, last = dims[0], dims[-1]
    if transition.kind == "identity":
        return "nothing decays: spans of tokens add up"
    if transition.kind == "scalar":
        return "one factor a chunk and head for the whole state"
    if transition.kind == "rows":
        return f"one factor for each row of the state, {first} numbers a chunk and head"
    if transition.kind == "columns":
        return f"one factor for each column of the state, {last} numbers a chunk and head"
    if transition.kind == "full":
        return "one factor for each entry of the state"
    return (
        f"a {first} x {first} matrix a chunk and head; joining two spans is a product of "
        f"such matrices, a chain of ranks sends the state alone"
    )

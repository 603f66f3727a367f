"""What M is, derived from `decay_mode`; and every `decay_mode` that is refused, with its line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from flexla_dist.compiler.affine import derive_transition
from flexla_dist.compiler.ir.graph import Cell
from flexla_dist.compiler.ir.operators import Sizes
from flexla_dist.compiler.passes.order import FORWARD_PASSES
from flexla_dist.compiler.pipeline import compile_graphs, run_passes
from flexla_dist.compiler.trace.stages import trace_spec
from flexla_dist.compiler.transition import KINDS, Transition
from flexla_dist.compiler.verify import verify_cell
from flexla_dist.errors import NotAffineError
from flexla_dist.spec import LinearAttentionSpec, LogScaled

from .compiled import SPECS, graphs_of

Stage = Callable[[Any, Any], Any]
SIZES = {"C": 9, "K": 5, "V": 7, "D": 6, "M": 4, "1": 1}
STATES = {"S": ("K", "V"), "z": ("K",), "R": ("K", "V")}


def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
    return {
        "total": x.g.sum(),
        "rows": x.k.sum(0),
        "cols": x.v.sum(0),
        "write": x.k.T @ x.v,
        "M": x.k.T @ x.q,
        "N": x.q.T @ x.q,
        "k": x.k,
        "v": x.v,
        "vv": x.v.T @ x.v,
        "token": x.k[-1],
        "a": p.a,
    }


def derive(decay_mode: Stage, state: Any = "K V", **changes: Any) -> Any:
    """Cell and transitions of a decay_mode, without the proofs about padding and signs."""
    name = "S" if isinstance(state, str) else next(iter(state))
    vector = len(STATES[name]) == 1 if not isinstance(state, str) else state == "K"
    output = (lambda S: S) if isinstance(state, str) else (lambda S: S[name])
    settings: dict[str, Any] = {
        "name": "mine",
        "inputs": {"q": "C K", "k": "C K", "v": "C V", "g": "C"},
        "params": {"a": ""},
        "chunk_mode": chunk_mode,
        "decay_mode": decay_mode,
        "merge_mode": lambda S, c: c.k * output(S)[None, :] if vector else c.k @ output(S),
        "state": state,
        "output": "C K" if vector else "C V",
        **changes,
    }
    spec = LinearAttentionSpec(**settings)
    return derive_transition(spec, run_passes(trace_spec(spec), FORWARD_PASSES, []))


def arguments(cell: Cell) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn([SIZES[d] for d in n.meta["dims"]], generator=generator).double()
        for name, n in cell.placeholders.items()
        if name not in ("sizes", "valid")
    }


def run_cell(cell: Cell, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    known = {
        **values,
        "sizes": Sizes(SIZES, torch.device("cpu"), torch.float64),
        "valid": torch.ones(SIZES["C"], dtype=torch.bool),
    }
    return fx.GraphModule({}, cell.graph)(*(known[name] for name in cell.placeholders))


def assert_means_the_same(cell: Cell, transitions: dict[str, Transition]) -> None:
    """next = decay * S + matrix @ S + local, with S nowhere in the three."""
    verify_cell(cell, "transition")
    values = arguments(cell)
    got = run_cell(cell, values)
    other = run_cell(cell, {**values, **{k: x * 3 for k, x in values.items() if "state" in k}})
    for name, transition in transitions.items():
        state = values[f"state_{name}"]
        expected = got[f"local_{name}"]
        assert transition.has_matrix == (f"matrix_{name}" in got)
        assert transition.has_decay == (f"decay_{name}" in got)
        if transition.has_matrix:
            expected = expected + got[f"matrix_{name}"] @ state
        if transition.has_decay:
            expected = expected + got[f"decay_{name}"] * state
        elif not transition.has_matrix:
            expected = expected + state
        torch.testing.assert_close(got[f"next_{name}"], expected)
        for part in ("local", "decay", "matrix"):
            if f"{part}_{name}" in got:
                assert torch.equal(got[f"{part}_{name}"], other[f"{part}_{name}"])


# -- kinds ----------------------------------------------------------------------------------------

MATRIX: dict[str, tuple[str, Stage]] = {
    "unchanged": ("identity", lambda S, c: S),
    "sum": ("identity", lambda S, c: S + c.write),
    "difference": ("identity", lambda S, c: S - c.write),
    "mean of twice": ("identity", lambda S, c: (S + S) / 2 + c.write),
    "negative": ("scalar", lambda S, c: c.write - S),
    "scalar": ("scalar", lambda S, c: c.total.exp() * S + c.write),
    "number": ("scalar", lambda S, c: 0.5 * S + c.write),
    "parameter": ("scalar", lambda S, c: S * c.a.exp() + c.write),
    "divided": ("scalar", lambda S, c: S / (1 + c.total**2) - c.write),
    "forgotten": ("scalar", lambda S, c: c.write),
    "forgotten by zero": ("scalar", lambda S, c: S * 0.0 + c.write),
    "constant": ("scalar", lambda S, c: torch.zeros(c.k.shape[1], c.v.shape[1])),
    "rows": ("rows", lambda S, c: c.rows[:, None] * S + c.write),
    "rows and scalar": ("rows", lambda S, c: (S * c.total + c.write) * c.rows[:, None]),
    "column vector": ("rows", lambda S, c: S * c.rows.unsqueeze(-1)),
    "columns": ("columns", lambda S, c: S * c.cols[None, :] + c.write),
    "columns by broadcast": ("columns", lambda S, c: S * c.cols + c.write),
    "rows and columns": ("full", lambda S, c: S * c.cols * c.rows[:, None] + c.write),
    "full": ("full", lambda S, c: S * c.write.sigmoid() + c.write),
    "sum of rows and columns": ("full", lambda S, c: S * c.cols + S * c.rows[:, None]),
    "selected rows": ("rows", lambda S, c: torch.where(c.rows[:, None] > 0, S, c.write)),
    "selected whole": ("scalar", lambda S, c: torch.where(c.total > 0, S * 2, S + c.write)),
    "dense": ("dense", lambda S, c: c.M @ S + c.write),
    "delta": ("dense", lambda S, c: S - c.k.T @ (c.k @ S) + c.write),
    "delta of the rest": ("dense", lambda S, c: S + c.k.T @ (c.v - c.k @ S)),
    "dense and rows": ("dense", lambda S, c: c.rows[:, None] * S + c.M @ S),
    "dense of rows": ("dense", lambda S, c: c.M @ (c.rows[:, None] * S + c.write)),
    "dense times rows": ("dense", lambda S, c: c.rows[:, None] * (c.M @ S)),
    "dense twice": ("dense", lambda S, c: c.M @ (c.N @ S + c.write) - c.N @ S),
    "one token": ("dense", lambda S, c: S - c.token[:, None] * (c.token[None, :] @ S)),
    "a vector from the left": ("dense", lambda S, c: S - torch.outer(c.token, c.token @ S)),
    "transposed twice": ("dense", lambda S, c: (S.T @ c.M).T + c.write),
    "einsum": ("dense", lambda S, c: torch.einsum("kj,jv->kv", c.M, S)),
    "selected dense": ("dense", lambda S, c: torch.where(c.rows[:, None] > 0, c.M @ S, S)),
    "one row, repeated": ("dense", lambda S, c: S + c.token[None, :] @ S + c.write),
    "ones": ("dense", lambda S, c: c.rows[:, None] * (torch.ones_like(c.M) @ S)),
}
VECTOR: dict[str, tuple[str, Stage]] = {
    "unchanged": ("identity", lambda S, c: S + c.rows),
    "scalar": ("scalar", lambda S, c: S * c.total + c.rows),
    "full": ("full", lambda S, c: S * c.rows.sigmoid() + c.rows),
}


@pytest.mark.parametrize("name", MATRIX)
def test_kind_of_a_matrix_state(name: str) -> None:
    kind, decay_mode = MATRIX[name]
    cell, transitions = derive(decay_mode)
    assert transitions["S"].kind == kind and kind in KINDS
    assert_means_the_same(cell, transitions)


@pytest.mark.parametrize("name", VECTOR)
def test_kind_of_a_vector_state(name: str) -> None:
    kind, decay_mode = VECTOR[name]
    cell, transitions = derive(decay_mode, "K")
    assert transitions["S"].kind == kind
    assert_means_the_same(cell, transitions)


def test_each_state_has_its_own_kind() -> None:
    cell, transitions = derive(
        lambda S, c: {"z": S.z * c.total + c.rows, "R": c.M @ S.R, "S": S.S * c.cols + c.write},
        {"S": "K V", "z": "K", "R": "K V"},
    )
    assert {n: t.kind for n, t in transitions.items()} == {
        "S": "columns",
        "z": "scalar",
        "R": "dense",
    }
    assert_means_the_same(cell, transitions)


def test_a_vector_state_with_a_matrix_is_declared_with_one_column() -> None:
    cell, transitions = derive(lambda S, c: c.M @ S + c.rows[:, None], "K 1", output="C 1")
    assert transitions["S"].kind == "dense"
    assert_means_the_same(cell, transitions)


@pytest.mark.parametrize("name", SPECS)
def test_elements_of_every_variant_mean_decay_mode(name: str) -> None:
    graphs = graphs_of(name)
    if SPECS[name].log_scaled is None:
        assert_means_the_same(graphs.cell, graphs.transitions)


def test_kinds_of_the_variants() -> None:
    kinds = {n: tuple(t.kind for t in graphs_of(n).transitions.values()) for n in SPECS}
    assert kinds == {
        "linear_attn": ("identity",),
        "linear_attn_normalized": ("identity", "identity"),
        "retention": ("scalar",),
        "lightning": ("scalar",),
        "simple_gla": ("scalar",),
        "mamba2": ("scalar",),
        "gla": ("rows",),
        "hgrn": ("full",),
        "delta_rule": ("dense",),
        "gated_delta_rule": ("dense",),
        "kda": ("dense",),
        "mlstm": ("scalar", "scalar"),
        "gsa": ("columns", "rows"),
        "rwkv6": ("rows",),
        "dplr": ("dense",),
    }


# -- refusals -------------------------------------------------------------------------------------

NOT_AFFINE = "not affine in the state"
COLUMNS = "columns stay independent"
REFUSED: dict[str, tuple[Stage, str]] = {
    "exp": (lambda S, c: S.exp(), f"{NOT_AFFINE}: exp of a value"),
    "sigmoid": (lambda S, c: torch.sigmoid(S) + c.write, f"{NOT_AFFINE}: sigmoid"),
    "tanh of a sum": (lambda S, c: torch.tanh(S + c.write), f"{NOT_AFFINE}: tanh"),
    "square": (lambda S, c: S * S, f"{NOT_AFFINE}: a product of two values"),
    "power": (lambda S, c: S**3, f"{NOT_AFFINE}: power"),
    "product of parts": (lambda S, c: (c.M @ S) * S, f"{NOT_AFFINE}: a product of two"),
    "gram": (lambda S, c: S @ (S.T @ S), COLUMNS),
    "detached square": (lambda S, c: S.detach() ** 2 + S, NOT_AFFINE),
    "detached": (lambda S, c: S.detach() + c.write, f"{NOT_AFFINE}: stop_gradient"),
    "sign": (lambda S, c: torch.sign(S), f"{NOT_AFFINE}: sign"),
    "sign beside it": (lambda S, c: S + torch.sign(S), f"{NOT_AFFINE}: sign"),
    "absolute": (lambda S, c: S.abs(), f"{NOT_AFFINE}: absolute"),
    "clamp": (lambda S, c: S.clamp(-1.0, 1.0), NOT_AFFINE),
    "relu": (lambda S, c: torch.relu(S), NOT_AFFINE),
    "division by it": (lambda S, c: c.write / S, f"{NOT_AFFINE}: a division by it"),
    "division of it": (lambda S, c: S / S.abs(), NOT_AFFINE),
    "selection by it": (
        lambda S, c: torch.where(S > 0, S, c.write),
        f"{NOT_AFFINE}: ",
    ),
    "normalised": (lambda S, c: S / S.square().sum(), NOT_AFFINE),
    "largest": (lambda S, c: S - S.amax(0, keepdim=True), NOT_AFFINE),
    "from the right": (lambda S, c: S @ c.vv, "multiplied from the right"),
    "einsum from the right": (
        lambda S, c: torch.einsum("kv,vw->kw", S, c.vv),
        "multiplied from the right",
    ),
    "sum of columns": (lambda S, c: S + S.sum(1, keepdim=True), COLUMNS),
    "sum of rows": (lambda S, c: S + S.sum(0, keepdim=True), COLUMNS),
    "mean": (lambda S, c: S - S.mean(), COLUMNS),
    "running sum": (lambda S, c: S.cumsum(1), COLUMNS),
    "one row": (lambda S, c: S + S[-1], COLUMNS),
    "dense, then columns": (lambda S, c: (c.M @ S) * c.cols, "differs by column"),
    "dense plus columns": (lambda S, c: c.M @ S + S * c.cols, "differs by column"),
    "columns, then dense": (lambda S, c: c.M @ (S * c.cols), "scaled by column"),
    "dense selected by column": (
        lambda S, c: torch.where(c.cols > 0, c.M @ S, S),
        "selection by column",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    decay_mode, part = REFUSED[name]
    with pytest.raises(NotAffineError) as caught:
        derive(decay_mode)
    message = str(caught.value)
    assert part in message, message
    assert "mine.decay_mode: " in message
    assert_line_of(decay_mode, message)


def assert_line_of(function: Stage, message: str) -> None:
    """The message ends with file, line and text of the function's own code."""
    lines, first = inspect.getsourcelines(function)
    assert any(f"{__file__}:{first + i}," in message for i in range(len(lines))), message
    text = message.splitlines()[-1].strip()
    assert text and any(text in line for line in lines), message


def test_the_line_is_that_of_the_operation_at_fault() -> None:
    def decay_mode(S: Any, c: Any) -> Any:
        kept = c.rows[:, None] * S
        squashed = torch.tanh(kept)
        return squashed + c.write

    with pytest.raises(NotAffineError, match=r"squashed = torch.tanh\(kept\)"):
        derive(decay_mode)


def test_states_that_mix() -> None:
    pair = {"S": "K V", "R": "K V"}
    with pytest.raises(NotAffineError, match="states 'S' and 'R' mix in decay_mode"):
        derive(lambda S, c: {"S": S.S + S.R, "R": S.R}, pair)
    with pytest.raises(NotAffineError, match="next state 'S' is made from state 'R'"):
        derive(lambda S, c: {"S": S.R, "R": S.R}, pair)
    with pytest.raises(NotAffineError, match="a product of two values that depend on it"):
        derive(lambda S, c: {"S": S.S * S.R, "R": S.R}, pair)
    with pytest.raises(NotAffineError, match="states 'R' and 'S' mix"):
        derive(lambda S, c: {"S": c.write - (S.R - c.M @ S.S), "R": S.R}, pair)
    with pytest.raises(NotAffineError, match="states 'S' and 'R' mix"):
        derive(lambda S, c: {"S": torch.where(c.total > 0, S.S, S.R), "R": S.R}, pair)


def test_a_state_that_is_repeated_before_a_product_is_refused() -> None:
    with pytest.raises(NotAffineError, match=r"the state \[1, V\] is broadcast to \[K, V\]"):
        derive(
            lambda S, c: c.token[None, :] @ (S * c.rows[:, None]),
            "1 V",
            merge_mode=lambda S, c: c.v * S,
        )


def test_a_vector_that_writes_into_a_matrix_is_refused() -> None:
    with pytest.raises(NotAffineError, match="of the state moves or sums its entries"):
        derive(
            lambda S, c: {"S": S.S + S.z[:, None], "z": S.z},
            {"S": "K V", "z": "K"},
        )
    with pytest.raises(NotAffineError, match="of the state moves or sums its entries"):
        derive(lambda S, c: c.M @ S, "K")


# -- log-scaled states ----------------------------------------------------------------------------


def log_scaled(decay_mode: Stage) -> Any:
    def chunk(x: Any, p: Any) -> dict[str, Any]:
        b = x.g.cumsum(0)
        mu = (b[-1] - b + x.i).amax(0)
        write = (x.k * (b[-1] - b + x.i - mu).exp()[:, None]).T @ x.v
        return {"b": b[-1], "mu": mu, "write": write, "k": x.k, "rows": x.k[-1]}

    return compile_graphs(
        LinearAttentionSpec(
            name="mine",
            inputs={"k": "C K", "v": "C V", "g": "C <=0", "i": "C"},
            padding={"i": -1e30},
            chunk_mode=chunk,
            decay_mode=decay_mode,
            merge_mode=lambda S, c: (c.k @ S) * c.m.sigmoid(),
            log_scaled=LogScaled(decay="b", weight="mu"),
        )
    )


LOG_SCALED: dict[str, Stage] = {
    "plain": lambda S, c: S * c.carry + c.fresh * c.write,
    "in the other order": lambda S, c: c.write * c.fresh + c.carry * S,
    "a difference": lambda S, c: c.carry * S - (c.fresh * c.write) / 2,
    "from a product": lambda S, c: S * c.carry + (c.fresh * c.rows)[:, None] * c.write,
}
NOT_LOG_SCALED: dict[str, tuple[Stage, str]] = {
    "unscaled": (lambda S, c: S + c.fresh * c.write, "scaled by c.carry alone"),
    "scaled twice": (lambda S, c: S * c.carry * c.carry + c.fresh * c.write, "c.carry alone"),
    "by row": (lambda S, c: S * c.carry * c.rows[:, None] + c.fresh * c.write, "c.carry alone"),
    "a factor of its own": (
        lambda S, c: S * (c.b + c.mu).exp() + c.fresh * c.write,
        "scaled by c.carry alone",
    ),
    "added bare": (lambda S, c: S * c.carry + c.write, "must be c.fresh times a value"),
    "fresh squared": (lambda S, c: S * c.carry + c.fresh**2 * c.write, "c.fresh times a value"),
    "fresh plus one": (lambda S, c: S * c.carry + (c.fresh + 1) * c.write, "c.fresh may only be"),
    "exp of fresh": (lambda S, c: S * c.carry + c.fresh.exp() * c.write, "c.fresh may only be"),
    "nothing added": (lambda S, c: S * c.carry, "must be c.fresh times a value"),
}


@pytest.mark.parametrize("name", LOG_SCALED)
def test_log_scaled_states(name: str) -> None:
    graphs = log_scaled(LOG_SCALED[name])
    assert graphs.transitions["S"].kind == "scalar"
    local = graphs.cell.outputs["local_S"]
    assert "fresh" not in {n.meta["key"] for n in _ancestors(local) if n.op == "placeholder"}


@pytest.mark.parametrize("name", NOT_LOG_SCALED)
def test_log_scaled_states_refused(name: str) -> None:
    decay_mode, part = NOT_LOG_SCALED[name]
    with pytest.raises(NotAffineError) as caught:
        log_scaled(decay_mode)
    assert part in str(caught.value)
    assert_line_of(decay_mode, str(caught.value))


def _ancestors(node: Any) -> list[Any]:
    seen, stack = [], [node]
    while stack:
        here = stack.pop()
        if here not in seen:
            seen.append(here)
            stack.extend(here.all_input_nodes)
    return seen

"""Every mistake in a callable is refused at the user's line, with what to do instead."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional as tnf

from flexla_dist.compiler.pipeline import compile_graphs
from flexla_dist.compiler.trace.lowering.refused import REFUSED
from flexla_dist.compiler.trace.stages import trace_spec
from flexla_dist.errors import NotAffineError, TraceError
from flexla_dist.spec import LinearAttentionSpec, LogScaled
from flexla_dist.spec import functional as F

INPUTS = {"q": "C K", "k": "C K", "v": "C V", "g": "C <=0"}
OUTSIDE = torch.ones(3)
Stage = Callable[..., Any]


def chunk_mode(x: Any, p: Any) -> dict[str, Any]:
    return {"q": x.q, "k": x.k, "v": x.v, "g": x.g}


def decay_mode(S: Any, c: Any) -> Any:
    return S + c.k.T @ c.v


def merge_mode(S: Any, c: Any) -> Any:
    return c.q @ S


def make(**stages: Any) -> LinearAttentionSpec:
    settings: dict[str, Any] = {
        "name": "mistaken",
        "inputs": INPUTS,
        "params": {"u": "K"},
        "scalars": {"scale": 1.0},
        "chunk_mode": chunk_mode,
        "decay_mode": decay_mode,
        "merge_mode": merge_mode,
        **stages,
    }
    return LinearAttentionSpec(**settings)


def refused(stage: str, function: Stage, error: type[TraceError] = TraceError, **other: Any) -> str:
    """The message; it names spec, stage and a line inside of `function`."""
    spec = make(**{stage: function}, **other)
    with pytest.raises(error) as caught:
        compile_graphs(spec)
    message = str(caught.value)
    assert message.startswith(f"mistaken.{stage}: "), message
    origin = caught.value.origin
    assert origin is not None and origin.file == __file__, message
    lines, first = inspect.getsourcelines(function)
    assert first <= origin.line < first + len(lines), message
    assert f"{__file__}:{origin.line}" in message
    return message


def chunk_refused(expression: Stage) -> str:
    """Refused inside of chunk_mode."""

    def wrapped(x: Any, p: Any) -> dict[str, Any]:
        return {**chunk_mode(x, p), "bad": expression(x, p)}

    spec = make(chunk_mode=wrapped)
    with pytest.raises(TraceError) as caught:
        trace_spec(spec)
    message = str(caught.value)
    assert message.startswith("mistaken.chunk_mode: "), message
    origin = caught.value.origin
    assert origin is not None and origin.file == __file__
    lines, first = inspect.getsourcelines(expression)
    assert first <= origin.line < first + len(lines), message
    return message


# -- expressions ----------------------------------------------------------------------------------


def branch(x: Any, p: Any) -> Any:
    if x.g.sum() > 0:
        return x.q
    return x.k


def shape_branch(x: Any, p: Any) -> Any:
    return x.q if x.q.shape[0] > 16 else x.k


def loop(x: Any, p: Any) -> Any:
    total = x.k[0]
    for row in x.k:
        total = total + row
    return total


def indexed_loop(x: Any, p: Any) -> Any:
    total = x.k[0]
    for t in range(x.k.shape[0]):
        total = total + x.k[t]
    return total


def assigned(x: Any, p: Any) -> Any:
    x.q[0] = 0.0
    return x.q


def attribute(x: Any, p: Any) -> Any:
    x.q.data = x.k
    return x.q


def input_assigned(x: Any, p: Any) -> Any:
    x.q = x.k
    return x.q


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any) -> Any:
        return a.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 7


def no_gradient(x: Any, p: Any) -> Any:
    with torch.no_grad():
        return x.q * 2


EXPRESSIONS: dict[str, tuple[Stage, tuple[str, ...]]] = {
    "unknown input": (lambda x, p: x.queue, ("no input named 'queue'", "known: q, k, v, g")),
    "misspelt input": (lambda x, p: x.gg, ("did you mean 'g'",)),
    "unknown parameter": (
        lambda x, p: p.bias, ("no parameter or scalar named 'bias'", "known: u, scale"),
    ),
    "dims of a sum": (
        lambda x, p: x.q + x.v, ("add:", "[C, K] and [C, V]", "K against V"),
    ),
    "missing dim": (
        lambda x, p: x.q * x.g,
        ("mul: [C, K] and [1, C] do not broadcast", "give [C] as x[:, None], which is [C, 1]"),
    ),
    "dims of a product": (
        lambda x, p: x.q @ x.v, (".chunk_mode: matmul of [C, K] and [C, V] contracts K with C",),
    ),
    "einsum": (lambda x, p: torch.einsum("ck,ck", x.q, x.k), ("'->'",)),
    "einsum term": (lambda x, p: torch.einsum("c,ck->k", x.q, x.k), ("term 'c'", "2 dims")),
    "no such dim": (lambda x, p: x.g.sum(1), ("dim 1 does not exist", "1 dims")),
    "too many indices": (lambda x, p: x.g[:, 0], ("2 indices into a value with 1 dims",)),
    "squeeze": (lambda x, p: x.q.squeeze(0), ("squeeze of dim C", "size is not one")),
    "transpose of a vector": (lambda x, p: x.g.mT, ("a transpose needs two dims",)),
    "tril of a matrix that is not square": (lambda x, p: x.q.tril(), ("square", "[C, K]")),
    "closure": (lambda x, p: x.q * OUTSIDE, ("a tensor of shape (3,)", "`params`", "`inputs`")),
    "closure, tensors alone": (lambda x, p: OUTSIDE + OUTSIDE, ("a tensor of shape (3,)",)),
    "list": (lambda x, p: x.q * [1.0], ("list is no operand",)),
    "None": (lambda x, p: x.q + None, ("NoneType is no operand",)),
    "branch": (branch, ("a branch on a value of the chunk", "torch.where")),
    "not": (lambda x, p: not x.q, ("a branch on a value",)),
    "shape branch": (shape_branch, ("a branch on the size of dim C",)),
    "sizes of two dims": (
        lambda x, p: x.q * (x.q.shape[0] == x.q.shape[1]), ("a branch on the size of dim C",),
    ),
    "a size and a number": (
        lambda x, p: x.q * (x.q.shape[0] == 64), ("a branch on the size of dim C",),
    ),
    "loop": (loop, ("a Python loop over a dim", "cumsum")),
    "indexed loop": (indexed_loop, ("index 1", "first (0) and the last (-1)")),
    "len": (lambda x, p: len(x.q), ("a Python loop over a dim",)),
    "partial slice": (lambda x, p: x.q[1:], ("a partial slice", "exclusive sum")),
    "strided slice": (lambda x, p: x.q[::2], ("a partial slice",)),
    "index by a value": (lambda x, p: x.q[x.g > 0], ("an index into a chunk must be a constant",)),
    "integer arithmetic": (
        lambda x, p: torch.ones(x.q.shape[0] // 2), ("integer arithmetic on the size of dim C",),
    ),
    "math on a size": (
        lambda x, p: x.q / math.sqrt(x.q.shape[1]), ("size of dim K", "** -0.5"),
    ),
    "fixed size": (lambda x, p: torch.zeros(64, 64), ("a fixed size 64", "x.shape")),
    "float": (lambda x, p: float(x.g.sum()), ("a Python number was asked",)),
    "item": (lambda x, p: x.g.sum().item(), ("a Python number was asked", ".item()")),
    "assignment": (assigned, ("in-place assignment",)),
    "attribute": (attribute, ("assigning .data",)),
    "input assigned": (input_assigned, ("input 'q' cannot be assigned", "return new values")),
    "in-place method": (lambda x, p: x.q.add_(1.0), ("in-place add_", "value that add returns")),
    "in-place clamp": (lambda x, p: x.g.clamp_(max=0), ("in-place clamp_",)),
    "in-place function": (lambda x, p: tnf.relu(x.q, inplace=True), ("inplace=True",)),
    "out": (lambda x, p: torch.exp(x.q, out=x.q), ("these arguments are not supported",)),
    "unknown operator": (
        lambda x, p: torch.erfinv(x.q),
        ("operator 'erfinv' is not supported. Write it with the", "supported_names() lists"),
    ),
    "no near operator": (
        lambda x, p: torch.linalg.qr(x.q), ("operator 'linalg_qr' is not supported. Write it",),
    ),
    "misspelt method": (lambda x, p: x.q.cumsun(0), ("did you mean 'cumsum'",)),
    "stack": (lambda x, p: torch.stack([x.q, x.k]), ("stack is not supported", "not joined")),
    "cat": (lambda x, p: torch.cat([x.q, x.k], -1), ("cat is not supported", "not joined")),
    "reshape": (lambda x, p: x.q.reshape(-1), ("reshape is not supported", "einsum")),
    "roll": (lambda x, p: torch.roll(x.k, 1, 0), ("roll is not supported", "exclusive sum")),
    "pad": (lambda x, p: tnf.pad(x.k, (0, 0, 1, 0)), ("pad is not supported",)),
    "random": (lambda x, p: x.q * torch.randn(x.q.shape[0])[:, None], ("pure",)),
    "dropout": (lambda x, p: tnf.dropout(x.q, 0.1), ("dropout is not supported",)),
    "projection": (lambda x, p: tnf.linear(x.q, x.k), ("linear is not supported", "the layer")),
    "cumprod": (lambda x, p: x.g.cumprod(0), ("cumprod is not supported", "cumsum")),
    "sort": (lambda x, p: x.g.sort(), ("sort is not supported",)),
    "flip": (lambda x, p: x.g.flip(0), ("x.sum(0) - x.cumsum(0) + x",)),
    "norm": (lambda x, p: x.q / torch.linalg.norm(x.q), ("normalize",)),
    "no_grad": (no_gradient, ("detach",)),
    "backward": (lambda x, p: x.q.sum().backward(), ("derives gradients itself",)),
    "position of a maximum": (lambda x, p: x.q.max(-1).indices, ("position of a maximum",)),
    "not of numbers": (lambda x, p: ~x.q, ("needs comparisons or masks",)),
    "and of numbers": (lambda x, p: x.q & (x.q > 0), ("needs comparisons or masks",)),
    "where of numbers": (lambda x, p: torch.where(x.q, x.q, 0.0), ("comparison or a mask",)),
    "diagonal": (
        lambda x, p: (x.q @ x.k.T).tril(x.q.shape[0]), ("must be a constant",),
    ),
    "tensor of numbers": (lambda x, p: torch.tensor([1.0, 2.0]), ("more than one number",)),
    "upper system": (
        lambda x, p: torch.linalg.solve_triangular(x.q @ x.k.T, x.v, upper=True), ("lower",),
    ),
    "dims of a domain operator": (
        lambda x, p: F.decay_matrix(x.q, x.q), ("b_row and b_col must both be [C]",),
    ),
    "dims of scores": (
        lambda x, p: F.decay_scores(x.q, x.k, x.g, x.g), ("must all be [C, K]", "[C]"),
    ),
    "dims of a scan": (lambda x, p: F.decay_scan(x.g, x.q), ("g and x must both be [C, D]",)),
    "NaN": (lambda x, p: torch.where(x.q > 0, math.nan, x.q), ("a constant that is no number",)),
    "to whole numbers": (lambda x, p: x.q.to(torch.int32), ("dtype=torch.int32", "rounded")),
    "type of whole numbers": (lambda x, p: x.q.type(torch.int64), ("dtype=torch.int64",)),
    "complex numbers": (lambda x, p: x.q.to(torch.complex64), ("not complex numbers",)),
    "a sum of whole numbers": (lambda x, p: x.q.sum(0, dtype=torch.int32), ("dtype=torch.int32",)),
    "a softmax of whole numbers": (
        lambda x, p: torch.softmax(x.q, -1, dtype=torch.int32), ("dtype=torch.int32",),
    ),
    "a running sum of whole numbers": (
        lambda x, p: x.q.cumsum(0, dtype=torch.int8), ("dtype=torch.int8",),
    ),
    "a fraction as a whole number": (
        lambda x, p: x.q + torch.full(x.q.shape, 0.5, dtype=torch.int32), ("dtype=torch.int32",),
    ),
    "a dim twice": (lambda x, p: x.q.sum((0, -2)), ("names a dim twice",)),
    "softmax without a dim": (lambda x, p: torch.softmax(x.q, None), ("dim None does not exist",)),
    "einsum result": (lambda x, p: torch.einsum("ck->cz", x.q), ("the result 'cz'",)),
    "parity of a size": (lambda x, p: x.q * (x.q.shape[0] & 1), ("integer arithmetic",)),
    "remainder of a size": (lambda x, p: x.q * divmod(x.q.shape[0], 2)[1], ("integer arithmetic",)),
    "modular power of a size": (
        lambda x, p: x.q * pow(x.q.shape[0], 1, 2), ("integer arithmetic",),
    ),
    "inverted size": (lambda x, p: x.q * ~x.q.shape[0], ("integer arithmetic",)),
    "quotient": (lambda x, p: x.q // 2, ("floor_divide is not supported", "whole numbers")),
    "remainder": (lambda x, p: x.q % 2, ("remainder is not supported",)),
    "shift": (lambda x, p: x.q << 1, ("bitwise_left_shift is not supported",)),
    "exclusive or of numbers": (lambda x, p: x.q ^ x.k, ("needs comparisons or masks",)),
    "rounded": (lambda x, p: round(x.q), ("round is not supported",)),
    "shape of a dim too many": (lambda x, p: x.q * x.q.shape[7], ("shape[7] of a value with 2",)),
    "numpy function": (lambda x, p: numpy.exp(x.q), ("TypeError", "no tensors")),
    "math function": (lambda x, p: {"a": x.q}["b"], ("KeyError: 'b'",)),
    "transpose of three dims": (lambda x, p: x.q[None].T, (".T of 3 dims",)),
    "power of what may be negative": (
        lambda x, p: x.q**p.scale, ("base may be negative", "x ** 2", "torch.exp(e * "),
    ),
    "value to a value": (lambda x, p: x.q**x.k, ("base may be negative",)),
    "negative number to a value": (lambda x, p: (-2.0) ** x.q, ("-2 ** a value",)),
    "dims of an inverse": (lambda x, p: F.unit_tril_inverse(x.q), ("square matrix",)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name: str) -> None:
    expression, parts = EXPRESSIONS[name]
    message = chunk_refused(expression)
    for part in parts:
        assert part in message, message


def test_every_refused_name_says_why() -> None:
    """The names in the table are real torch spellings."""
    names = {n for space in (torch, torch.Tensor, tnf, torch.linalg) for n in dir(space)}
    for name, reason in REFUSED.items():
        bare = name.removeprefix("linalg_").removeprefix("_")
        assert bare in names or name in names, name
        assert len(reason) > 20


LOOKS: dict[str, Stage] = {
    "a branch on the dtype": lambda x, p: 2.0 if x.q.dtype == torch.float32 else 1.0,
    "a number of the dtype": lambda x, p: torch.finfo(x.q.dtype).eps,
    "a common divisor of a size": lambda x, p: math.gcd(x.q.shape[0], 2),
    "a whole number from a size": lambda x, p: int(x.q.shape[0]),
}


@pytest.mark.parametrize("name", LOOKS)
def test_numbers_that_come_from_sizes_or_the_dtype(name: str) -> None:
    def looks(x: Any, p: Any) -> dict[str, Any]:
        return {**chunk_mode(x, p), "q": x.q * LOOKS[name](x, p)}

    message = refused("chunk_mode", looks)
    assert "changes with the sizes of the dims, with the dtype" in message


def test_a_function_with_its_own_backward() -> None:
    def doubled(x: Any, p: Any) -> dict[str, Any]:
        return {**chunk_mode(x, p), "q": Doubled.apply(x.q)}

    with pytest.raises(TraceError, match="its backward would be ignored") as caught:
        compile_graphs(make(chunk_mode=doubled))
    assert caught.value.origin is not None and caught.value.origin.text == "return a.clone()"


@pytest.mark.parametrize("name", ["value_exp", "value_exp_1", "value_decay_scores"])
def test_names_of_values_that_wait(name: str) -> None:
    with pytest.raises(TraceError, match=f"'{name}' is a name of the compiler's own values"):
        compile_graphs(make(inputs={**INPUTS, name: "C K"}))
    assert compile_graphs(make(inputs={**INPUTS, "value_states": "C K"})).cell.outputs


# -- purity ---------------------------------------------------------------------------------------


def test_impure_callables() -> None:
    calls = iter(range(100))

    def counting(x: Any, p: Any) -> dict[str, Any]:
        return {**chunk_mode(x, p), "q": x.q * float(next(calls))}

    def drawing(x: Any, p: Any) -> dict[str, Any]:
        return {**chunk_mode(x, p), "q": x.q * random.random()}

    def looping(x: Any, p: Any) -> dict[str, Any]:
        total = x.g
        for _ in range(x.q.shape[0]):
            total = total + x.g
        return {**chunk_mode(x, p), "q": x.q * total[:, None]}

    for function in (counting, drawing, looping):
        message = refused("chunk_mode", function)
        assert "changes with the sizes of the dims" in message and "call to call" in message


def test_values_kept_from_another_trace() -> None:
    kept: list[Any] = []

    def keeping(x: Any, p: Any) -> dict[str, Any]:
        kept.append(x.q)
        return {**chunk_mode(x, p), "q": kept[0]}

    assert "kept from another trace" in refused("chunk_mode", keeping)


# -- what stages return ---------------------------------------------------------------------------


def returns_tensor(x: Any, p: Any) -> Any:
    return x.q


def returns_outside(x: Any, p: Any) -> Any:
    return {"k": x.k, "v": x.v, "q": OUTSIDE}


def returns_none(x: Any, p: Any) -> Any:
    return {"k": x.k, "v": x.v, "q": None}


def test_chunk_mode_returns() -> None:
    assert "chunk_mode returns Traced; expected a dict" in refused("chunk_mode", returns_tensor)
    assert "local values 'q' is Tensor" in refused("chunk_mode", returns_outside)
    assert "is NoneType; expected a tensor" in refused("chunk_mode", returns_none)


def test_decay_mode_returns() -> None:
    def wrong_dims(S: Any, c: Any) -> Any:
        return c.k.T @ c.k

    def nothing(S: Any, c: Any) -> Any:
        S * 2.0

    def unknown(S: Any, c: Any) -> Any:
        return S * c.decay

    message = refused("decay_mode", wrong_dims)
    assert "next state 'S' has dims [K, K]; expected [K, V]" in message
    assert "the next state is NoneType" in refused("decay_mode", nothing)
    assert "no local value named 'decay'" in refused("decay_mode", unknown)


def test_decay_mode_states() -> None:
    states = {"A": "K V", "z": "K"}

    def missing(S: Any, c: Any) -> Any:
        return {"A": S.A}

    def extra(S: Any, c: Any) -> Any:
        return {"A": S.A, "z": S.z, "y": S.z}

    def unknown(S: Any, c: Any) -> Any:
        return {"A": S.A, "z": S.y}

    def single(S: Any, c: Any) -> Any:
        return S.A

    merge: Stage = lambda S, c: c.q @ S.A  # noqa: E731
    for function in (missing, extra):
        message = refused("decay_mode", function, state=states, merge_mode=merge)
        assert "decay_mode returns states" in message and "expected ['A', 'z']" in message
    message = refused("decay_mode", unknown, state=states, merge_mode=merge)
    assert "no state named 'y'" in message and "known: A, z" in message
    message = refused("decay_mode", single, state=states, merge_mode=merge)
    assert "expected a dict of states" in message


def test_merge_mode_returns() -> None:
    def wrong_dims(S: Any, c: Any) -> Any:
        return c.q * 1.0

    def reads_inputs(S: Any, c: Any) -> Any:
        return c.x @ S

    message = refused("merge_mode", wrong_dims)
    assert "the output has dims [C, K]; expected [C, V]" in message
    assert "no local value named 'x'" in refused("merge_mode", reads_inputs)


MIXED: tuple[Stage, ...] = (
    lambda x, p: x.q.cumsum(0),
    lambda x, p: x.q.mean(0),
    lambda x, p: x.q.softmax(0),
    lambda x, p: x.q[-1],
    lambda x, p: x.q[:1],
    lambda x, p: torch.arange(x.q.shape[0])[:, None],
    lambda x, p: x.k / x.q.shape[0],
    lambda x, p: (x.q @ x.k.T) @ x.k,
    lambda x, p: x.q @ (x.k.T @ x.k),
    lambda x, p: (x.g[:, None] * x.g[None, :]) @ x.k,
    lambda x, p: F.decay_scan(x.q, x.k),
)


def test_token_mode() -> None:
    def unknown(x: Any, p: Any) -> Any:
        return {"gate": x.g}

    def wrong_dims(x: Any, p: Any) -> Any:
        return {"g": x.q * 2.0}

    def no_dict(x: Any, p: Any) -> Any:
        return x.g

    for expression in MIXED:
        with pytest.raises(TraceError, match="token_mode mixes tokens") as caught:
            compile_graphs(make(token_mode=lambda x, p, e=expression: {"q": x.q * e(x, p)}))
        origin = caught.value.origin
        assert origin is not None and origin.line >= expression.__code__.co_firstlineno

    def by_itself(x: Any, p: Any) -> Any:
        rows = torch.ones(x.q.shape[0], dtype=x.q.dtype)[:, None]
        return {"q": (x.q.softmax(-1) + x.q[:, -1:] + x.q.mean(-1, keepdim=True) * p.u) * rows}

    compile_graphs(make(token_mode=by_itself))
    assert "token_mode returns 'gate', which is no input" in refused("token_mode", unknown)
    message = refused("token_mode", wrong_dims)
    assert "input 'g' has dims [C, K]; expected [C]" in message
    assert "expected a dict of inputs" in refused("token_mode", no_dict)


def test_log_scaled_names() -> None:
    def reserved(x: Any, p: Any) -> Any:
        return {**chunk_mode(x, p), "carry": x.g.sum(), "b": x.g.sum(), "mu": x.g.amax(0)}

    def per_token(x: Any, p: Any) -> Any:
        return {**chunk_mode(x, p), "b": x.g * 1.0, "mu": x.g.amax(0)}

    scaled = LogScaled(decay="b", weight="mu")
    message = refused("chunk_mode", chunk_mode, log_scaled=scaled)
    assert "log_scaled names 'b', which chunk_mode does not return" in message
    assert "'carry' is reserved" in refused("chunk_mode", reserved, log_scaled=scaled)
    message = refused("chunk_mode", per_token, log_scaled=scaled)
    assert "log_scaled local 'b' has dims [C]; expected []" in message


# -- the state ------------------------------------------------------------------------------------


def squared(S: Any, c: Any) -> Any:
    return S * S


def detached(S: Any, c: Any) -> Any:
    return S.detach() ** 2 + S


def signed(S: Any, c: Any) -> Any:
    return torch.sign(S)


def from_the_right(S: Any, c: Any) -> Any:
    return S @ (c.v.T @ c.v)


def softened(S: Any, c: Any) -> Any:
    return torch.softmax(S, -1)


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (squared, "not affine"),
        (detached, "not affine"),
        (signed, "sign of a value that depends on it"),
        (from_the_right, "mixes its columns"),
        (softened, "the state"),
    ],
)
def test_decay_mode_that_is_not_affine(function: Stage, part: str) -> None:
    assert part in refused("decay_mode", function, NotAffineError)


def test_coupled_states() -> None:
    def coupled(S: Any, c: Any) -> Any:
        return {"A": S.A + S.B, "B": S.B}

    message = refused(
        "decay_mode",
        coupled,
        NotAffineError,
        state={"A": "K V", "B": "K V"},
        merge_mode=lambda S, c: c.q @ S.A,
    )
    assert "'A'" in message and "'B'" in message and "merge_mode" in message


# -- what is understood ---------------------------------------------------------------------------

UNDERSTOOD: dict[str, Stage] = {
    "sum": lambda x, p: x.q.sum(-1) + torch.sum(x.q, dim=1) + x.q.sum((0, 1)),
    "tril of ones": lambda x, p: torch.ones(x.q.shape[0], x.q.shape[0]).tril() @ x.q,
    "ones of a tuple": lambda x, p: torch.ones((x.q.shape[0], x.k.shape[0])) @ x.q,
    "ellipsis": lambda x, p: torch.exp(x.g)[..., None] * x.q,
    "softplus": lambda x, p: tnf.softplus(x.g) + tnf.softplus(x.g, beta=2.0),
    "cumsum": lambda x, p: x.g.cumsum(0) + torch.cumsum(x.g, dim=-1),
    "einsum": lambda x, p: (
        torch.einsum("ck,cv->kv", x.k, x.v) + torch.einsum("a k, a v -> k v", x.k, x.v)
    ),
    "transpose": lambda x, p: x.k.transpose(0, 1) @ x.v + x.k.t() @ x.v + x.k.permute(1, 0) @ x.v,
    "number first": lambda x, p: 2.0 * x.q - 1 / (3 + x.k) + (1 - x.q) ** 2,
    "size": lambda x, p: x.q * x.q.shape[-1] ** -0.5 + x.q / x.q.size(1) ** 0.5,
    "new_zeros": lambda x, p: (
        x.q + x.q.new_zeros(x.q.shape[0], x.q.shape[1]) + x.q.new_full((1,), 2)
    ),
    "full": lambda x, p: x.q + torch.full(x.q.shape, 2.0) + torch.full_like(x.q, 1.0),
    "to": lambda x, p: x.q.to(torch.float32).float().type_as(x.k).to(x.k.dtype).contiguous(),
    "device": lambda x, p: x.q + torch.zeros(x.q.shape, device=x.q.device, dtype=x.q.dtype),
    "arange": lambda x, p: torch.arange(0, x.q.shape[0], device=x.q.device) * x.g,
    "mask arithmetic": lambda x, p: (x.q > 0) * x.q + (x.q < 0).float().sum(-1, keepdim=True),
    "boolean": lambda x, p: torch.where((x.q > 0) & ~(x.k != 0) | (x.q <= 1), x.q, x.k),
    "eye": lambda x, p: torch.where(torch.eye(x.q.shape[0], dtype=torch.bool), 0.0, x.q @ x.k.T),
    "normalize": lambda x, p: tnf.normalize(x.q, dim=-1) + tnf.normalize(x.k, p=2, dim=1, eps=1e-6),
    "max": lambda x, p: x.q.max(-1).values + x.q.max(-1)[0] + torch.max(x.g, x.g * 2) + x.q.max(),
    "edges": lambda x, p: x.q[-1:] - x.q[:1] + x.q[0] - x.q[-1] + x.q[None, -1],
    "bases": lambda x, p: torch.exp2(x.g) + torch.log2(x.g.abs() + 1) + 2.0**x.g,
    "diag": lambda x, p: torch.diag(p.u) @ x.k.T,
    "activations": lambda x, p: tnf.silu(x.q) + tnf.relu(x.q) + tnf.elu(x.q) + tnf.sigmoid(x.q),
    "outer": lambda x, p: (
        torch.outer(x.g, x.q[-1]) * x.q + x.q @ p.u[:, None] + (x.q @ p.u)[:, None]
    ),
    "expand": lambda x, p: (
        x.g[:, None].expand(-1, x.q.shape[1]) * x.q + x.g[:, None].expand_as(x.q)
    ),
    "in-place operator": lambda x, p: augmented(x.q, x.k),
    "numpy number": lambda x, p: x.q * float(torch.finfo(torch.float32).eps),
    "mean": lambda x, p: x.q.mean(-1, keepdim=True) * x.q - x.q.mean(),
    "sums over no dim": lambda x, p: (
        x.q * x.q.sum(()) + x.k.sum([]) + x.q.mean(()) + x.q.amax(()) + x.q.amin([])
    ),
    "softplus threshold": lambda x, p: (
        tnf.softplus(x.q, threshold=0.5) + tnf.softplus(x.q, beta=2, threshold=1)
    ),
    "sum of masks": lambda x, p: ((x.q > 0) + (x.k > 0)) * x.q,
    "product of masks": lambda x, p: ((x.q > 0) * (x.k > 0) + (x.q < 1)) * x.q,
    "exclusive or": lambda x, p: ((x.q > 0) ^ (x.k > 0)) * x.q,
    "masks alike": lambda x, p: (
        x.q * ~torch.zeros_like(x.q > 0) + (torch.full(x.q.shape, True) ^ (x.k > 0)) * x.k
    ),
    "any number as a mask": lambda x, p: x.q * torch.full(x.q.shape, 0.3, dtype=torch.bool),
    "whole numbers": lambda x, p: (
        x.g * torch.arange(x.q.shape[0], dtype=torch.int32)
        + torch.ones(x.q.shape[0], dtype=torch.int64)
        + (x.g < -0.1).to(torch.int32)
    ),
    "einsum of no sum": lambda x, p: torch.einsum("ck,ck->ck", x.q, x.k) + x.g[:, None],
    "clamp": lambda x, p: x.q.clamp(-1, 1) + x.q.clamp(max=0) + torch.clamp(x.q, min=0.0),
}  # fmt: skip


def augmented(a: Any, b: Any) -> Any:
    a += b
    a *= 2.0
    return a


class _Eager:
    """Inputs as tensors, to compare a traced spelling with torch itself."""

    def __init__(self, **values: Any):
        self.__dict__.update({name: x.clone() for name, x in values.items()})


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_understood_as_torch_does(name: str) -> None:
    from .cells import SIZES, cell_of, data, run

    values = data()
    expression = UNDERSTOOD[name]
    values["u"] = torch.randn(SIZES["K"]).double()
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        expected = expression(_Eager(**values), _Eager(**values))
    finally:
        torch.set_default_dtype(previous)
    cell = cell_of(expression, params={"a": "", "u": "K"})
    got = run(cell, values)["value"]
    torch.testing.assert_close(got.expand(expected.shape), expected.double(), rtol=1e-6, atol=1e-6)


def test_sizes_that_are_equal_by_name_may_be_compared() -> None:
    def compared(x: Any, p: Any) -> dict[str, Any]:
        rows, others = x.q.shape[0], x.k.shape[0]
        assert rows == others and rows <= others and rows >= others
        assert [rows != others, rows < others, rows > others] == 3 * [False]
        assert x.q.shape == x.k.shape
        return chunk_mode(x, p)

    assert compile_graphs(make(chunk_mode=compared)).cell.outputs


@pytest.mark.parametrize(
    ("stage", "function", "expected"),
    [
        ("chunk_mode", lambda x: {"q": x.q}, "2 arguments, (x, p), but too many"),
        ("token_mode", lambda x, p, extra: {}, "2 arguments, (x, p), but missing a required"),
        ("decay_mode", lambda S: S, "2 arguments, (state, c), but too many"),
        ("merge_mode", lambda: 0, "2 arguments, (state, c), but too many"),
    ],
)
def test_callables_with_other_arguments(stage: str, function: Stage, expected: str) -> None:
    with pytest.raises(TraceError) as caught:
        compile_graphs(make(**{stage: function}))
    message = str(caught.value)
    assert message.startswith(f"mistaken.{stage}: it must take {expected}"), message
    assert caught.value.origin is not None and caught.value.origin.file == __file__

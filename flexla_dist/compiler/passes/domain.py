"""Plain spellings of decays and triangular inverses become domain operators.

Requires: canonical spelling. Guarantees: no masked exponential of a difference of running sums is
left, in whatever order mask, exponential, product and sum were written, also where it was factored
into a growing and a shrinking exponential; the only inverse left is `unit_tril_inverse`. Here
because these spellings overflow or need memory for every pair of tokens and key dims, while the
domain operators are exact and small.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from flexla_dist.compiler.forms import Bound, Form, View, form, plus, strip, view, whole
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Builder, Cell, Operand, dims_of
from flexla_dist.compiler.passes import masks
from flexla_dist.compiler.passes.contractions import (
    Contraction,
    decays,
    gate_steps,
    required_gap,
    scalar_decay,
)
from flexla_dist.compiler.passes.engine import Match, Rule, any_, call
from flexla_dist.compiler.passes.products import Emitter, Product, factor
from flexla_dist.compiler.passes.simplify import constant_of
from flexla_dist.errors import TraceError
from flexla_dist.shapes import TOKEN_DIM
from flexla_dist.spec.spec import LinearAttentionSpec

X, Y = any_("x"), any_("y")
PAIR = (TOKEN_DIM, TOKEN_DIM)


# -- decays between pairs of tokens ---------------------------------------------------------------


def _masked(b: Builder, m: Match) -> Operand | None:
    """A lower triangle of a product: its decays become operators that know their triangle."""
    node: fx.Node = m["outer"]
    gap = -node.kwargs["diagonal"]
    if gap < 0 or dims_of(node) != PAIR:
        return None
    known = (Bound(0, 1, gap),)
    product = factor(view(node.args[0], (0, 1)), known)
    if product.bounds:
        own = required_gap(product.bounds, 0, 1)
        if own is None:
            return None
        gap = max(gap, own)
    return _with_decays(b, product, gap, known)


def _masked_exponent(b: Builder, m: Match) -> Operand | None:
    """exp of an exponent that is -inf outside of a lower triangle."""
    node: fx.Node = m["outer"]
    if dims_of(node) != PAIR:
        return None
    product = factor(whole(node))
    gap = required_gap(product.bounds, 0, 1)
    return None if gap is None or gap < 0 else _with_decays(b, product, gap, ())


def _with_decays(
    b: Builder, product: Product, gap: int, known: tuple[Bound, ...]
) -> Operand | None:
    """The product where `row - col >= gap`, or None if it has no decay."""
    emit = Emitter(b, PAIR)
    found: list[fx.Node] = []
    plain = []
    for v, power in product.plain:
        scores = _scores(b, v, gap, known) if power == 1 else None
        if scores is None:
            plain.append((v, power))
        else:
            found.append(scores)
    taken, _ = decays(product.exps, 0, 1)
    if taken:
        found.extend(_decay_factors(emit, product, gap))
    if not found:
        return None
    rest = [e for e in product.exps if e not in taken]
    around = emit.product(plain, rest, (0, 1), product.coefficient)
    out = found[0]
    for node in found[1:]:
        out = b.emit(ops.mul, out, node)
    out = out if around is None else b.emit(ops.mul, out, around)
    return b.emit(ops.tril, out, diagonal=-gap) if gap > 1 else out


def _decay_factors(emit: Emitter, product: Product, gap: int) -> list[fx.Node]:
    """One operator for each decay, those that belong together first."""
    out = []
    exps = list(product.exps)
    singles = [e for e in exps if e.axes >= {0, 1} and decays([e], 0, 1)[0]]
    for e in singles:
        out.append(scalar_decay(emit, e.exponent, gap))
        exps.remove(e)
    pairs, exponent = decays(exps, 0, 1)
    if pairs:
        out.append(scalar_decay(emit, exponent, gap))
    return out


def _scores(b: Builder, v: View, gap: int, known: tuple[Bound, ...]) -> fx.Node | None:
    if v.at not in ((0, 1), (1, 0)) or v.node.target not in (ops.total, ops.matmul):
        return None
    if v.at == (1, 0):
        return None
    contraction = Contraction.read(b, v.node, known)
    return None if contraction is None else contraction.scores(gap)


def _sum(b: Builder, m: Match) -> Operand | None:
    """A sum over one dim of a product in three dims."""
    contraction = Contraction.read(b, m["outer"])
    if contraction is None:
        return None
    for attempt in (contraction.scores(None), contraction.scan()):
        if attempt is not None:
            return attempt
    return contraction.product_of_matrices()


# -- the scan, factored ---------------------------------------------------------------------------


def _factored_scan(b: Builder, m: Match) -> Operand | None:
    """exp(b) * cumsum(exp(-b) * x): the recurrence of the steps of b."""
    node: fx.Node = m["outer"]
    dims = dims_of(node)
    if len(dims) != 2 or TOKEN_DIM not in dims or "1" in dims:
        return None
    row = dims.index(TOKEN_DIM)
    product = factor(whole(node))
    for item in product.plain:
        v, power = item
        if v.node.target is not ops.cumsum or power < 0 or v.node.kwargs["reverse"]:
            continue
        if v.at[len(v.at) + v.node.kwargs["dim"]] != row:
            continue
        inner = factor(view(v.node.args[0], v.at))
        for grown in product.exps:
            steps = gate_steps(grown.exponent, row)
            shrunk = [e for e in inner.exps if not plus(e.exponent, grown.exponent)]
            if steps is None or not shrunk or inner.bounds or product.bounds:
                continue
            emit = Emitter(b, dims)
            axes = (row, 1 - row)
            inner_rest = [e for e in inner.exps if e is not shrunk[0]]
            x = emit.product(inner.plain, inner_rest, axes, inner.coefficient)
            x = b.expand(1.0 if x is None else x, emit.named(axes))
            h = b.emit(ops.decay_scan, emit.form(steps, axes), x)
            h = b.transpose(h) if row == 1 else h
            plain = [other for other in product.plain if other is not item]
            rest = [e for e in product.exps if e is not grown]
            around = emit.product(plain, rest, (0, 1), product.coefficient)
            return h if around is None else b.emit(ops.mul, h, around)
    return None


# -- diagonal matrices ----------------------------------------------------------------------------


def _diagonal(x: fx.Node) -> Product | None:
    """Factors of the diagonal of a matrix that is the identity times them."""
    product = factor(whole(x))
    eyes = [item for item in product.plain if item[0].node.target is ops.eye and item[1] == 1]
    if len(eyes) != 1 or product.bounds:
        return None
    product.plain.remove(eyes[0])
    axes = [v.axes for v, _ in product.plain] + [e.axes for e in product.exps]
    if {0, 1} in axes:
        return None
    product.plain = [(v.moved({1: 0}), power) for v, power in product.plain]
    product.exps = [replace(e, view=e.view.moved({1: 0})) for e in product.exps]
    return product


def _times_diagonal(b: Builder, m: Match) -> Operand | None:
    """A product with a diagonal matrix scales rows or columns."""
    for x, other, axes in ((m["x"], m["y"], (0, 1)), (m["y"], m["x"], (1, 0))):
        diagonal = _diagonal(x)
        if diagonal is None:
            continue
        emit = Emitter(b, dims_of(x))
        scale = emit.product(diagonal.plain, diagonal.exps, axes, diagonal.coefficient)
        return other if scale is None else b.emit(ops.mul, other, scale)
    return None


# -- triangular inverses --------------------------------------------------------------------------


def _inverse(b: Builder, m: Match) -> Operand | None:
    """inverse of the identity plus a strictly lower triangle."""
    x: fx.Node = m["x"]
    inner = whole(x)
    if x.target is ops.tril and x.kwargs["diagonal"] == 0:
        inner = whole(x.args[0])
    terms = form(inner)
    identity = [t for t in terms if len(t) == 1 and t[0].node.target is ops.eye]
    if len(identity) != 1 or terms[identity[0]] != 1.0:
        return None
    rest: Form = {t: value for t, value in terms.items() if t != identity[0]}
    if not all(any(_strictly_lower(v) for v in t) for t in rest):
        return None
    return b.emit(ops.unit_tril_inverse, Emitter(b, dims_of(x)).form(rest, (0, 1)))


def _strictly_lower(v: View) -> bool:
    """Whether a matrix is zero on its diagonal and above."""
    v = strip(v)
    node = v.node
    if v.at != (0, 1):
        return False
    if node.target is ops.tril:
        return node.kwargs["diagonal"] < 0 or _strictly_lower(whole(node.args[0]))
    if node.target in (ops.decay_matrix, ops.decay_scores):
        return bool(node.kwargs["strict"])
    if node.target is ops.where:
        mask, _, outside = node.args
        is_lower = mask.target is ops.tri_mask and mask.kwargs["diagonal"] < 0
        return is_lower and constant_of(outside) == 0.0
    if node.target in (ops.mul, ops.div, ops.neg):
        numerators = node.args[:1] if node.target is ops.div else node.args
        return any(_strictly_lower(view(x, v.at)) for x in numerators if isinstance(x, fx.Node))
    if node.target in (ops.add, ops.sub):
        return all(
            _strictly_lower(view(x, v.at)) if isinstance(x, fx.Node) else x == 0 for x in node.args
        )
    return False


def _inverse_of_triangle(b: Builder, m: Match) -> Operand | None:
    """unit_tril_inverse reads below the diagonal only."""
    x: fx.Node = m["x"]
    return b.emit(ops.unit_tril_inverse, x.args[0]) if x.kwargs["diagonal"] >= -1 else None


def refuse_inverses(cell: Cell, spec: LinearAttentionSpec) -> None:
    """Raise TraceError at the user's line for an inverse that no rule could rewrite."""
    for node in cell.calls:
        if node.target is ops.inverse:
            raise TraceError(
                "inverse of a matrix that is not seen to be unit lower triangular. Only the "
                "inverse of the identity plus a strictly lower triangle is supported: write "
                "torch.linalg.inv(torch.eye(C) + A.tril(-1)), or call "
                "flexla_dist.spec.functional.unit_tril_inverse(A)",
                spec=spec.name,
                stage=node.meta["stage"],
                origin=node.meta["origin"],
            )


RULES: tuple[Rule, ...] = (
    *masks.RULES,
    Rule("masked decay", call(ops.tril, X, name="outer"), _masked),
    Rule("masked exponent", call(ops.exp, X, name="outer"), _masked_exponent),
    Rule("sum of products", call(ops.total, X, name="outer"), _sum),
    Rule("factored scan", call(ops.mul, X, Y, name="outer"), _factored_scan),
    Rule("times a diagonal matrix", call(ops.matmul, X, Y), _times_diagonal),
    Rule("unit triangular inverse", call(ops.inverse, X), _inverse),
    Rule(
        "inverse of a triangle",
        call(ops.unit_tril_inverse, call(ops.tril, any_("inner"), name="x")),
        _inverse_of_triangle,
    ),
)

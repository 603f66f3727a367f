"""What several variants share: outer products, outputs, the WY factors of the delta rules."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flexla_dist.spec.functional import unit_tril_inverse


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Outer product of the last dims: `[..., K]`, `[..., V]` to `[..., K, V]`."""
    return a[..., :, None] * b[..., None, :]


def read(q: Tensor, S: Tensor) -> Tensor:
    """Row vector times state: `[..., K]`, `[..., K, V]` to `[..., V]`."""
    return (q[..., :, None] * S).sum(-2)


def merge_linear(S: Tensor, c: Any) -> Tensor:
    """Output of a variant that writes v: what the state holds, plus the chunk's own pairs."""
    return c.q_in @ S + c.scores @ c.v


def merge_delta(S: Tensor, c: Any) -> Tensor:
    """Output of a delta rule, which writes `U - W S` in place of v."""
    return c.q_in @ S + c.scores @ (c.U - c.W @ S)


def wy_factors(gram: Tensor, k_in: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Factors with which a chunk of delta rules writes `U - W S` for the entering state S.

    gram `[C, C]`: decayed products of keys, read below the diagonal only; k_in `[C, K]`: keys
    decayed from the start of the chunk; v `[C, V]`; beta `[C]`. Returns U `[C, V]`, W `[C, K]`.
    Source: the WY form of DeltaNet (arXiv 2406.06484) and its gated kin (arXiv 2412.06464).
    """
    weights = beta[:, None]
    T = unit_tril_inverse(weights * gram)
    return T @ (weights * v), T @ (weights * k_in)

"""Device functions of `triton_dist.language`, by the interpreter."""

from typing import Any

import triton.language as tl

from flexla_dist.comm.device.timing import pause

from ..memory import SYMMETRIC, at_peer, element, number, scalar_pointer

FLAGS = (tl.int32, tl.int64, tl.uint64)


def rank(axis: int = -1) -> int:
    """This rank."""
    return SYMMETRIC.rank


def num_ranks(axis: int = -1) -> int:
    """How many ranks there are."""
    return SYMMETRIC.size


def symm_at(ptr: Any, rank: Any) -> tl.tensor:
    """The pointer in the memory of another rank."""
    return at_peer(scalar_pointer(ptr, "symm_at"), element(rank))


def wait(
    barrierPtrs: Any, numBarriers: Any, scope: str, semantic: str, waitValue: Any = 1
) -> tl.tensor:
    """Wait until a flag equals a value; gives the token."""
    pointer = scalar_pointer(barrierPtrs, "wait")
    if pointer.dtype.element_ty not in FLAGS or number(numBarriers) != 1:
        raise TypeError(f"wait: {pointer.dtype} x {numBarriers}, expected one flag of {FLAGS}")
    if scope not in ("cta", "gpu", "sys") or semantic not in ("acquire", "relaxed"):
        raise ValueError(f"wait: scope {scope!r}, semantic {semantic!r}")
    while number(tl.atomic_add(pointer, 0, sem=semantic, scope=scope)) != number(waitValue):
        pause()
    return tl.full([], 1, tl.int32)


def consume_token(value: Any, token: Any) -> Any:
    """The value; reads through it come after the wait that gave the token."""
    if not isinstance(token, tl.tensor) or token.dtype != tl.int32:
        raise TypeError(f"consume_token: token is {token}, expected what wait gave")
    return value


def notify(
    ptr: Any,
    rank: Any,
    signal: Any = 1,
    sig_op: str = "set",
    comm_scope: str = "inter_node",
) -> None:
    """Set or add to a flag of another rank."""
    pointer = scalar_pointer(ptr, "notify")
    if pointer.dtype.element_ty not in (tl.int64, tl.uint64):
        raise TypeError(f"notify: flag is {pointer.dtype}, expected a 64-bit integer")
    if comm_scope not in ("gpu", "intra_node", "inter_node"):
        raise ValueError(f"notify: comm_scope {comm_scope!r}")
    change = {"set": tl.atomic_xchg, "add": tl.atomic_add}[sig_op]
    change(at_peer(pointer, element(rank)), signal, sem="release", scope="sys")

"""Bytes that a rank sends and receives: counted where they are posted, and by formula.

Contract: counted are the payloads of the calls of `torch.distributed` that this process makes
inside `counted()`; a collective counts what it moves to and from other ranks whatever its
algorithm, (P - 1) times a rank's part for an all-gather. Used for one pass beside the timed ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


@dataclass
class Traffic:
    """Bytes sent to and received from other ranks, and the posts that moved them."""

    sent: int = 0
    received: int = 0
    posts: int = 0

    def add(self, sent: int, received: int, posts: int = 1) -> None:
        """Count one more post."""
        self.sent += sent
        self.received += received
        self.posts += posts

    def plus(self, other: Traffic) -> Traffic:
        """The sum of both."""
        return Traffic(
            self.sent + other.sent, self.received + other.received, self.posts + other.posts
        )


def tensor_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors without anything around them."""
    return sum(t.numel() * t.element_size() for t in tensors)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count what this process posts through `torch.distributed` inside the block."""
    counter = _Counter()
    replaced = [(module, name, getattr(module, name)) for module, name in _places()]
    try:
        for module, name, original in replaced:
            setattr(module, name, counter.wrap(name, original))
        yield counter.traffic
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _places() -> list[tuple[Any, str]]:
    names = [name for name in _SIZES if hasattr(dist, name)]
    return [(module, name) for module in (dist, c10d) for name in names if hasattr(module, name)]


class _Counter:
    """Wraps functions of `torch.distributed`; one that calls another counts once."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._inside = threading.local()
        self._wrapped: dict[str, Callable[..., Any]] = {}

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A counting function; one a name, because P2POp compares functions by identity."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "on", False):
                return original(*args, **kwargs)
            self.traffic.add(*_SIZES[name](args, kwargs))
            self._inside.on = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside.on = False

        return self._wrapped.setdefault(name, call)


def _ranks(kwargs: dict[str, Any]) -> int:
    return dist.get_world_size(kwargs.get("group"))


def _argument(place: int, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[place] if len(args) > place else kwargs[name]


def _send(args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    return tensor_bytes([_argument(0, "tensor", args, kwargs)]), 0


def _receive(args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    return 0, tensor_bytes([_argument(0, "tensor", args, kwargs)])


def _gather(args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    own = tensor_bytes([_argument(1, "input_tensor", args, kwargs)])
    whole = tensor_bytes([_argument(0, "output_tensor", args, kwargs)])
    return whole - own, whole - own


def _all_to_all(args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    output = _argument(0, "output", args, kwargs)
    given = _argument(1, "input", args, kwargs)
    rank = dist.get_rank(kwargs.get("group"))
    size = _ranks(kwargs)

    def others(tensor: Tensor, splits: Sequence[int] | None) -> int:
        row = tensor_bytes([tensor]) // max(tensor.shape[0], 1)
        own = splits[rank] if splits else tensor.shape[0] // size
        return (tensor.shape[0] - own) * row

    return (
        others(given, kwargs.get("input_split_sizes")),
        others(output, kwargs.get("output_split_sizes")),
    )


def _all_reduce(args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    size, own = _ranks(kwargs), tensor_bytes([_argument(0, "tensor", args, kwargs)])
    moved = 2 * own * (size - 1) // size
    return moved, moved


_SIZES: dict[str, Callable[[tuple, dict[str, Any]], tuple[int, int]]] = {
    "isend": _send,
    "irecv": _receive,
    "send": _send,
    "recv": _receive,
    "all_gather_into_tensor": _gather,
    "all_gather_single": _gather,
    "all_to_all_single": _all_to_all,
    "all_reduce": _all_reduce,
}

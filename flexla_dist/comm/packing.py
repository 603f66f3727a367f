"""Several tensors and a header in one flat uint8 buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexla_dist.comm.tag import HEADER_BYTES, Header

_ALIGNMENT = 16


def packed_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the payload that `pack` makes of tensors of these shapes and dtypes."""
    return sum(_padded(t.numel() * t.element_size()) for t in tensors)


def pack(header: Header, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """A new uint8 buffer on `device`: header, then every tensor, each at a multiple of 16 bytes."""
    buffer = empty_message(tensors, device)
    words = torch.tensor(header.words(), dtype=torch.int64)
    buffer[:HEADER_BYTES].view(torch.int64).copy_(words, non_blocking=True)
    for view, tensor in zip(views(buffer, tensors), tensors, strict=True):
        view.copy_(tensor)
    return buffer


def empty_message(like: Sequence[Tensor], device: torch.device) -> Tensor:
    """An uninitialised buffer for a message with tensors of the shapes of `like`."""
    return torch.empty(HEADER_BYTES + packed_bytes(like), dtype=torch.uint8, device=device)


def views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a message as views of its buffer, in the shapes and dtypes of `like`."""
    found, offset = [], HEADER_BYTES
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        part = buffer[offset : offset + size]
        found.append(part.view(tensor.dtype).view(tensor.shape))
        offset += _padded(size)
    return found


def header_words(buffer: Tensor) -> Tensor:
    """The header of a message as eight int64 values, a view of its buffer."""
    return buffer[:HEADER_BYTES].view(torch.int64)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

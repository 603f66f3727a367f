"""How large an error may be, and how it is measured.

Contract: one metric for every comparison. A result passes when the ratio RMSE / RMS over the whole
tensor is within its bound, and when in every chunk of tokens the RMS error is at most
`3 * bound * max(RMS of the chunk, 0.1 * RMS of the tensor)`, because a ratio over the tensor hides
one bad chunk. Anything not finite fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
TINY = 1e-300


@dataclass(frozen=True)
class Bounds:
    """Relative bounds of one dtype: outputs and states, ordinary gradients, gate gradients."""

    output: float
    gradient: float
    gate_gradient: float

    def of(self, name: str) -> float:
        """Bound of a result called `name`: `o`, `state...`, or the gradient `d<input>`."""
        if not name.startswith("d"):
            return self.output
        gates = ("g", "beta", "dt", "A_log", "dt_bias", "f", "i")
        return self.gate_gradient if name[1:] in gates else self.gradient


BOUNDS: Mapping[torch.dtype, Bounds] = {
    torch.float64: Bounds(1e-9, 1e-9, 1e-9),
    torch.float32: Bounds(1e-5, 1e-5, 1e-5),
    torch.bfloat16: Bounds(5e-3, 8e-3, 2e-2),
    torch.float16: Bounds(5e-3, 8e-3, 2e-2),
}
SHARDED: Mapping[torch.dtype, Bounds] = {
    torch.float64: Bounds(1e-10, 1e-10, 1e-10),
    torch.float32: Bounds(1e-5, 1e-5, 1e-5),
    torch.bfloat16: Bounds(3e-3, 3e-3, 3e-3),
    torch.float16: Bounds(3e-3, 3e-3, 3e-3),
}


@dataclass(frozen=True)
class ErrorReport:
    """Errors of one tensor: `ratio` over all of it, `worst_chunk` the largest ratio of a chunk."""

    ratio: float
    worst_chunk: float
    chunk_index: int

    def within(self, bound: float) -> bool:
        """True when both the ratio and every chunk keep to the bound; NaN does not."""
        return self.ratio <= bound and self.worst_chunk <= 3 * bound


def measure(
    got: Tensor, want: Tensor, *, dim: int | None = None, chunk: int = CHUNK
) -> ErrorReport:
    """Errors of `got` against `want` (compared in float64).

    Args:
        got, want: tensors of one shape.
        dim: token dim that is cut in chunks; None measures the tensor as one chunk.
        chunk: tokens of a chunk.

    Raises:
        AssertionError: shapes differ.
    """
    assert got.shape == want.shape, f"shape {list(got.shape)}, expected {list(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    if want.numel() == 0:
        return ErrorReport(0.0, 0.0, 0)
    error = got.to(want.device) - want
    total = _rms(want)
    ratio = _relative(_rms(error), total)
    if dim is None or want.ndim == 0:
        return ErrorReport(ratio, ratio, 0)
    sizes = zip(_chunk_rms(error, dim, chunk), _chunk_rms(want, dim, chunk), strict=True)
    chunks = [_relative(e, max(w, 0.1 * total)) for e, w in sizes]
    worst = max(range(len(chunks)), key=lambda i: (chunks[i] != chunks[i], chunks[i]))
    return ErrorReport(ratio, chunks[worst], worst)


def check(
    name: str,
    got: Tensor,
    want: Tensor,
    bound: float,
    *,
    dim: int | None = None,
    chunk: int = CHUNK,
) -> ErrorReport:
    """`measure`, and AssertionError naming tensor, errors and chunk when out of bounds."""
    report = measure(got, want, dim=dim, chunk=chunk)
    assert report.within(bound), (
        f"{name}: RMSE ratio {report.ratio:.3e} (bound {bound:.1e}), worst chunk "
        f"{report.chunk_index}: {report.worst_chunk:.3e} (bound {3 * bound:.1e})"
    )
    return report


def _rms(x: Tensor) -> float:
    """Root mean square; infinity when a value is not finite."""
    return x.square().mean().sqrt().item() if bool(x.isfinite().all()) else float("inf")


def _chunk_rms(x: Tensor, dim: int, chunk: int) -> list[float]:
    """Root mean square of every run of `chunk` along `dim`; infinity as in `_rms`."""
    squares = x.square().movedim(dim, 0).flatten(1)
    rows = torch.where(squares.isfinite().all(1), squares.sum(1), torch.inf)
    width = squares.shape[1]
    lengths = torch.tensor([len(part) for part in rows.split(chunk)], dtype=torch.float64)
    padded = rows.new_zeros(len(lengths), chunk)
    padded.view(-1)[: len(rows)] = rows
    return (padded.sum(1).cpu() / (lengths * width)).sqrt().tolist()


def _relative(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return error / max(size, TINY) if size != float("inf") else float("inf")

"""Bytes, floating-point operations, and the least time they take on an H200.

Contract: plain arithmetic. Bytes count every tensor once for each kernel that reads or writes it;
what column tiles or the heads of a group ask for again comes from the cache. FLOPs are those of
products (2 m n k), on whole tiles where a kernel computes on tiles; exponentials, scans and
elementwise work are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import dims_of
from flexla_dist.errors import SourceLine
from flexla_dist.shapes import UNIT_DIM


@dataclass(frozen=True)
class Roofline:
    """What a device can do: bytes a second, and FLOPs a second of each dot policy."""

    device: str
    bandwidth: float
    rates: Mapping[str, float]

    def memory_seconds(self, moved: float) -> float:
        """Time to move that many bytes."""
        return moved / self.bandwidth

    def __str__(self) -> str:
        tera = self.rates["bf16"] / 1e12
        return f"{self.device}, {self.bandwidth / 1e12:g} TB/s, {tera:g} TFLOP/s"


_PEAK = 790e12  # dense bfloat16 products, measured
H200 = Roofline(
    "H200",
    4.3e12,  # a copy, measured
    {"bf16": _PEAK, "fp16": _PEAK, "tf32x3": _PEAK / 6, "float32": 67e12},
)


@dataclass(frozen=True)
class Move:
    """A tensor that a step reads or writes; it is asked for `times` times."""

    name: str
    bytes: int
    times: int = 1

    def __str__(self) -> str:
        return self.name if self.times == 1 else f"{self.name} x{self.times}"


@dataclass(frozen=True)
class Product:
    """A matrix product or domain operator of a step: FLOPs of the whole step at a dot policy."""

    text: str
    flops: float
    policy: str
    origin: SourceLine | None = None


def product_flops(node: fx.Node, size: Callable[[str], int]) -> float:
    """FLOPs of one product or domain operator on dims of the given sizes; 0 for all else.

    Decay sums are counted at one level, which gates of ordinary size need; steep gates need up to
    log2(C) + 1 of them.
    """

    def sizes(x: Any) -> list[int]:
        return [1 if dim == UNIT_DIM else size(dim) for dim in dims_of(x)]

    if node.target is ops.matmul:
        (rows, inner), (_, columns) = sizes(node.args[0]), sizes(node.args[1])
        return 2.0 * rows * inner * columns
    if node.target in (ops.decay_scores, ops.decay_rows, ops.decay_cols):
        gate = sizes(node.args[2])
        return 2.0 * gate[0] * gate[0] * gate[-1]
    if node.target is ops.unit_tril_inverse:
        return _inverse_flops(sizes(node)[0])
    return 0.0


def _inverse_flops(tokens: int) -> float:
    """Blocks of 16 by substitution, then two products for each pair of blocks of 16, 32, ..."""
    total, half = 2.0 * 15 * 16 * min(tokens, max(tokens, 16)), 16
    while half < tokens:
        total += tokens / (2 * half) * 2 * (2.0 * half**3)
        half *= 2
    return total


def policy_of(node: fx.Node, policy: str) -> str:
    """Dot policy of a product in a kernel whose policy is given; inverses are always exact."""
    exact = node.target is ops.unit_tril_inverse
    return "tf32x3" if exact and policy in ("bf16", "fp16") else policy


@dataclass(frozen=True)
class Step:
    """One kernel launch of a plan, or the PyTorch operations between two launches (`torch`).

    `steps` of `grid` are programs by heads. `registers` is the most that a thread may take, where
    that is limited; `configuration` says where tiles, warps and stages are from. `calls` counts
    PyTorch operations.
    """

    name: str
    kind: str
    purpose: str
    reads: tuple[Move, ...]
    writes: tuple[Move, ...]
    products: tuple[Product, ...] = ()
    grid: tuple[int, ...] = ()
    tiles: Mapping[str, int] | None = None
    warps: int = 0
    stages: int = 0
    registers: int | None = None
    configuration: str = ""
    calls: int = 1
    statements: tuple[Any, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def bytes_read(self) -> int:
        """Bytes read, each tensor once."""
        return sum(move.bytes for move in self.reads)

    @property
    def bytes_written(self) -> int:
        """Bytes written."""
        return sum(move.bytes for move in self.writes)

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return sum(product.flops for product in self.products)

    def product_seconds(self, device: Roofline) -> float:
        """Least time of the products."""
        return sum(p.flops / device.rates.get(p.policy, _PEAK) for p in self.products)

    def memory_seconds(self, device: Roofline) -> float:
        """Least time of the memory traffic."""
        return device.memory_seconds(self.bytes_read + self.bytes_written)

    def seconds(self, device: Roofline) -> float:
        """Least time of the step: the longer of the two."""
        return max(self.memory_seconds(device), self.product_seconds(device))

    def bound(self, device: Roofline) -> str:
        """What limits it: `memory` or `products`."""
        memory = self.memory_seconds(device) >= self.product_seconds(device)
        return "memory" if memory else "products"

"""Places the boxes of a small graph in layers, top to bottom.

Contract: plain geometry on numbers; the same graph gives the same picture. Boxes are put one layer
below what they read; edges over several layers run through bends that take part in the ordering.
Orders come from barycentres, positions from isotonic regression: each box as close to its
neighbours as the order and the gaps allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP = 24.0
LAYER_GAP = 44.0
BEND_WIDTH = 8.0
SWEEPS = 12


@dataclass(frozen=True)
class Box:
    """A box to place; `late` boxes (arguments) move down to just above what reads them."""

    key: str
    width: float
    height: float
    late: bool = False


@dataclass(frozen=True)
class Picture:
    """Centres of the boxes, bends of the edges in order, and the size of it all."""

    centres: Mapping[str, tuple[float, float]]
    paths: Mapping[tuple[str, str], tuple[tuple[float, float], ...]]
    width: float
    height: float


@dataclass
class _Item:
    """A box, or a bend of a long edge."""

    width: float
    height: float
    layer: int
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    x: float = 0.0
    bend: bool = False


def place_boxes(boxes: Sequence[Box], edges: Sequence[tuple[str, str]]) -> Picture:
    """Place boxes so that edges point down; edges must form no cycle."""
    layer_of = _assign_layers(boxes, edges)
    items, index, chains = _items(boxes, edges, layer_of)
    layers: list[list[int]] = [[] for _ in range(max(layer_of.values(), default=0) + 1)]
    for at, item in enumerate(items):
        layers[item.layer].append(at)
    _order(items, layers)
    _spread(items, layers)
    return _picture(items, layers, index, chains)


def _assign_layers(boxes: Sequence[Box], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    readers: dict[str, list[str]] = {box.key: [] for box in boxes}
    waiting = {box.key: 0 for box in boxes}
    for a, b in edges:
        readers[a].append(b)
        waiting[b] += 1
    layer = {box.key: 0 for box in boxes}
    ready = [key for key, count in waiting.items() if count == 0]
    while ready:
        key = ready.pop(0)
        for reader in readers[key]:
            layer[reader] = max(layer[reader], layer[key] + 1)
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    for box in boxes:
        if box.late and readers[box.key]:
            layer[box.key] = min(layer[r] for r in readers[box.key]) - 1
    lowest = min(layer.values(), default=0)
    return {key: value - lowest for key, value in layer.items()}


def _items(
    boxes: Sequence[Box], edges: Sequence[tuple[str, str]], layer_of: Mapping[str, int]
) -> tuple[list[_Item], dict[str, int], dict[tuple[str, str], list[int]]]:
    items = [_Item(box.width, box.height, layer_of[box.key]) for box in boxes]
    index = {box.key: at for at, box in enumerate(boxes)}
    chains: dict[tuple[str, str], list[int]] = {}
    for a, b in dict.fromkeys(edges):
        chain = [index[a]]
        for layer in range(layer_of[a] + 1, layer_of[b]):
            items.append(_Item(BEND_WIDTH, 0.0, layer, bend=True))
            chain.append(len(items) - 1)
        chain.append(index[b])
        for upper, lower in pairwise(chain):
            items[upper].below.append(lower)
            items[lower].above.append(upper)
        chains[a, b] = chain
    return items, index, chains


def _order(items: list[_Item], layers: list[list[int]]) -> None:
    best, fewest = [list(layer) for layer in layers], _crossings(items, layers)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else layers[::-1]:
            place = {at: i for row in layers for i, at in enumerate(row)}
            centre = {at: _barycentre(items[at], down, place, place[at]) for at in layer}
            layer.sort(key=centre.__getitem__)
        count = _crossings(items, layers)
        if count < fewest:
            best, fewest = [list(layer) for layer in layers], count
    layers[:] = best


def _barycentre(item: _Item, down: bool, place: Mapping[int, int], own: float) -> float:
    near = item.above if down else item.below
    return sum(place[n] for n in near) / len(near) if near else own


def _crossings(items: list[_Item], layers: list[list[int]]) -> int:
    place = {at: i for row in layers for i, at in enumerate(row)}
    total = 0
    for row in layers:
        ends = [(place[a], place[b]) for a in row for b in items[a].below]
        for i, (a, b) in enumerate(ends):
            total += sum((a - c) * (b - d) < 0 for c, d in ends[i + 1 :])
    return total


def _spread(items: list[_Item], layers: list[list[int]]) -> None:
    for layer in layers:
        x = 0.0
        for at in layer:
            items[at].x = x + items[at].width / 2
            x += items[at].width + GAP
        for at in layer:
            items[at].x -= x / 2
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else layers[::-1]:
            wanted = [_wanted(items, at, down) for at in layer]
            weights = [8.0 if items[at].bend else 1.0 for at in layer]
            for at, x in zip(layer, _keep_apart(items, layer, wanted, weights), strict=True):
                items[at].x = x


def _wanted(items: list[_Item], at: int, down: bool) -> float:
    item = items[at]
    near = (item.above if down else item.below) or item.above or item.below
    return sum(items[n].x for n in near) / len(near) if near else item.x


def _distance(left: _Item, right: _Item) -> float:
    """Between the centres of neighbours; bends may run close together."""
    gap = BEND_WIDTH if left.bend and right.bend else GAP
    return (left.width + right.width) / 2 + gap


def _keep_apart(
    items: list[_Item], layer: list[int], wanted: list[float], weights: list[float]
) -> list[float]:
    """The positions nearest to those wanted that keep order and gaps (pool adjacent violators)."""
    offset, offsets = 0.0, []
    for i, at in enumerate(layer):
        if i:
            offset += _distance(items[layer[i - 1]], items[at])
        offsets.append(offset)
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for x, shift, weight in zip(wanted, offsets, weights, strict=True):
        pool = (x - shift, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, total, members = pools.pop()
            joined = total + pool[1]
            pool = ((mean * total + pool[0] * pool[1]) / joined, joined, members + pool[2])
        pools.append(pool)
    flat = [mean for mean, _, members in pools for _ in range(members)]
    return [mean + shift for mean, shift in zip(flat, offsets, strict=True)]


def _picture(
    items: list[_Item],
    layers: list[list[int]],
    index: Mapping[str, int],
    chains: Mapping[tuple[str, str], list[int]],
) -> Picture:
    left = min((item.x - item.width / 2 for item in items), default=0.0) - GAP
    right = max((item.x + item.width / 2 for item in items), default=0.0) + GAP
    middle, y = [], GAP
    for layer in layers:
        height = max((items[at].height for at in layer), default=0.0)
        middle.append(y + height / 2)
        y += height + LAYER_GAP
    centre = [(item.x - left, middle[item.layer]) for item in items]
    paths = {}
    for edge, chain in chains.items():
        (x0, y0), (x1, y1) = centre[chain[0]], centre[chain[-1]]
        start = (x0, y0 + items[chain[0]].height / 2)
        end = (x1, y1 - items[chain[-1]].height / 2)
        paths[edge] = (start, *(centre[at] for at in chain[1:-1]), end)
    return Picture(
        {key: centre[at] for key, at in index.items()}, paths, right - left, y - LAYER_GAP + GAP
    )

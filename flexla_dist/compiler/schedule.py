"""Turns a graph into a list of kernels: what each computes, loads and stores.

Contract: `schedule_forward` and `schedule_backward` are pure functions of the graphs and the plan.
The plan `unfused`:

    chunk kernels   one program a chunk: values that the serial loop should not compute
    scan            one program a document, head and column tile: the states entering each chunk
    chunk kernels   outputs, or adjoint values that need the states
    reverse         the gradients of the states leaving each chunk
    chunk kernels   gradients of inputs and parameters

The forward plan `fused` writes outputs from within the loop, so that no state goes through memory:

    chunk kernels   what the state needs and the loop should not compute: domain operators, gates
    summary         the state that a segment leaves behind; only where documents are cut
    chunk kernels   what outputs need beside it: they run while ranks exchange states
    scan            outputs and exit states, one program a document, head and column tile

In front of a serial loop gates are exponentiated too: vectors, or the tile that they scale. What a
loop computes anyway and a later kernel needs is stored by the loop. A loop that never sums over the
state's first dim is cut into row tiles as well as column tiles.

A value travels through memory when making it again costs more than reading it: domain operators
always, and in front of a serial loop every product with tokens as rows. Everything elementwise is
made again. A chunk stage with more products than a kernel may hold is cut where the fewest bytes
cross.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import fx

from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell
from flexla_dist.compiler.kinds import HEAVY, SLOW, VECTOR_SUMS, VIEWS
from flexla_dist.compiler.liveness import most_alive
from flexla_dist.compiler.partition import LEVELS
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims
from flexla_dist.spec.spec import LinearAttentionSpec

LOOPS = ("scan", "reverse", "map", "summary")
MAX_PRODUCTS = 10
MAX_HEAVY = 2
SMALL_PRODUCTS = 5  # as many never need a cut
MAX_ALIVE = 27 * 2**10  # elements at the usual sizes; with more, four warps spill registers


@dataclass(frozen=True)
class Kernel:
    """One kernel: `kind` is chunk, scan or reverse; decays (a chunk kernel), map (a scan of M
    alone) and summary (a scan that keeps nothing) run only when documents are cut into segments.

    `loads` are arguments and values of earlier kernels, `body` the nodes to compute in order,
    `stores` the results by name. A scan carries `carried`: argument of the state (or of its
    gradient) to the node that follows it; with `history` the states entering the chunks are stored.
    """

    name: str
    kind: str
    loads: tuple[fx.Node, ...]
    body: tuple[fx.Node, ...]
    stores: dict[str, fx.Node]
    carried: dict[fx.Node, fx.Node] = field(default_factory=dict)
    row_dim: str | None = None  # a dim that may be tiled too
    summed: bool = False  # one program adds up the tiles of row_dim
    history: bool = True

    @property
    def products(self) -> int:
        """Number of matrix products and domain operators."""
        return sum(node.target is ops.matmul or node.target in HEAVY for node in self.body)


@dataclass(frozen=True)
class Schedule:
    """Kernels in order; `partial` holds the stored values that are sums over column tiles."""

    kernels: tuple[Kernel, ...]
    column: str
    contracts_column: bool


def buffer_name(node: fx.Node) -> str:
    """Name of the memory that holds a value between kernels."""
    return f"value_{node.name}"


class _Scheduler:
    def __init__(self, spec: LinearAttentionSpec, cell: Cell):
        self.spec, self.cell = spec, cell
        self.order = {node: at for at, node in enumerate(cell.graph.nodes)}
        self.level: dict[fx.Node, int] = {}
        self.costly: dict[fx.Node, bool] = {}  # a product or domain operator below it
        self.gated: dict[fx.Node, bool] = {}  # an exponential or a sum over tokens below it
        for node in cell.graph.nodes:
            if node.op == "placeholder":
                self.level[node], self.costly[node] = LEVELS[node.meta["role"]], False
                self.gated[node] = False
            elif node.op == "call_function":
                operands = [x for x in node.args if isinstance(x, fx.Node)]
                self.level[node] = max((self.level[x] for x in operands), default=0)
                self.costly[node] = (
                    node.target is ops.matmul
                    or node.target in HEAVY
                    or any(self.costly[x] for x in operands)
                )
                self.gated[node] = node.target in SLOW or any(self.gated[x] for x in operands)
        self.stored: dict[fx.Node, None] = {}
        self.kernels: list[Kernel] = []

    # -- walks --------------------------------------------------------------------------------

    def body_of(self, roots: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Nodes to compute for `roots`, and what they load; stored values are not computed."""
        body: set[fx.Node] = set()
        loads: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in body or node in loads:
                continue
            if node.op == "placeholder" or node in self.stored:
                loads.add(node)
                continue
            body.add(node)
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return sorted(body, key=self.order.__getitem__), sorted(loads, key=self.order.__getitem__)

    def wanted_before_loop(self, roots: Iterable[fx.Node], level: int) -> list[fx.Node]:
        """Values below `level` with token rows that contain a product: computed before a loop."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen or node.op == "placeholder" or node in self.stored:
                continue
            seen.add(node)
            if self.level[node] < level and self._worth_storing(node):
                found[node] = None
                continue
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return sorted(found, key=self.order.__getitem__)

    def _worth_storing(self, node: fx.Node) -> bool:
        """A product with token rows, a vector of gates, or a tile scaled by a tile of gates."""
        if node.target in VIEWS or not (self.costly[node] or self.gated[node]):
            return False
        if self.costly[node]:
            return self._has_token_rows(node)
        if _rank(node) <= 1 or node.target in SLOW:
            return True
        bases = [_base(x) for x in node.args if isinstance(x, fx.Node)]
        return any(self.gated[x] and _rank(x) > 1 for x in bases)

    def shared_with(self, loop: Kernel, roots: Iterable[fx.Node]) -> dict[str, fx.Node]:
        """Products with token rows that the loop computes and kernels for `roots` need."""
        inside = set(loop.body)
        found: dict[str, fx.Node] = {}
        seen: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen or node.op == "placeholder" or node in self.stored:
                continue
            seen.add(node)
            useful = node in inside and self.costly[node] and self._has_token_rows(node)
            if useful and node.target not in VIEWS:
                found[buffer_name(node)] = node
                continue
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return found

    def heavy_below(self, roots: Iterable[fx.Node]) -> list[fx.Node]:
        """Domain operators that a kernel for `roots` would contain."""
        body, _ = self.body_of(roots)
        return [node for node in body if node.target in HEAVY]

    @staticmethod
    def _has_token_rows(node: fx.Node) -> bool:
        return TOKEN_DIM in node.meta["dims"]

    # -- kernels ------------------------------------------------------------------------------

    def add_loop(
        self,
        kind: str,
        carried: dict[fx.Node, fx.Node],
        later: Iterable[fx.Node],
        maps: dict[fx.Node, fx.Node] | None = None,
        decays: dict[str, fx.Node] | None = None,
    ) -> None:
        """A scan; first whatever should be computed before it, and what M is by itself.

        `later` are the results of kernels after it, which share what it computes.
        """
        level = 1 if kind == "scan" else 2
        roots = [*carried.values(), *(maps or {}).values()]
        self.add_chunks(f"before_{kind}", self.wanted_before_loop(roots, level))
        if decays:
            body, loads = self.body_of(decays.values())
            self.kernels.append(Kernel("decays", "decays", tuple(loads), tuple(body), decays))
        if maps:
            self.kernels.append(self._loop("map", maps))
        loop = self._loop(kind, carried)
        for node in carried:
            self.stored[node] = None
        shared = self.shared_with(loop, later)
        self.stored.update(dict.fromkeys(shared.values()))
        self.kernels.append(replace(loop, stores=shared) if shared else loop)

    def add_fused_loop(
        self,
        carried: dict[fx.Node, fx.Node],
        results: dict[str, fx.Node],
        maps: dict[fx.Node, fx.Node],
        decays: dict[str, fx.Node],
    ) -> None:
        """A scan that computes the results too; first what a serial loop should not compute."""
        early = self.wanted_before_loop([*carried.values(), *maps.values()], 1)
        extra = [x for x in self._slow_below(results.values(), 1) if x not in early]
        heavy = [x for x in extra if any(n.target in HEAVY for n in self.body_of([x])[0])]
        early += [x for x in extra if x not in heavy]
        self.add_chunks("before_scan", sorted(early, key=self.order.__getitem__))
        if decays:
            body, loads = self.body_of(decays.values())
            self.kernels.append(Kernel("decays", "decays", tuple(loads), tuple(body), decays))
        if maps:
            self.kernels.append(self._loop("map", maps))
        self.kernels.append(replace(self._loop("summary", carried), history=False))
        self.add_chunks("before_output", sorted(heavy, key=self.order.__getitem__))
        body, loads = self.body_of([*results.values(), *carried.values()])
        loads = [node for node in loads if node not in carried]
        scan = Kernel("scan", "scan", tuple(loads), tuple(body), results, carried, history=False)
        self.kernels.append(scan)

    def _slow_below(self, roots: Iterable[fx.Node], level: int) -> list[fx.Node]:
        """Domain operators and vectors of gates below `level` that results need."""
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in seen or node.op == "placeholder" or node in self.stored:
                continue
            seen.add(node)
            slow = node.target in HEAVY or (not self.costly[node] and self._worth_storing(node))
            if self.level[node] < level and slow and not self._is_square(node):
                found[node] = None
                continue
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return list(found)

    @staticmethod
    def _is_square(node: fx.Node) -> bool:
        """A plain [C, C] tile of gates: cheaper to make than to read."""
        return node.target not in HEAVY and node.meta["dims"] == (TOKEN_DIM, TOKEN_DIM)

    def _loop(self, kind: str, carried: dict[fx.Node, fx.Node]) -> Kernel:
        body, loads = self.body_of(carried.values())
        loads = [node for node in loads if node not in carried]
        row_dim = _free_row_dim(body, carried, self.spec.output_dims[-1])
        return Kernel(kind, kind, tuple(loads), tuple(body), {}, carried, row_dim)

    def add_chunks(
        self, name: str, values: list[fx.Node], results: dict[str, fx.Node] | None = None
    ) -> None:
        """Chunk kernels that compute values for later kernels, and results of the call."""
        results = results or {}
        pending = [v for v in values if v not in self.stored]
        remaining = dict(results)
        while pending or remaining:
            roots = [*pending, *remaining.values()]
            body, _ = self.body_of(roots)
            scores = self._scores_apart(body)
            if scores and scores != roots:
                self._emit_chunk("scores", scores, {})
                pending = [v for v in pending if v not in self.stored]
                continue
            before = self._before_vector_sums(body)
            if before:
                finished = {n: x for n, x in remaining.items() if x in before}
                crossing = self._crossing(before, [x for x in body if x not in before], set(roots))
                for result in finished:
                    remaining.pop(result)
                kept = self._still_read(crossing, [*pending, *remaining.values()])
                self.add_chunks(name, kept, finished)
                pending = [v for v in pending if v not in self.stored]
                continue
            if self._fits(body, roots):
                self._emit_chunk(name, pending, remaining)
                return
            kept, finished = self._cheapest_cut(body, pending, remaining)
            for result in finished:
                remaining.pop(result)
            self._emit_chunk(name, kept, finished)
            pending = [v for v in pending if v not in self.stored]

    def _scores_apart(self, body: list[fx.Node]) -> list[fx.Node]:
        """Scores with vector decays made of arguments by arithmetic alone, where they are not all
        that is computed: sums over their dim, of which a kernel of its own holds a tile at a time.
        """
        found = []
        for node in body:
            if node.target is ops.decay_scores:
                cone, _ = self.body_of(x for x in node.args if isinstance(x, fx.Node))
                if _summed_dim(cone, [node], self.spec.output_dims[-1]):
                    found.append(node)
        return found

    @staticmethod
    def _before_vector_sums(body: list[fx.Node]) -> list[fx.Node]:
        """What does not depend on sums over pairs of tokens with vector decays, where that holds
        products: those sums are elementwise in their dim, so by themselves they may be tiled."""
        after: set[fx.Node] = set()
        for node in body:
            if node.target in VECTOR_SUMS or any(x in after for x in node.args):
                after.add(node)
        before = [node for node in body if node not in after]
        costly = any(node.target is ops.matmul or node.target in HEAVY for node in before)
        return before if after and costly else []

    def _finished(self, crossing: list[fx.Node], results: dict[str, fx.Node]) -> dict[str, fx.Node]:
        """Results that are plain arithmetic on values of a cut: they end in the kernel before it.
        What they load beside must not grow: arguments stay where they are read anyway."""
        before, _ = self.body_of(crossing)
        known = {*before, *crossing}
        found = {}
        for name, root in results.items():
            stack, plain = [root], True
            while stack and plain:
                node = stack.pop()
                if node in known or node.op == "placeholder" or node in self.stored:
                    continue
                plain = node.target is not ops.matmul and node.target not in HEAVY | SLOW
                stack.extend(x for x in node.args if isinstance(x, fx.Node))
            if plain and any(x in known for x in self.body_of([root])[0]):
                found[name] = root
        return found

    def _still_read(self, crossing: list[fx.Node], roots: list[fx.Node]) -> list[fx.Node]:
        """The values of a cut that the rest needs."""
        needed: set[fx.Node] = set()
        stack, seen = list(roots), set()
        while stack:
            node = stack.pop()
            if node in seen or node.op == "placeholder" or node in self.stored:
                continue
            seen.add(node)
            if node in crossing:
                needed.add(node)
                continue
            stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return [node for node in crossing if node in needed]

    def _emit_chunk(self, name: str, values: list[fx.Node], results: dict[str, fx.Node]) -> None:
        body, loads = self.body_of([*values, *results.values()])
        stores = {buffer_name(node): node for node in values} | results
        count = sum(k.name.startswith(name) for k in self.kernels)
        unique = f"{name}_{count}" if count else name
        column = self.spec.output_dims[-1]
        row_dim = _free_chunk_dim(loads, body, stores.values(), column)
        kernel = Kernel(unique, "chunk", tuple(loads), tuple(body), stores, row_dim=row_dim)
        cone = [node for node in body if node not in stores.values()]
        summed = _summed_dim(cone, list(stores.values()), column)
        if summed:
            kernel = replace(kernel, row_dim=summed, summed=True)
        self.kernels.append(kernel)
        for node in values:
            self.stored[node] = None

    def _fits(self, body: list[fx.Node], results: Iterable[fx.Node]) -> bool:
        """Few enough products, and few enough registers unless it is small or tiled."""
        products = sum(node.target is ops.matmul for node in body)
        if not self._few_products(body):
            return False
        tiled = any(node.target in VECTOR_SUMS for node in body)
        if products <= SMALL_PRODUCTS or tiled:
            return True
        _, loads = self.body_of(results)
        return most_alive(loads, body, results) <= MAX_ALIVE

    @staticmethod
    def _few_products(body: list[fx.Node]) -> bool:
        products = sum(node.target is ops.matmul for node in body)
        heavy = sum(node.target in HEAVY for node in body)
        return products <= MAX_PRODUCTS and heavy <= MAX_HEAVY

    def _cheapest_cut(
        self, body: list[fx.Node], pending: list[fx.Node], results: dict[str, fx.Node]
    ) -> tuple[list[fx.Node], dict[str, fx.Node]]:
        """The cut with the fewest bytes a product of those that fit one kernel: values that cross
        it, and results that end before it."""
        roots = {*pending, *results.values()}
        cuts: list[tuple[float, int, list[fx.Node]]] = []
        for end in range(1, len(body)):
            prefix = body[:end]
            if not self._few_products(prefix):
                break
            if not any(n.target is ops.matmul or n.target in HEAVY for n in prefix):
                continue
            crossing = self._crossing(prefix, body[end:], roots)
            work = sum(n.target is ops.matmul or n.target in HEAVY for n in prefix)
            cost = sum(self._weight(node) for node in crossing) / work
            if crossing:
                cuts.append((cost, -end, crossing))
        for _, _, crossing in sorted(cuts, key=lambda cut: cut[:2]):
            finished = self._finished(crossing, results)
            rest = [x for name, x in results.items() if name not in finished]
            kept = self._still_read(crossing, [*pending, *rest])
            before = [*kept, *finished.values()]
            if self._fits(self.body_of(before)[0], before):
                return kept, finished
        raise AssertionError("no cut fits a kernel")

    def _crossing(
        self, prefix: list[fx.Node], suffix: list[fx.Node], roots: set[fx.Node]
    ) -> list[fx.Node]:
        inside = set(prefix)
        out: dict[fx.Node, None] = {}
        stack = [x for node in suffix for x in node.args if isinstance(x, fx.Node)]
        stack.extend(root for root in roots if root in inside)
        seen: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or node not in inside:
                continue
            seen.add(node)
            if self.costly[node] and node.target not in VIEWS:
                below = self._only_product_below(node)
                if below is None or below not in inside:
                    out[node] = None
                else:
                    stack.append(below)
            else:
                stack.extend(x for x in node.args if isinstance(x, fx.Node))
        return sorted(out, key=self.order.__getitem__)

    def _only_product_below(self, node: fx.Node) -> fx.Node | None:
        """The one operand with a product below it, if the node is arithmetic on it alone: several
        values that are made from it then cross as one."""
        if node.target in HEAVY | SLOW or node.target in (ops.matmul, ops.total, ops.amax):
            return None
        operands = [x for x in node.args if isinstance(x, fx.Node)]
        products = {x for x in operands if self.costly[x]}
        if len(products) != 1:
            return None
        below = products.pop()
        return below if _rank(below) <= _rank(node) else None

    @staticmethod
    def _weight(node: fx.Node) -> float:
        """Bytes of a value relative to a [C, C] tile."""
        rank = sum(dim != UNIT_DIM for dim in node.meta["dims"])
        return {0: 0.02, 1: 0.05, 2: 1.0}[rank]


def _rank(node: fx.Node) -> int:
    return sum(dim != UNIT_DIM for dim in node.meta["dims"])


def _base(node: fx.Node) -> fx.Node:
    """What a view looks at."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[-1]
    return node


def _free_row_dim(
    body: Iterable[fx.Node], carried: dict[fx.Node, fx.Node], column: str
) -> str | None:
    """First dim of all carried states if the loop never sums over it."""
    firsts = {node.meta["dims"][0] for node in carried if len(node.meta["dims"]) == 2}
    if len(firsts) != 1 or any(len(node.meta["dims"]) != 2 for node in carried):
        return None
    row = firsts.pop()
    summed = any(row in _contracted(node) for node in body)
    return None if summed or row == column else row


def _summed_dim(cone: list[fx.Node], roots: list[fx.Node], column: str) -> str | None:
    """The dim that scores with vector decays sum over, if nothing below them sums over it and they
    are the only products."""
    if not roots or any(node.target is not ops.decay_scores for node in roots):
        return None
    dims = {_contracted(node)[0] for node in roots}
    if len(dims) != 1 or column in dims:
        return None
    dim = dims.pop()
    plain = all(node.target is not ops.matmul and node.target not in HEAVY for node in cone)
    return dim if plain and not any(dim in _contracted(node) for node in cone) else None


def _free_chunk_dim(
    loads: Iterable[fx.Node], body: list[fx.Node], stores: Iterable[fx.Node], column: str
) -> str | None:
    """A dim of every product and of some result, over which a chunk kernel never sums."""
    costly = [node for node in body if node.target is ops.matmul or node.target in HEAVY]
    dims = {d for node in stores for d in node.meta["dims"]} - {TOKEN_DIM, UNIT_DIM, column}
    for dim in sorted(dims):
        in_all = costly and all(dim in node.meta["dims"] for node in costly)
        summed = any(dim in _contracted(node) for node in body)
        if in_all and not summed and not any(node.meta["dims"].count(dim) > 1 for node in loads):
            return dim
    return None


def keeps_column_whole(spec: LinearAttentionSpec, forward: Cell, column: str) -> bool:
    """Must one program hold all columns? It must where the forward graph sums over them, and where
    a state has none: its gradient is a sum over all columns."""
    lacking = any(column not in dims for dims in spec.state_dims.values())
    return lacking or contracts(forward, column)


def contracts(cell: Cell, column: str) -> bool:
    """Does the forward graph sum over the output's columns anywhere?"""
    return any(column in _contracted(node) for node in cell.calls)


def _contracted(node: fx.Node) -> tuple[str, ...]:
    """Dims that an operator sums over or picks from."""
    first: Dims = ()
    if node.args and isinstance(node.args[0], fx.Node):
        first = node.args[0].meta["dims"]
    if node.target in (ops.matmul, ops.decay_scores):
        return (first[1],)
    if node.target in (ops.total, ops.amax, ops.cumsum, ops.select):
        return (first[node.kwargs["dim"]],)
    return ()


def can_fuse(spec: LinearAttentionSpec, cell: Cell) -> bool:
    """May outputs be computed within the scan? Where one program need not hold all columns."""
    column = spec.output_dims[-1]
    tiled = column in cell.outputs["output"].meta["dims"]
    return bool(_states(cell)) and tiled and not keeps_column_whole(spec, cell, column)


def schedule_forward(spec: LinearAttentionSpec, cell: Cell, plan: str = "unfused") -> Schedule:
    """Kernels of the forward pass; the cell has the results `output` and `next_<s>`.

    plan: "unfused" or, where `can_fuse`, "fused".
    """
    scheduler = _Scheduler(spec, cell)
    outputs = cell.outputs
    states = _states(cell)
    if states:
        carried = {node: outputs[f"next_{name}"] for name, node in states.items()}
        maps = {
            node: outputs[f"map_{name}"]
            for name, node in states.items()
            if f"map_{name}" in outputs
        }
        decays = {name: node for name, node in outputs.items() if name.startswith("decay_")}
        if plan == "fused":
            scheduler.add_fused_loop(carried, {"output": outputs["output"]}, maps, decays)
            column = spec.output_dims[-1]
            return Schedule(tuple(scheduler.kernels), column, False)
        scheduler.add_loop("scan", carried, [outputs["output"]], maps, decays)
    heavy = scheduler.heavy_below([outputs["output"]])
    early = [node for node in heavy if scheduler.level[node] == 0]
    scheduler.add_chunks("before_output", early)
    scheduler.add_chunks("output", [], {"output": outputs["output"]})
    column = spec.output_dims[-1]
    return Schedule(tuple(scheduler.kernels), column, keeps_column_whole(spec, cell, column))


def schedule_backward(spec: LinearAttentionSpec, cell: Cell, forward: Cell) -> Schedule:
    """Kernels of the backward pass; the cell has `next_<s>`, `prev_<s>` and `grad_<x>`."""
    scheduler = _Scheduler(spec, cell)
    outputs = cell.outputs
    states = _states(cell)
    gradients = {name: node for name, node in outputs.items() if name.startswith("grad_")}
    leaving = {n: x for n, x in cell.placeholders.items() if x.meta["role"] == "grad_next"}
    previous = {
        leaving[f"grad_next_{name}"]: outputs[f"prev_{name}"]
        for name in spec.state_dims
        if f"grad_next_{name}" in leaving
    }
    results = [*gradients.values()]
    needed = scheduler.body_of([*results, *previous.values()])[1]
    if any(node in needed for node in states.values()):
        carried = {node: outputs[f"next_{name}"] for name, node in states.items()}
        scheduler.add_loop("scan", carried, [*results, *previous.values()])
    if previous:
        scheduler.add_loop("reverse", previous, results)
    scheduler.add_chunks("gradients", [], gradients)
    column = spec.output_dims[-1]
    return Schedule(tuple(scheduler.kernels), column, keeps_column_whole(spec, forward, column))


def _states(cell: Cell) -> dict[str, fx.Node]:
    prefix = "state_"
    return {
        node.meta["key"].removeprefix(prefix): node
        for node in cell.placeholders.values()
        if node.meta["role"] == "state" and node.meta["key"].startswith(prefix)
    }

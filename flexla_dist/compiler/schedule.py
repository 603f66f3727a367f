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

A fused loop without products waits for memory: tiles that come from what it loads anyway it makes
itself. Where M is dense a loop's steps wait for one another: products that need no state are made
before, those that only outputs need beside the exchange.

In front of a serial loop gates are exponentiated too: vectors, or the tile that they scale. What a
loop computes anyway and a later kernel needs is stored by the loop. A loop that never sums over the
state's first dim is cut into row tiles as well as column tiles.

No program holds all columns but where `column_sums` says so. A sum over columns that something
other than a sum needs is stored tile by tile, by a kernel before, and added up where it is loaded.

A value travels through memory when making it again costs more than reading it: domain operators
always, and in front of a serial loop every product with tokens as rows. Everything elementwise is
made again. A chunk stage with more products than a kernel may hold is cut where the fewest bytes
cross.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from flexla_dist.compiler.chunk_kernels import ChunkKernels
from flexla_dist.compiler.column_sums import whole_sums
from flexla_dist.compiler.free_dims import free_row_dim, mixes_columns
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import Cell
from flexla_dist.compiler.kernels import Kernel, Schedule
from flexla_dist.compiler.kinds import HEAVY
from flexla_dist.spec.spec import LinearAttentionSpec


class _Scheduler(ChunkKernels):
    """Kernels in order."""

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
        early = self.wanted_before_loop(roots, level)
        early += self.sums_before_loop([*roots, *(decays or {}).values()], early, level)
        self.add_chunks(f"before_{kind}", sorted(set(early), key=self.order.__getitem__))
        self._add_decays(decays or {})
        self._add_maps(maps or {})
        loop = self._loop(kind, carried)
        for node in carried:
            self.stored[node] = None
        shared = self.shared_with(loop, later)
        self.stored.update(dict.fromkeys(shared.values()))
        self.add_kernel(replace(loop, stores=shared) if shared else loop)

    def add_fused_loop(
        self,
        carried: dict[fx.Node, fx.Node],
        results: dict[str, fx.Node],
        maps: dict[fx.Node, fx.Node],
        decays: dict[str, fx.Node],
    ) -> None:
        """A scan that computes the results too; first what a serial loop should not compute."""
        early = self.wanted_before_loop([*carried.values(), *maps.values()], 1)
        body, loads = self.body_of([*results.values(), *carried.values()])
        extra = self._wanted_for(results.values(), early, bool(maps))
        if not any(x.target in HEAVY or x.target is ops.matmul for x in body):
            extra = [x for x in extra if not self._from_the_same(x, loads)]
        heavy = [x for x in extra if self._is_late(x, early)]
        early += [x for x in extra if x not in heavy]
        self.add_chunks("before_scan", sorted(early, key=self.order.__getitem__))
        self._add_decays(decays)
        self._add_maps(maps)
        self.add_kernel(replace(self._loop("summary", carried), history=False))
        self.add_chunks("before_output", sorted(heavy, key=self.order.__getitem__))
        body, loads = self.body_of([*results.values(), *carried.values()])
        loads = [node for node in loads if node not in carried]
        scan = Kernel("scan", "scan", tuple(loads), tuple(body), results, carried, history=False)
        self.add_kernel(scan)

    def _wanted_for(
        self, results: Iterable[fx.Node], early: list[fx.Node], dense: bool
    ) -> list[fx.Node]:
        """What else results need that a loop should not compute: where M is dense also products."""
        stored = self.stored
        self.stored = stored | dict.fromkeys(early)
        found = self.slow_below(results, 1)
        found += self.wanted_before_loop(results, 1) if dense else []
        self.stored = stored
        return list(dict.fromkeys(found))

    def _is_late(self, node: fx.Node, early: list[fx.Node]) -> bool:
        """Does a value for the results hold products that no value before the summary shares? Sums
        over pairs under one decay are made together, its factors once."""
        body = self.body_of([node])[0]
        decays = {x.args[2:] for y in early for x in self.body_of([y])[0] if x.target in HEAVY}
        costly = [x for x in body if x.target in HEAVY or x.target is ops.matmul]
        return any(x.target is ops.matmul or x.args[2:] not in decays for x in costly)

    def _from_the_same(self, node: fx.Node, loads: list[fx.Node]) -> bool:
        """Is a tile made of what a loop loads anyway? A loop without products waits for memory, so
        that it makes such a tile itself sooner than it reads one more."""
        tile = len(node.meta["dims"]) > 1
        return tile and set(self.body_of([node])[1]).issubset(loads)

    def _add_decays(self, decays: dict[str, fx.Node]) -> None:
        if decays:
            body, loads = self.body_of(decays.values())
            kernel = Kernel("decays", "decays", tuple(loads), tuple(body), decays)
            self.add_kernel(self._summing(kernel, decays.values()))

    def _add_maps(self, maps: dict[fx.Node, fx.Node]) -> None:
        """A kernel for M of each state, with as many columns as M has rows: whatever sums over the
        state's own columns is made before."""
        self.add_chunks("before_map", self._column_sums(maps))
        for at, (node, following) in enumerate(maps.items()):
            loop = self._loop("map", {node: following})
            self.add_kernel(replace(loop, name=f"map_{at}") if at else loop)

    def _column_sums(self, maps: dict[fx.Node, fx.Node]) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for state, following in maps.items():
            column, reached = state.meta["dims"][-1], {state}
            for node in self.body_of([following])[0]:
                operands = [x for x in node.args if isinstance(x, fx.Node)]
                summed = any(column in x.meta["dims"] for x in operands)
                if any(x in reached for x in operands):
                    reached.add(node)
                elif summed and column not in node.meta["dims"]:
                    found[node] = None
        return list(found)

    def _loop(self, kind: str, carried: dict[fx.Node, fx.Node]) -> Kernel:
        body, loads = self.body_of(carried.values())
        loads = [node for node in loads if node not in carried]
        row_dim = free_row_dim(body, carried, self.column)
        kernel = Kernel(kind, kind, tuple(loads), tuple(body), {}, carried, row_dim)
        return self._summing(kernel, carried.values())

    def _summing(self, kernel: Kernel, results: Iterable[fx.Node]) -> Kernel:
        """The kernel with what it does with sums over columns."""
        sums = self.loop_sums(kernel.loads, kernel.body, results)
        if sums.whole:
            sums = whole_sums(kernel.loads, self.sliced)
            return replace(kernel, sums=sums, whole=True, row_dim=None)
        return replace(kernel, sums=sums)


def can_fuse(spec: LinearAttentionSpec, cell: Cell) -> bool:
    """May outputs be computed within the scan? Where every column is computed by itself."""
    column = spec.output_dims[-1]
    tiled = column in cell.outputs["output"].meta["dims"]
    return bool(_states(cell)) and tiled and not mixes_columns(spec, cell, column)


def schedule_forward(
    spec: LinearAttentionSpec, cell: Cell, plan: str = "unfused", kept: Iterable[fx.Node] = ()
) -> Schedule:
    """Kernels of the forward pass; the cell has the results `output` and `next_<s>`.

    plan: "unfused" or, where `can_fuse`, "fused". kept: values that backward reads again.
    """
    scheduler = _Scheduler(spec, cell, kept, mixes_columns(spec, cell, spec.output_dims[-1]))
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
            return Schedule(tuple(scheduler.kernels), scheduler.column, scheduler.mixed)
        scheduler.add_loop("scan", carried, [outputs["output"]], maps, decays)
    heavy = scheduler.heavy_below([outputs["output"]])
    early = [node for node in heavy if scheduler.level[node] == 0]
    scheduler.add_chunks("before_output", early)
    scheduler.add_chunks("output", [], {"output": outputs["output"]})
    return Schedule(tuple(scheduler.kernels), scheduler.column, scheduler.mixed)


def schedule_backward(
    spec: LinearAttentionSpec, cell: Cell, forward: Cell, kept: Iterable[fx.Node] = ()
) -> Schedule:
    """Kernels of the backward pass; the cell has `next_<s>`, `prev_<s>` and `grad_<x>`.

    kept: values that forward stored.
    """
    mixed = mixes_columns(spec, forward, spec.output_dims[-1])
    scheduler = _Scheduler(spec, cell, mixed=mixed)
    scheduler.stored.update(dict.fromkeys(kept))
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
    return Schedule(tuple(scheduler.kernels), scheduler.column, scheduler.mixed)


def _states(cell: Cell) -> dict[str, fx.Node]:
    prefix = "state_"
    return {
        node.meta["key"].removeprefix(prefix): node
        for node in cell.placeholders.values()
        if node.meta["role"] == "state" and node.meta["key"].startswith(prefix)
    }

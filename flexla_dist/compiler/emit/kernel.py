"""One kernel of a schedule as Triton source.

Contract: `emit_kernel` returns the function's text, the order of its arguments and the device
functions that it uses. The text depends only on the graph and on which dims are uneven; sizes,
tiles, heads and the dot policy are constexpr arguments, T and the number of chunks are run-time
numbers. See `memory` for where things lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from flexla_dist.compiler.emit.expressions import emit_pair, value_name
from flexla_dist.compiler.emit.memory import TOKEN_ROLES, Memory
from flexla_dist.compiler.emit.tiles import index_name, shape_text
from flexla_dist.compiler.emit.writer import Writer
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.kernels import Kernel, Schedule
from flexla_dist.compiler.kinds import VECTOR_SUMS, pair_of_sums
from flexla_dist.compiler.liveness import cheap_values, emission_order, held_values
from flexla_dist.compiler.passes.padding import is_valid_mask
from flexla_dist.shapes import TOKEN_DIM
from flexla_dist.spec.spec import LinearAttentionSpec


@dataclass(frozen=True)
class Emitted:
    """Source of one kernel and what a launch must pass.

    `pointers` and `numbers` are run-time arguments in order, `constants` the names of constexprs.
    `sliced` names stores that hold one partial sum a column tile.
    """

    name: str
    source: str
    pointers: tuple[str, ...]
    numbers: tuple[str, ...]
    constants: tuple[str, ...]
    helpers: frozenset[str]
    sliced: frozenset[str]


class _Emitter(Memory):
    """Writes one kernel."""

    # -- the text -----------------------------------------------------------------------------

    def run(self) -> Emitted:
        body = self._body_text()
        name = f"{self.spec.name}_{self.kernel.name}"
        pointers, numbers = tuple(self.pointers), tuple(self.numbers)
        constants = tuple(self.constants)
        head = Writer()
        fixed = ", ".join(repr(n) for n in numbers)
        head.line(f"@triton.jit(do_not_specialize=[{fixed}])")
        with head.block(f"def {name}("):
            for argument in (*pointers, *numbers):
                head.line(f"{argument},")
            for argument in constants:
                head.line(f"{argument}: tl.constexpr,")
        head.line("):")
        source = head.text() + body
        return Emitted(
            name,
            source,
            pointers,
            numbers,
            constants,
            frozenset(self.expressions.used_helpers),
            frozenset(self.sliced),
        )

    def _body_text(self) -> str:
        w = self.writer
        with w.indent():
            w.line(f'"""{self._describe()}"""')
            self._positions()
            if self.loop:
                self._loop_text()
            else:
                self._chunk_position()
                if self.kernel.summed:
                    self._summed_text()
                else:
                    self._chunk_text()
        return w.text()

    def _summed_text(self) -> None:
        """Results that add up over the tiles of a dim."""
        w, dim = self.writer, self.kernel.row_dim
        assert dim is not None
        sums = {}
        for name, node in self.kernel.stores.items():
            shape = shape_text(node.meta["dims"])
            sums[name] = w.assign(f"{value_name(node)}_sum", f"tl.zeros({shape}, dtype=tl.float32)")
        with w.block("for row_tile in range(0, num_row_tiles):"):
            w.line(f"{index_name(dim)} = row_tile * tile_{dim} + tl.arange(0, tile_{dim})")
            for name, node in self.kernel.stores.items():
                self._need(node)
                w.line(f"{sums[name]} += {self.expressions.wide(node)}")
        for name, node in self.kernel.stores.items():
            self.expressions.tiles[node] = replace(self.expressions.tile(node), name=sums[name])
            self._store_result(name, node)

    def _chunk_text(self) -> None:
        """Steps in the order of fewest live registers; results are stored as soon as they are
        there."""
        names: dict[fx.Node, list[str]] = {}
        for name, node in self.kernel.stores.items():
            names.setdefault(node, []).append(name)
        kernel = self.kernel
        steps = emission_order(kernel.loads, kernel.body, kernel.stores.values())
        held = held_values(kernel.loads, kernel.body)
        for at, node in enumerate(steps):
            partner = self._partner(node, steps[at + 1 :])
            if partner is not None:
                for x in (*node.args, *partner.args):
                    if isinstance(x, fx.Node):
                        self._need(x)
                rows_first = node.target is ops.decay_rows
                emit_pair(self.expressions, *((node, partner) if rows_first else (partner, node)))
            self._need(node)
            for name in names.pop(node, ()):
                self._store_result(name, node)
            if at + 1 < len(steps):
                self._forget(held - self._near(steps[at + 1]))
        for node, rest in names.items():  # arguments that are results
            self._need(node)
            for name in rest:
                self._store_result(name, node)

    def _partner(self, node: fx.Node, later: list[fx.Node]) -> fx.Node | None:
        """The other sum over the same pairs under the same decay, if its operand is there too."""
        there = self.expressions.tiles
        if node.target not in VECTOR_SUMS or node in there:
            return None
        others = [x for x in later if x.target in VECTOR_SUMS and x.target is not node.target]
        alike = [x for x in others if x not in there and pair_of_sums(x) == pair_of_sums(node)]
        known = cheap_values(self.kernel.loads, self.kernel.body).union(there)
        return next((x for x in alike if x.args[1] in known), None)

    def _near(self, node: fx.Node) -> set[fx.Node]:
        """What a step needs that is not there, and what it reads."""
        found: set[fx.Node] = set()
        stack = [node]
        while stack:
            x = stack.pop()
            if x in found:
                continue
            found.add(x)
            if x is node or (x in self.inside and x not in self.expressions.tiles):
                stack.extend(y for y in x.args if isinstance(y, fx.Node))
        return found

    def _forget(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.expressions.forget(node)

    def _describe(self) -> str:
        kinds = {
            "chunk": "One program computes one chunk of one head (and column tile).",
            "decays": "One program computes the decays of one chunk of one head.",
            "map": "One program applies the transition M of a span of chunks to a matrix.",
            "scan": "One program carries the state through the chunks of one document and head.",
            "summary": "One program carries a state through the chunks of one segment and head.",
            "reverse": "One program carries the state's gradient back through the chunks.",
        }
        return kinds[self.kernel.kind]

    def _positions(self) -> None:
        w = self.writer
        for name in ("HV", "MODE", "PACKED", "num_tiles"):
            self._constant(name)
        self._number("T")
        self._number("chunks_per_lane")
        w.line("unit = tl.program_id(0).to(tl.int64)")
        head = "tl.program_id(1)"
        if self.loop:
            head = f"({head} + {self._number('first_head')})"
        w.line(f"head = {head}.to(tl.int64)")
        w.line("tile = unit % num_tiles")
        w.line("unit = unit // num_tiles")
        if self.kernel.row_dim:
            self._constant("num_row_tiles")
        if self.kernel.row_dim and not self.kernel.summed:
            w.line("row_tile = unit % num_row_tiles")
            w.line("unit = unit // num_row_tiles")
        self._constant("tile_C")
        w.line("rows = tl.arange(0, tile_C)")
        for dim in self.dims:
            if dim == TOKEN_DIM:
                if any(x.target is ops.size and x.kwargs["dim"] == dim for x in self.inside):
                    self._constant(f"size_{dim}")
                continue
            self._constant(f"size_{dim}")
            self._constant(f"tile_{dim}")
            if dim == self.kernel.row_dim and self.kernel.summed:
                continue  # in the loop over its tiles
            base = f"tile.to(tl.int32) * tile_{dim} + " if dim == self.column else ""
            if dim == self.kernel.row_dim:
                base = f"row_tile.to(tl.int32) * tile_{dim} + "
            w.line(f"{index_name(dim)} = {base}tl.arange(0, tile_{dim})")

    def _chunk_position(self) -> None:
        w = self.writer
        w.line("chunk = unit")
        with w.block("if PACKED:"):
            w.line(f"start = tl.load({self._pointer('chunk_start')} + chunk).to(tl.int64)")
            w.line(f"length = tl.load({self._pointer('chunk_length')} + chunk).to(tl.int32)")
        with w.block("else:"):
            w.line("lane = chunk // chunks_per_lane")
            w.line("first = (chunk % chunks_per_lane) * tile_C")
            w.line("start = lane * T + first")
            w.line("length = tl.minimum(T - first, tile_C).to(tl.int32)")

    def _loop_text(self) -> None:
        w = self.writer
        w.line("document = unit")
        with w.block("if PACKED:"):
            first = self._pointer("document_chunk")
            w.line(f"first_chunk = tl.load({first} + document).to(tl.int64)")
            w.line(f"count = tl.load({first} + document + 1).to(tl.int64) - first_chunk")
            offsets = self._pointer("document_start")
            w.line(f"first_token = tl.load({offsets} + document).to(tl.int64)")
            w.line(f"tokens = tl.load({offsets} + document + 1).to(tl.int64) - first_token")
        with w.block("else:"):
            w.line("first_chunk = document * chunks_per_lane")
            w.line("count = chunks_per_lane.to(tl.int64)")
            w.line("first_token = document * T")
            w.line("tokens = T.to(tl.int64)")
        for node in self.kernel.loads:
            if self._is_fixed(node):
                self._load(node)
        for node in self.kernel.carried:
            self._load_carried(node)
        # Named here, they hold for all loads of the loop, else for operands of products alone.
        stages = self._constant("STAGES")
        with w.block(f"for step in tl.range(0, count, num_stages={stages}):"):
            at = "count - 1 - step" if self.kernel.kind == "reverse" else "step"
            w.line(f"at = {at}")
            w.line("chunk = first_chunk + at")
            w.line("start = first_token + at * tile_C")
            w.line("length = tl.minimum(tokens - at * tile_C, tile_C).to(tl.int32)")
            if self.kernel.history:
                self._chunk_with_history()
            else:
                for name, node in self.kernel.stores.items():
                    self._need(node)
                    self._store_result(name, node)
                for following in self.kernel.carried.values():
                    self._need(following)
            for node, following in self.kernel.carried.items():
                carried = self.expressions.tile(node).name
                w.line(f"{carried} = {self.expressions.wide(following)}")
        for node in self.kernel.carried:
            self._store_exit(node)

    def _chunk_with_history(self) -> None:
        for node in self.kernel.carried:
            self._store_state(node)
        for following in self.kernel.carried.values():
            self._need(following)
        for name, node in self.kernel.stores.items():
            with self.writer.block(f"if {self._constant('KEEP')}:"):
                self._store_result(name, node)

    def _is_fixed(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.meta["role"] in ("param", "scalar", "sizes")

    # -- computing ----------------------------------------------------------------------------

    def _need(self, root: fx.Node) -> None:
        """Emit what a node needs, depth first, and the node: loads stand next to their first use,
        so that few tiles are alive at a time."""
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self.expressions.tiles or node.meta.get("role") == "sizes":
                stack.pop()
                continue
            if node not in self.inside:
                self._load(node)
                stack.pop()
                continue
            missing = [
                x
                for x in reversed(node.args)
                if isinstance(x, fx.Node)
                and x not in self.expressions.tiles
                and x.meta.get("role") != "sizes"
            ]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if self._is_padded_load(node):
                self.expressions.tiles[node] = self.expressions.tile(node.args[1])  # type: ignore[arg-type]
            else:
                self.expressions.emit(node)

    def _is_padded_load(self, node: fx.Node) -> bool:
        """`where(valid, loaded, 0)`: loads already give zeros beyond the tokens."""
        return (
            node.target is ops.where
            and is_valid_mask(node.args[0])  # type: ignore[arg-type]
            and isinstance(node.args[1], fx.Node)
            and node.args[1].op == "placeholder"
            and node.args[1].meta["role"] in TOKEN_ROLES
            and node.args[2] == 0.0
        )


def emit_kernel(
    spec: LinearAttentionSpec, schedule: Schedule, kernel: Kernel, uneven: frozenset[str]
) -> Emitted:
    """Source of one kernel; `uneven` names the dims whose size is not their tile."""
    return _Emitter(spec, schedule, kernel, uneven).run()

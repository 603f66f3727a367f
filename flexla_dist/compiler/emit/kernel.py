"""One kernel of a schedule as Triton source.

Contract: `emit_kernel` returns the function's text, the order of its arguments and the device
functions that it uses. The text depends only on the graph and on which dims are uneven; sizes,
tiles, heads and the dot policy are constexpr arguments, T and the number of chunks are run-time
numbers. Memory layout: inputs and outputs [B, T, heads, ...]; states and values between kernels
[chunks, HV, ...], chunk by chunk in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from flexla_dist.compiler.emit import device
from flexla_dist.compiler.emit.expressions import Expressions, value_name
from flexla_dist.compiler.emit.tiles import Tile, along, index_name, shape_text
from flexla_dist.compiler.emit.writer import Writer
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.kernels import LOOPS, Kernel, Schedule, buffer_name
from flexla_dist.compiler.liveness import emission_order, held_values
from flexla_dist.compiler.passes.padding import is_valid_mask
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims
from flexla_dist.spec.spec import LinearAttentionSpec

RESERVED = (
    *device.__all__,
    *("tl", "triton", "unit", "head", "tile", "rows", "chunk", "lane", "first", "start", "length"),
    *("document", "first_chunk", "count", "first_token", "tokens", "step", "at"),
    *("row_tile", "num_row_tiles", "KEEP"),
    *("T", "HV", "MODE", "PACKED", "num_tiles", "num_chunks", "num_tokens", "chunks_per_lane"),
    *("chunk_start", "chunk_length", "document_chunk", "document_start", "float"),
)
_AGAIN = (  # loads that differ are not merged into one that would hold registers in between
    "",
    ', cache_modifier=".ca"',
    ', eviction_policy="evict_last"',
    ', cache_modifier=".cg"',
    ', eviction_policy="evict_first"',
)
TOKEN_ROLES = frozenset({"input", "log_decay", "grad_output"})


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


class _Emitter:
    def __init__(
        self, spec: LinearAttentionSpec, schedule: Schedule, kernel: Kernel, uneven: frozenset[str]
    ):
        self.spec, self.schedule, self.kernel = spec, schedule, kernel
        names = (*spec.inputs, *spec.params, *spec.scalars)
        self.writer = Writer((*RESERVED, *spec.scalars, *(f"{n}_ptr" for n in names)))
        self.expressions = Expressions(self.writer, uneven, spec.name)
        self.uneven = uneven
        self.pointers: dict[str, None] = {}
        self.numbers: dict[str, None] = {}
        self.constants: dict[str, None] = {}
        self.sliced: set[str] = set()
        self.partial: dict[fx.Node, bool] = {}
        self.dims = self._all_dims()
        self.column = schedule.column
        self.loop = kernel.kind in LOOPS
        self.inside = frozenset(kernel.body)
        self.loaded: dict[fx.Node, int] = {}

    # -- facts --------------------------------------------------------------------------------

    def _all_dims(self) -> list[str]:
        found: dict[str, None] = {}
        nodes = (*self.kernel.loads, *self.kernel.body, *self.kernel.carried)
        for node in nodes:
            for dim in node.meta["dims"]:
                if dim != UNIT_DIM:
                    found[dim] = None
        return list(found)

    def _note_partial(self) -> None:
        """A value without columns that sums over them is partial when columns are tiled."""
        for node in self.kernel.loads:
            self.partial[node] = bool(node.meta.get("partial"))
        for node in self.kernel.body:
            operands = [x for x in node.args if isinstance(x, fx.Node)]
            summed = any(self.column in x.meta["dims"] for x in operands)
            inherited = any(self.partial.get(x, False) for x in operands)
            missing = self.column not in node.meta["dims"]
            self.partial[node] = missing and (summed or inherited)
            node.meta["partial"] = self.partial[node]

    # -- the text -----------------------------------------------------------------------------

    def run(self) -> Emitted:
        self._note_partial()
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
            self._need(node)
            for name in names.pop(node, ()):
                self._store_result(name, node)
            if at + 1 < len(steps):
                self._forget(held - self._near(steps[at + 1]))
        for node, rest in names.items():  # arguments that are results
            self._need(node)
            for name in rest:
                self._store_result(name, node)

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

    def _constant(self, name: str) -> str:
        self.constants[name] = None
        return name

    def _pointer(self, name: str) -> str:
        self.pointers[name] = None
        return name

    def _number(self, name: str) -> str:
        self.numbers[name] = None
        return name

    def _positions(self) -> None:
        w = self.writer
        for name in ("HV", "MODE", "PACKED", "num_tiles"):
            self._constant(name)
        self._number("T")
        self._number("chunks_per_lane")
        w.line("unit = tl.program_id(0).to(tl.int64)")
        w.line("head = tl.program_id(1).to(tl.int64)")
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
        with w.block("for step in range(0, count):"):
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

    # -- loads --------------------------------------------------------------------------------

    def _load(self, node: fx.Node) -> None:
        role = node.meta["role"] if node.op == "placeholder" else "value"
        if role in ("sizes", "valid"):
            if role == "valid":
                name = self.writer.assign("valid", "rows < length")
                self.expressions.tiles[node] = Tile(name, node.meta["dims"])
            return
        if role == "scalar":
            if node.meta["key"] in RESERVED:
                raise self.expressions.error(node, f"a scalar called {node.meta['key']!r}")
            self._number(node.meta["key"])
            self.expressions.tiles[node] = Tile(node.meta["key"], ())
            return
        name = node.meta["key"] if node.op == "placeholder" else buffer_name(node)
        address, mask = self._address(node, name, role)
        guard = f", mask={mask}, other=0.0" if mask else ""
        again = _AGAIN[self.loaded.get(node, 0) % len(_AGAIN)]
        self.loaded[node] = self.loaded.get(node, 0) + 1
        text = f"tl.load({address}{guard}{again})"
        label = value_name(node)
        var = self.writer.assign(label, text)
        zero = frozenset(node.meta["dims"]) & self.uneven
        self.expressions.tiles[node] = Tile(var, node.meta["dims"], False, zero)

    def _address(self, node: fx.Node, name: str, role: str) -> tuple[str, str]:
        dims: Dims = node.meta["dims"]
        if role in TOKEN_ROLES:
            return self._token_address(name, dims, self._heads_of(name, role))
        if role == "param":
            return self._block_address(self._pointer(f"{name}_ptr"), "head", dims)
        if role == "value" and self.partial.get(node):
            base = f"{self._pointer(f'{name}_ptr')} + tile * num_chunks * HV * {self._numel(dims)}"
            self._number("num_chunks")
            return self._block_address(base, "(chunk * HV + head)", dims)
        return self._block_address(self._pointer(f"{name}_ptr"), "(chunk * HV + head)", dims)

    def _heads_of(self, name: str, role: str) -> tuple[str, str]:
        """Number of heads in memory and which one this program reads."""
        if role == "grad_output" or self.spec.input_specs[name].group is None:
            return "HV", "head"
        heads = self._constant(f"heads_{self.spec.input_specs[name].group}")
        return heads, f"(head // (HV // {heads}))"

    def _token_address(self, name: str, dims: Dims, heads: tuple[str, str]) -> tuple[str, str]:
        pointer = self._pointer(f"{name}_ptr")
        count, head = heads
        if len(dims) == 1:
            return f"{pointer} + (start * {count} + {head}) + rows * {count}", "rows < length"
        dim = dims[1]
        if dim == UNIT_DIM:
            return (
                f"{pointer} + (start * {count} + {head}) + (rows * {count})[:, None]",
                "(rows < length)[:, None]",
            )
        at = index_name(dim)
        address = (
            f"{pointer} + (start * {count} + {head}) * size_{dim} "
            f"+ ((rows * ({count} * size_{dim}))[:, None] + {at}[None, :])"
        )
        mask = "(rows < length)[:, None]"
        if self._cut(dim):
            mask += f" & ({at} < size_{dim})[None, :]"
        return address, mask

    def _cut(self, dim: str) -> bool:
        return dim in self.uneven

    def _numel(self, dims: Dims) -> str:
        sizes = ["tile_C" if d == TOKEN_DIM else f"size_{d}" for d in dims if d != UNIT_DIM]
        return " * ".join(sizes) or "1"

    def _block_address(self, base: str, index: str, dims: Dims) -> tuple[str, str]:
        """Address of a tile that lies in one piece at `index`."""
        numel = self._numel(dims)
        address = f"{base} + {index} * {numel}" if numel != "1" else f"{base} + {index}"
        masks, steps = [], []
        rank = len(dims)
        for axis, dim in enumerate(dims):
            if dim == UNIT_DIM:
                if rank == 2 and any(d != UNIT_DIM for d in dims):
                    steps.append(along("tl.arange(0, 1)", axis, rank))
                continue
            stride = self._numel(dims[axis + 1 :])
            step = index_name(dim) if stride == "1" else f"({index_name(dim)} * {stride})"
            steps.append(along(step, axis, rank))
            if self._cut(dim):
                masks.append(along(f"({index_name(dim)} < size_{dim})", axis, rank))
        offset = " + ".join(steps)
        if offset:
            address += f" + ({offset})" if len(steps) > 1 else f" + {offset}"
        return address, " & ".join(masks)

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

    # -- states -------------------------------------------------------------------------------

    def _load_carried(self, node: fx.Node) -> None:
        dims = node.meta["dims"]
        key = node.meta["key"]
        address, mask = self._block_address(
            self._pointer(f"enter_{key}_ptr"), "(document * HV + head)", dims
        )
        guard = f", mask={mask}, other=0.0" if mask else ""
        name = self.writer.assign(key, f"tl.load({address}{guard}).to(tl.float32)")
        zero = frozenset(dims) & self.uneven
        self.expressions.tiles[node] = Tile(name, dims, True, zero)

    def _store_state(self, node: fx.Node) -> None:
        key = node.meta["key"]
        pointer = self._pointer(f"{key}_ptr")
        address, mask = self._block_address(pointer, "(chunk * HV + head)", node.meta["dims"])
        with self.writer.block(f"if {self._constant('KEEP')}:"):
            self._store(address, self.expressions.tile(node).name, mask)

    def _store_exit(self, node: fx.Node) -> None:
        key = node.meta["key"]
        pointer = self._pointer(f"leave_{key}_ptr")
        address, mask = self._block_address(pointer, "(document * HV + head)", node.meta["dims"])
        self._store(address, self.expressions.tile(node).name, mask)

    # -- stores -------------------------------------------------------------------------------

    def _store(self, address: str, value: str, mask: str) -> None:
        guard = f", mask={mask}" if mask else ""
        self.writer.line(f"tl.store({address}, {value}{guard})")

    def _store_result(self, name: str, node: fx.Node) -> None:
        dims = node.meta["dims"]
        tiled = self.column in dims
        partial = self.partial.get(node, bool(node.meta.get("partial"))) and not tiled
        if partial:
            self.sliced.add(name)
        target = name.removeprefix("grad_")
        tokens = name == "output" or target in self.spec.inputs
        if tokens:
            address, mask = self._token_address(name, dims, ("HV", "head"))
            offset = f"tile * num_tokens * HV * {self._numel(dims[1:])}"
            amount = "num_tokens"
        else:
            index = "(chunk * HV + head)"
            address, mask = self._block_address(self._pointer(f"{name}_ptr"), index, dims)
            offset = f"tile * num_chunks * HV * {self._numel(dims)}"
            amount = "num_chunks"
        if partial:
            self._number(amount)
            address = address.replace(f"{name}_ptr", f"{name}_ptr + {offset}", 1)
        value = self._shaped(node)
        first = [] if partial or tiled else ["tile == 0"]
        if self.kernel.row_dim and not self.kernel.summed and self.kernel.row_dim not in dims:
            first.append("row_tile == 0")
        if not first:
            self._store(address, value, mask)
            return
        with self.writer.block(f"if {' and '.join(first)}:"):
            self._store(address, value, mask)

    def _shaped(self, node: fx.Node) -> str:
        tile = self.expressions.stored(node)
        return tile.name


def emit_kernel(
    spec: LinearAttentionSpec, schedule: Schedule, kernel: Kernel, uneven: frozenset[str]
) -> Emitted:
    """Source of one kernel; `uneven` names the dims whose size is not their tile."""
    return _Emitter(spec, schedule, kernel, uneven).run()

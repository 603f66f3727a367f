"""What a kernel reads and writes: arguments, addresses, masks, loads and stores.

Contract: inputs and outputs are [B, T, heads, ...]; states and values between kernels lie chunk by
chunk in one piece, [chunks, HV, ...]. An address is a 64-bit base of the program and 32-bit offsets
within a tile.
"""

from __future__ import annotations

from torch import fx

from flexla_dist.compiler.emit import device
from flexla_dist.compiler.emit.expressions import Expressions, value_name
from flexla_dist.compiler.emit.tiles import Tile, along, index_name
from flexla_dist.compiler.emit.writer import Writer
from flexla_dist.compiler.ir import operators as ops
from flexla_dist.compiler.ir.graph import is_mask
from flexla_dist.compiler.kernels import LOOPS, Kernel, Schedule, buffer_name
from flexla_dist.shapes import TOKEN_DIM, UNIT_DIM, Dims
from flexla_dist.spec.spec import LinearAttentionSpec

RESERVED = (
    *device.__all__,
    *("tl", "triton", "unit", "head", "tile", "rows", "chunk", "lane", "first", "start", "length"),
    *("document", "first_chunk", "count", "first_token", "tokens", "step", "at"),
    *("row_tile", "num_row_tiles", "KEEP", "STAGES", "part", "first_head", "range"),
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


class Memory:
    """Arguments of one kernel and the text of its loads and stores."""

    def __init__(
        self, spec: LinearAttentionSpec, schedule: Schedule, kernel: Kernel, uneven: frozenset[str]
    ):
        self.spec, self.schedule, self.kernel = spec, schedule, kernel
        names = (*spec.inputs, *spec.params, *spec.scalars)
        self.writer = Writer((*RESERVED, *spec.scalars, *(f"{n}_ptr" for n in names)))
        self.expressions = Expressions(self.writer, uneven, spec.name, kernel.sums.once)
        self.uneven = uneven
        self.pointers: dict[str, None] = {}
        self.numbers: dict[str, None] = {}
        self.constants: dict[str, None] = {}
        self.sliced: set[str] = set()
        self.dims = self._all_dims()
        self.column = schedule.column
        self.loop = kernel.kind in LOOPS
        self.inside = frozenset(kernel.body)
        self.loaded: dict[fx.Node, int] = {}

    def _all_dims(self) -> list[str]:
        found: dict[str, None] = {}
        nodes = (*self.kernel.loads, *self.kernel.body, *self.kernel.carried)
        for node in nodes:
            for dim in node.meta["dims"]:
                if dim != UNIT_DIM:
                    found[dim] = None
            if node.target is ops.size:
                found[str(node.kwargs["dim"])] = None
        return list(found)

    def _constant(self, name: str) -> str:
        self.constants[name] = None
        return name

    def _pointer(self, name: str) -> str:
        self.pointers[name] = None
        return name

    def _number(self, name: str) -> str:
        self.numbers[name] = None
        return name

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
        if node in self.kernel.sums.completed:
            self._load_sum(node, name)
            return
        address, mask = self._address(node, name, role)
        guard = f", mask={mask}, other=0.0" if mask else ""
        again = _AGAIN[self.loaded.get(node, 0) % len(_AGAIN)]
        self.loaded[node] = self.loaded.get(node, 0) + 1
        text = f"tl.load({address}{guard}{again})"
        label = value_name(node)
        if is_mask(node):  # memory holds ones and zeros
            self.expressions.tiles[node] = Tile(
                self.writer.assign(label, f"{text} != 0.0"), node.meta["dims"]
            )
            return
        var = self.writer.assign(label, text)
        zero = frozenset(node.meta["dims"]) & self.uneven
        self.expressions.tiles[node] = Tile(var, node.meta["dims"], False, zero)

    def _load_sum(self, node: fx.Node, name: str) -> None:
        """A sum over columns of which memory has one part a column tile."""
        dims, w = node.meta["dims"], self.writer
        first, mask = self._part_address(node, name, "0")
        following, _ = self._part_address(node, name, "part")
        guard = f", mask={mask}, other=0.0" if mask else ""
        var = w.assign(value_name(node), f"tl.load({first}{guard}).to(tl.float32)")
        with w.block(f"for part in tl.static_range(1, {self._constant(f'parts_{name}')}):"):
            w.line(f"{var} += tl.load({following}{guard}).to(tl.float32)")
        self.expressions.tiles[node] = Tile(var, dims, True, frozenset(dims) & self.uneven)

    def _part_address(self, node: fx.Node, name: str, part: str) -> tuple[str, str]:
        dims = node.meta["dims"]
        base = self._pointer(f"{name}_ptr")
        if part != "0":
            base += f" + {part} * num_chunks * HV * {self._numel(dims)}"
            self._number("num_chunks")
        return self._block_address(base, "(chunk * HV + head)", dims)

    def _address(self, node: fx.Node, name: str, role: str) -> tuple[str, str]:
        dims: Dims = node.meta["dims"]
        if role in TOKEN_ROLES:
            return self._token_address(name, dims, self._heads_of(name, role))
        if role == "param":
            return self._block_address(self._pointer(f"{name}_ptr"), "head", dims)
        if role == "value" and node in self.kernel.sums.partial:
            return self._part_address(node, name, "tile")
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
        keep = self._constant("KEEP")
        if self.column not in node.meta["dims"]:
            keep += " and tile == 0"
        with self.writer.block(f"if {keep}:"):
            self._store(address, self.expressions.tile(node).name, mask)

    def _store_exit(self, node: fx.Node) -> None:
        key = node.meta["key"]
        pointer = self._pointer(f"leave_{key}_ptr")
        address, mask = self._block_address(pointer, "(document * HV + head)", node.meta["dims"])
        if self.column in node.meta["dims"]:
            self._store(address, self.expressions.tile(node).name, mask)
            return
        with self.writer.block("if tile == 0:"):
            self._store(address, self.expressions.tile(node).name, mask)

    # -- stores -------------------------------------------------------------------------------

    def _store(self, address: str, value: str, mask: str) -> None:
        guard = f", mask={mask}" if mask else ""
        self.writer.line(f"tl.store({address}, {value}{guard})")

    def _store_result(self, name: str, node: fx.Node) -> None:
        dims = node.meta["dims"]
        tiled = self.column in dims
        partial = node in self.kernel.sums.partial and not tiled
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

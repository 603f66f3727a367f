"""Source of an exchange kernel: one description, verbs of a dialect, sizes as literals.

Contract: the text is whole, it needs beside Triton only the clock of `timing` (and
Triton-Distributed in its dialect). The functions are those of the modules of this folder that the
kernel needs, word for word; a dialect replaces the module that holds the verbs and nothing else.
Triton wants functions in a real file: the text is written under a hash of it to the user's cache.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Literal

from flexla_dist.comm.device.layout import Layout, Signature
from flexla_dist.comm.device.panels import Tiling
from flexla_dist.comm.device.plan import FIELDS
from flexla_dist.generated import load_text

Dialect = Literal["p2p", "nvshmem", "triton_dist"]
DIALECTS: tuple[Dialect, ...] = ("p2p", "nvshmem", "triton_dist")
_FOLDER = Path(__file__).parent
_IMPORTS = {
    "p2p": "",
    "nvshmem": "from triton.language import core\n",
    "triton_dist": (
        "import triton_dist\n"
        "import triton_dist.language as dl\n"
        "from triton_dist.language.extra import libshmem_device\n"
    ),
}


def exchange_source(signature: Signature, layout: Layout, dialect: Dialect) -> str:
    """The module of the kernel `exchange` for such states, strategy and dialect."""
    kernel = "\n".join(_kernel(signature, layout, dialect))
    wanted = {node.id for node in ast.walk(ast.parse(kernel)) if isinstance(node, ast.Name)}
    functions = _needed(wanted, dialect)
    timing = sorted({"pause", "clock_ns"} & _names(functions))
    head = [
        f"# Exchange by {layout.strategy}, dialect {dialect}: {signature}.",
        "",
        "import triton",
        "import triton.language as tl",
        _IMPORTS[dialect],
        f"from flexla_dist.comm.device.timing import {', '.join(timing)}",
    ]
    text = "\n".join(line for line in head)
    return "\n\n\n".join([text, *functions, kernel]) + "\n"


def load_source(text: str, folder: Path | None = None) -> ModuleType:
    """Write the text to the cache if it is not there and import it."""
    return load_text(f"exchange_{hashlib.sha256(text.encode()).hexdigest()[:16]}", text, folder)


@cache
def _functions(module: str) -> dict[str, str]:
    """Top-level functions of a module of this folder, with their decorators."""
    text = (_FOLDER / f"{module}.py").read_text()
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def _needed(wanted: set[str], dialect: Dialect) -> list[str]:
    """The functions that a kernel calls, and those that they call, callees first."""
    table: dict[str, str] = {}
    for module in ("memory", dialect, "links", "elementwise", "dense", "dense_strategies"):
        table |= _functions(module)
    found: set[str] = set()
    waiting = wanted & table.keys()
    while waiting:
        found |= waiting
        waiting = (_names([table[name] for name in waiting]) & table.keys()) - found
    return [text for name, text in table.items() if name in found]


def _names(functions: list[str]) -> set[str]:
    trees = [ast.parse(text) for text in functions]
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


def state_arguments(tiling: Tiling, entry: bool, index: int) -> list[str]:
    """Tensor arguments of the kernel for one state, in order."""
    names = ["local"]
    if tiling.has_decay:
        names.append("decay")
    if tiling.dense:
        names += ["matrix", "scratch"]
    if entry:
        names.append("entry")
    return [f"{name}_{index}" for name in (*names, "entering")]


def _kernel(signature: Signature, layout: Layout, dialect: Dialect) -> list[str]:
    """Lines of the kernel: who this program is, then a loop over the panels of each state."""
    states = range(len(layout.tilings))
    tensors = [
        name for i in states for name in state_arguments(layout.tilings[i], signature.entry, i)
    ]
    offsets = ["errors", "flags", "credits", "sent", "epochs"]
    offsets += [f"{name}_{i}" for i in states for name in ("slots", "staging")]
    served = ["lanes", "heads", "first_head", "head_count"]
    numbers = ["programs", "pitch", *served, "size", "limit", "tag", *offsets]
    jit = "triton_dist.jit" if dialect == "triton_dist" else "triton.jit"
    fields = [
        *("rank", "home", "position", "count", "reset", "live", "segments", "turn"),
        *("part_position", "part_count", "before", "after", "fresh"),
    ]
    lines = [
        f"@{jit}(",
        "    do_not_specialize=[",
        *(f'        "{name}",' for name in numbers),
        "    ]",
        ")",
        "def exchange(",
        *(f"    {name}," for name in ("bases", "plan", *numbers, *tensors)),
        "    COMPOSED: tl.constexpr,",
        "    PRECISION: tl.constexpr,",
        "    DELAY: tl.constexpr,",
        "):",
        "    program = tl.program_id(0).to(tl.int64)",
        "    lanes = program * 0 + lanes",
        "    served = lanes // heads * head_count",
        "    row = plan + (program // programs) * pitch",
        *(f"    {name} = tl.load(row + {i})" for i, name in enumerate(fields)),
        f"    starts = row + {FIELDS}",
        "    place = (",
        *(f"        {name}," for name in (*fields[2:], "starts")),
        "    )",
        "    base = tl.load(bases + rank)",
        "    origin = tl.where(turn > 0, 0, segments - 1)",
    ]
    for i in states:
        lines += _state_loop(signature, layout, i)
    return lines


def _state_loop(signature: Signature, layout: Layout, i: int) -> list[str]:
    t = layout.tilings[i]
    before = sum(part.tiles for part in layout.tilings[:i])
    message = t.message_bytes(layout.strategy)
    kind = "dense" if t.dense else "elementwise"
    body = _dense(signature, t, i) if t.dense else _elementwise(signature, t, i)
    lines = [
        f"    # state {i}: {signature.states[i]}, {t.row_tiles} x {t.column_tiles} tiles a head",
        f"    for number in range(program % programs, served * {t.tiles}, programs):",
        "        item = program * 0 + number",
        f"        lane = item // {t.tiles}",
        "        lane = lane // head_count * heads + first_head + lane % head_count",
        f"        panel = lane * {t.tiles} + item % {t.tiles}",
        f"        first_row = panel % {t.tiles} // {t.column_tiles} * {t.BR}",
        f"        first_column = panel % {t.column_tiles} * {t.BC}",
        f"        every = panel + lanes * {before}" if before else "        every = panel",
        "        counter = word_at(base, epochs + every * 8)",
        "        epoch = tl.load(counter) + 1",
        "        link = (",
        "            bases,",
        "            base,",
        "            errors,",
        "            rank,",
        "            size,",
        "            limit,",
        "            tag,",
        "            every,",
        "            epoch,",
        f"            slots_{i} + panel * {2 * layout.slots * message},",
        f"            flags + every * {16 * layout.slots},",
        f"            credits + every * {16 * layout.channels},",
        f"            sent + every * {16 * layout.channels},",
        f"            staging_{i} + panel * {message},",
        "        )",
        *body,
        f"        {layout.strategy}_{kind}(",
        "            link,",
        "            tile,",
        "            place,",
    ]
    if t.dense:
        lines += [f"            {name}={value}," for name, value in _dense_sizes(t).items()]
        lines += [
            "            PRECISION=PRECISION,",
            f"            ENTRY={signature.entry},",
            "            COMPOSED=COMPOSED,",
        ]
    else:
        sizes = {"BR": t.BR, "BC": t.BC, "DR": t.DR, "DC": t.DC}
        lines += [f"            {name}={value}," for name, value in sizes.items()]
        lines += [f"            DECAY={t.has_decay},", f"            ENTRY={signature.entry},"]
    return [
        *lines,
        f"            ROUNDS={layout.rounds},",
        f"            MESSAGE={message},",
        "            DELAY=DELAY,",
        "        )",
        "        fence()",
        "        tl.store(counter, epoch)",
    ]


def _dense_sizes(t: Tiling) -> dict[str, int]:
    return {"K": t.rows, "WIDTH": t.columns, "BR": t.BR, "BC": t.BC, "BM": t.BM, "BK": t.BK}


def _elementwise(signature: Signature, t: Tiling, i: int) -> list[str]:
    """Blocks of pointers to the tile of the first segment."""
    entries = t.rows * t.columns
    lines = [
        f"        rows = (first_row + tl.arange(0, {t.BR}))[:, None]",
        f"        columns = (first_column + tl.arange(0, {t.BC}))[None, :]",
        f"        mask = (rows < {t.rows}) & (columns < {t.columns})",
        f"        inside = rows * {t.columns} + columns",
        f"        at = (home * segments * lanes + lane) * {entries} + inside",
        f"        local = local_{i} + at",
        f"        entering = entering_{i} + at",
    ]
    if signature.entry:
        lines.append(f"        entry = entry_{i} + (home * lanes + lane) * {entries} + inside")
    else:
        lines.append("        entry = local")
    factors = t.decay_rows * t.decay_columns
    if t.has_decay:
        row = "rows" if t.DR > 1 else "tl.arange(0, 1)[:, None]"
        column = "columns" if t.DC > 1 else "tl.arange(0, 1)[None, :]"
        lines += [
            f"        decay_row, decay_column = {row}, {column}",
            f"        decay_mask = decay_row < {t.decay_rows}",
            f"        decay_mask = decay_mask & (decay_column < {t.decay_columns})",
            f"        decay = decay_{i} + (home * segments * lanes + lane) * {factors}",
            f"        decay += decay_row * {t.decay_columns} + decay_column",
        ]
    else:
        lines.append("        decay, decay_mask = local, mask")
    return [
        *lines,
        "        tile = (",
        "            local,",
        "            decay,",
        "            entering,",
        "            entry,",
        f"            lanes * {entries},",
        f"            lanes * {factors},",
        "            origin,",
        "            turn,",
        "            mask,",
        "            decay_mask,",
        "        )",
    ]


def _dense(signature: Signature, t: Tiling, i: int) -> list[str]:
    """Pointers to the panel's first column in the first segment."""
    entries, square = t.rows * t.columns, t.rows * t.rows
    first = "first_row * 0 + first_column"
    entry = f"entry_{i} + (home * lanes + lane) * {entries} + first_column"
    return [
        f"        at = (home * segments * lanes + lane) * {entries} + {first}",
        "        tile = (",
        f"            matrix_{i} + (home * segments * lanes + lane) * {square},",
        f"            local_{i} + at,",
        f"            entering_{i} + at,",
        f"            {entry if signature.entry else f'local_{i}'},",
        f"            lanes * {square},",
        f"            lanes * {entries},",
        "            origin,",
        "            turn,",
        f"            {t.columns} - first_column,",
        f"            scratch_{i} + (home * lanes * {t.tiles} + panel) * {t.scratch_words},",
        "        )",
    ]

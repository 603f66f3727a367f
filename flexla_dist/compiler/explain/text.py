"""An explanation as text, at most 100 columns where the user's lines allow it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from flexla_dist.compiler.explain.costs import H200, Move, Product, Step
from flexla_dist.compiler.explain.explanation import Explanation, PassView
from flexla_dist.compiler.explain.numbers import as_bytes, as_flops, as_ms, shape_line, times
from flexla_dist.compiler.explain.plans import DirectionPlan, Missing
from flexla_dist.compiler.explain.statements import Argument, Listing, Statement
from flexla_dist.compiler.signs import LIMIT, SignFact
from flexla_dist.errors import SourceLine

WIDTH = 100
NEGLIGIBLE = 4096  # bytes: tables of offsets
ROLES = {
    "input": "",
    "log_decay": "log decay",
    "param": "parameter",
    "scalar": "scalar",
    "state": "state",
    "valid": "mask of real tokens",
}


def as_text(explanation: Explanation) -> str:
    """The parts that `explanation.stage` asks for."""
    x = explanation
    lines = [f"{x.spec.name}   {shape_line(x.problem)}"]
    parts = {
        "graph": _graph,
        "passes": _passes,
        "state": _states,
        "signs": _signs,
        "torch": _torch,
        "triton": _triton,
    }
    if x.stage == "all":
        for part in parts.values():
            lines += part(x)
    elif x.stage in parts:
        lines += parts[x.stage](x)
    else:
        view = next(v for v in (*x.passes, *x.kernel_passes) if v.name == x.stage)
        lines += _one_pass(view)
    if x.with_source:
        lines += _source(x)
    return "\n".join(line.rstrip() for line in lines)


def title(text: str, right: str = "") -> list[str]:
    """A headline with a note at the right end."""
    rule = "-" * max(2, WIDTH - len(text) - len(right) - 2 - bool(right))
    return ["", f"{text} {rule} {right}" if right else f"{text} {rule}"]


def columns(rows: Sequence[Sequence[str]], right: str = "", gap: str = "  ") -> list[str]:
    """Rows in aligned columns; `right` holds a letter a column, `r` for right-aligned ones."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    out = []
    for row in rows:
        cells = [
            cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        out.append(gap.join(cells).rstrip())
    return out


def place(origin: SourceLine | None) -> str:
    """`file.py:12` without its folder."""
    return "" if origin is None else f"{origin.file.rsplit('/', 1)[-1]}:{origin.line}"


def dims_text(dims: Sequence[str]) -> str:
    """`[C, K]`, `[]` for a number."""
    return f"[{', '.join(dims)}]"


# -- graphs ---------------------------------------------------------------------------------------


def _size(listing: Listing) -> str:
    return f"{times(listing.operators, 'operator')}, {times(len(listing.products), 'product')}"


def _graph(x: Explanation) -> list[str]:
    return [*title("Graph", _size(x.graph)), *listing_lines(x.graph)]


def listing_lines(listing: Listing) -> list[str]:
    """Arguments, then statements below the user's lines."""
    lines = _argument_lines(listing.arguments)
    width = max((len(_head(s)) for s in listing.statements), default=0)
    width = min(width, 28)
    for (stage, file), group in groupby(listing.statements, _stage_and_file):
        lines += ["", f"  {stage}  {file}".rstrip()]
        for origin, statements in groupby(group, lambda s: s.origin):
            if origin is not None and origin.text:
                lines.append(f"  {origin.line:>5} | {origin.text.strip()}")
            lines += [statement_line(s, width, "        ") for s in statements]
    results = ", ".join(
        name if name == shown else f"{name} = {shown}" for name, shown in listing.results.items()
    )
    lines.append("")
    lines += textwrap.wrap(results, WIDTH, initial_indent="  results  ", subsequent_indent=" " * 11)
    return lines


def _argument_lines(arguments: Sequence[Argument]) -> list[str]:
    shown = []
    for argument in arguments:
        role = ROLES.get(argument.role, "")
        text = f"{argument.name} {dims_text(argument.dims)}" if argument.dims else argument.name
        shown.append(f"{text} {role}".strip().replace(" ", "\0"))
    return [
        line.replace("\0", " ")
        for line in textwrap.wrap(
            "   ".join(shown),
            WIDTH,
            initial_indent="  given    ",
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
        )
    ]


def _head(statement: Statement) -> str:
    return f"{statement.name} {dims_text(statement.dims)}"


def statement_line(statement: Statement, width: int, indent: str) -> str:
    """`name [dims]   = text`."""
    return f"{indent}{_head(statement):<{width}} = {statement.text}"


def _stage_and_file(statement: Statement) -> tuple[str, str]:
    file = "" if statement.origin is None else statement.origin.file.rsplit("/", 1)[-1]
    return statement.stage, file


# -- passes ---------------------------------------------------------------------------------------


def _passes(x: Explanation) -> list[str]:
    lines = title("Passes", "explain with --pass NAME shows the graphs in full")
    views = (*x.passes, *x.kernel_passes)
    width = max(len(view.name) for view in views if not _quiet(view))
    indent = " " * (width + 4)
    for quiet, group in groupby(views, _quiet):
        if quiet:
            names = "no rule fits in " + ", ".join(view.name for view in group)
            lines += textwrap.wrap(
                names, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
            continue
        for view in group:
            lines.append(f"  {view.name:<{width}}  {_effect(view)}")
            lines += _fired(view, indent) if view.fired else []
            lines += _changes(view, indent)
    return lines


def _quiet(view: PassView) -> bool:
    unchanged = view.before is not None and view.before.operators == view.after.operators
    return unchanged and not view.fired


def _effect(view: PassView) -> str:
    after = view.after
    if view.before is None:
        return _size(after)
    return f"{view.before.operators} -> {_size(after)}"


def _fired(view: PassView, indent: str) -> list[str]:
    shown = ", ".join(f"{name} x{count}" for name, count in view.fired.items())
    return textwrap.wrap(shown, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _changes(view: PassView, indent: str, limit: int = 12) -> list[str]:
    changes = view.changes
    width = min(max((len(_head(s)) for _, s in changes), default=0), 28)
    lines = [f"{indent}{sign} {statement_line(s, width, '')}" for sign, s in changes[:limit]]
    if len(changes) > limit:
        lines.append(f"{indent}  and {len(changes) - limit} more")
    return lines


def _one_pass(view: PassView) -> list[str]:
    lines: list[str] = []
    if view.before is not None:
        lines += [*title(f"Before {view.name}", _size(view.before)), *listing_lines(view.before)]
        lines += [*title(f"Rules of {view.name}")]
        lines += _fired(view, "  ") if view.fired else ["  no rule fits"]
        lines += _changes(view, "  ", limit=1000)
    lines += [*title(f"After {view.name}", _size(view.after)), *listing_lines(view.after)]
    return lines


# -- facts ----------------------------------------------------------------------------------------


def _states(x: Explanation) -> list[str]:
    lines = title("State")
    for state in x.states:
        lines.append(f"  {state.name} {dims_text(state.dims)}   {state.rule}")
        rows = [("M is", f"{state.kind}: {state.words}")]
        rows += [(n, t) for n, t in (("decay", state.decay), ("matrix", state.matrix)) if t]
        rows.append(("S_hat", state.local))
        size = f"{as_bytes(state.bytes)} a document, all heads; this is what a chain of ranks sends"
        rows.append(("size", size))
        for head, text in rows:
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=f"    {head:<7} ", subsequent_indent=" " * 12
            )
        if state.origin is not None:
            lines.append(f"    {'from':<7} {place(state.origin)}  {state.origin.text.strip()}")
    return lines


def _signs(x: Explanation) -> list[str]:
    if not x.signs:
        return [*title("Signs"), "  no exponential"]
    proved = sum(fact.proved for fact in x.signs)
    lines = title("Signs", f"{proved} of {len(x.signs)} exponentials cannot overflow")
    rows = [
        (f"  {fact.operator}", fact.exponent, bound_text(fact), place(fact.origin), _line(fact))
        for fact in x.signs
    ]
    return lines + [line[:WIDTH].rstrip() for line in columns(rows)]


def _line(fact: SignFact) -> str:
    return "" if fact.origin is None else fact.origin.text.strip()


def bound_text(fact: SignFact) -> str:
    """What is known of an exponent."""
    if fact.bound <= LIMIT:
        return f"<= {fact.bound:g}"
    return "a parameter" if fact.learned else "NOT PROVED"


def _torch(x: Explanation) -> list[str]:
    layout = x.problem.layout
    chunks = f"{times(len(layout.chunks), 'chunk')} of {layout.chunk_size} tokens"
    lines = title("Executor torch", chunks)
    for direction, levels in groupby(x.torch, lambda level: level.direction):
        lines.append(f"  {direction}")
        for level in levels:
            counts = f"{times(level.operators, 'operator')}, {times(level.products, 'product')}"
            lines.append(f"    {level.level}  {level.when}: {counts}")
            lines += textwrap.wrap(
                "gives " + ", ".join(level.results),
                WIDTH,
                initial_indent=" " * 7,
                subsequent_indent=" " * 7,
            )
            if level.after:
                lines.append(f"       then {level.after}")
    return lines


# -- kernels --------------------------------------------------------------------------------------


def _triton(x: Explanation) -> list[str]:
    if isinstance(x.triton, Missing):
        lines = title("Executor triton", "no plan")
        return lines + textwrap.wrap(
            x.triton.reason, WIDTH, initial_indent="  ", subsequent_indent="  "
        )
    lines = []
    for plan in x.triton.directions:
        lines += _direction(plan)
    lines.append("")
    return lines + textwrap.wrap(legend_text(), WIDTH, initial_indent="  ", subsequent_indent="  ")


_SHORT = {"tuned": "tuned", "nearest bucket": "near", "estimate": "est", "": ""}


def source_word(step: Step) -> str:
    """Where tiles, warps and stages of a kernel are from, in one word; "" for fixed ones."""
    return _SHORT.get(step.configuration.partition(" (")[0], step.configuration)


def configuration_text(step: Step) -> str:
    """Stages, a limit of registers, and what is to be said of where they are from."""
    text = times(step.stages, "pipeline stage")
    if step.registers is not None:
        text += f", at most {step.registers} registers a thread"
    if step.configuration not in ("", "estimate"):
        text += f"; configuration: {step.configuration}"
    return text


def legend_text() -> str:
    """What the columns mean."""
    return (
        f"at least: the longer of bytes at the {H200.device}'s {H200.bandwidth / 1e12:g} TB/s and "
        f"products at its {H200.rates['bf16'] / 1e12:g} TFLOP/s (bf16; TF32x3 at a sixth). Bytes "
        "count a tensor once a kernel; k x2 is asked for twice and comes from the cache the second "
        "time. Floor: inputs and results once, and once every product that is needed given what "
        "forward keeps. Beside warps: whether tiles, warps and stages are measured (tuned; near: "
        "for calls of nearly this size) or an estimate (est)."
    )


def _direction(plan: DirectionPlan) -> list[str]:
    between = sum(step.calls for step in plan.steps if step.kind == "torch")
    notes = [times(len(plan.kernels), "launch")]
    notes += [times(between, "PyTorch operation")] if between else []
    notes += [f"scans in {times(plan.segments, 'segment')}"] if plan.segments else []
    lines = title(f"Executor triton, {plan.direction}, {plan.plan}", ", ".join(notes))
    head = ("", "kernel", "grid", "tiles", "warps", "read", "written", "products", "at least", "")
    rows: list[tuple[str, ...]] = [head]
    for number, step in _numbered(plan.steps):
        if step.kind != "torch" or step.bytes_read + step.bytes_written > NEGLIGIBLE:
            rows.append((f"  {number}", *_row(step)))
    total = (as_bytes(plan.bytes_read), as_bytes(plan.bytes_written), as_flops(plan.flops))
    rows.append(("", "total", "", "", "", *total, as_ms(plan.seconds()), ""))
    rows.append(("", "floor", *_row(plan.floor)[1:]))
    lines += columns(rows, "lllllrrrr")
    seen: dict[str, str] = {}
    for number, step in _numbered(plan.steps):
        if step.kind != "torch":
            lines += _details(number, step, seen.get(step.name))
            seen.setdefault(step.name, number)
    return lines


def _numbered(steps: Sequence[Step]) -> Iterator[tuple[str, Step]]:
    number = 0
    for step in steps:
        number += step.kind != "torch"
        yield (str(number) if step.kind != "torch" else "", step)


def _row(step: Step) -> tuple[str, ...]:
    name = times(step.calls, "torch op") if step.kind == "torch" else step.name
    tiles = " ".join(f"{dim}{size}" for dim, size in (step.tiles or {}).items())
    return (
        name,
        " x ".join(map(str, step.grid)),
        tiles,
        f"{step.warps} {source_word(step)}".rstrip() if step.warps else "",
        as_bytes(step.bytes_read),
        as_bytes(step.bytes_written),
        as_flops(step.flops),
        as_ms(step.seconds(H200)),
        step.bound(H200),
    )


def _details(number: str, step: Step, earlier: str | None) -> list[str]:
    lines = ["", f"  {number} {step.name}: {step.purpose}; {configuration_text(step)}"]
    if earlier is None:
        rows = [("loads", moves_text(step.reads)), ("stores", moves_text(step.writes))]
        rows.append(("products", products_text(step.products)))
    else:
        rows = [("loads", f"as {earlier}"), ("stores", moves_text(step.writes))]
    for head, text in rows:
        lines += textwrap.wrap(
            text.replace(" ", "\0").replace(",\0", ", "),
            WIDTH,
            initial_indent=f"    {head:<8} ",
            subsequent_indent=" " * 13,
        )
    return [line.replace("\0", " ") for line in lines]


def products_text(products: Sequence[Product]) -> str:
    """Texts of products; the dot policy stands with those that differ from most."""
    policies = [product.policy for product in products]
    usual = max(policies, key=policies.count, default="")
    shown = [
        product.text if product.policy == usual else f"{product.text} in {product.policy}"
        for product in products
    ]
    return ", ".join(shown) or "none"


def moves_text(moves: Sequence[Move]) -> str:
    """`q, k x2`."""
    return ", ".join(str(move) for move in moves) or "nothing"


def _source(x: Explanation) -> list[str]:
    lines: list[str] = []
    for direction, text in x.source.items():
        lines += [*title(f"Source, {direction}"), "", *text.rstrip().splitlines()]
    return lines

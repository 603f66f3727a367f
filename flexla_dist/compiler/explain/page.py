"""An explanation as one self-contained page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import groupby

from flexla_dist.compiler.explain.costs import H200, Step
from flexla_dist.compiler.explain.drawing import graph_svg, plan_svg, stage_class
from flexla_dist.compiler.explain.explanation import Explanation, PassView
from flexla_dist.compiler.explain.numbers import as_bytes, as_flops, as_ms, shape_line, times
from flexla_dist.compiler.explain.plans import DirectionPlan, Missing
from flexla_dist.compiler.explain.statements import Listing, Statement
from flexla_dist.compiler.explain.style import SCRIPT, STYLE
from flexla_dist.compiler.explain.text import (
    NEGLIGIBLE,
    bound_text,
    configuration_text,
    dims_text,
    legend_text,
    moves_text,
    place,
    products_text,
    source_word,
)

_PARTS = (
    ("code", "Code"),
    ("graphs", "Graphs"),
    ("passes", "Passes"),
    ("state", "State"),
    ("signs", "Signs"),
    ("torch", "Executor torch"),
    ("triton", "Executor triton"),
    ("source", "Source"),
)
_WORDS = re.compile(
    r"(?P<c>#[^\n]*)|(?P<s>\"\"\".*?\"\"\"|\"[^\"\n]*\")|(?P<f>(?<=def )\w+)"
    r"|(?P<k>\b(?:def|for|in|if|else|import|from|return|while|range)\b|@triton\.jit)",
    re.DOTALL,
)


def as_page(x: Explanation) -> str:
    """The whole page."""
    parts = [_code(x), _graphs(x), _passes(x), _states(x), _signs(x), _torch(x), _triton(x)]
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name in _PARTS)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(x.spec.name)} explained</title><style>{STYLE}</style></head><body>
<header><div class="inner"><h1>{escape(x.spec.name)}</h1>{_chips(x)}
<nav>{links}</nav></div></header>
<main>{_cards(x)}{"".join(parts)}{_source(x)}
<footer>Written by flexla-dist explain. Nothing was run to make this page.</footer></main>
<script>{SCRIPT}</script></body></html>
"""


def _section(key: str, note: str, body: str) -> str:
    name = dict(_PARTS)[key]
    return f'<section><h2 id="{key}">{name}</h2><p class="note">{note}</p>{body}</section>'


# -- head -----------------------------------------------------------------------------------------


def _chips(x: Explanation) -> str:
    pairs = re.split(r"\s{2,}", shape_line(x.problem))
    shown = []
    for pair in pairs:
        name, _, size = pair.partition(" ")
        text = f"<b>{escape(name)}</b> {escape(size)}" if size else escape(name)
        shown.append(f'<span class="chip">{text}</span>')
    return f'<div class="chips">{"".join(shown)}</div>'


def _cards(x: Explanation) -> str:
    kinds = ", ".join(dict.fromkeys(state.kind for state in x.states))
    open_ = sum(not fact.proved for fact in x.signs)
    cards = [
        (f"{times(x.graph.operators, 'operator')}", f"{_products(x.graph)} in the forward graph"),
        (f"M is {kinds}", "what a chunk does to the state that enters it"),
        (
            "no overflow" if not open_ else f"{open_} not proved",
            f"{times(len(x.signs), 'exponential')} analysed",
        ),
    ]
    if not isinstance(x.triton, Missing):
        for plan in x.triton.directions:
            floor = plan.floor.seconds(H200)
            ratio = plan.seconds() / floor if floor else 1.0
            cards.append(
                (
                    as_ms(plan.seconds()),
                    f"{plan.direction} at least, {ratio:.1f} x the floor of {as_ms(floor)}",
                )
            )
    shown = "".join(
        f'<div class="card"><div class="big">{escape(big)}</div>'
        f'<div class="what">{escape(what)}</div></div>'
        for big, what in cards
    )
    return f'<div class="cards">{shown}</div>'


def _products(listing: Listing) -> str:
    return times(len(listing.products), "product")


# -- graphs ---------------------------------------------------------------------------------------


def _code(x: Explanation) -> str:
    note = "Your lines in grey, and below each what the compiler made of it after all passes."
    return _section("code", note, _listing(x.graph))


def _listing(listing: Listing) -> str:
    out = []

    def stage_and_file(s: Statement) -> tuple[str, str]:
        return s.stage, place(s.origin).partition(":")[0]

    for (stage, file), group in groupby(listing.statements, stage_and_file):
        out.append(
            f'<div class="stage s-{stage_class(stage)}">{escape(stage)} '
            f'<span class="dims mono">{escape(file)}</span></div>'
        )
        for origin, statements in groupby(group, lambda s: s.origin):
            if origin is not None:
                out.append(
                    f'<div class="user mono"><span class="no">{origin.line}</span>'
                    f"{escape(origin.text.strip())}</div>"
                )
            out += [_statement(s) for s in statements]
    return f'<div class="listing">{"".join(out)}</div>'


def _statement(s: Statement) -> str:
    return (
        f'<div class="made mono"><span class="name">{escape(s.name)} '
        f'<span class="dims">{escape(dims_text(s.dims))}</span></span>= {escape(s.text)}</div>'
    )


def _graphs(x: Explanation) -> str:
    first, last = x.passes[0], x.passes[-1]
    shown = [("as traced", first.after)]
    shown += [(v.title, v.after) for v in x.passes[1:] if v.fired and v.after != last.after]
    shown.append(("after all passes", last.after))
    shown += [("backward", x.kernel_passes[-1].after)]
    tabs = [(name, f'<div class="picture">{graph_svg(g, name)}</div>') for name, g in shown]
    note = (
        "A box is a statement; a thick border is a matrix product or domain operator. Point at a "
        "box for its line, and to follow its edges. Scalars are left out. "
        + "".join(
            f'<span class="key" style="background:var(--{name})"></span>{name}_mode'
            for name in ("token", "chunk", "decay", "merge")
        )
    )
    return _section("graphs", note, _tabs("graph", tabs, len(tabs) - 2))


def _tabs(group: str, tabs: Sequence[tuple[str, str]], chosen: int) -> str:
    rules, inputs, panels = [], [], []
    for at, (name, body) in enumerate(tabs):
        key = f"{group}-{at}"
        checked = ' checked="checked"' if at == chosen else ""
        inputs.append(
            f'<input type="radio" name="{group}" id="{key}"{checked}/>'
            f'<label for="{key}">{escape(name)}</label>'
        )
        panels.append(f'<div class="panel" id="{key}-panel">{body}</div>')
        rules.append(f"#{key}:checked ~ #{key}-panel")
    style = f"<style>{', '.join(rules)} {{ display: block; }}</style>"
    return f'{style}<div class="tabs">{"".join(inputs)}{"".join(panels)}</div>'


# -- passes and facts -----------------------------------------------------------------------------


def _passes(x: Explanation) -> str:
    rows = ["<tr><th>pass</th><th>operators</th><th>products</th><th>rules that fired</th></tr>"]
    for view in (*x.passes, *x.kernel_passes):
        before = view.before.operators if view.before is not None else None
        after = view.after.operators
        count = str(after) if before in (None, after) else f"{before} → {after}"
        quiet = ' class="quiet"' if view.before is not None and not view.fired else ""
        rows.append(
            f'<tr{quiet}><td class="n">{escape(view.name)}</td><td class="n">{count}</td>'
            f"<td>{len(view.after.products)}</td><td>{_fired(view)}</td></tr>"
        )
    table = f'<div class="scroll"><table>{"".join(rows)}</table></div>'
    return _section("passes", "Every pass is verified; a rule changes only the spelling.", table)


def _fired(view: PassView) -> str:
    if view.before is None:
        return ""
    fired = ", ".join(f"{escape(name)} × {count}" for name, count in view.fired.items())
    if not view.changes:
        return fired or "none"
    lines = "\n".join(
        f'<span class="{"plus" if sign == "+" else "minus"}">{sign} {escape(str(s))}</span>'
        for sign, s in view.changes
    )
    what = fired or "results added"
    return f'<details><summary>{what}</summary><div class="diff mono">{lines}</div></details>'


def _states(x: Explanation) -> str:
    out = []
    for state in x.states:
        rows = [("M", f"<b>{escape(state.kind)}</b>: {escape(state.words)}")]
        rows += [
            (name, f"<code>{escape(text)}</code>")
            for name, text in (
                ("decay", state.decay),
                ("matrix", state.matrix),
                ("S_hat", state.local),
            )
            if text
        ]
        rows.append(
            ("size", f"{as_bytes(state.bytes)} a document over all heads, what a chain sends")
        )
        if state.origin is not None:
            line = f"{place(state.origin)}  {state.origin.text.strip()}"
            rows.append(("from", f"<code>{escape(line)}</code>"))
        body = "".join(f'<tr><td class="n">{n}</td><td>{text}</td></tr>' for n, text in rows)
        out.append(
            f"<h3><code>{escape(state.name)} {escape(dims_text(state.dims))}</code> &nbsp; "
            f"<code>{escape(state.rule)}</code></h3><table>{body}</table>"
        )
    note = "decay_mode is affine in the state: S after a chunk is M S + S_hat."
    return _section("state", note, "".join(out))


def _signs(x: Explanation) -> str:
    rows = ["<tr><th>operator</th><th>exponent</th><th>bound</th><th>line</th></tr>"]
    for fact in x.signs:
        style = "good" if fact.proved else "bad"
        text = "" if fact.origin is None else f"{place(fact.origin)}  {fact.origin.text.strip()}"
        rows.append(
            f"<tr><td>{escape(fact.operator)}</td><td class='code'>{escape(fact.exponent)}</td>"
            f"<td class='n {style}'>{escape(bound_text(fact))}</td>"
            f"<td class='code'>{escape(text)}</td></tr>"
        )
    body = f'<div class="scroll"><table>{"".join(rows)}</table></div>'
    return _section("signs", "The largest exponent of every exponential, proved.", body)


def _torch(x: Explanation) -> str:
    layout = x.problem.layout
    rows = [
        "<tr><th></th><th>level</th><th>operators</th><th>products</th><th>gives</th>"
        "<th>then</th></tr>"
    ]
    for level in x.torch:
        rows.append(
            f"<tr><td>{level.direction}</td><td class='n'>{level.level} {escape(level.when)}</td>"
            f"<td>{level.operators}</td><td>{level.products}</td>"
            f"<td class='code'>{escape(', '.join(level.results))}</td>"
            f"<td class='n'>{escape(level.after)}</td></tr>"
        )
    note = (
        f"{times(len(layout.chunks), 'chunk')} of {layout.chunk_size} tokens, batched over "
        "documents, heads and slabs of chunks."
    )
    return _section("torch", note, f'<div class="scroll"><table>{"".join(rows)}</table></div>')


# -- kernels --------------------------------------------------------------------------------------


def _triton(x: Explanation) -> str:
    if isinstance(x.triton, Missing):
        return _section("triton", "There is no plan.", f"<p>{escape(x.triton.reason)}</p>")
    bodies = [_direction(plan) for plan in x.triton.directions]
    note = (
        '<span class="key" style="background:var(--memory);margin-left:0"></span>memory '
        '<span class="key" style="background:var(--products)"></span>products &nbsp; '
        + escape(legend_text())
    )
    return _section("triton", note, "".join(bodies))


def _direction(plan: DirectionPlan) -> str:
    cut = f", scans in {times(plan.segments, 'segment')}" if plan.segments else ""
    longest = max((_longer(step) for step in plan.steps), default=0.0)
    head = (
        "<tr><th></th><th>kernel</th><th>grid</th><th>tiles</th><th class='r'>warps</th>"
        "<th class='r'>read</th><th class='r'>written</th><th class='r'>products</th>"
        "<th class='r'>at least</th><th>from</th><th class='bars'></th></tr>"
    )
    rows, number = [head], 0
    for step in plan.steps:
        number += step.kind != "torch"
        if step.kind != "torch" or step.bytes_read + step.bytes_written > NEGLIGIBLE:
            rows.append(_step(step, number, longest))
    rows.append(
        f"<tr class='sum'><td></td><td>total</td><td></td><td></td><td></td>"
        f"<td class='r'>{as_bytes(plan.bytes_read)}</td>"
        f"<td class='r'>{as_bytes(plan.bytes_written)}</td>"
        f"<td class='r'>{as_flops(plan.flops)}</td>"
        f"<td class='r'>{as_ms(plan.seconds())}</td><td></td><td></td></tr>"
    )
    rows.append(_step(plan.floor, 0, longest))
    table = f'<div class="scroll"><table>{"".join(rows)}</table></div>'
    picture = f'<div class="picture">{plan_svg(plan)}</div>'
    return (
        f"<h3>{plan.direction}, {plan.plan}: {times(len(plan.kernels), 'launch')}{cut}</h3>{table}"
        f'<details open="open"><summary>what flows between the kernels</summary>'
        f"{picture}</details>"
    )


def _longer(step: Step) -> float:
    return max(step.memory_seconds(H200), step.product_seconds(H200))


def _step(step: Step, number: int, longest: float) -> str:
    torch_ops = step.kind == "torch"
    tiles = " ".join(f"{dim}{size}" for dim, size in (step.tiles or {}).items())
    name = escape(times(step.calls, "torch op") if torch_ops else step.name)
    bars = "".join(
        f'<div class="bar {kind}" style="width:{100 * seconds / longest if longest else 0:.1f}%" '
        f'title="{kind} {as_ms(seconds)}"></div>'
        for kind, seconds in (
            ("memory", step.memory_seconds(H200)),
            ("products", step.product_seconds(H200)),
        )
    )
    style = "quiet" if torch_ops else "sum" if step.kind == "floor" else "first"
    return (
        f"<tr class='{style}'><td>{number if step.grid else ''}</td><td class='n'>{name}</td>"
        f"<td class='n'>{' × '.join(map(str, step.grid))}</td><td class='n'>{tiles}</td>"
        f"<td class='r'>{step.warps or ''}</td><td class='r'>{as_bytes(step.bytes_read)}</td>"
        f"<td class='r'>{as_bytes(step.bytes_written)}</td>"
        f"<td class='r'>{as_flops(step.flops)}</td>"
        f"<td class='r'>{as_ms(step.seconds(H200))}</td>"
        f"<td class='n'>{escape(source_word(step))}</td>"
        f"<td class='bars'>{bars}</td></tr>" + (_details(step) if step.grid else "")
    )


def _details(step: Step) -> str:
    text = (
        f"{step.purpose}; loads {moves_text(step.reads)}; stores {moves_text(step.writes)}; "
        f"{configuration_text(step)}"
    )
    return (
        f"<tr class='more'><td></td><td colspan='10'>{escape(text)}"
        f"<div class='mono'>{escape(products_text(step.products))}</div></td></tr>"
    )


def _source(x: Explanation) -> str:
    if not x.source:
        return _section("source", "No kernels, no source.", "")
    body = "".join(
        f"<details><summary>{direction}, {len(text.splitlines())} lines</summary>"
        f'<pre class="source">{_coloured(text)}</pre></details>'
        for direction, text in x.source.items()
    )
    return _section("source", "The generated Triton module of each direction.", body)


def _coloured(text: str) -> str:
    out, at = [], 0
    for found in _WORDS.finditer(text):
        out.append(escape(text[at : found.start()]))
        out.append(f'<span class="{found.lastgroup}">{escape(found[0])}</span>')
        at = found.end()
    return "".join(out) + escape(text[at:])

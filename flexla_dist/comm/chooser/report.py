"""Topology, links, rates and predictions as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexla_dist.comm.chooser.choose import Choice
from flexla_dist.comm.chooser.links import Link, Rates
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.setting import Setting

_HEADS = ("", "strategy", "engine", "latency", "wire", "combine", "total", "exposed", "sent")


def report(settings: Mapping[str, Setting], choice: Choice) -> str:
    """Everything that a choice rests on, and the table of predictions."""
    first = next(iter(settings.values()))
    parts = [section("Topology", first.topology.lines())]
    lines = [
        link_line(engine, name, link)
        for engine, setting in settings.items()
        for name, link in setting.links.items()
    ]
    parts.append(section("Links", lines))
    parts.append(section("Composing", [rates_line(first.rates)]))
    parts.append(section("Element of a rank", payload_lines(first.payload, first.work)))
    parts.append(section("Predicted milliseconds", prediction_lines(choice)))
    return "\n".join(parts) + f"\n\nchosen: {choice.strategy} with the {choice.engine} engine"


def section(title: str, lines: Sequence[str]) -> str:
    """A title and indented lines."""
    return "\n".join(["", title, *(f"  {line}" for line in lines)])


def link_line(engine: str, name: str, link: Link) -> str:
    """A link in a line."""
    how = "measured" if link.measured else "assumed"
    bandwidth = 1 / link.beta / 1e9 if link.beta > 0 else float("inf")
    numbers = f"alpha {link.alpha * 1e6:7.1f} us  {bandwidth:7.1f} GB/s"
    return f"{engine:<7} {name:<14} {numbers}  {how}: {link.source}"


def rates_line(rates: Rates) -> str:
    """Rates in a line."""
    how = "measured" if rates.measured else "assumed"
    return (
        f"{rates.stream / 1e9:.0f} GB/s read and written, {rates.flops / 1e12:.3g} TFLOP/s in "
        f"float32 accuracy, {rates.launch * 1e6:.0f} us a call  {how}: {rates.source}"
    )


def payload_lines(payload: Payload, work: float) -> list[str]:
    """The element and the overlappable work."""
    lines = [
        f"state {_mib(payload.state)}, M {_mib(payload.transition)} ({payload.kind}), "
        f"{payload.panels} panels"
    ]
    if work:
        lines.append(f"work that needs no entering state: {work * 1e3:.3g} ms")
    return lines


def prediction_lines(choice: Choice) -> list[str]:
    """The table of all candidates, the chosen one marked."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for e in choice.table:
        chosen = (e.strategy, e.engine) == (choice.strategy, choice.engine)
        times = (e.latency, e.wire, e.combine, e.total, e.exposed)
        numbers = tuple(f"{seconds * 1e3:.3f}" for seconds in times)
        rows.append(("*" * chosen, e.strategy, e.engine, *numbers, _mib(e.sent)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    return [
        "  ".join(
            word.ljust(width) if i < 3 else word.rjust(width)
            for i, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"

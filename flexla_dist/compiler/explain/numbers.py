"""Numbers as people read them."""

from __future__ import annotations

from flexla_dist.compiler.executor.problem import Problem

_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def as_bytes(count: float) -> str:
    """`268.4 MB`, decimal units."""
    for unit, scale in _BYTES:
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def as_flops(count: float) -> str:
    """`27.4 GFLOP`."""
    if not count:
        return "-"
    if count >= 1e12:
        return f"{count / 1e12:.2f} TFLOP"
    if count >= 1e8:
        return f"{count / 1e9:.1f} GFLOP"
    return f"{count / 1e6:.1f} MFLOP"


def as_ms(seconds: float) -> str:
    """`0.125 ms`."""
    return f"{seconds * 1e3:.3f} ms" if seconds >= 5e-7 or not seconds else "<0.001 ms"


def times(count: int, what: str) -> str:
    """`1 operator`, `3 operators`."""
    if count == 1:
        return f"1 {what}"
    return f"{count} {what}es" if what.endswith("ch") else f"{count} {what}s"


def shape_line(problem: Problem) -> str:
    """Sizes of a call in one line."""
    sizes = {
        "B": problem.batch,
        "T": problem.tokens,
        **_heads(problem),
        **problem.sizes,
        "C": problem.layout.chunk_size,
    }
    shown = "  ".join(f"{name} {size}" for name, size in sizes.items())
    packed = f"  {times(problem.num_sequences, 'document')}" if problem.layout.packed else ""
    return f"{shown}{packed}  {str(problem.output_dtype).removeprefix('torch.')}"


def _heads(problem: Problem) -> dict[str, int]:
    groups = {
        item.group: problem.inputs[name].shape[2]
        for name, item in problem.spec.input_specs.items()
        if item.group is not None
    }
    grouped = {"H": next(iter(groups.values()))} if groups else {}
    return {**grouped, "HV": problem.heads}

"""What `explain` returns: everything that the compiler made of a spec, for one call.

Contract: `explain` compiles the spec if need be, runs nothing, and needs neither a GPU nor Triton;
without Triton, or for a spec that its executor refuses, the kernels are replaced by the reason.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexla_dist.compiler.executor.layout import check_chunk_size
from flexla_dist.compiler.executor.problem import Problem
from flexla_dist.compiler.explain.call import describe
from flexla_dist.compiler.explain.plans import Missing, TritonPlan
from flexla_dist.compiler.explain.statements import Listing, Names, Statement, cell_listing
from flexla_dist.compiler.explain.states import StateFacts, state_facts
from flexla_dist.compiler.explain.torch_plan import Level, torch_plan
from flexla_dist.compiler.pipeline import Graphs, Stage, compile_graphs
from flexla_dist.compiler.signs import SignFact, analyse_signs
from flexla_dist.errors import ArgumentError, ArgumentTypeError, FlexlaError
from flexla_dist.shapes import nearest
from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants.registry import get_variant

SECTIONS = ("graph", "passes", "state", "signs", "torch", "triton")


@dataclass(frozen=True)
class PassView:
    """One pass: the graphs before and after it as statements, and which rules fired how often."""

    name: str
    title: str
    before: Listing | None
    after: Listing
    fired: Mapping[str, int]

    @property
    def changes(self) -> list[tuple[str, Statement]]:
        """Statements that went ("-") and came ("+")."""
        if self.before is None:
            return []
        old, new = self.before.statements, self.after.statements
        out: list[tuple[str, Statement]] = []
        match = difflib.SequenceMatcher(None, [*map(str, old)], [*map(str, new)], autojunk=False)
        for kind, a, b, c, d in match.get_opcodes():
            if kind != "equal":
                out += [("-", x) for x in old[a:b]] + [("+", x) for x in new[c:d]]
        return out


@dataclass(frozen=True, eq=False)
class Explanation:
    """What became of a spec; prints as text, `html()` is a page, all parts are attributes."""

    spec: LinearAttentionSpec
    problem: Problem
    stage: str
    with_source: bool
    passes: tuple[PassView, ...]
    kernel_passes: tuple[PassView, ...]
    signs: tuple[SignFact, ...]
    states: tuple[StateFacts, ...]
    torch: tuple[Level, ...]
    triton: TritonPlan | Missing

    @property
    def graph(self) -> Listing:
        """The forward graph after all passes."""
        return self.passes[-1].after

    @property
    def source(self) -> dict[str, str]:
        """Generated source of the kernels by direction; empty where there are none."""
        if isinstance(self.triton, Missing):
            return {}
        return {plan.direction: plan.source for plan in self.triton.directions}

    def __str__(self) -> str:
        from flexla_dist.compiler.explain.text import as_text

        return as_text(self)

    __repr__ = __str__

    def html(self) -> str:
        """One self-contained page; needs no network."""
        from flexla_dist.compiler.explain.page import as_page

        return as_page(self)

    def write_html(self, path: str | Path) -> Path:
        """Write the page to a file; returns its path."""
        out = Path(path)
        out.write_text(self.html(), encoding="utf-8")
        return out


def explain(
    spec: LinearAttentionSpec | str | Any,
    *,
    batch: int = 1,
    tokens: int = 16384,
    heads: int = 32,
    value_heads: int | None = None,
    K: int = 128,
    V: int | None = None,
    sizes: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cu_seqlens: Sequence[int] | None = None,
    chunk_size: int | None = None,
    stage: str = "all",
    source: bool = False,
    tuned: str | Path | None = None,
) -> Explanation:
    """What the compiler makes of a spec for a call of the given shape; nothing is run.

    Args:
        spec: a LinearAttentionSpec, a compiled operator, or the name of a variant.
        batch, tokens, heads, value_heads: B, T, H of the head groups, HV of all else (default H).
        K, V: sizes of the dims K and V; V is K where it is not given, other dims have the size K.
        sizes: sizes of dims by name, before K and V.
        dtype: dtype of the inputs.
        cu_seqlens: document bounds of a packed call (B = 1).
        chunk_size: as for `flexla_dist.compile`; an operator has its own.
        stage: what the text shows: "all", a section ("graph", "passes", "state", "signs", "torch",
            "triton"), or the name of a pass, whose graphs before and after are then shown in full.
        source: show the generated kernels as well (the page always has them).
        tuned: as for `flexla_dist.compile`; an operator has its own.

    Raises:
        TraceError and its kinds: the spec does not compile.
        ArgumentError, ArgumentTypeError: shapes, names or types do not fit.
    """
    check_chunk_size(chunk_size)
    graphs, own_chunk = _graphs(spec)
    known = {"K": K, "V": K if V is None else V, **(sizes or {})}
    problem = describe(
        graphs.spec,
        batch=batch,
        tokens=tokens,
        heads=heads,
        value_heads=heads if value_heads is None else value_heads,
        sizes=known,
        other=K,
        dtype=dtype,
        cu_seqlens=cu_seqlens,
        chunk_size=own_chunk if chunk_size is None else chunk_size,
    )
    views = _views(graphs.stages)
    kernels = tuple(
        view for d in ("forward", "backward") for view in _views(graphs.kernel_stages(d), d)
    )
    _check_stage(stage, [view.name for view in (*views, *kernels)])
    return Explanation(
        spec=graphs.spec,
        problem=problem,
        stage=stage,
        with_source=source,
        passes=views,
        kernel_passes=kernels,
        signs=_signs(graphs),
        states=state_facts(graphs, problem),
        torch=torch_plan(graphs),
        triton=_triton(graphs, problem, tuned or getattr(spec, "tuned", None)),
    )


def _graphs(spec: Any) -> tuple[Graphs, int | None]:
    if isinstance(spec, str):
        spec = get_variant(spec)
    graphs = getattr(spec, "graphs", None)
    if isinstance(graphs, Graphs):
        return graphs, spec.chunk_size
    if not isinstance(spec, LinearAttentionSpec):
        raise ArgumentTypeError(
            f"explain takes a LinearAttentionSpec, a compiled operator or the name of a variant; "
            f"got {type(spec).__name__}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is not proved is among the facts
        return compile_graphs(spec), None


def _views(stages: Sequence[Stage], direction: str = "") -> tuple[PassView, ...]:
    views: list[PassView] = []
    before: Listing | None = None
    for stage in stages:
        after = cell_listing(stage.cell, Names(stage.cell))
        title = stage.name
        if direction and before is not None:
            title = f"{direction} {stage.name.removesuffix(' backward').removesuffix(' kernels')}"
        name = title.replace(" ", "-")
        count = sum(view.title == title for view in views)
        name = f"{name}-{count + 1}" if count else name
        views.append(PassView(name, title, before, after, dict(stage.fired)))
        before = after
    return tuple(views)


def _signs(graphs: Graphs) -> tuple[SignFact, ...]:
    """Facts of the graph that the compiler analysed: the one before the transition is derived."""
    at = next(i for i, stage in enumerate(graphs.stages) if stage.name == "transition")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(dict.fromkeys(analyse_signs(graphs.stages[at - 1].cell, graphs.spec)))


def _triton(graphs: Graphs, problem: Problem, tuned: str | Path | None) -> TritonPlan | Missing:
    try:
        from flexla_dist.compiler.executor.choosing import Tuned
        from flexla_dist.compiler.explain.triton_plan import triton_plan
    except ImportError as missing:
        return Missing(
            f"the package triton is not installed ({missing}); pip install 'triton>=3.6' on Linux "
            "shows the kernels, no GPU is needed"
        )
    try:
        return triton_plan(graphs, problem, Tuned(None if tuned is None else Path(tuned)))
    except FlexlaError as refused:
        return Missing(str(refused))


def _check_stage(stage: str, passes: list[str]) -> None:
    known = ("all", *SECTIONS, *passes)
    if stage not in known:
        raise ArgumentError(
            f"there is no stage {stage!r}{nearest(stage, known)}; expected all, a section "
            f"({', '.join(SECTIONS)}) or a pass ({', '.join(passes)})"
        )

"""What `multi_gpu.sh` measures: sizes of a real run and of its rehearsals on CPU processes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from flexla_dist.spec.variants import variant_names
from scaling_runs.weak_grid import Grid, Point

STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")
HOST = STRATEGIES
DEVICE = tuple(f"{name}_device" for name in STRATEGIES)
OTHERS = ("lasp2", "lasp2_naive", "lasp", "ulysses")
FOREIGN = ("fla_cp",)  # tunes itself while it runs: a step of its own
IDEALS = ("ideal_same_plan", "ideal_best")
FEW = ("chain_device", "chain", *IDEALS, "lasp2")  # what tells most comes first
EVERY = (*FEW, *(s for s in (*DEVICE, "auto", *HOST, *OTHERS) if s not in FEW))


@dataclass(frozen=True)
class Stages(Grid):
    """Several grids one after another; settings are those of this one."""

    parts: tuple[Grid, ...] = ()

    def points(self) -> list[Point]:
        """Points of all parts in order, each once."""
        return list(dict.fromkeys(point for part in self.parts for point in part.points()))

    @classmethod
    def of(cls, parts: tuple[Grid, ...]) -> Stages:
        """Settings are those of the first part; groups are made for the ranks of all."""
        shared = {item.name: getattr(parts[0], item.name) for item in fields(Grid)}
        ranks = tuple(sorted({n for part in parts for n in part.ranks}))
        return cls(**{**shared, "ranks": ranks}, parts=tuple(part.checked() for part in parts))


@dataclass(frozen=True)
class Sizes:
    """Sizes of all steps of a run, and the order of work in them.

    compiled: variants whose kernels are made ahead. checked: variants that are compared, `leading`
    ones first; shape: BxHxKxV of that and of the weak grid. check_tokens: of the first rank, each
    further one has 3 more. timed: variants of the weak grid, `more_timed` come later. wide: its
    shape with several rows. few, systems: of the weak grid, those that tell most and all; foreign:
    other people's code, in a step of its own. link_heads: sizes of the states of the link test, in
    heads of K x K. trained: variants of the training step. seconds: of timed calls a point.
    timeout: of a rank's wait. engines: that carry states.
    """

    name: str
    device: Literal["cpu", "cuda"]
    dtype: str
    compiled: tuple[str, ...]
    leading: tuple[str, ...]
    checked: tuple[str, ...]
    strategies: tuple[str, ...]
    shape: str
    wide: str
    check_tokens: int
    timed: tuple[str, ...]
    more_timed: tuple[str, ...]
    long_tokens: int
    tokens: tuple[int, int]
    systems: tuple[str, ...]
    few: tuple[str, ...]
    foreign: tuple[str, ...]
    link_heads: tuple[int, ...]
    trained: tuple[str, ...]
    train_tokens: int
    train_heads: int
    train_dim: int
    train_steps: int
    seconds: float
    timeout: float
    engines: tuple[str, ...] = ("device", "host")

    def turned(self) -> Sizes:
        """With systems and engines in reversed order: after something has ended a step, those of
        another kind come first."""
        return replace(
            self,
            systems=self.systems[::-1],
            few=self.few[::-1],
            engines=self.engines[::-1],
        )

    def node_size(self, ranks: int) -> int | None:
        """Ranks that count as a node for the hierarchical strategy: two nodes where that makes a
        difference to doubling."""
        return ranks // 2 if ranks >= 4 and ranks % 2 == 0 else None

    def grid(self, world: int, **changes: object) -> Grid:
        """A grid with this run's settings, on all ranks of the world."""
        base = Grid(
            systems=self.systems,
            variants=self.timed,
            ranks=(world,),
            tokens_per_rank=(self.tokens[1],),
            shapes=(self.wide, self.shape),
            dtype=self.dtype,
            placements=("barrier",),
            seconds=self.seconds,
            node_size=self.node_size(world),
            timeout=self.timeout,
        )
        return replace(base, **changes)  # type: ignore[arg-type]

    def weak(self, ranks: int) -> Stages:
        """The main comparison on all ranks, the longer shards: few systems, then all."""
        few = [self.grid(ranks, systems=self.few, shapes=(s,)) for s in (self.wide, self.shape)]
        return Stages.of((*few, self.grid(ranks)))

    def weak_more(self, ranks: int) -> Stages:
        """What the main comparison left, shorter shards, fewer ranks with few systems, and more
        variants."""
        fewer = tuple(n for n in (4, 2) if n < ranks)
        both = self.tokens[::-1]
        first = (self.grid(ranks, shapes=(self.wide,), tokens_per_rank=(self.tokens[0],)),)
        less = tuple(self.grid(ranks, ranks=(n,), systems=self.few) for n in fewer)
        alone = self.grid(ranks, ranks=(1,), systems=("ideal_best",), tokens_per_rank=both)
        other = self.grid(ranks, variants=self.more_timed, systems=self.few)
        short = tuple(
            self.grid(
                ranks,
                ranks=(n,),
                systems=self.few,
                shapes=(self.wide,),
                tokens_per_rank=(self.tokens[0],),
            )
            for n in fewer
        )
        main = self.weak(ranks).parts
        return Stages.of((*main, other, *first, *less, alone, *short))

    def other_code(self, ranks: int) -> Stages:
        """Other people's code, which tunes its kernels while it runs: long shards first."""
        variants = (*self.timed, *self.more_timed)
        grid = self.grid(ranks, systems=self.foreign, variants=variants)
        shorter = replace(grid, tokens_per_rank=(self.tokens[0],), shapes=(self.wide,))
        return Stages.of((grid, self.long(ranks, self.foreign).parts[0], shorter))

    def long(self, ranks: int, systems: tuple[str, ...] | None = None) -> Stages:
        """One long sequence over all ranks: few systems, then all."""
        grids = [
            self.grid(
                ranks,
                systems=some,
                modes=("strong",),
                total_tokens=(self.long_tokens,),
                variants=("gated_delta_rule",),
                shapes=(self.shape,),
            )
            for some in ((self.few, self.systems) if systems is None else (systems,))
        ]
        return Stages.of(tuple(grids))


FULL = Sizes(
    name="full",
    device="cuda",
    dtype="bfloat16",
    compiled=variant_names(),
    leading=("gated_delta_rule", "simple_gla", "gla"),
    checked=variant_names(),
    strategies=STRATEGIES,
    shape="1x32x128x128",
    wide="4x32x128x128",
    check_tokens=520,
    timed=("gated_delta_rule", "simple_gla"),
    more_timed=("gla", "kda"),
    long_tokens=262144,
    tokens=(8192, 32768),
    systems=EVERY,
    few=FEW,
    foreign=FOREIGN,
    link_heads=(16, 32, 64, 128),
    trained=("gated_delta_rule", "simple_gla"),
    train_tokens=4096,
    train_heads=4,
    train_dim=64,
    train_steps=20,
    seconds=0.25,
    timeout=30.0,
)
REHEARSAL = replace(
    FULL,
    name="rehearsal",
    device="cpu",
    dtype="float32",
    compiled=("linear_attn",),
    leading=("gated_delta_rule", "simple_gla"),
    checked=("linear_attn", "simple_gla", "gla", "gated_delta_rule"),
    shape="1x4x8x8",
    wide="1x4x8x8",
    check_tokens=20,
    more_timed=("gla",),
    long_tokens=64,
    tokens=(16, 32),
    systems=(*DEVICE, *HOST, "lasp2", "lasp2_naive", "lasp", "ulysses", *IDEALS),
    few=("chain_device", "chain", "ideal_best"),
    link_heads=(1, 2),
    train_tokens=48,
    train_heads=2,
    train_dim=8,
    seconds=0.01,
    timeout=60.0,
)
SHORT = replace(
    REHEARSAL,
    name="short",
    compiled=(),
    leading=("simple_gla",),
    checked=("simple_gla",),
    strategies=("chain",),
    timed=("simple_gla",),
    more_timed=(),
    systems=("chain_device", "chain", "ideal_same_plan"),
    few=("chain_device", "chain"),
    link_heads=(1,),
    trained=("simple_gla",),
    train_steps=3,
)
ONE_GPU = replace(  # several processes share it: gloo serves them, and no host engine or baseline
    FULL,
    name="one_gpu",
    compiled=("linear_attn", "simple_gla", "gla", "gated_delta_rule"),
    checked=("linear_attn", "simple_gla", "gla", "gated_delta_rule"),
    wide="2x32x128x128",
    more_timed=(),
    long_tokens=16384,
    tokens=(2048, 4096),
    systems=("chain_device", "log_scan_device", "all_gather_device", *IDEALS),
    few=("chain_device", *IDEALS),
    foreign=(),
    trained=("gated_delta_rule",),
    train_tokens=512,
    seconds=0.1,
    engines=("device",),
)
SIZES = {sizes.name: sizes for sizes in (FULL, REHEARSAL, SHORT, ONE_GPU)}

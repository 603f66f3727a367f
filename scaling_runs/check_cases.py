"""The grid of `check_gpu.py`: cases in the order in which they tell most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flexla_dist.spec.spec import LinearAttentionSpec
from flexla_dist.spec.variants import get_variant, variant_names

DTYPES = ("bfloat16", "float32")
SIZES = (32, 64, 100, 128, 256)
TOKENS = (1, 63, 64, 65, 1000, 16384, 65536)
UNEQUAL = ((64, 128), (128, 64), (100, 36), (32, 256), (256, 100))
SAME_GRAPH = ("retention", "lightning")  # simple_gla's, so fewer cases tell all
ORACLE_TOKENS = 1000  # longer sequences are compared with the float64 torch executor


@dataclass(frozen=True)
class Case:
    """One call shape of a variant, checked in every dtype; K = V = D for a variant of one dim."""

    variant: str
    T: int
    K: int
    V: int
    packed: bool

    @property
    def spec(self) -> LinearAttentionSpec:
        """The variant's spec."""
        return get_variant(self.variant)

    @property
    def batch(self) -> int:
        """B: two where that is cheap, one for packed and long calls."""
        return 1 if self.packed or self.T > ORACLE_TOKENS else 2

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the named dims."""
        return {"K": self.K, "V": self.V, "D": self.V}

    @property
    def cu_seqlens(self) -> list[int] | None:
        """Documents of a packed call: an empty one, one of a single token, uneven ones."""
        if not self.packed:
            return None
        inner = sorted({min(x, self.T) for x in (1, self.T // 3, self.T // 3 + 64, self.T - 7)})
        cuts = [0, *(x for x in inner if x > 0), self.T]
        return [0, *cuts, self.T]

    def key(self, dtype: str, executor: str = "triton") -> dict[str, object]:
        """The key columns of a row."""
        return {
            "variant": self.variant,
            "executor": executor,
            "dtype": dtype,
            "T": self.T,
            "K": self.K,
            "V": self.V,
            "packed": int(self.packed),
        }


def cases(variants: Sequence[str] | None = None, quick: bool = False) -> list[Case]:
    """Every case once; `quick` keeps the first tiers."""
    names = tuple(variants or variant_names())
    every = dict.fromkeys(case for tier in _tiers(names, quick) for case in tier)
    return list(every)


def _tiers(names: Sequence[str], quick: bool) -> Iterator[list[Case]]:
    every = list(names)
    distinct = [name for name in names if name not in SAME_GRAPH]

    def grid(
        names: Sequence[str],
        tokens: Sequence[int],
        sizes: Sequence[tuple[int, int]],
        packed: bool = False,
    ) -> list[Case]:
        return [
            Case(name, t, k, v, packed)
            for name in names
            for k, v in sizes
            if k == v or "K" in _dims(name)
            for t in tokens
        ]

    yield grid(every, (65, 1000), _square(64))
    yield grid(distinct, (1000,), _square(128))
    yield grid(distinct, (1000,), _square(64), True)
    yield grid(distinct, (1000,), UNEQUAL[:1])
    if quick:
        return
    yield grid(every, (16384,), _square(128))
    yield grid(distinct, (1000,), _square(100, 256, 32))
    yield grid(every, (1, 63, 64), _square(64))
    yield grid(every, (65536,), _square(128))
    yield grid(distinct, (1000, 16384), _square(128, 100), True)
    yield grid(distinct, (65, 1000), UNEQUAL)
    yield grid(distinct, (65536,), _square(64))
    yield grid(distinct, (1000,), UNEQUAL[:3], True)
    yield grid(distinct, (16384, 65536), _square(32, 64, 100, 256))
    yield grid(distinct, TOKENS[1:], _square(*SIZES))
    yield grid(distinct, TOKENS[:1], _square(100, 256))


def _square(*sizes: int) -> list[tuple[int, int]]:
    return [(size, size) for size in sizes]


def _dims(name: str) -> set[str]:
    return {dim for item in get_variant(name).input_specs.values() for dim in item.dims}

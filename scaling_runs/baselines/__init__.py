"""Other systems for sequence parallelism of linear attention, on the same local kernels as ours."""

from __future__ import annotations

from scaling_runs.baselines.formulas import Sizes, sizes_of
from scaling_runs.baselines.shard import Refused, Sharding
from scaling_runs.baselines.systems import SYSTEMS, Attend, Settings, System, get_system
from scaling_runs.baselines.traffic import Traffic, counted

__all__ = [
    "SYSTEMS",
    "Attend",
    "Refused",
    "Settings",
    "Sharding",
    "Sizes",
    "System",
    "Traffic",
    "counted",
    "get_system",
    "sizes_of",
]

"""How kernels are launched: stages of loops, registers of inverses, tiles of plain sums.

On described calls: nothing runs.
"""

from __future__ import annotations

import pytest
import torch

from flexla_dist.compiler.aot import CompileTask, LaunchRecord, describe_call, record_launches
from flexla_dist.compiler.executor.choosing import Tuned
from flexla_dist.compiler.kernels import LOOPS

from .compiled import graphs_of


def launches(name: str, direction: str, dtype: torch.dtype, size: int = 128) -> list[LaunchRecord]:
    graphs = graphs_of(name)
    heads = 1 if name == "hgrn" else 32
    sizes = {"K": size, "V": size, "D": 32 * size}
    call = describe_call(graphs, tokens=16384, heads=heads, sizes=sizes, dtype=dtype)
    return record_launches(CompileTask(graphs, call, tuned=(Tuned(measured=False),)), direction)


def named(found: list[LaunchRecord], *names: str) -> list[LaunchRecord]:
    return [x for x in found if x.kernel in names]


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda", "simple_gla", "hgrn"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_stages_of_a_loop_are_those_of_its_launch(name: str, direction: str) -> None:
    """Triton looks ahead for scalars too only where the loop itself names its stages."""
    loops = [x for x in launches(name, direction, torch.bfloat16) if "STAGES" in x.keywords]
    kinds = {x.kernel.removeprefix(f"{name}_") for x in loops}
    assert kinds <= set(LOOPS) and kinds & {"scan", "reverse"}
    assert all(x.keywords["STAGES"] == x.keywords["num_stages"] for x in loops)
    assert all("num_stages=STAGES" in x.function.src for x in loops)


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule", "kda"])
def test_an_inverse_leaves_room_for_more_programs(name: str) -> None:
    found = launches(name, "forward", torch.bfloat16)
    [first] = named(found, f"{name}_before_scan")
    assert first.keywords["maxnreg"] == 128
    assert not any("maxnreg" in x.keywords for x in found if x is not first)
    assert not any("maxnreg" in x.keywords for x in launches(name, "forward", torch.float32))
    assert not any("maxnreg" in x.keywords for x in launches(name, "forward", torch.bfloat16, 256))


def test_a_loop_that_waits_for_memory_makes_tiles_itself() -> None:
    """The factor `carried` [C, D] of hgrn comes from gates that its scan loads anyway."""
    found = launches("hgrn", "forward", torch.bfloat16)
    [first], [scan] = named(found, "hgrn_before_scan"), named(found, "hgrn_scan")
    tiles = [x for x in first.arguments if isinstance(x, torch.Tensor) and x.numel() >= 1 << 26]
    assert len(tiles) == 2  # g and x; nothing as large is written
    assert (first.keywords["tile_D"], first.keywords["num_warps"]) == (32, 1)
    assert scan.keywords["STAGES"] == 3
    [stores_tiles] = named(launches("gla", "forward", torch.bfloat16), "gla_before_scan")
    assert stores_tiles.keywords["num_warps"] == 4

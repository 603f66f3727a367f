"""Local parts of a GPU from rows, and the report's section on the published cluster."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scaling_runs.model.clusters import ModelProblem, get_cluster, slowest
from scaling_runs.model.gpu_rows import COPY_BANDWIDTH, GpuRows
from scaling_runs.report_cluster import cluster_section, losses, measured_losses
from scaling_runs.report_data import Line
from scaling_runs.weak_grid import Point

CALL = {"variant": "gla", "B": "1", "H": "2", "K": "8", "V": "8", "dtype": "float32"}
POINT = Point("chain", "gla", "weak", "barrier", "fwd", 2, 256, 512, 3, 2, 8, 8, "float32")


def rows() -> GpuRows:
    single = [
        {**CALL, "T": "64", "impl": impl, "direction": direction, "median_ms": ms, "commit": "s1"}
        for impl, direction, ms in (
            ("ours", "fwd", "2"),
            ("ours", "fwdbwd", "7"),
            ("fla", "fwd", "1"),
        )
    ]
    virtual = [
        {**CALL, "T": "64", "W": "4", "impl": impl, "groups": groups, "direction": direction}
        | {"median_ms": ms, "commit": commit}
        for impl, groups, direction, ms, commit in (
            ("ideal_best", "", "fwd", "8", "v1"),
            ("ideal_same_plan", "2", "fwd", "10", "v1"),
            ("ideal_same_plan", "1+1", "fwd", "99", "v2"),
            ("ideal_best", "", "fwdbwd", "28", "v1"),
            ("ideal_same_plan", "2", "fwdbwd", "36", "v1"),
        )
    ]
    return GpuRows(single, virtual)


def test_local_parts_come_from_rows() -> None:
    """Twelve times as many tokens as the rows'; 2 ms in W = 4 ranks are summaries."""
    found = rows().kernels(POINT)
    assert found.forward == pytest.approx(12 * 2e-3) and found.backward == 0.0
    assert found.summary == pytest.approx(12 * 2e-3 / 4)
    both = rows().kernels(replace(POINT, direction="fwdbwd"))
    assert both.backward == pytest.approx(12 * 5e-3)
    assert both.summary == both.adjoint == pytest.approx(12 * 8e-3 / 4 / 2)
    state = 4 * 3 * 2 * 8 * 8
    assert found.apply == pytest.approx(3 * state / COPY_BANDWIDTH, rel=0.05)
    assert rows().source("gla") == "single_gpu s1; virtual_ranks v1"
    with pytest.raises(ModelProblem, match="no rows of gla fwd with 4 heads"):
        rows().kernels(replace(POINT, H=4))


def test_rows_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ModelProblem, match="no rows of local parts on nvidia_h200"):
        GpuRows.read(tmp_path, "nvidia_h200")


def test_a_cluster_has_its_slowest_kernels() -> None:
    cluster = get_cluster("h20_ib")
    slow = slowest(cluster)
    assert slow is not None and slow.kernel_scale > cluster.kernel_scale
    assert slow.name == "h20_ib_slow" and slowest(get_cluster("h200_ib")) is None


def line(system: str, P: int, ms: float, **columns: object) -> Line:
    values = {"kind": "modelled", "where": "h20_ib", "system": system, "variant": "simple_gla"}
    values |= {"mode": "weak", "placement": "barrier", "direction": "fwd", "P": P, "T": 64, "B": 4}
    values |= {"H": 2, "K": 8, "V": 8, "dtype": "bfloat16", "state_bytes": 1024, "ms": ms}
    values |= {"p20_ms": None, "p80_ms": None, "received_bytes": None, "date": "", "commit": "abc"}
    return Line(**{**values, **columns})  # type: ignore[arg-type]


def lines(P: int, hierarchical: float, lasp2: float) -> list[Line]:
    times = {"ideal_best": 8.0, "ideal_same_plan": 10.0, "fused_hierarchical": hierarchical}
    times |= {"fused_chain": 12.0, "chain": 11.0, "lasp2": lasp2, "ulysses": 50.0}
    return [line(system, P, ms, kernels_of="some rows") for system, ms in times.items()]


def test_the_section() -> None:
    text = cluster_section([*lines(128, 10.4, 10.8), *lines(8, 10.6, 10.5)])
    assert "Modelled, not measured" in text and "some rows" in text
    row = next(r for r in text.splitlines() if r.startswith("| simple_gla fwd | `h20_ib`"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:] == [
        "*8.00*",
        "*10.00*",
        "*10.40*",
        "*12.00*",
        "*+4.0%*",
        "yes",
        "*+30.0%*",
        "*10.80*",
    ]
    assert "simple_gla fwd, `h20_ib`: P = 8, to `lasp2`, by up to 1.0%" in text
    assert "P = 8, 128, to `lasp2`, by up to 4.8%" in text.split("host engine")[1]
    assert "| FlexLA, published | 12.2 | 14.5 | 2.3 |" in text
    assert "latencies are assumptions" in text and "Sources" in text
    assert "**no**" in cluster_section(lines(128, 10.51, 10.8))
    assert cluster_section(lines(64, 10.4, 10.8)) == ""


def test_losses_are_told() -> None:
    case = ("gla", "fwd", "x")
    found = losses(
        [(4, case, {"chain": 3.0, "lasp": 2.0}), (8, case, {"chain": 2.0, "lasp": 2.0})], ("chain",)
    )
    assert found == ["gla fwd, `x`: P = 4, to `lasp`, by up to 50.0%"]
    measured = [
        line(s, 2, ms, kind="measured", where="cpu") for s, ms in (("chain", 3.0), ("zeco", 2.0))
    ]
    assert "measured, of 1 cases" in measured_losses(measured)
    assert "P = 2, to `zeco`, by up to 50.0%" in measured_losses(measured)
    assert "- nowhere" in measured_losses([measured[0], replace(measured[1], ms=4.0)])
    assert measured_losses(measured[:1]) == ""

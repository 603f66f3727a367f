"""Source of the exchange kernels: golden files of the three dialects, and that they compile."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from flexla_dist.comm.device.layout import Layout, Signature
from flexla_dist.comm.device.panels import StateForm, tiling
from flexla_dist.comm.device.record import Record, late_rank
from flexla_dist.comm.device.source import DIALECTS, Dialect, exchange_source, load_source

GOLDEN = Path(__file__).parent / "golden"
PROGRAM = Path(__file__).with_name("device_exchange_compiler.py")
SCALAR = Signature(32, (StateForm((128, 128), (1, 1)),))
TWO = Signature(32, (StateForm((64, 32), None, True), StateForm((100,), (100,))), entry=True)
LIBRARY = "libnvshmem_device.bc"


def source(signature: Signature, strategy: str, dialect: Dialect) -> str:
    nodes = (0, 0, 1, 1)
    layout = Layout.of(signature, strategy, 4, nodes, dialect != "p2p")
    return exchange_source(signature, layout, dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_golden_source(dialect: Dialect, request: pytest.FixtureRequest) -> None:
    """What is generated is what was read and accepted; `--accept-golden` accepts it anew."""
    text = source(SCALAR, "chain", dialect)
    path = GOLDEN / f"exchange_chain_{dialect}.py.txt"
    if request.config.getoption("--accept-golden"):
        path.write_text(text)
    accepted = path.read_text() if path.exists() else ""
    changes = difflib.unified_diff(
        accepted.splitlines(), text.splitlines(), str(path), "generated", lineterm="", n=1
    )
    shown = "\n".join(list(changes)[:60])
    assert text == accepted, (
        f"generated source changed; read it, then run pytest --accept-golden {__file__}\n{shown}"
    )


@pytest.mark.parametrize("strategy", ["chain", "log_scan", "hierarchical", "all_gather"])
@pytest.mark.parametrize("signature", [SCALAR, TWO])
def test_dialects_differ_in_their_verbs_only(signature: Signature, strategy: str) -> None:
    def rest(dialect: Dialect) -> list[str]:
        """The functions of a source without imports, decorators and verbs."""
        parts = source(signature, strategy, dialect).split("\n\n\n")[1:]
        verbs = ("remote_ptr", "message_ptr", "signal_set", "put_signal", "wait_ge")
        own = ("putmem_signal_block", "signal_op", "thread_index")
        found = [p for p in parts if not any(f"def {name}(" in p for name in (*verbs, *own))]
        return [part.replace("@triton_dist.jit", "@triton.jit") for part in found]

    first = rest("p2p")
    assert len(first) > 8
    assert rest("nvshmem") == first and rest("triton_dist") == first


def test_source_loads_once(tmp_path: Path) -> None:
    text = source(SCALAR, "chain", "p2p")
    module = load_source(text, tmp_path)
    assert module is load_source(text, tmp_path)
    assert load_source(text.replace("chain", "chain ", 1), tmp_path) is not module
    for line in text.splitlines():
        assert line == line.rstrip()


def test_layout_gives_every_word_one_place() -> None:
    for strategy in ("chain", "log_scan", "hierarchical", "all_gather"):
        layout = Layout.of(TWO, strategy, 4, (0, 0, 1, 1), True)
        panels = sum(layout.panels)
        messages = [t.message_bytes(strategy) for t in layout.tilings]
        ends = [
            (layout.errors, 64 * 5),
            (layout.flags, 16 * layout.slots * panels),
            (layout.credits, 16 * layout.channels * panels),
            (layout.sent, 16 * layout.channels * panels),
            (layout.epochs, 8 * panels),
        ]
        for i, each in enumerate(messages):
            ends.append((layout.slots_at[i], 2 * layout.slots * layout.panels[i] * each))
            ends.append((layout.staging_at[i], layout.panels[i] * each))
        ends.sort()
        for (start, size), (following, _) in zip(
            ends, [*ends[1:], (layout.nbytes, 0)], strict=True
        ):
            assert start % 256 == 0 and start + size <= following
        assert layout.moved_by(512).slots_at[1] == layout.slots_at[1] + 512


def test_tiles_fit_a_kernel() -> None:
    for dims in ((128, 128), (256, 256), (5, 7), (1, 4096), (4096, 1), (4096,), (1,)):
        t = tiling(StateForm(dims, tuple(1 for _ in dims)))
        assert t.BR * t.BC <= 4096 and t.tiles * t.BR * t.BC >= t.rows * t.columns
    for dims in ((256, 256), (128, 128), (17, 1), (64,)):
        t = tiling(StateForm(dims, None, True))
        assert t.row_tiles == 1 and t.BR >= 16 and t.BC >= 16 and t.BR * t.BC <= 8192


def test_who_is_late() -> None:
    records = [Record(2, 1, 0, 5, 0), Record(1, 0, 3, 5, 0), Record(3, 2, 0, 5, 0)]
    assert late_rank(records) == 0
    assert late_rank([Record(0, 1, 0, 2, 1), Record(1, 0, 0, 2, 0)]) in (0, 1)


def reports(library: str = "") -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *([library] if library else [])],
        capture_output=True,
        text=True,
        timeout=220,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def nvshmem_library() -> str:
    """Path of NVSHMEM's device code: beside its Python package, or where NVSHMEM_LIB_DIR says."""
    folders = [Path(os.environ["NVSHMEM_LIB_DIR"])] if "NVSHMEM_LIB_DIR" in os.environ else []
    try:
        package = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        package = None
    if package is not None and package.submodule_search_locations:
        folders += [Path(folder) / "lib" for folder in package.submodule_search_locations]
    found = [folder / LIBRARY for folder in folders if (folder / LIBRARY).exists()]
    return str(found[0]) if found else ""


def check(report: dict[str, Any]) -> None:
    """Waits are acquiring loads, signals releasing stores, panels travel in 16 bytes."""
    print(report)
    assert report["acquires"] >= 3 and report["releases"] >= 2, report
    assert report["other_reads_of_flags"] == 0, report
    assert report["shared"] <= 128 * 1024 and report["wide_stores"] > 0, report
    assert report["stack"] <= 128, report
    assert (report["clocks"] > 0) == (report["kernel"][3] > 0), report


@pytest.mark.timeout(240)
def test_p2p_compiles_for_hopper() -> None:
    for report in reports():
        check(report)


@pytest.mark.timeout(240)
@pytest.mark.skipif(not nvshmem_library(), reason=f"no {LIBRARY}: pip install nvidia-nvshmem-cu13")
def test_nvshmem_compiles_for_hopper() -> None:
    for report in reports(nvshmem_library()):
        check(report)
        assert report["puts"] > 0, report

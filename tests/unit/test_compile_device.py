"""The device functions compile without a GPU, for sm_90 and gfx942, and do not spill there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
PROGRAM = Path(__file__).with_name("device_compiler.py")
MAY_SPILL = {("inverse", 128)}  # kernel and C: 128 rows fill the registers of 8 warps


def reports(target: str) -> list[dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), target],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(240)
def test_hopper_compiles_without_spills() -> None:
    for report in reports("cuda"):
        print(report)
        spilled = report["stack"] > 0
        allowed = (report["kernel"], report["constants"].get("C")) in MAY_SPILL
        assert allowed or not spilled, f"spills {report['stack']} bytes a thread: {report}"
        assert report["shared"] <= 64 * 1024, report


def test_portable_kernels_compile_for_amd() -> None:
    for report in reports("hip"):
        print(report)
        assert report["binary"] > 0

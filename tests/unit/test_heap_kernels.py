"""The kernels that time messages compile for a GPU and are small enough for any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILER = Path(__file__).with_name("heap_kernels_compiler.py")


def test_kernels_compile_for_sm_90() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(COMPILER.parents[2])
    done = subprocess.run(
        [sys.executable, str(COMPILER)],
        capture_output=True, text=True, timeout=200, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["kernel"] for r in reports] == ["rounds_of_messages"] * 3 + ["products"]
    for report in reports:
        assert report["stack"] <= 64 and report["shared"] <= 98304 and report["registers"] <= 255, (
            report
        )
        messages = report["kernel"] == "rounds_of_messages"
        assert (report["releases"] > 0) == messages == (report["acquires"] > 0), report

"""Kernels that are compiled ahead of `multi_gpu.sh` are those that its ranks launch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from flexla_dist.comm.device_exchange import signature_of
from flexla_dist.comm.engines import span_of
from flexla_dist.compiler.aot import CompileTask, record_launches

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from scaling_runs.multi_gpu_calls import Call, calls  # noqa: E402
from scaling_runs.multi_gpu_sizes import FULL  # noqa: E402
from scaling_runs.weak_cases import compiled, example_element, inputs_of  # noqa: E402
from scaling_runs.weak_grid import CallShape, Point  # noqa: E402

ONE, WIDE = CallShape.parse(FULL.shape), CallShape.parse(FULL.wide)


def keys(task: CompileTask) -> set[str]:
    """Launches of both directions; equal keys compile to the same binary."""
    return {r.key for d in task.directions for r in record_launches(task, d)}


@pytest.mark.parametrize("variant", ["gated_delta_rule", "simple_gla"])
def test_long_shards_launch_what_is_compiled_for_shorter_ones(variant: str) -> None:
    ahead = {
        key
        for call in calls(FULL, 2)
        if call.variant == variant and call.dtype == "bfloat16" and call.shape.H == 32
        for key in keys(call.task())
    }
    for shape in (ONE, WIDE):
        for opened in (True, False):
            call = Call(variant, shape, "bfloat16", 32768, opened)
            assert keys(call.task()) <= ahead, call
    assert keys(Call(variant, ONE, "bfloat16", 131072, True).task()) <= ahead


def test_a_call_that_stops_has_kernels_of_its_own() -> None:
    call = Call("gated_delta_rule", WIDE, "bfloat16", 8192, False)
    assert not keys(replace(call, opened=True).task()) <= keys(call.task())


def test_a_call_of_every_kind_is_there() -> None:
    found = calls(FULL, 2)
    for variant in FULL.checked:
        lengths = {c.tokens for c in found if c.variant == variant and c.shape == ONE}
        assert {1, 520, 523} <= lengths
    trained = {(c.variant, c.tokens, c.opened) for c in found if c.dtype == "float32"}
    assert {("gated_delta_rule", 2048, True), ("gated_delta_rule", 4096, False)} <= trained
    assert {c.shape.H for c in found if c.variant == "simple_gla"} == {32, 16, 4}


@pytest.mark.parametrize("variant", ["gated_delta_rule", "gla", "linear_attn_normalized", "hgrn"])
def test_signatures_are_those_of_elements(variant: str) -> None:
    """A rank with nothing to say exchanges a blank element: what others exchange has its forms."""
    point = Point("chain", variant, "weak", "barrier", "fwd", 1, 1, 1, **vars(ONE), dtype="float32")
    call = Call(variant, ONE, "bfloat16", 1, True)
    given = inputs_of(point, 1, torch.device("cpu"), 1)
    element = example_element(compiled(variant), given)
    assert call.signature() == signature_of(span_of(element), False)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_triton_finds_what_was_compiled(tmp_path: Path) -> None:
    """Triton's own launch code finds every kernel, in a process of its own, without a GPU."""
    program = """
import sys
from dataclasses import replace
from scaling_runs import multi_gpu_compile as ahead
tiny = replace(ahead.SIZES["one_gpu"], compiled=("linear_attn",), timed=("linear_attn",),
               leading=(), checked=("linear_attn",), trained=(), shape="1x2x16x16",
               wide="2x2x16x16", strategies=("chain",), device="cpu", systems=())
ahead.SIZES["one_gpu"] = tiny
sys.exit(ahead.main(["--sizes", "one_gpu", "--ranks", "2", "--jobs", "1", *sys.argv[1:]]))
"""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)

    def run(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-c", program, *words]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        return ran.returncode, ran.stdout + ran.stderr

    code, text = run("--prove")
    assert code == 1 and "not in the cache" in text, text
    code, text = run()
    assert code == 0 and " 0 failed" in text, text
    code, text = run("--prove")
    assert code == 0 and " 0 not found" in text, text
    code, text = run()
    assert code == 0 and "all kernels are there" in text, text

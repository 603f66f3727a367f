"""A sequence over virtual ranks, as the measuring program runs it, equals one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import make_inputs
from scaling_runs import virtual_bits, virtual_ranks
from scaling_runs.virtual_measure import Measurement
from scaling_runs.virtual_run import VirtualRanks

from .test_triton_executor import graphs_of

CASES = [
    (name, s, None)
    for name in ("simple_gla", "gla", "gated_delta_rule")
    for s in ("chain", "all_gather")
]
CASES += [("gla", "log_scan", None), ("gated_delta_rule", "chain", 2)]


@pytest.mark.parametrize(("name", "strategy", "groups"), CASES)
def test_equals_one_process(name: str, strategy: str, groups: int | None) -> None:
    call = make_inputs(
        get_variant(name), batch=2, tokens=96, heads=2, value_heads=2,
        sizes={"K": 16, "V": 16}, dtype=torch.float32,
    )  # fmt: skip
    op = LinearAttentionOp(graphs_of(name), "triton", 16)
    ranks = VirtualRanks(op, call, 3, groups)
    ranks.executor.segment_chunks = 1
    seed = torch.randn(2, 96, 2, 16, generator=torch.Generator().manual_seed(1))
    found = ranks.run(ranks.exchanger(strategy, timeout=30.0), seed)

    exact = call.to(torch.float64)
    single = LinearAttentionOp(graphs_of(name), "torch", 16)
    output = single(**exact.inputs, **exact.params, **exact.scalars)[0]
    wanted = torch.autograd.grad(output, list(exact.inputs.values()), seed.double())
    for got, want in zip((found.output, *found.gradients.values()), (output, *wanted), strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error <= 1e-5


def test_what_is_timed_is_checked() -> None:
    words = ["--dtype", "float32", "--heads", "2", "--size", "16", "--groups", "2"]
    options = virtual_ranks.parse(words)
    options.device = "cpu"
    measurement = Measurement(options, "gated_delta_rule", 2, 70)
    found = measurement.checks("chain")
    assert found["ok"] == "yes" and found["same_bits"] == "same"
    measurement.both(measurement.exchanger("chain"))
    measurement.alone()
    assert virtual_ranks.state_mib(measurement) == 2 * 16 * 16 * 4 / 2**20


def test_a_program_checks_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rehearse", "--points", "2x40", "--repeats", "2", "--heads", "1", "--size", "16"]
    words += ["--variants", "retention", "--strategies", "chain,hierarchical", "--commit", "x"]
    words += ["--results", str(tmp_path)]
    assert virtual_bits.main([*words, "--seconds", "0"]) == 3
    assert virtual_bits.main(words) == 0
    assert "2 rows, 0 not ok" in capsys.readouterr().out
    assert virtual_bits.main([*words, "--seconds", "0"]) == 0  # all known

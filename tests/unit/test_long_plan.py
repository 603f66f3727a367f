"""The memory model of long sequences against measured peaks, and the plan's page."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from flexla_dist.comm.element import element_tensors, state_bytes
from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.ops.op import compile
from flexla_dist.parallel.local_call import as_element
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import make_inputs
from flexla_dist.train import arguments
from scaling_runs import long_plan
from scaling_runs.long_context import case_of, longest, main, parse, plan_page, settings_of
from scaling_runs.long_plan import LongCase, PlanProblem, plan_memory

from .test_memory import allocated

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 16384
SMALL = ModelConfig(
    layers=2, width=64, heads=2, value_heads=4, key_dim=16, value_dim=32, mlp_width=96, vocab=16
)
HELD_BEFORE = ("inputs", "parameters", "optimizer")  # not made by a step
SHAPES = {  # by where the peak is
    "mlp": {"mlp_width": 512},
    "loss": {"vocab": 256},
    "attention": {"mlp_width": 16, "value_heads": 8},
}
CASES = list(product(long_plan.VARIANTS, (False, True), (False, True), SHAPES))
QUICK = [
    ("simple_gla", False, False, "mlp"),
    ("gated_delta_rule", False, True, "loss"),
    ("simple_gla", True, True, "attention"),
    ("gated_delta_rule", True, False, "mlp"),
]


def measured(case: LongCase) -> int:
    """Peak bytes of forward, loss and backward, beside the parameters."""
    torch.manual_seed(0)
    model = LinearAttentionModel(case.model)
    model.checkpoint_activations = case.checkpoint
    ids = torch.randint(case.model.vocab, (1, case.tokens))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            logits = model(ids)
        F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()

    step()  # programs are made at the first call
    model.zero_grad(set_to_none=True)
    return allocated(step)[0]


@pytest.mark.parametrize(
    ("variant", "bf16", "checkpoint", "shape"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_peak_is_what_the_formulas_say(
    variant: str, bf16: bool, checkpoint: bool, shape: str
) -> None:
    model = replace(SMALL, variant=variant, **SHAPES[shape])
    case = LongCase(model, TOKENS, 1, 1, bf16, checkpoint, "torch", sharded=False)
    parts = plan_memory(case)
    formula = sum(size for name, size in parts.items() if name not in HELD_BEFORE)
    formula += 2 * long_plan.parameters_of(model)[0] if bf16 else 0
    assert measured(case) == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("variant", long_plan.VARIANTS)
def test_states_and_elements(variant: str) -> None:
    case = LongCase(replace(SMALL, variant=variant), 1024, 4)
    call = make_inputs(
        get_variant(variant),
        batch=1,
        tokens=64,
        heads=2,
        value_heads=4,
        sizes={"K": 16, "V": 32},
        dtype=torch.float32,
    )
    op = compile(get_variant(variant))
    problem = op.bind(call.inputs, call.params, call.scalars)
    element = as_element(op.executor("torch").summary(problem, -1))
    assert long_plan.element_bytes(case) == sum(t.nbytes for t in element_tensors(element))
    assert long_plan.state_bytes(case) == state_bytes([s.local for s in element.states])


def test_parts_follow_ranks_and_settings() -> None:
    case = LongCase(SMALL, 1 << 20, 8)
    parts, more = plan_memory(case), plan_memory(replace(case, ranks=16))
    for name in ("inputs", "activations", "one block again", "state history"):
        assert more[name] == pytest.approx(parts[name] / 2, rel=1e-3)
    assert more["optimizer"] == parts["optimizer"] / 2
    whole = plan_memory(replace(case, sharded=False))
    assert whole["optimizer"] == 8 * parts["optimizer"] and whole["inputs"] == parts["inputs"]
    kept = plan_memory(replace(case, checkpoint=False))
    assert kept["activations"] > 10 * parts["activations"] and kept["one block again"] == 0
    gathered = plan_memory(replace(case, strategy="all_gather", ranks=128))["exchange"]
    assert gathered > plan_memory(replace(case, strategy="log_scan", ranks=128))["exchange"]


def test_page(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--plan"])
    case = case_of(options)
    assert (case.local, case.ranks) == (131072, 128)
    page = plan_page(case, options.memory_gib)
    assert "\nfits in 131 GiB" in page and "nothing was run" in page
    assert "does NOT fit in 40 GiB" in plan_page(case, 40)
    most = longest(case, options.memory_gib * 2**30)
    for tokens, fits in ((most, True), (most + case.ranks, False)):
        size = sum(plan_memory(replace(case, tokens=tokens)).values())
        assert (size <= options.memory_gib * 2**30) == fits
    assert longest(case, 1.0) == 0
    made = arguments.parse(["--config", str(ROOT / "configs" / "long.yaml"), *settings_of(case)])
    assert made.model == case.model and made.data.length == case.tokens and made.mesh.cp == 128
    assert main(["--plan", "--ranks", "0"]) == 2
    assert "ranks 0" in capsys.readouterr().err
    with pytest.raises(PlanProblem, match="simple_gla, gated_delta_rule"):
        LongCase(replace(SMALL, variant="gla"), 1024, 4)

"""The plain form of gated slot attention is that variant; what bfloat16 costs it."""

from __future__ import annotations

import torch

from flexla_dist.spec.oracle import run_recurrence
from flexla_dist.testing.budget import BOUNDS, measure

from .outside_specs import OUTSIDE
from .outside_training import make_call
from .plain_gsa import bfloat16_errors, run

SIZES = {"K": 32, "V": 32, "M": 16}


def test_it_is_the_recurrence() -> None:
    spec = OUTSIDE["gsa"]
    call = make_call(spec, torch.float64, "cpu", sizes=SIZES, tokens=40, batch=2)
    inputs = {name: x.detach() for name, x in call.inputs.items()}
    want, _ = run_recurrence(spec, inputs, {}, call.scalars, None, False, None)
    assert measure(run(call, torch.float64)["o"], want).ratio < 1e-12


def test_its_errors_in_bfloat16() -> None:
    """Two passes: above the bound of one, below twice it."""
    call = make_call(OUTSIDE["gsa"], torch.bfloat16, "cpu", sizes=SIZES, tokens=200, batch=2)
    errors, bounds = bfloat16_errors(call), BOUNDS[torch.bfloat16]
    for name in ("o", "dq", "dk"):
        assert bounds.of(name) < errors[name] < 2 * bounds.of(name), (name, errors[name])

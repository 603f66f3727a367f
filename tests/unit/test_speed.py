"""The chunk form beside the token recurrence, on two cores: how many times faster it is.

Other processes may be busy. The recurrence runs on one core, its operations are too small to share:
its processor time counts. The chunk form uses both: of many runs the quickest counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flexla_dist.spec import LinearAttentionSpec, Values
from flexla_dist.testing.inputs import CallInputs, make_inputs

from .compiled import SPECS, call_op, op_of

TOKENS, HEADS, WIDTH = 8192, 4, 64
FASTER = {
    "linear_attn": 10,
    "linear_attn_normalized": 10,
    "simple_gla": 10,
    "mamba2": 10,
    "gla": 6,
    "kda": 4,
}
PATIENCE = 100.0  # seconds in which a busy machine may show a quiet moment


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def recurrence(spec: LinearAttentionSpec, call: CallInputs) -> Tensor:
    """One token after the other, as short as Python allows."""
    assert spec.recurrence is not None
    steps = {name: x.unbind(1) for name, x in call.inputs.items()}
    p = Values({**call.params, **call.scalars}, "parameter")
    entering = call.initial_state
    if not isinstance(entering, Tensor):
        entering = Values(dict(zip(spec.state_dims, entering, strict=True)), "state")
    outputs = []
    for t in range(TOKENS):
        x = Values({name: values[t] for name, values in steps.items()}, "input")
        entering, out = spec.recurrence(entering, x, p)
        if isinstance(entering, dict):
            entering = Values(entering, "state")
        outputs.append(out)
    return torch.stack(outputs, 1)


def seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FASTER)
def test_times_faster_than_the_token_recurrence(name: str, two_threads: None) -> None:
    spec, op = SPECS[name], op_of(name)
    call = make_inputs(
        spec,
        batch=1,
        tokens=TOKENS,
        heads=HEADS,
        value_heads=HEADS,
        sizes={"K": WIDTH, "V": WIDTH},
        dtype=torch.float32,
        requires_grad=False,
    )
    with torch.no_grad():
        output = call_op(op, call)[0]
        torch.testing.assert_close(output, recurrence(spec, call), rtol=1e-3, atol=1e-3)
        chunks = tokens = float("inf")
        for _ in range(3):
            tokens = min(tokens, seconds(lambda: recurrence(spec, call), time.thread_time))
        begin = time.perf_counter()
        while time.perf_counter() - begin < PATIENCE:
            for _ in range(20):
                chunks = min(chunks, seconds(lambda: call_op(op, call), time.perf_counter))
            if tokens / chunks >= FASTER[name]:
                break
    print(f"{name}: {tokens * 1e3:.0f} ms token by token, {chunks * 1e3:.1f} ms in chunks")
    assert tokens / chunks >= FASTER[name]

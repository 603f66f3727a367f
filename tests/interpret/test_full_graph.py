"""Generated kernels behind the custom ops: segments in full graphs, strides, what is saved."""

import pytest
import torch
from torch import Tensor

from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import CallInputs, make_inputs

SHAPES = {
    "rows": {"batch": 2, "tokens": 40},
    "packed": {"batch": 1, "tokens": 40, "cu_seqlens": torch.tensor([0, 3, 3, 40])},
}


def operator(name: str) -> LinearAttentionOp:
    """An operator whose scans are cut into segments of two chunks of 16 tokens."""
    op = compile(get_variant(name), executor="triton", chunk_size=16)
    op.executor("triton").segment_chunks = 2  # type: ignore[attr-defined]
    return op


def results(run: LinearAttentionOp, call: CallInputs, state: Tensor) -> list[Tensor]:
    """Output, final state and every gradient."""
    leaves = [*call.inputs.values(), state]
    o, final = run(
        **call.inputs,
        **call.scalars,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=call.cu_seqlens,
    )
    grads = torch.autograd.grad((o.square().sum(), final.mT.square().sum()), leaves)
    return [o.detach(), final.detach(), *grads]


@pytest.mark.parametrize(("name", "shape"), [("gla", "packed"), ("gated_delta_rule", "rows")])
def test_full_graph_equals_eager(name: str, shape: str) -> None:
    op = operator(name)
    sizes = {"K": 16, "V": 16}
    spec = get_variant(name)
    call = make_inputs(
        spec, heads=1, value_heads=1, sizes=sizes, dtype=torch.float32, **SHAPES[shape]
    )
    state = call.initial_state
    want = results(op, call, state)
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    odd = state.detach().mT.contiguous().mT.requires_grad_()
    for run, entry in ((op, odd), (compiled, odd)):
        for a, b in zip(results(run, call, entry), want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    torch_results = results(compile(spec, executor="torch", chunk_size=16), call, state)
    for a, b in zip(want, torch_results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bounds", [None, [0, 5, 12, 24]], ids=["rows", "packed"])
def test_chunks_shorter_than_the_longest(bounds: list[int] | None) -> None:
    """What forward keeps of each chunk goes through the graph in a room for the longest chunk."""
    spec = get_variant("gated_delta_rule")
    op = compile(spec, executor="triton", chunk_size=32)
    assert op.executor("triton").kept  # type: ignore[attr-defined]
    shape = {"batch": 1, "heads": 1, "value_heads": 1, "sizes": {"K": 16, "V": 16}}
    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for tokens in (24,) if bounds else (12, 9, 24):
        cu_seqlens = None if bounds is None else torch.tensor(bounds)
        call = make_inputs(spec, dtype=torch.float32, tokens=tokens, cu_seqlens=cu_seqlens, **shape)
        want = results(op, call, call.initial_state)
        for a, b in zip(results(compiled, call, call.initial_state), want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

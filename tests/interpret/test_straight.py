"""Straight code computes what the steps of a plan compute, bit by bit: kernels run in the
interpreter, and a double hands them what a direct launch would get: addresses and numbers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexla_dist.compiler.executor import triton_executor, triton_run
from flexla_dist.compiler.executor.direct import Direct
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.executor.triton_run import Frame, Launch
from flexla_dist.ops.known_calls import KnownCall
from flexla_dist.ops.op import LinearAttentionOp
from flexla_dist.testing.inputs import CallInputs, make_inputs

from ..unit.comparing import run, same, with_gradients
from ..unit.compiled import SPECS, graphs_of

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning", "ignore::DeprecationWarning")
ORDINARY = triton_run.Launch.__call__


Kind = tuple[torch.Size, torch.dtype]


def tensors_at(addresses: Sequence[int], kinds: Sequence[Kind]) -> list[Tensor]:
    """The memory at addresses as tensors; one storage for each address, as the interpreter wants
    it."""
    sizes: dict[int, int] = {}
    for at, (shape, dtype) in zip(addresses, kinds, strict=True):
        sizes[at] = max(sizes.get(at, 0), math.prod(shape) * dtype.itemsize)
    bytes_at = {
        at: torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=torch.uint8)
        for at, size in sizes.items()
    }
    return [
        bytes_at[at][: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for at, (shape, dtype) in zip(addresses, kinds, strict=True)
    ]


class Interpreted(Direct):
    """Double of `Direct`: launches an interpreted kernel on tensors at addresses."""

    def __init__(self, step: Launch, tensors: list[Tensor]) -> None:
        self.function, self.step = step.function, step
        self.kinds = [(x.shape, x.dtype) for x in tensors]
        self.grid, self.front, self.tail = step.grid, ("function",), tuple(step.constants.values())
        self.launch = self.run

    def run(self, columns: int, rows: int, one: int, stream: int, *given: Any) -> None:
        count, constants = len(self.kinds), len(self.tail)
        pointers, numbers = given[1 : 1 + count], given[1 + count : len(given) - constants]
        assert (given[0], one, stream, given[len(given) - constants :]) == (
            "function", 1, 0, self.tail,
        )  # fmt: skip
        found = tensors_at(pointers, self.kinds)
        options = {**self.step.constants, **self.step.options}
        self.function[columns, rows](*found, *numbers, **options)


def launched(step: Launch, frame: Frame) -> None:
    """A launch that is known afterwards."""
    ORDINARY(step, frame)
    if step.again is None:
        step.again = Interpreted(step, [frame.tensor(place) for place in step.places])


@pytest.fixture(autouse=True)
def known_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_run.Launch, "__call__", launched)
    monkeypatch.setattr(triton_executor, "PATIENCE", 1)


def operator(name: str, segment: int | None = None) -> LinearAttentionOp:
    op = LinearAttentionOp(graphs_of(name), "triton", 16)
    executor = op.executor()
    assert isinstance(executor, TritonExecutor)
    executor.segment_chunks = segment
    return op


def the_call(op: LinearAttentionOp) -> KnownCall:
    (found,) = op.known_calls._calls.values()
    return found


def small(name: str, **options: Any) -> CallInputs:
    shape: dict[str, Any] = {"batch": 1, "tokens": 40, "heads": 1, "value_heads": 2} | options
    sizes = {"K": 16, "V": 20, "D": 20, "M": 16}
    return make_inputs(SPECS[name], sizes=sizes, dtype=torch.float32, **shape)


SHAPES: dict[str, tuple[dict[str, Any], int | None]] = {
    "whole": ({"tokens": 20, "batch": 2}, None),
    "segments": ({"tokens": 40}, 1),
    "packed": ({"cu_seqlens": torch.tensor([0, 3, 3, 25, 40])}, 1),
}
QUICK = [
    ("simple_gla", "segments"),
    ("gla", "packed"),
    ("gated_delta_rule", "segments"),
    ("kda", "whole"),
    ("mamba2", "whole"),
    ("gsa", "segments"),
]
LONG = [
    pytest.param(name, shape, marks=pytest.mark.long)
    for name in ("simple_gla", "gla", "gated_delta_rule", "kda", "mamba2", "gsa", "hgrn")
    for shape in SHAPES
    if (name, shape) not in QUICK
]


@pytest.mark.parametrize("name, shape", [*QUICK, *LONG])
def test_straight_code_computes_what_steps_compute(name: str, shape: str) -> None:
    options, segment = SHAPES[shape]
    op, call = operator(name, segment), small(name, **options)
    want = with_gradients(call, lambda: run(op, call))
    known = the_call(op)
    assert known.straight_calls == 0
    for count in (2, 4):
        same(with_gradients(call, lambda: run(op, call)), want)
        assert known.straight_calls == count


def warm(name: str, segment: int | None = None, **options: Any) -> Any:
    """An operator whose next call is straight, a call, and its results."""
    op, call = operator(name, segment), small(name, **options)
    return op, call, with_gradients(call, lambda: run(op, call))


def test_strides_do_not_matter() -> None:
    op, call, want = warm("simple_gla")

    def strided(x: Tensor) -> Tensor:
        turned = x.detach().transpose(1, -1).contiguous().transpose(1, -1)
        return turned.requires_grad_(x.requires_grad)

    inputs = {n: strided(x) for n, x in call.inputs.items()}
    odd = CallInputs(inputs, call.params, call.scalars, call.initial_state, call.cu_seqlens)
    assert not odd.inputs["k"].is_contiguous()
    same(with_gradients(odd, lambda: run(op, odd)), want)
    assert the_call(op).straight_calls == 2


def test_pointers_that_16_does_not_divide() -> None:
    op, call, want = warm("simple_gla")

    def moved(x: Tensor) -> Tensor:
        room = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        return room.copy_(x.detach()).requires_grad_(x.requires_grad)

    inputs = {n: moved(x) for n, x in call.inputs.items()}
    odd = CallInputs(inputs, call.params, call.scalars, call.initial_state, call.cu_seqlens)
    before = the_call(op).ordinary_calls
    same(with_gradients(odd, lambda: run(op, odd)), want)
    assert the_call(op).ordinary_calls == before + 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    op, call, want = warm("simple_gla", 2)
    names = list(call.inputs)

    def again(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(names, tensors, strict=True))
        given = CallInputs(inputs, call.params, call.scalars, call.initial_state)
        return run(op, given)

    tensors = call.inputs.values()
    if reentrant:
        results = checkpoint(again, *tensors, use_reentrant=True)
        same([x.detach() for x in results], want[:2])
    else:
        same(with_gradients(call, lambda: checkpoint(again, *tensors, use_reentrant=False)), want)
        assert the_call(op).straight_calls == 3


def test_autocast_casts_nothing() -> None:
    """Not even where PyTorch operations run between the kernels: a dense M in segments."""
    op, call, want = warm("gated_delta_rule", 1)
    with torch.autocast("cpu", torch.bfloat16):
        same(with_gradients(call, lambda: run(op, call)), want)
    assert the_call(op).straight_calls == 2
    assert the_call(op)._code["forward"].computes


def each(arguments: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same arguments with other tensors."""
    return {n: change(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}


def test_without_an_initial_state_and_without_gradients() -> None:
    op, call = operator("simple_gla", 2), small("simple_gla")
    arguments: dict[str, Any] = {**call.inputs, **call.params, **call.scalars}
    plain = each(arguments, Tensor.detach)
    want, state = op(**plain, output_final_state=True)
    got, left = op(**plain, output_final_state=True)
    same([got, left], [want, state])
    assert the_call(op).straight_calls == 1
    assert not got.requires_grad
    with torch.no_grad():
        same([op(**arguments)[0]], [want])
    other = each(plain, torch.rand_like)
    other["g"] = -other["g"]
    (first, _), _ = op(**other), op(**plain)
    fresh = operator("simple_gla", 2)
    same([first], [fresh(**other)[0]])

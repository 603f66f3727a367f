"""What a call costs on the host: operations of PyTorch and, with --long, microseconds.

Tensors are on the CPU and no kernel is launched: doubles stand for compiled kernels and for their
launches, everything else is the path of a call on a GPU."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.compiler import CompiledKernel

from flexla_dist.compiler.aot import describe_call
from flexla_dist.compiler.executor import direct as directly
from flexla_dist.compiler.executor import launch, packing
from flexla_dist.compiler.executor.tables import device_zeros
from flexla_dist.compiler.executor.triton_executor import TritonExecutor
from flexla_dist.compiler.executor.triton_run import Allocate, Compute, Launch, Place, Release
from flexla_dist.ops import custom_ops
from flexla_dist.ops.op import LinearAttentionOp

from .compiled import graphs_of
from .launch_doubles import NotLaunched, OneCall, replace_launches

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches nothing directly"
)
CPU = torch.device("cpu")


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_launches(monkeypatch)


class Operations(TorchDispatchMode):
    """Names of the operations of PyTorch, views apart, without making a call one operation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.made: list[str] = []
        monkeypatch.setattr(custom_ops, "is_watched", lambda: False)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not op.is_view:
            self.made.append(op.overloadpacket.__name__)
        return op(*args, **(kwargs or {}))


CALLS = {
    "simple_gla": ("simple_gla", 64),
    "simple_gla in segments": ("simple_gla", 4096),
    "gla in segments": ("gla", 4096),
    "gated_delta_rule": ("gated_delta_rule", 64),
}


@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS.keys())
def test_operations_of_a_call(
    arguments: tuple[str, int], no_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is asked for, once for a result and about once a kernel, and nothing else is done."""
    call = OneCall(*arguments)
    for _ in range(3):
        call.both()
    asked = 0
    for direction, run in (("forward", call.forward), ("backward", call.both)):
        with monkeypatch.context() as patched, Operations(patched) as operations:
            run()
        assert not [name for name in operations.made if name != "fill_"]  # poisoned memory
        plan = call.executor.plan_of(direction)
        allocated = sum(isinstance(step, Allocate) for step in plan.steps)
        asked += allocated
        assert len(operations.made) == asked  # filled once each; memory comes without dispatch
        assert allocated <= len(plan.results) + len(plan.launches) + 1


def test_a_plan_is_made_once(no_device: None) -> None:
    call = OneCall("gla", 4096)
    for _ in range(3):
        call.both()
    for direction in ("forward", "backward"):
        steps = call.executor.plan_of(direction).launches
        for step in steps:
            assert step.function.launches == sum(s.function is step.function for s in steps)
            assert step.again.launches == (3 if direction == "forward" else 2)  # type: ignore[union-attr]
    call.arguments["scale"] = 0.25
    call.both()
    launches = call.executor.plan_of("forward").launches
    assert any(0.25 in step.again.arguments for step in launches)  # type: ignore[union-attr]
    call.executor.segment_chunks = 4
    call.both()
    with pytest.raises(ValueError, match="too many values to unpack"):
        call.executor.plan_of("forward")


def test_other_packings_launch_known_kernels(no_device: None) -> None:
    call = OneCall("simple_gla", 256)
    for offsets in ([0, 100, 256], [0, 10, 150, 256], [0, 64, 256]):
        call.arguments["cu_seqlens"] = offsets
        call.both()
    plans = [p for key, p in call.executor._plans.items() if key[0].states[0][0] > 1]
    assert len(plans) == 6
    again = [step.again is not None for plan in plans for step in plan.launches]
    assert all(again)


def test_pointers_that_16_does_not_divide_go_through_the_binder(no_device: None) -> None:
    call = OneCall("simple_gla", 64)
    call.forward()
    q = call.arguments["q"]
    call.arguments["q"] = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    before = [step.function.launches for step in call.executor.plan_of("forward").launches]
    call.forward()
    after = [step.function.launches for step in call.executor.plan_of("forward").launches]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1] * len(before)


def test_whoever_listens_to_launches_hears_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not directly.watched()
    hook = triton.knobs.runtime.launch_enter_hook
    monkeypatch.setattr(hook, "calls", [print])
    assert directly.watched()
    monkeypatch.setattr(hook, "calls", [])
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    assert directly.watched()


def test_memory_is_dropped_after_its_last_reader(
    no_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SLACK", 0)
    call = OneCall("kda", 4096)
    call.both()
    for direction in ("forward", "backward"):
        plan = call.executor.plan_of(direction)
        held: set[int] = set(range(len(plan.given))) | {slot for slot, _ in plan.tables}
        dropped: set[int] = set()
        for step in plan.steps:
            if isinstance(step, Release):
                assert held >= set(step.slots)
                held -= set(step.slots)
                dropped |= set(step.slots)
            elif isinstance(step, Launch):
                assert all(slot in held for slot, _ in step.parts)
            elif isinstance(step, Compute):
                assert all(place.slot in held for place in step.sources)
                held.add(step.slot)
            else:
                held.add(step.slot)  # type: ignore[attr-defined]
        assert held >= set(plan.results) and not dropped & set(plan.results)
        blocks = {s.slot for s in plan.steps if isinstance(s, Allocate)} - set(plan.results)
        if direction == "backward":  # forward is one scan that reads nearly all that there is
            assert blocks & dropped


@pytest.mark.parametrize("name", ["gated_delta_rule", "gla", "kda"])
def test_parts_of_a_block_do_not_overlap(name: str, no_device: None) -> None:
    """Nothing is written where a value lies that is still to be read."""
    call = OneCall(name, 4096)
    call.both()
    for direction in ("forward", "backward"):
        plan = call.executor.plan_of(direction)
        sizes = {s.slot: s.shape[0] * 4 for s in plan.steps if isinstance(s, Allocate)}
        needed: dict[Place, list[int]] = {}
        for at, step in enumerate(plan.launches):
            for place in step.places:
                if place.shape is not None:
                    needed.setdefault(place, []).append(at)
        assert len(needed) >= 2
        for place, events in needed.items():
            assert place.offset % 256 == 0 and end_of(place) <= sizes[place.slot]
            for other, theirs in needed.items():
                apart = events[-1] < theirs[0] or theirs[-1] < events[0]
                beside = end_of(place) <= other.offset or end_of(other) <= place.offset
                assert place is other or place.slot != other.slot or apart or beside


def end_of(place: Place) -> int:
    assert place.dtype is not None and place.shape is not None
    return place.offset + math.prod(place.shape) * place.dtype.itemsize


def test_shared_zeros_stay_zeros(no_device: None) -> None:
    op = LinearAttentionOp(graphs_of("gla"), "torch", None)
    call = OneCall("gla", 40)
    for _ in range(2):
        output, state = op(**call.arguments, output_final_state=True)
        assert isinstance(state, Tensor)
        torch.autograd.grad(output.sum(), call.leaves, allow_unused=True)
        state.detach().add_(1.0)
    assert not device_zeros((1 << 16,), torch.float32, CPU).any()
    with torch.inference_mode():
        assert not device_zeros((3, 5), torch.float32, CPU).is_inference()
    double = device_zeros((2,), torch.float64, CPU)
    assert double.dtype == torch.float64
    assert device_zeros((2,), torch.float64, CPU) is not double


# -- what a direct launch hands to a kernel --------------------------------------------------------


class NamedGpu:
    """A driver that names a GPU and does no more."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def test_direct_launches_are_those_of_the_binder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernel, grid and arguments; compiled for a GPU, whose launcher is a double."""
    calls: list[tuple[Any, ...]] = []

    def load(kernel: CompiledKernel) -> None:
        kernel.module, kernel.function = object(), kernel.name
        kernel._run = lambda *arguments: calls.append(arguments)

    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    monkeypatch.setattr(triton.runtime.driver, "_active", NamedGpu(), raising=False)
    monkeypatch.setattr(launch, "check_sizes", lambda *_: None)
    graphs = graphs_of("linear_attn")
    executor = TritonExecutor(graphs)
    problem = describe_call(graphs, tokens=64, sizes={"K": 16, "V": 16})
    entry = problem.zero_state()
    for _ in range(2):
        executor.forward(problem, entry)
    half = len(calls) // 2
    assert half >= 1 and len(calls) == 2 * half
    for bound, again in zip(calls[:half], calls[half:], strict=True):
        assert again[:3] == bound[:3] and again[4:6] == bound[4:6]  # grid, function, metadata
        assert again[6:9] == (None, None, None)  # nobody listens
        assert len(bound) == len(again)
        for a, b in zip(bound[9:], again[9:], strict=True):
            if isinstance(a, Tensor):
                assert a.data_ptr() == b
            else:
                assert a == b and type(a) is type(b)


def test_a_launcher_without_scratch_is_called_at_once() -> None:
    """What Triton's launcher on CUDA hands to its function in C, without the launcher."""
    launcher = object.__new__(CudaLauncher)
    calls: list[tuple[Any, ...]] = []
    launcher.launch = lambda *arguments: calls.append(arguments)
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, False
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    kernel = SimpleNamespace(run=launcher, function=99, packed_metadata=(4, 1, 1024))
    again = directly.Direct(kernel, (2, 3), (64, True))  # type: ignore[arg-type]
    assert again.launch is launcher.launch
    again(7, [4096, 8192])
    launcher(2, 3, 1, 7, 99, (4, 1, 1024), None, None, None, 4096, 8192, 64, True)
    assert calls[0] == calls[1]
    launcher.global_scratch_size = 128
    assert directly.Direct(kernel, (2, 3), ()).launch is launcher  # type: ignore[arg-type]


def test_what_is_not_compiled_is_not_launched_directly() -> None:
    def constants() -> Mapping[str, Any]:
        raise AssertionError("not asked for")

    assert directly.direct(NotLaunched(), NotLaunched(), (1, 1), constants) is None  # type: ignore[arg-type]
    assert directly.direct(NotLaunched(), None, (1, 1), {}) is None


# -- microseconds ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", ["simple_gla", "gated_delta_rule"])
def test_microseconds_of_a_call(name: str, no_device: None) -> None:
    """Without launches, with poisoned memory; several times what an idle machine takes."""
    call = OneCall(name, 64)
    call.both()
    assert _fastest(call.forward) < 100
    assert _fastest(call.both) < 400


def _fastest(run: Callable[[], Any], rounds: int = 20, calls: int = 20) -> float:
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - begin) / calls)
    return 1e6 * min(found)

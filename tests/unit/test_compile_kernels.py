"""Kernels of every spec compile ahead, without a GPU; `-s` prints what they use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from flexla_dist import assembler
from flexla_dist.compiler import aot
from flexla_dist.compiler.aot import CompiledInfo, CompileTask, compile_ahead, describe_call
from flexla_dist.compiler.aot_pool import CompilePool
from flexla_dist.compiler.executor import launch
from flexla_dist.compiler.executor.triton_executor import Built, TritonExecutor
from flexla_dist.errors import ExecutorError
from flexla_dist.spec.variants import variant_names
from flexla_dist.testing.inputs import make_inputs

from .compiled import DISTINCT, SPECS, graphs_of, op_of

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="compiles; the interpreter does not"
    ),
    pytest.mark.timeout(900),
]
HOPPER, CDNA3 = ("cuda", 90), ("hip", "gfx942")
JOBS = 2
SPILL_LIMIT = 1024  # bytes of stack a thread; more means that a kernel should be cut
PACKAGE = [name for name in DISTINCT if name in variant_names()]
OTHERS = [name for name in DISTINCT if name not in PACKAGE and SPECS[name].log_scaled is None]
PORTABLE = ["simple_gla", "gla", "delta_rule"]


def task(name: str, size: int, tokens: int = 16384) -> CompileTask:
    """A bf16 call that is long enough to be cut into segments."""
    graphs = graphs_of(name)
    sizes = {"K": size, "V": size, "D": 4 * size, "M": size}
    return CompileTask(graphs, describe_call(graphs, tokens=tokens, heads=32, sizes=sizes))


@pytest.fixture(scope="module")
def hopper() -> Iterator[tuple[list[str], CompilePool]]:
    with CompilePool([task(name, 64) for name in PACKAGE], HOPPER, JOBS) as pool:
        yield PACKAGE, pool


@pytest.fixture(scope="module")
def cdna() -> Iterator[tuple[list[str], CompilePool]]:
    with CompilePool([task(name, 32) for name in PORTABLE], CDNA3, JOBS) as pool:
        yield PORTABLE, pool


@pytest.mark.parametrize("name", PACKAGE)
def test_kernels_compile_for_hopper(name: str, hopper: tuple[list[str], CompilePool]) -> None:
    names, pool = hopper
    infos = pool.kernels(names.index(name))
    report(infos)
    assert {info.direction for info in infos} == {"forward", "backward"}
    assert any("scan" in info.kernel for info in infos)
    spilling = {i.kernel: i.stack_bytes for i in infos if (i.stack_bytes or 0) > SPILL_LIMIT}
    assert not spilling, f"bytes of stack: {spilling}"


@pytest.mark.parametrize("name", PORTABLE)
def test_kernels_compile_for_cdna(name: str, cdna: tuple[list[str], CompilePool]) -> None:
    names, pool = cdna
    infos = pool.kernels(names.index(name))
    report(infos)
    assert all(info.regs is None for info in infos)


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_other_specs(name: str) -> None:
    with CompilePool([task(name, 64)], HOPPER, JOBS) as pool:
        report(pool.kernels(0))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PACKAGE if name not in PORTABLE])
def test_other_kernels_for_cdna(name: str) -> None:
    with CompilePool([task(name, 32)], CDNA3, JOBS) as pool:
        report(pool.kernels(0))


@pytest.mark.long
@pytest.mark.parametrize("name", ["simple_gla", "gla", "gated_delta_rule", "kda", "hgrn"])
def test_kernels_of_wide_heads(name: str) -> None:
    with CompilePool([task(name, 128)], HOPPER, JOBS) as pool:
        report(pool.kernels(0))


def report(infos: list[CompiledInfo]) -> None:
    for info in infos:
        print(info)


def test_kernels_made_ahead_are_those_of_a_call(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A call of the same shapes finds every kernel in Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    graphs = graphs_of("gla")
    sizes = {"K": 16, "V": 16}
    made = compile_ahead(
        op_of("gla"), tokens=70, heads=1, value_heads=2, sizes=sizes, cu_seqlens=[0, 0, 70], jobs=2
    )
    found: list[bool] = []
    monkeypatch.setattr(launch, "check_sizes", lambda *_: None)  # tensors of this call are on a CPU
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeDriver(), raising=False)
    monkeypatch.setattr(assembler, "_capability", lambda device: 90)
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit)
    )
    call = make_inputs(
        graphs.spec,
        batch=1,
        tokens=70,
        heads=1,
        value_heads=2,
        sizes=sizes,
        dtype=torch.bfloat16,
        cu_seqlens=torch.tensor([0, 0, 70]),
        requires_grad=False,
    )
    executor = WarmingExecutor(graphs)
    problem = aot.bind(graphs.spec, call.inputs, call.params, call.scalars, call.cu_seqlens)
    entry = problem.entry_state(call.initial_state)
    result = executor.forward(problem, entry)
    executor.backward(problem, result.saved, entry, result.output, entry)
    assert len(made) == len(found) and all(found)


class FakeDriver:
    """A driver that names a GPU and does no more."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Warming:
    """Looks up a kernel as a launch does, without launching."""

    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        self.function = function

    def __getitem__(self, grid):  # type: ignore[no-untyped-def]
        return lambda *a, **k: self.function.run(*a, grid=grid, warmup=True, **k)


class WarmingExecutor(TritonExecutor):
    def built(self, direction: str, uneven: frozenset[str]) -> tuple[Built, ...]:  # type: ignore[override]
        return tuple(
            Built(b.kernel, b.emitted, Warming(b.function))
            for b in TritonExecutor.built(self, direction, uneven)
        )

    def helper(self, direction: str, name: str, subject: str) -> Warming:
        return Warming(TritonExecutor.helper(self, direction, name, subject))


def test_a_smaller_device_gets_smaller_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of("linear_attn")
    call = CompileTask(graphs, describe_call(graphs, tokens=64, sizes={"K": 64, "V": 64}))
    with CompilePool([call], HOPPER, JOBS) as pool:
        largest = max(info.shared_bytes for info in pool.kernels(0))
    monkeypatch.setitem(aot.SHARED_LIMITS, 90, largest - 1)  # type: ignore[misc]
    with CompilePool([call], HOPPER, JOBS) as pool:
        smaller = pool.kernels(0)
    assert max(info.shared_bytes for info in smaller) < largest
    assert min(info.tiles["tile_V"] for info in smaller if "tile_V" in info.tiles) < 64
    monkeypatch.setitem(aot.SHARED_LIMITS, 90, 100)  # type: ignore[misc]
    with (
        CompilePool([call], HOPPER, JOBS) as pool,
        pytest.raises(ExecutorError, match=r"linear_attn: .* bytes of shared memory .* has 100"),
    ):
        pool.kernels(0)


def test_refusals() -> None:
    op = op_of("linear_attn")
    with pytest.raises(ExecutorError, match="dim K is 512"):
        compile_ahead(op, sizes={"K": 512, "V": 64})
    with pytest.raises(ExecutorError, match="float64 inputs need executor='torch'"):
        compile_ahead(op, dtype=torch.float64)
    with pytest.raises(ExecutorError, match="expected forward or backward"):
        compile_ahead(op, directions=("sideways",))


def test_a_kernel_that_does_not_compile_is_named() -> None:
    with pytest.raises(ExecutorError, match=r"linear_attn: linear_attn_scan .* does not compile"):
        compile_ahead(op_of("linear_attn"), tokens=64, target=("cuda", 1))


def test_what_a_task_may_have_beside_its_call_is_named() -> None:
    """Groups of heads and databases of configurations must not be taken for one another."""
    call = task("gla", 16, 64)
    with pytest.raises(TypeError):
        CompileTask(call.graphs, call.problem, ("forward",), ((0, 1),))  # type: ignore[misc]

"""Executors neither copy between host and device nor read numbers back: a CUDA graph of them can
be captured. Tensors without memory (device "meta") stand for a device, kernels are not launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexla_dist.compiler.executor import layout, segments
from flexla_dist.compiler.executor.torch_executor import TorchExecutor

from .compiled import graphs_of

pytest.importorskip("triton")

from flexla_dist.compiler import aot
from flexla_dist.compiler.executor import rooms
from flexla_dist.compiler.executor.tables import Table

META = torch.device("meta")
READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default}
CASES: list[tuple[int, int, Sequence[int] | None]] = [
    (1, 1500, None),
    (3, 1500, None),
    (2, 128, None),
    (1, 1500, (0, 100, 100, 700, 1500)),
]


class Watch(TorchDispatchMode):
    """Notes what would copy to or from the device, or wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.made: list[Tensor] = []  # kept, so that identities are not used twice

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if x.dim() > 0}
        if len(devices) > 1 or op in READS:
            self.found.append(str(op))
        if op in INDEXING:
            known = {id(x) for x in self.made}
            indices = [x for x in args[1] if x is not None]
            if any(id(x) not in known for x in indices):
                self.found.append(f"{op} with a list of Python numbers")
        self.made.extend(x for x in tree_leaves(result) if isinstance(x, Tensor))
        return result

    def table(self, numbers: Sequence[int], device: torch.device, dtype: Any = None) -> Tensor:
        """Stands for a table that is on the device already."""
        table = torch.empty(max(len(numbers), 1), dtype=dtype or torch.int32, device=device)
        self.made.append(table)
        return table

    def stored(self, numbers: Sequence[int], device: torch.device) -> Table:
        """The same, for a launch plan."""
        return Table((tuple(numbers), device, torch.int32), self.table(numbers, device))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    for module in (layout, segments):
        monkeypatch.setattr(module, "device_table", watch.table)
    monkeypatch.setattr(rooms, "found_table", watch.stored)
    return watch


MAKERS: dict[str, Callable[[Any], Any]] = {
    "triton": lambda graphs: aot._RecordingExecutor(graphs),
    "torch": TorchExecutor,
}


@pytest.mark.parametrize("executor", MAKERS)
@pytest.mark.parametrize("name", ["gla", "gated_delta_rule", "linear_attn_normalized", "mlstm"])
def test_nothing_is_copied(
    name: str, executor: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = graphs_of(name)
    if graphs.spec.log_scaled is not None and executor == "triton":
        pytest.skip("log-scaled states run on the torch executor")
    runner = MAKERS[executor](graphs)
    for batch, tokens, offsets in CASES:
        shape = {"batch": batch, "tokens": tokens, "heads": 2, "cu_seqlens": offsets}
        problem = aot.describe_call(graphs, **shape)
        run(runner, problem)  # compiles what is compiled at the first call
        with monkeypatch.context() as patched, watch:
            for function in ("tensor", "as_tensor"):
                patched.setattr(torch, function, refuse)
            run(runner, problem)
        assert watch.found == []


def run(runner: Any, problem: Any) -> None:
    entry = problem.zero_state()
    result = runner.forward(problem, entry)
    runner.backward(problem, result.saved, entry, result.output, result.exit)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("torch.tensor copies from the host")


def test_the_watch_sees(watch: Watch) -> None:
    with watch:
        x = torch.empty(5, device=META)
        x[[0, 2, 3]]
        torch.arange(5).to(META)
        torch.arange(5)[0].item()
    assert len(watch.found) == 3

"""What waits for what on a GPU, seen with streams that only note what they are told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from flexla_dist.comm.engines import DeviceEngine
from flexla_dist.compiler.executor.opened_torch import OpenedTorch
from flexla_dist.compiler.executor.torch_executor import TorchExecutor
from flexla_dist.testing.ranks import run_ranks

from . import device_parallel_cases as cases
from .device_parallel_cases import PRELOAD, Case

CASE = Case("gla", "chain", (20, 17))


class Streams:
    """Stands for CUDA's streams; `log` says who did what in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.main = Stream("main", self.log)

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.main


class Stream:
    """One of them."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"{self.name}"


def noted_run(rank: int, size: int) -> tuple[list[str], Any]:
    streams = Streams()

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "ahead" or kwargs.get("opened") is not None:
                streams.log.append(f"{name} on {streams.current.name}")
            return original(*args, **kwargs)

        return call

    made = DeviceEngine.__post_init__

    def on_gpu(engine: DeviceEngine) -> None:
        made(engine)
        engine._side = Stream("side", streams.log)

    patches = [
        mock.patch.object(DeviceEngine, "__post_init__", on_gpu),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: streams.current),
        mock.patch.object(torch.cuda, "stream", streams.use),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
        mock.patch.object(OpenedTorch, "proceed", noted("ahead", OpenedTorch.proceed)),
    ]
    for name in ("forward", "backward"):
        original = getattr(TorchExecutor, name)
        patches.append(mock.patch.object(TorchExecutor, name, noted("rest", original)))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        values = cases.run_shard(CASE, rank, size)
    return streams.log, values


def test_only_what_needs_the_state_waits_for_the_exchange() -> None:
    ranks = run_ranks(noted_run, 2, preload=PRELOAD)
    assert max(cases.errors(CASE, [values for _, values in ranks]).values()) < cases.BOUND
    start = "side waits for main"
    receives = [start, "ahead on main", "main waits for side", "rest on main"]
    sends = [start, "ahead on main", "rest on main", "main waits for side"]
    first, last = (log for log, _ in ranks)
    assert first == [*sends, *receives], first
    assert last == [*receives, *sends], last

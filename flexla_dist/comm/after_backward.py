"""A check at the end of a backward pass, once however many exchanges were in it."""

from __future__ import annotations

from collections.abc import Callable

import torch


class AfterBackward:
    """Runs `check` when the backward pass that asked for it has ended; what it raises, backward
    raises.

    paused: it does nothing, and the caller checks.
    """

    paused = False

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._queued = -1

    def ask(self) -> None:
        """Called inside of a backward pass."""
        task = torch._C._current_graph_task_id()
        if task != self._queued and not self.paused:
            self._queued = task
            torch.autograd.Variable._execution_engine.queue_callback(self._check)

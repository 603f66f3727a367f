"""What calls of an operator ran, in words.

Contract: plain data, set when a direction is run; nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flexla_dist.compiler.executor.problem import Problem


@dataclass(frozen=True)
class Plan:
    """What a call ran: executor, chunk size, chunks, documents, and the plan of its kernels:
    "fused" or "unfused"; "batched" where PyTorch operations run."""

    executor: str
    chunk_size: int
    num_chunks: int
    num_sequences: int
    kernels: str = "batched"


def plan_of(
    executor: Any, problem: Problem, direction: Literal["forward", "backward"] = "forward"
) -> Plan:
    """The plan of one direction of a call on an executor."""
    layout = problem.layout
    return Plan(
        executor.name,
        layout.chunk_size,
        len(layout.chunks),
        problem.num_sequences,
        executor.plan if direction == "forward" else executor.backward_plan,
    )


@dataclass
class Ran:
    """The backward pass that an operator ran last; shared with the nodes of its calls."""

    backward: Plan | None = None

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
    "fused" or "unfused"; "batched" where PyTorch operations run.

    `configurations` are kernels by name with where their tiles, warps and stages are from: "tuned"
    (measured), "nearest bucket" (measured for calls of nearly this size) or "estimate", with the
    reason where a measured one could not be used."""

    executor: str
    chunk_size: int
    num_chunks: int
    num_sequences: int
    kernels: str = "batched"
    configurations: tuple[tuple[str, str], ...] = ()


def plan_of(
    executor: Any, problem: Problem, direction: Literal["forward", "backward"] = "forward"
) -> Plan:
    """The plan of one direction of a call on an executor."""
    layout = problem.layout
    configurations = executor.configurations(problem, direction)
    return Plan(
        executor.name,
        layout.chunk_size,
        len(layout.chunks),
        problem.num_sequences,
        executor.plan if direction == "forward" else executor.backward_plan,
        tuple((name, str(choice)) for name, choice in configurations.items()),
    )


@dataclass
class Ran:
    """The backward pass that an operator ran last; shared with the nodes of its calls."""

    backward: Plan | None = None

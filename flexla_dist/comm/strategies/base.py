"""The interface of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flexla_dist.comm.channel import Channel
from flexla_dist.comm.element import Element, State, zero_state
from flexla_dist.comm.links import Line
from flexla_dist.comm.tag import Tag


@dataclass(frozen=True)
class ScanProblem:
    """One exclusive scan as one rank sees it.

    element: of this rank's span; template: tensors of the state's shapes and dtypes; line: the
    connected ranks in scan order, this one included; nodes: node number of every group rank.
    """

    element: Element
    template: State
    line: Line
    nodes: tuple[int, ...]
    channel: Channel
    tag: Tag

    def zero(self) -> State:
        """The state before any token."""
        return zero_state(self.element, self.template)


class Strategy(Protocol):
    """An exclusive scan over the ranks of a line.

    collective: every rank of the group takes part as soon as any cut is crossed; otherwise a rank
    without neighbours in its line is left out.
    """

    name: str
    collective: bool

    def scan(self, problem: ScanProblem) -> State:
        """The state that enters this rank's span."""
        ...

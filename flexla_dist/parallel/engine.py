"""What carries the states of a site's calls from rank to rank, and why.

Contract: which engine it is follows from the wish of the caller, from the operator, from dtype and
device, which the ranks have compared, and from what they told each other of their machines. So all
ranks choose alike. "auto" takes the device engine for plain fp32 states on GPUs that share a
symmetric heap, and says why where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch

from flexla_dist.comm.chooser.choose import Choice
from flexla_dist.comm.chooser.links import DEVICE, HOST
from flexla_dist.comm.device.panels import LARGEST_DENSE
from flexla_dist.comm.element import State
from flexla_dist.comm.engines import Arriving, DeviceEngine
from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.open_engine import EngineRefused
from flexla_dist.comm.tag import Tag
from flexla_dist.errors import ShardingError
from flexla_dist.parallel.outgoing import Outgoing
from flexla_dist.parallel.runtime import GroupRuntime
from flexla_dist.shapes import nearest

if TYPE_CHECKING:
    from flexla_dist.comm.device_exchange import Span

BACKENDS = ("auto", "host", "device")
Groups = tuple[tuple[int, int], ...]  # the first head of each group, and how many it has
HeadGroups = int | tuple[int, ...] | None


@dataclass(frozen=True)
class ExchangePlan:
    """How the states of a sharded layer's last call crossed the ranks.

    engine: "host" or "device". strategy: the way. heap: the symmetric memory, "none" for the host
    engine. microseconds: predicted by the cost model, None where it was not asked. reason: why
    this engine, and this strategy.
    """

    engine: str
    strategy: str
    heap: str
    microseconds: float | None
    reason: str

    def __str__(self) -> str:
        time = "not predicted" if self.microseconds is None else f"{self.microseconds:.3g} us"
        over = f" over {self.heap}" if self.engine == DEVICE else ""
        return f"{self.engine} engine{over}, {self.strategy}, {time}: {self.reason}"


class Carrier(Protocol):
    """Carries states over the ranks of a group; all of them make the same calls."""

    plan: ExchangePlan | None

    def groups(self, problem: Any) -> Groups:
        """The groups of heads in which the states of such a call travel."""

    def begin(
        self,
        leaving: Outgoing,
        crossing: Sequence[bool],
        tag: Tag,
        template: State,
        groups: Groups,
        reverse: bool,
    ) -> Arriving:
        """Start a scan; see `StateExchanger.prefix`, and `suffix` for the reversed one."""

    def check_after_backward(self) -> None:
        """Called in a backward pass: at its end every rank raises what went wrong on one."""

    def no_backward_follows(self) -> None:
        """Called after a forward pass of which no rank wants a gradient."""


@dataclass
class HostCarrier:
    """The host engine: torch.distributed moves the states, and the caller waits for them."""

    exchanger: StateExchanger
    reason: str
    plan: ExchangePlan | None = None

    def groups(self, problem: Any) -> Groups:
        """All heads at once."""
        return ((0, problem.heads),)

    def begin(
        self,
        leaving: Outgoing,
        crossing: Sequence[bool],
        tag: Tag,
        template: State,
        groups: Groups,
        reverse: bool,
    ) -> Arriving:
        """See `Carrier`."""
        scan = self.exchanger.suffix if reverse else self.exchanger.prefix
        found = scan(leaving.element(), crossing, tag, template)
        self.plan = self._plan()
        return Arriving(found)

    def check_after_backward(self) -> None:
        """See `Carrier`; nothing over gloo, where a wait that expires raises where it is."""
        self.exchanger.check_after_backward()

    def no_backward_follows(self) -> None:
        """See `Carrier`: the end of the sequence_context checks, or the caller."""
        self.exchanger.no_backward_follows()

    def _plan(self) -> ExchangePlan:
        choice = self.exchanger.last_choice
        if choice is None:
            strategy = self.exchanger.strategy
            return ExchangePlan(HOST, strategy, "none", None, f"{self.reason}; {strategy} is asked")
        return _plan_of(choice, HOST, "none", self.reason)


@dataclass
class DeviceCarrier:
    """The device engine: kernels compute, put, signal and wait in symmetric memory."""

    engine: DeviceEngine
    exchanger: StateExchanger
    strategy: str
    reason: str
    wanted: HeadGroups = None
    plan: ExchangePlan | None = None
    _choice: Choice | None = None

    def groups(self, problem: Any) -> Groups:
        """Those that are asked for, or all heads at once."""
        return cut_heads(1 if self.wanted is None else self.wanted, problem.heads)

    def begin(
        self,
        leaving: Outgoing,
        crossing: Sequence[bool],
        tag: Tag,
        template: State,
        groups: Groups,
        reverse: bool,
    ) -> Arriving:
        """See `Carrier`: the exchange of a group of heads starts as soon as these are summed up."""
        arriving: Arriving | None = None
        for number, heads in enumerate(groups):
            leaving.summarise(number)
            span = leaving.span()
            choice = self._chosen(span, template)
            survey = self.exchanger.heap_survey(self.engine.heap.device, self.engine.heap.name)
            arriving = self.engine.begin(
                span,
                crossing,
                tag,
                choice.strategy,
                survey.topology.runs,
                reverse=reverse,
                heads=heads,
                earlier=arriving,
            )
        assert arriving is not None
        return arriving

    def _chosen(self, span: Span, template: State) -> Choice:
        choice = self.engine.choice(self.exchanger, span, template, self.strategy)
        if choice is not self._choice:
            self._choice = choice
            self.plan = _plan_of(choice, DEVICE, self.engine.heap.name, self.reason)
        return choice

    def check_after_backward(self) -> None:
        """See `Carrier`."""
        self.engine.check_after_backward()

    def no_backward_follows(self) -> None:
        """See `Carrier`: the end of the sequence_context checks, or the caller."""
        if not self.engine.capturing():
            self.engine.no_backward = True


def _plan_of(choice: Choice, engine: str, heap: str, reason: str) -> ExchangePlan:
    time = choice.seconds * 1e6 if choice.table else None
    return ExchangePlan(engine, choice.strategy, heap, time, f"{reason}; {choice.reason}")


def check_backend(backend: str) -> None:
    """ShardingError for an unknown backend."""
    if backend not in BACKENDS:
        raise ShardingError(
            f"backend is {backend!r}{nearest(backend, BACKENDS)}, expected one of: "
            f"{', '.join(BACKENDS)}"
        )


def check_groups(groups: HeadGroups) -> None:
    """ShardingError for what cannot be groups of heads."""
    if groups is None:
        return
    counts = groups if isinstance(groups, tuple) else (groups,)
    if not counts or not all(isinstance(count, int) and count >= 1 for count in counts):
        raise ShardingError(
            f"groups is {groups!r}; expected None, how many groups of heads there are, or a tuple "
            "of the heads in each"
        )


def cut_heads(groups: int | tuple[int, ...], heads: int) -> Groups:
    """(first, count) of every group: `groups` of them, equal as far as they can be, or of those
    sizes. ShardingError where they are not groups of `heads` heads."""
    check_groups(groups)
    if isinstance(groups, int):
        most = min(groups, heads)
        counts = [heads * (at + 1) // most - heads * at // most for at in range(most)]
    else:
        counts = list(groups)
    if sum(counts) != heads:
        raise ShardingError(
            f"groups of {counts} heads are {sum(counts)} together; expected the {heads} of a state"
        )
    ends = list(accumulate(counts))
    return tuple((end - count, count) for end, count in zip(ends, counts, strict=True))


def choose_carrier(
    runtime: GroupRuntime,
    exchanger: StateExchanger,
    backend: str,
    op: Any,
    problem: Any,
    groups: HeadGroups = None,
) -> Carrier:
    """The carrier for an operator's states; collective where it asks for the device engine.

    exchanger: the group's, with the strategy and nodes of the site. problem: a bound call. groups:
    of heads, as asked for, see `cut_heads`.
    EngineRefused, on every rank, if backend="device" cannot be had.
    """
    if backend == HOST:
        return HostCarrier(exchanger, "backend='host' is asked")
    device: torch.device = problem.device
    if backend == "auto" and device.type != "cuda":
        return HostCarrier(exchanger, f"the tensors are on {device.type}")
    unfit = _unfit(op, problem)
    engine = None if unfit else runtime.device_engine(device)
    if isinstance(engine, DeviceEngine):
        why = "backend='device' is asked" if backend == DEVICE else "plain states on GPUs"
        return DeviceCarrier(engine, exchanger, exchanger.strategy, why, groups)
    if engine is not None:
        unfit = str(engine)
    if backend == DEVICE:
        raise EngineRefused(f"{op.spec.name}: backend='device' cannot be had: {unfit}")
    return HostCarrier(exchanger, f"no device engine: {unfit}")


def _unfit(op: Any, problem: Any) -> str:
    """Why kernels do not exchange an operator's states, "" if they do."""
    if op.spec.log_scaled is not None:
        return (
            "its states are log-scaled (they carry a scale m), and kernels exchange plain affine "
            "states only: use backend='host' or 'auto'"
        )
    if problem.compute_dtype != torch.float32:
        return (
            f"its states are {problem.compute_dtype}, and kernels exchange float32 states: give "
            "inputs of at most 32 bits, or use backend='host' or 'auto'"
        )
    for name, transition in op.graphs.transitions.items():
        dims = problem.state_shape(name, 1)[2:]
        if len(dims) > 2:
            return f"state {name} has {len(dims)} dims, and kernels exchange one or two"
        if transition.has_matrix and dims[0] > LARGEST_DENSE:
            return (
                f"state {name} has a dense M of {dims[0]} rows, and kernels hold at most "
                f"{LARGEST_DENSE}: use backend='host' or 'auto'"
            )
    return ""

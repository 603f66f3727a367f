"""`StateExchanger`: everything that crosses ranks, over torch.distributed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.comm import agreement, transfer
from flexla_dist.comm.after_backward import AfterBackward
from flexla_dist.comm.channel import Channel
from flexla_dist.comm.chooser.choose import AUTO, Choice
from flexla_dist.comm.chooser.links import HOST
from flexla_dist.comm.chooser.measure import HostTransport
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.survey import Survey, survey_group
from flexla_dist.comm.element import Element, State, state_bytes, zero_state
from flexla_dist.comm.links import (
    GroupRanks,
    Line,
    host_name,
    node_runs,
    nodes_of_ids,
    nodes_of_size,
)
from flexla_dist.comm.lookout import Lookout
from flexla_dist.comm.strategies import STRATEGIES, ScanProblem, check_strategy
from flexla_dist.comm.tag import Tag
from flexla_dist.comm.transfer import TransferPlan
from flexla_dist.comm.watch import Watch

FEW_RANKS = 4


class StateExchanger:
    """Exchanges of one rank with the others of its sequence group.

    group: the process group whose rank order is the order of the shards (None: the default group).
    strategy: "auto", "chain", "log_scan", "hierarchical" or "all_gather".
    node_size, node_ids: consecutive ranks per node, or one id per group rank; without either the
        host names are gathered once, when a strategy needs them.
    timeout: seconds a rank waits for a peer at most.

    Every method but `guard` and `flush` is called by all ranks of the group in the same order, with
    the same tag. Use one exchanger per group: the order of operations is checked within it.
    Raises ExchangeTimeout, RemoteRankError, RankMismatch, TagMismatch; after one of them from a
    wait the group is unusable. Nothing here is recorded by autograd.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        strategy: str = "auto",
        *,
        node_size: int | None = None,
        node_ids: Sequence[int | str] | None = None,
        timeout: float = 60.0,
    ) -> None:
        check_strategy(strategy)
        self.ranks = GroupRanks.of(group)
        self.strategy = strategy
        self.last_choice: Choice | None = None
        self._nodes = self._given_nodes(node_size, node_ids)
        self._layout = _in_words(self._nodes, strategy)
        self._watch = Watch(self.ranks, timeout)
        self._channel = Channel(self.ranks, self._watch)
        self.after_backward = AfterBackward(self._channel.works.check)
        self._surveys: dict[tuple[str, tuple[int, ...] | None, str | None], Survey] = {}

    def using(self, strategy: str, *, node_size: int | None = None) -> StateExchanger:
        """The same exchanger, order of operations included, with another strategy for its scans."""
        check_strategy(strategy)
        other = copy.copy(self)
        other.strategy, other.last_choice = strategy, None
        given = None if node_size is None else nodes_of_size(self.size, node_size)
        other._nodes = self._nodes if given is None else given
        other._layout = _in_words(given, strategy)
        return other

    def set_timeout(self, seconds: float) -> None:
        """Seconds a rank waits for a peer at most, from now on."""
        self._watch.set_timeout(seconds)

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks of the group."""
        return self.ranks.size

    def prefix(
        self, element: Element, crossing: Sequence[bool], tag: Tag, template: State
    ) -> State:
        """The state that enters this rank's shard from the ranks before it.

        element: this shard's (M, local), of the same structure and shapes on all ranks.
        crossing: [P - 1], whether a document crosses the cut after each rank; same on all ranks.
        template: tensors of the shapes, dtypes and device of the state (m last if log-scaled).
        Returns zeros (m = -inf) where nothing enters.
        """
        return self._scan("prefix", element, crossing, tag, template, reverse=False)

    def suffix(
        self, element: Element, crossing: Sequence[bool], tag: Tag, template: State
    ) -> State:
        """The gradient that enters this rank's shard from the ranks after it.

        As `prefix` in reversed rank order: element holds M transposed and the gradient that leaves
        the shard's start when none enters its end; its reset means that a document ends inside.
        """
        return self._scan("suffix", element, crossing, tag, template, reverse=True)

    @torch.no_grad()
    def transfer(self, rows: Tensor, plan: TransferPlan, tag: Tag, dim: int = 1) -> Tensor:
        """The `plan.width` rows before this shard along `dim`; zero where the plan moves nothing.

        rows: this rank's shard. See `plan_tails` for the plan.
        """
        self._check_rows(rows.shape[dim], plan.lengths, "transfer")
        self._watch.begin(f"transfer of {plan.width} rows{_without(rows, dim)} ({tag})")
        return transfer.transfer(self._channel, rows, plan, tag, dim)

    @torch.no_grad()
    def transfer_adjoint(
        self, grad_halo: Tensor, plan: TransferPlan, tag: Tag, dim: int = 1
    ) -> Tensor:
        """Gradient of the rows of this shard from the halo gradients of all ranks (its adjoint)."""
        shape = _without(grad_halo, dim)
        self._watch.begin(f"transfer_adjoint of {plan.width} rows{shape} ({tag})")
        return transfer.transfer_adjoint(self._channel, grad_halo, plan, tag, dim)

    def agree(
        self, name: str, values: Sequence[int | str], fields: Sequence[str] | None = None
    ) -> None:
        """Raise RankMismatch on every rank, naming ranks and values, unless all are equal."""
        names = fields or [""] * len(values)
        said = ", ".join(f"{f} {v}".strip() for f, v in zip(names, values, strict=True))
        self._watch.begin(f"agree({name}: {said})")
        agreement.agree(self._channel, name, values, fields)

    def gather_integers(
        self, name: str, values: Sequence[int], *, hint: str = ""
    ) -> list[list[int]]:
        """The integers of every rank, in rank order; each rank gives the same number of them.

        hint: what this rank adds to the message if other ranks turn out to do something else.
        """
        self._watch.begin(f"gather_integers({name}, {len(values)} values)", hint)
        return agreement.gather_integers(self._channel, f"gather_integers({name})", values)

    def gather_texts(self, name: str, text: str) -> list[str]:
        """The text of every rank, in rank order."""
        self._watch.begin(f"gather_texts({name})")
        return agreement.gather_texts(self._channel, f"gather_texts({name})", text)

    def all_reduce_max(self, name: str, values: Sequence[int]) -> list[int]:
        """Entry by entry the largest value of all ranks."""
        return [max(column) for column in zip(*self.gather_integers(name, values), strict=True)]

    @torch.no_grad()
    def gather_rows(self, rows: Tensor, lengths: Sequence[int], tag: Tag, dim: int = 1) -> Tensor:
        """The shards of all ranks, `lengths` rows each, joined along `dim` on every rank."""
        self._check_rows(rows.shape[dim], lengths, "gather_rows")
        self._watch.begin(f"gather_rows of {sum(lengths)} rows ({tag})")
        return transfer.gather_rows(self._channel, rows, lengths, tag, dim)

    @torch.no_grad()
    def broadcast(self, tensors: State, source: int, tag: Tag) -> State:
        """The tensors of group rank `source`; elsewhere `tensors` give the shapes and dtypes."""
        self._watch.begin(f"broadcast from rank {source} ({tag})")
        return transfer.broadcast(self._channel, tensors, source, tag)

    @torch.no_grad()
    def all_reduce_sum(self, tensor: Tensor, tag: Tag) -> Tensor:
        """Sum over all ranks, the same bits on each: gathered, then added in rank order."""
        self._watch.begin(f"all_reduce_sum ({tag})")
        return transfer.all_reduce_sum(self._channel, tensor, tag)

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Context in which an exception is told to the group: ranks that wait raise as well."""
        return self._watch.guard(what)

    def flush(self) -> None:
        """Wait until all that this rank sent has been received.

        A rank that leaves (`destroy_process_group`, end of the program) right after an exchange
        calls this first; any collective that follows on all ranks does as well.
        """
        self._channel.flush()

    def check(self, *, ask: bool = False) -> None:
        """Raise what went wrong in this rank's exchanges that the device does by itself, NCCL's;
        returns once it has all that it waits for.

        ask: also for failures that other ranks told of, which costs a short request.
        """
        self._channel.works.check()
        if ask:
            self._watch.raise_error()
            self._watch.raise_remote_failure()

    def check_without_backward(self) -> None:
        """`check` if `no_backward_follows` was called since the last one."""
        if self._channel.works.no_backward:
            self.check()

    def check_after_backward(self) -> None:
        """Called in a backward pass: `check` at its end."""
        if self._channel.works.active:
            self.after_backward.ask()

    def no_backward_follows(self) -> None:
        """Called after exchanges that no backward pass follows."""
        self._channel.works.no_backward = self._channel.works.active

    def lookout(self) -> Lookout:
        """Looks after the group's ranks while this one's device waits; collective at first."""
        if self._channel.works.lookout is None:
            self._watch.begin("look after the ranks")
        return agreement.look_after(self._channel)

    def resolve(self, element: Element, template: State) -> str:
        """The strategy that a scan of such elements uses.

        "auto" takes the cheapest by the cost model, which needs the group's `survey`; up to 4 ranks
        it is chain, at most three hops of one state, and nothing is asked. The choice rests on
        measured links, which are kept on disk: force a strategy for the same bits on any machine.
        """
        if self.strategy != AUTO:
            return self.strategy
        if self.size <= FEW_RANKS:
            why = f"{self.size} ranks: at most {FEW_RANKS - 1} hops of one state"
            self.last_choice = Choice("chain", HOST, 0.0, why)
        else:
            survey = self._survey(template[0].device)
            self.last_choice = survey.choose(Payload.of_element(element, template))
        return self.last_choice.strategy

    @torch.no_grad()
    def survey(self, device: torch.device, *, measure: bool = True, fresh: bool = False) -> Survey:
        """Topology, links and rates of the group for states on `device`; collective.

        measure: time the links that no earlier run on these hosts timed, in about a second; fresh:
        time all of them again.
        """
        self._watch.begin(f"survey of the group for {device.type}{' again' * fresh}")
        return self._survey(device, measure, fresh)

    def heap_survey(self, device: torch.device, heap: str) -> Survey:
        """What the device engine goes by, over a symmetric heap of this name; collective at its
        first call. Nothing is timed: links and rates are kept ones, else assumed."""
        key = (device.type, self._nodes, heap)
        if key not in self._surveys:
            self._watch.begin(f"survey of the group for kernels over {heap}")
        return self._survey(device, measure=False, heap=heap)

    def _survey(
        self,
        device: torch.device,
        measure: bool = True,
        fresh: bool = False,
        heap: str | None = None,
    ) -> Survey:
        key = (device.type, self._nodes, heap)
        if key not in self._surveys or fresh:
            carrier = heap or self.ranks.carrier_for(device)
            if measure:
                agreement.open_messages(self._channel, device)
            self._surveys[key] = survey_group(
                self.rank,
                partial(agreement.gather_texts, self._channel),
                HostTransport(self._channel, device, carrier),
                device,
                nodes=self._nodes,
                measure=measure,
                fresh=fresh,
            )
        return self._surveys[key]

    @torch.no_grad()
    def _scan(
        self,
        what: str,
        element: Element,
        crossing: Sequence[bool],
        tag: Tag,
        template: State,
        reverse: bool,
    ) -> State:
        self._check_scan(element, crossing, template)
        size = state_bytes(template)
        self._watch.begin(f"{what} by {self.strategy} of {size} bytes{self._layout} ({tag})")
        if not any(crossing):
            return zero_state(element, template)
        strategy = STRATEGIES[self.resolve(element, template)]
        agreement.open_messages(self._channel, template[0].device)
        line = Line.around(self.rank, crossing, reverse)
        nodes = self._node_numbers() if strategy.name == "hierarchical" else ()
        if len(line.ranks) == 1 and not strategy.collective:
            return zero_state(element, template)
        return strategy.scan(ScanProblem(element, template, line, nodes, self._channel, tag))

    def _check_scan(self, element: Element, crossing: Sequence[bool], template: State) -> None:
        if len(crossing) != self.size - 1:
            raise ValueError(
                f"crossing has {len(crossing)} entries, expected {self.size - 1}, one for every "
                f"cut between the {self.size} ranks of the group"
            )
        expected = [tuple(s.local.shape) for s in element.states]
        if element.log_weight is not None:
            expected.append(tuple(element.log_weight.shape))
        got = [tuple(t.shape) for t in template]
        if got != expected:
            raise ValueError(
                f"template has shapes {got}, expected {expected}, those of the element's states"
                + (" and of its log scale" if element.log_scaled else "")
            )

    def _check_rows(self, rows: int, lengths: Sequence[int], what: str) -> None:
        if len(lengths) != self.size or rows != lengths[self.rank]:
            raise ValueError(
                f"{what}: this rank holds {rows} rows, and the lengths are {tuple(lengths)} for "
                f"{self.size} ranks; expected entry {self.rank} to be {rows}"
            )

    def _given_nodes(
        self, node_size: int | None, node_ids: Sequence[int | str] | None
    ) -> tuple[int, ...] | None:
        if node_size is not None and node_ids is not None:
            raise ValueError("give node_size or node_ids, not both")
        if node_size is not None:
            return nodes_of_size(self.size, node_size)
        if node_ids is None:
            return None
        if len(node_ids) != self.size:
            raise ValueError(f"node_ids has {len(node_ids)} entries for {self.size} ranks")
        return nodes_of_ids(node_ids)

    def _node_numbers(self) -> tuple[int, ...]:
        """Node of every rank; gathers host names the first time, if none were given."""
        if self._nodes is None:
            names = agreement.gather_texts(self._channel, "gathering of host names", host_name())
            self._nodes = nodes_of_ids(names)
        return self._nodes


def _in_words(nodes: Sequence[int] | None, strategy: str) -> str:
    """Nodes that were given, where they decide who sends to whom."""
    if nodes is None or strategy not in ("auto", "hierarchical"):
        return ""
    return f" on nodes of {node_runs(nodes)} ranks"


def _without(rows: Tensor, dim: int) -> str:
    """Shape of rows beside the dim they are counted in, for the desynchronisation message."""
    rest = list(rows.shape)
    del rest[dim]
    return f" of {rest}"

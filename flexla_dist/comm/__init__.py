"""Exchange of states, gradients and boundary rows between the ranks of a sequence group."""

from __future__ import annotations

from flexla_dist.comm.chooser.choose import Choice, choose
from flexla_dist.comm.chooser.payload import Payload
from flexla_dist.comm.chooser.survey import Survey
from flexla_dist.comm.element import (
    Element,
    State,
    StateElement,
    after_reset,
    apply,
    combine,
    element_bytes,
    identity_like,
    state_bytes,
    zero_state,
)
from flexla_dist.comm.errors import (
    ExchangeError,
    ExchangeTimeout,
    RankMismatch,
    RemoteRankError,
    TagMismatch,
)
from flexla_dist.comm.exchange import StateExchanger
from flexla_dist.comm.links import GroupRanks, Line, node_runs, nodes_of_ids, nodes_of_size
from flexla_dist.comm.tag import Tag
from flexla_dist.comm.topology import Topology
from flexla_dist.comm.transfer import Piece, TransferPlan, plan_tails

__all__ = [
    "Choice",
    "Element",
    "ExchangeError",
    "ExchangeTimeout",
    "GroupRanks",
    "Line",
    "Payload",
    "Piece",
    "RankMismatch",
    "RemoteRankError",
    "State",
    "StateElement",
    "StateExchanger",
    "Survey",
    "Tag",
    "TagMismatch",
    "Topology",
    "TransferPlan",
    "after_reset",
    "apply",
    "choose",
    "combine",
    "element_bytes",
    "identity_like",
    "node_runs",
    "nodes_of_ids",
    "nodes_of_size",
    "plan_tails",
    "state_bytes",
    "zero_state",
]

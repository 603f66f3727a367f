"""What ranks tell each other through the group's store: failures, and where they wait."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass

import torch.distributed as dist

from flexla_dist.comm.errors import ExchangeError, RankMismatch, RemoteRankError
from flexla_dist.comm.links import GroupRanks

_FAILURE_KEY = "failure"
_TEXT_LIMIT = 4000
_NO_ENTRY = ""


@dataclass(frozen=True)
class Failure:
    """The first failure of a group: which rank, doing what, and its error."""

    rank: int
    kind: str
    what: str
    text: str

    def as_error(self, ranks: GroupRanks) -> ExchangeError:
        """The exception that every other rank raises."""
        if self.kind == RankMismatch.__name__:
            return RankMismatch(self.text)
        where = f" in {self.what}" if self.what else ""
        return RemoteRankError(f"{ranks.name(self.rank)} failed{where}: {self.kind}: {self.text}")


class FailureBoard:
    """The keys of one group in its store; every call is one short request, none of them waits."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks
        self._store = dist.PrefixStore("flexla_dist", ranks.group.get_group_store())

    def publish(self, error: BaseException, what: str) -> None:
        """Tell the group that this rank failed; the first failure of a group stays."""
        text = str(error) or "".join(traceback.format_exception_only(error)).strip()
        entry = {
            "rank": self._ranks.rank,
            "kind": type(error).__name__,
            "what": what,
            "text": text[:_TEXT_LIMIT],
        }
        self._store.compare_set(_FAILURE_KEY, _NO_ENTRY, json.dumps(entry))

    def failure(self) -> Failure | None:
        """The failure that some rank published, if any."""
        if not self._store.check([_FAILURE_KEY]):
            return None
        return Failure(**json.loads(self._store.get(_FAILURE_KEY)))

    def publish_progress(self, history: dict[int, tuple[str, str]]) -> None:
        """Say which operations this rank did last, each with its hint; in the last one it waits."""
        self._store.set(f"progress/{self._ranks.rank}", json.dumps(list(history.items())))

    def progress_of(self, rank: int) -> dict[int, tuple[str, str]]:
        """The operations that `rank` published, empty if it does not wait."""
        key = f"progress/{rank}"
        if not self._store.check([key]):
            return {}
        entries = json.loads(self._store.get(key))
        return {int(number): (text, hint) for number, (text, hint) in entries}

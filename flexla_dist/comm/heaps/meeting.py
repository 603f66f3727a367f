"""Where the ranks of a group meet for a heap: small texts through the group's store.

Contract: every wait is bounded, ends early if a rank published a failure or has ended, and never
leaves a rank behind: what one rank cannot do, or asks for differently, every rank raises. The store
serves groups of every backend, and ranks that share one GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from flexla_dist.comm.errors import ExchangeTimeout, RemoteRankError
from flexla_dist.comm.heaps.errors import HeapError, HeapMismatch
from flexla_dist.comm.heaps.place import Place
from flexla_dist.comm.links import GroupRanks
from flexla_dist.comm.watch import Watch

LOOK_SECONDS = 0.25
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0001, 0.02
_TEXT_LIMIT = 300


class Meeting:
    """The meetings of one rank for one heap; every rank of the group makes it at the same place.

    ranks: the group; timeout: seconds that a rank waits for the others at most.
    """

    def __init__(self, ranks: GroupRanks, timeout: float = 60.0) -> None:
        self.ranks = ranks
        self.timeout = timeout
        self._watch = Watch(ranks, timeout)
        self._number = 0
        self._lost = False
        self._places: tuple[Place, ...] = ()
        root = dist.PrefixStore("flexla_dist/heaps", ranks.group.get_group_store())
        # Counted in the store, by rank: heaps that are made at the same place share a number.
        heap = root.add(f"made by {ranks.rank}", 1)
        self._store = dist.PrefixStore(f"heap {heap}", root)
        places = self.gather("make a heap", Place.here().as_fields())
        self._places = tuple(Place(**place) for place in places)

    @property
    def places(self) -> tuple[Place, ...]:
        """The processes of all ranks."""
        return self._places

    @property
    def failed(self) -> bool:
        """Whether this rank has seen a failure of the group or lost its store."""
        return self._lost or self._watch.failed

    def gather(self, what: str, value: Any) -> list[Any]:
        """What every rank says in `what`, in rank order; values are what JSON can hold.

        Raises HeapMismatch on every rank if they are in different operations, ExchangeTimeout or
        RemoteRankError if one does not come.
        """
        self._watch.begin(f"heap: {what}")
        self._number += 1
        own = json.dumps({"what": what, "value": value})
        self._request(partial(self._store.set, self._key(self.ranks.rank), own))
        keys = [self._key(rank) for rank in range(self.ranks.size)]
        self._wait(keys, what)
        texts = [self._request(partial(self._store.get, key)) for key in keys]
        self._forget()
        said = [json.loads(text) for text in texts]
        if any(entry["what"] != what for entry in said):
            self._differ("ranks use a heap differently", [entry["what"] for entry in said])
        return [entry["value"] for entry in said]

    def agree(self, what: str, value: Any) -> None:
        """Raise HeapMismatch on every rank unless all say the same."""
        self.compare(what, self.gather(what, value))

    def compare(self, what: str, values: Sequence[Any]) -> None:
        """Raise HeapMismatch, on every rank, unless the gathered values are equal."""
        if any(value != values[0] for value in values):
            self._differ(f"ranks disagree in {what}", [str(value) for value in values])

    def attempt(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Do something that may fail on a rank; the results of all, or HeapError on all.

        action: raises HeapError, OSError or RuntimeError where it cannot be done; its result is
            what JSON can hold.
        """
        own: Exception | None = None
        outcome: dict[str, Any] = {}
        try:
            outcome["result"] = action()
        except (OSError, RuntimeError) as error:
            own = error
            outcome["error"] = str(error)[:_TEXT_LIMIT] or type(error).__name__
        outcomes = self.gather(what, outcome)
        failed = {rank: entry["error"] for rank, entry in enumerate(outcomes) if "error" in entry}
        if failed:
            said = "\n".join(f"  {self.ranks.name(rank)}: {text}" for rank, text in failed.items())
            raise HeapError(
                f"{what} failed on {len(failed)} of {len(outcomes)} ranks:\n{said}"
            ) from own
        return [entry["result"] for entry in outcomes]

    def _key(self, rank: int, back: int = 0) -> str:
        return f"{self._number - back}/{rank}"

    def _forget(self) -> None:
        """Drop what was said two meetings ago: all ranks have read it, they said more since."""
        if self._number > 2:
            with suppress(RuntimeError):
                self._store.delete_key(self._key(self.ranks.rank, back=2))

    def _request(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except RuntimeError as cause:
            self._lost_store(cause)

    def _wait(self, keys: list[str], what: str) -> None:
        """Ask until all keys are there: a wait inside the store that expires is logged by it."""
        start = looked = time.monotonic()
        pause = SHORTEST_PAUSE_SECONDS
        while not self._request(partial(self._store.check, keys)):
            now = time.monotonic()
            expired = now - start > self.timeout
            if expired or now - looked > LOOK_SECONDS:
                looked = now
                self._look(keys, what, expired)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _look(self, keys: list[str], what: str, expired: bool) -> None:
        """After a while without all keys: did a rank fail, has one ended, is it too late?"""
        self._watch.raise_remote_failure()
        # Ended first, missing second: what a rank said before it ended counts.
        ended = self._ended()
        missing = [
            rank
            for rank, key in enumerate(keys)
            if not self._request(partial(self._store.check, [key]))
        ]
        own = self.ranks.name(self.ranks.rank)
        for rank in missing:
            if rank in ended:
                self._watch.fail(
                    RemoteRankError(
                        f"{own} waited for {self.ranks.name(rank)} in [heap: {what}], and its "
                        f"process (pid {self._places[rank].pid}) has ended; look at its log"
                    ),
                    f"heap: {what}",
                )
        if missing and expired:
            names = ", ".join(self.ranks.name(rank) for rank in missing)
            self._watch.fail(
                ExchangeTimeout(
                    f"{own} waited {self.timeout:g} s in [heap: {what}], and {names} did not come; "
                    "all ranks must make the same call. If they only computed longer, raise "
                    "timeout="
                ),
                f"heap: {what}",
            )

    def _ended(self) -> set[int]:
        if not self._places:
            return set()
        here = self._places[self.ranks.rank]
        return {rank for rank, place in enumerate(self._places) if place.has_ended(here)}

    def _lost_store(self, cause: RuntimeError) -> NoReturn:
        self._lost = True
        raise RemoteRankError(
            f"{self.ranks.name(self.ranks.rank)} lost the store of its group: the process that "
            f"holds it has probably ended. The store said: {' '.join(str(cause).split())[:300]}"
        ) from cause

    def _differ(self, problem: str, said: Sequence[str]) -> NoReturn:
        by_text: dict[str, list[str]] = {}
        for rank, text in enumerate(said):
            by_text.setdefault(text, []).append(self.ranks.name(rank))
        lines = [f"  {', '.join(names)}: {text}" for text, names in by_text.items()]
        raise HeapMismatch(
            "\n".join(
                [f"{problem}:", *lines, "make the same calls in the same order on every rank"]
            )
        )

"""Makes the launch plan of one direction for calls of equal shapes, dtypes and documents.

Contract: pure host work on numbers; no tensor of a call is kept. `memory` maps the pointer names of
the generated kernels to rooms; scans run once, or, cut into segments, from zero, folded, and again
(see `segments`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from flexla_dist.compiler.executor import between
from flexla_dist.compiler.executor import fold_kernel as hand
from flexla_dist.compiler.executor import triton_run as running
from flexla_dist.compiler.executor.planned_launches import Heads, LaunchPlanner
from flexla_dist.compiler.executor.rooms import Event, Room, place_of
from flexla_dist.compiler.executor.triton_run import Plan, Step
from flexla_dist.compiler.kernels import buffer_name
from flexla_dist.shapes import UNIT_DIM

if TYPE_CHECKING:
    from flexla_dist.compiler.executor.triton_executor import Built


class Planner(LaunchPlanner):
    """Plans one direction."""

    coming: list[Built]
    locals: dict[str, Room] | None = None  # S_hat of the segments, between summary and fold
    maps: list[Callable[[Heads], None]]  # scans of M that run group by group, before the summary

    # -- the plan -----------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Every kernel in order, then the results."""
        self.maps = []
        if self.forward:
            problem = self.problem
            output = Room(problem.output_shape(), problem.output_dtype, kept=True)
            self.memory["output_ptr"] = self.results["output"] = output
        if self.num_chunks == 0:
            self._nothing_to_do()
        else:
            self.coming = self._in_order(self.executor.built(self.direction, self.uneven))
            while self.coming:
                self._add_kernel(self.coming.pop(0))
        self._add_results()
        for room in self.results.values():
            room.kept = True
        rooms, steps = self.rooms, self.rooms.steps()
        results = tuple(place_of(room).slot for room in self.results.values())
        given, tables = tuple(rooms.given), tuple(rooms.tables)
        return Plan(rooms.slots, given, tables, steps, results, self.segments)

    def _add_kernel(self, built: Built) -> None:
        kind = built.kernel.kind
        if kind == "chunk":
            self.launch(built)
        elif kind == "decays":
            self._decays(built)
        elif kind == "map":
            self._map(built)
        elif kind == "summary":
            self._summarise(built)
        else:
            self._loop(built, "state" if kind == "scan" else "grad_next")

    def _nothing_to_do(self) -> None:
        """A call without tokens: states pass through."""
        for name in self.executor.state_names:
            for kind in ("state", "grad_next"):
                entering = self.memory.get(f"enter_{kind}_{name}_ptr")
                if entering is not None:
                    copy = self.rooms.compute(torch.clone, entering)
                    self.memory[f"leave_{kind}_{name}_ptr"] = copy
        if self.forward:
            self._touch(self.results["output"])

    def _touch(self, room: Room) -> None:
        """Memory for a result that no kernel writes, of no tokens."""
        self.rooms.events.append(Event((room,), lambda: running.Release(())))

    def _add_results(self) -> None:
        """Results by name: states and what backward needs, or gradients."""
        names = self.executor.state_names
        if self.forward:
            found = self.entering
            self.results |= {f"leave_{n}": self.memory[f"leave_state_{n}_ptr"] for n in names}
            self.results |= {f"enter_{n}": found.states[n] for n in names if n in found.states}
            self.results |= {f"map_{n}": found.maps[n] for n in names if n in found.maps}
            for node, _ in self.executor.kept if self.num_chunks else ():
                self.results[buffer_name(node)] = self.memory[f"{buffer_name(node)}_ptr"]
            return
        self.results |= {f"grad_enter_{n}": self.memory[f"leave_grad_next_{n}_ptr"] for n in names}
        for name, x in self.problem.inputs.items():
            self.results[f"grad_{name}"] = self._input_gradient(name, x)
        for name, x in self.problem.params.items():
            self.results[f"grad_{name}"] = self._param_gradient(name, x)

    # -- segments -----------------------------------------------------------------------------

    def _decays(self, built: Built) -> None:
        if self.segments is None:
            return
        self.launch(built)
        for name, node in built.kernel.stores.items():
            dims = tuple(1 if d == UNIT_DIM else self.problem.size(d) for d in node.meta["dims"])
            found = Room((self.segments.count, self.problem.heads, *dims), torch.float32)
            state = name.removeprefix("decay_")
            self._multiply(f"state_{state}", self.memory[f"{name}_ptr"], found)
            self.entering.maps[state] = found

    def _multiply(self, subject: str, decays: Room, found: Room) -> None:
        """M of each segment from those of the chunks."""
        size = math.prod(found.shape[2:])
        blocks = -(-size // hand.PRODUCT_BLOCK)
        constants = {
            "HV": self.problem.heads,
            "SIZE": size,
            "BLOCK": hand.PRODUCT_BLOCK,
            "ROWS": hand.PRODUCT_ROWS,
            "num_blocks": blocks,
        }
        rooms = (decays, self.memory["document_chunk"], found)
        self._add_helper("segment_products", subject, found.shape[0] * blocks, rooms, constants)

    def _map(self, built: Built) -> None:
        """M of every segment: the scan of M alone, from the identity."""
        if self.segments is None:
            return
        (node,) = built.kernel.carried
        key, rows = node.meta["key"], self.problem.size(node.meta["dims"][0])
        shape = (self.segments.count, self.problem.heads, rows, rows)
        identity = partial(between.identities, shape=shape, device=self.problem.device)
        found = Room(shape, torch.float32)
        override = {
            f"enter_{key}_ptr": self.rooms.compute(identity),
            f"leave_{key}_ptr": found,
            f"{key}_ptr": found,
        }
        self.entering.maps[key.removeprefix("state_")] = found
        launch = partial(self.launch, built, override, False, rows)
        if len(self.groups) > 1:
            self.maps.append(launch)
        else:
            launch(self.every)

    def _loop(self, built: Built, kind: str) -> None:
        """A scan over all chunks, whole or in segments."""
        if self.segments is None:
            self.launch(built)
            return
        keys = [node.meta["key"] for node in built.kernel.carried]
        known = kind == "state" and bool(self.entering.states)
        entering = dict(self.entering.states) if known else {}
        local = {} if known else self._summarised(built, kind, keys)
        leave = {key: self._segment_states(key) for key in keys}
        for number, heads in enumerate(self._groups_of(kind)):
            if self._pauses_at(kind):
                self._pause("entry", (), number)
            for key, room in local.items():
                name = key.removeprefix(f"{kind}_")
                entering[name] = self._fold(key, kind, room, heads, entering.get(name))
            override = {f"enter_{key}_ptr": entering[key.removeprefix(f"{kind}_")] for key in keys}
            override |= {f"leave_{key}_ptr": leave[key] for key in keys}
            self.launch(built, override, heads=heads)
        if kind == "state":
            self.entering.states = entering
        for key in keys:
            dense = self.executor.graphs.transitions[key.removeprefix(f"{kind}_")].has_matrix
            if dense and not (known and not self.forward):
                self._take_exit(key, leave[key], kind)

    def _summarise(self, built: Built) -> None:
        """What the segments leave behind, by a scan of its own."""
        if self.segments is not None:
            keys = [node.meta["key"] for node in built.kernel.carried]
            self.locals = self._first_pass(built, "state", keys)

    def _segment_states(self, key: str) -> Room:
        assert self.segments is not None
        like = self.memory[f"enter_{key}_ptr"]
        return Room((self.segments.count, *like.shape[1:]), like.dtype)

    def _summarised(self, built: Built, kind: str, keys: list[str]) -> dict[str, Room]:
        """S_hat (or G_hat) of the segments: of a summary that ran already, or by a first pass."""
        found, self.locals = self.locals, None
        if found is None:
            found = self._first_pass(built, kind, keys)
            if self._pauses_at(kind):
                self._run_ahead(built)
        return found

    def _groups_of(self, kind: str) -> tuple[Heads, ...]:
        """The groups of heads of a loop: all at once where it does not pause."""
        return self.groups if self._pauses_at(kind) else (self.every,)

    def _first_pass(self, built: Built, kind: str, keys: list[str]) -> dict[str, Room]:
        """S_hat (or G_hat) of the segments: the scan from zero; before it M of the same heads."""
        found = {key: self._segment_states(key) for key in keys}
        override: dict[str, Room] = {}
        for key, local in found.items():
            override[f"enter_{key}_ptr"] = self.rooms.zeros(local.shape)
            override[f"leave_{key}_ptr"] = override[f"{key}_ptr"] = local
        told: list[Room] = []
        if self._pauses_at(kind):
            told = [found[f"{kind}_{name}"] for name in self.executor.state_names]
            told += [self.entering.maps[name] for name in self.executor.mapped_states]
        for number, heads in enumerate(self._groups_of(kind)):
            for launch in self.maps:
                launch(heads)
            self.launch(built, override, keep=False, heads=heads)
            if told:
                self._pause("summary", tuple(told), number)
        self.maps = []
        return found

    def _pauses_at(self, kind: str) -> bool:
        return self.pauses and kind == ("state" if self.forward else "grad_next")

    def _pause(self, at: str, rooms: tuple[Room, ...], group: int) -> None:
        def make() -> Step:
            return running.Pause(at, tuple(place_of(room) for room in rooms), group)

        self.rooms.events.append(Event(rooms, make))

    def _in_order(self, kernels: Sequence[Built]) -> list[Built]:
        """As the schedule has them. Where backward pauses, what its first pass does not need comes
        after the loop, to run beside the exchange: mostly the scan that brings states back."""
        if not self.pauses or self.forward:
            return list(kernels)
        at = next(i for i, built in enumerate(kernels) if built.kernel.kind == "reverse")
        needed, first = set(kernels[at].kernel.loads), [kernels[at]]
        later: list[Built] = []
        for built in reversed(kernels[:at]):
            if needed.intersection(_made_by(built)):
                needed.update(built.kernel.loads)
                first.insert(0, built)
            else:
                later.insert(0, built)
        return [*first, *later, *kernels[at + 1 :]]

    def _run_ahead(self, loop: Built) -> None:
        """Kernels that need nothing of a loop, before the states that enter it are there."""
        waiting = _made_by(loop)
        later: list[Built] = []
        for built in self.coming:
            if built.kernel.kind in ("chunk", "scan") and not waiting.intersection(
                built.kernel.loads
            ):
                self._add_kernel(built)
            else:
                waiting |= _made_by(built)
                later.append(built)
        self.coming = later

    def _fold(self, key: str, kind: str, local: Room, heads: Heads, entering: Room | None) -> Room:
        """States entering the segments; where M is elementwise also those leaving documents.

        entering: memory of the result that has other heads already.
        """
        assert self.segments is not None
        name, entry = key.removeprefix(f"{kind}_"), self.memory[f"enter_{key}_ptr"]
        found = self.entering.maps.get(name)
        if self.executor.graphs.transitions[name].has_matrix:
            assert found is not None
            reverse = kind != "state"
            if heads == self.every:
                function = partial(between.folded, reverse=reverse, segments=self.segments)
                return self.rooms.compute(function, local, entry, found, like=local)
            entering = entering or Room(local.shape, torch.float32)
            self._fold_heads((local, entry, found, entering), reverse, heads)
            return entering
        sizes = (*local.shape[2:], 1, 1)
        mapped = (1, 1) if found is None else (*found.shape[2:], 1, 1)
        size = math.prod(local.shape[2:])
        blocks = -(-size // hand.FOLD_BLOCK)
        constants = {
            "HV": self.problem.heads,
            "ROWS": sizes[0],
            "COLUMNS": sizes[1],
            "MAP_ROWS": mapped[0],
            "MAP_COLUMNS": mapped[1],
            "DECAY": found is not None,
            "REVERSE": kind != "state",
            "BLOCK": hand.FOLD_BLOCK,
            "num_blocks": blocks,
        }
        entering = entering or Room(local.shape, torch.float32)
        leave = self.memory[f"leave_{key}_ptr"]
        rooms = (local, found or local, entry, self._owners(), entering, leave)
        programs = entry.shape[0] * blocks
        self._add_helper("fold_segments", key, programs, rooms, constants, heads)
        return entering

    def _fold_heads(self, rooms: tuple[Room, ...], reverse: bool, heads: Heads) -> None:
        """States entering the segments by PyTorch operations; rooms as `between` takes them."""
        assert self.segments is not None
        function = partial(between.fold_heads, reverse=reverse, segments=self.segments, heads=heads)

        def make() -> Step:
            return running.Change(function, tuple(place_of(room) for room in rooms))

        self.rooms.events.append(Event(rooms, make))

    def _owners(self) -> Room:
        """First segment of each document."""
        if "owners" not in self.memory:
            assert self.segments is not None
            documents = self.segments.documents
            counts = Counter(documents)
            starts = accumulate((counts[d] for d in range(self.problem.num_sequences)), initial=0)
            self._add_table("owners", list(starts))
        return self.memory["owners"]

    def _take_exit(self, key: str, leave: Room, kind: str) -> None:
        """States that leave documents: of their last segment, or first for gradients."""
        assert self.segments is not None
        documents = self.segments.documents
        order = range(len(documents)) if kind == "state" else range(len(documents) - 1, -1, -1)
        last = {documents[i]: i for i in order}
        rows = [last[d] for d in range(self.problem.num_sequences)]
        self.memory[f"leave_{key}_ptr"] = self.rooms.compute(
            partial(between.exit_rows, rows=rows), leave
        )

    # -- results ------------------------------------------------------------------------------

    def _input_gradient(self, name: str, x: Tensor) -> Room:
        """Gradient of an input, summed over column tiles and heads of a group."""
        found = self.memory.get(f"grad_{name}_ptr")
        if found is None:
            return self.rooms.compute(torch.zeros_like, self.memory[f"{name}_ptr"])
        if found.kept:
            return found
        group = self.problem.heads // int(x.shape[2])
        return self.rooms.compute(partial(between.input_sum, group=group, dtype=x.dtype), found)

    def _param_gradient(self, name: str, x: Tensor) -> Room:
        """Gradient of a per-head parameter, summed over tiles and chunks."""
        found = self.memory.get(f"grad_{name}_ptr")
        if found is None:
            return self.rooms.compute(torch.zeros_like, self.memory[f"{name}_ptr"])
        return self.rooms.compute(partial(between.param_sum, dtype=x.dtype), found)


def _made_by(built: Built) -> set[fx.Node]:
    """Values that a kernel stores, and the states that it carries."""
    return {*built.kernel.carried, *built.kernel.stores.values()}

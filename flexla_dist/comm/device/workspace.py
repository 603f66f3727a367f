"""Memory and kernel of the exchanges of one signature, and their launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from flexla_dist.assembler import assembling, sound_options
from flexla_dist.comm.device.layout import RECORD_WORDS, WORD, Layout, Signature
from flexla_dist.comm.device.memory import poll_ge
from flexla_dist.comm.device.plan import Place
from flexla_dist.comm.device.record import Record
from flexla_dist.comm.device.source import Dialect, exchange_source, load_source, state_arguments
from flexla_dist.comm.heaps.nvshmem_runtime import device_library

INTERPRETED: bool = triton.knobs.runtime.interpret
PLANS_KEPT = 4096


@triton.jit(do_not_specialize=["limit"])
def _look(words, limit):
    poll_ge(words, 1, words + 1, limit)


def looks_per_second(device: torch.device) -> float:
    """How often a waiting program looks at its flag, measured on a flag that is never set."""
    words = torch.zeros(2, dtype=torch.int64, device=device)
    looks = 50 if INTERPRETED else 20000
    _look[(1,)](words, 1)  # compiles
    _synchronise(device)
    start = time.perf_counter()
    _look[(1,)](words, looks)
    _synchronise(device)
    return looks / (time.perf_counter() - start)


@dataclass(frozen=True)
class Memory:
    """The parts of a symmetric block that this process owns, and the addresses of all parts.

    parts: uint8 tensors, of this rank or of all virtual ranks in order.
    """

    parts: tuple[Tensor, ...]
    bases: Tensor


@dataclass
class Workspace:
    """Everything that an exchange needs besides its tensors, made once for all ranks.

    layouts: of the prefix and of the suffix. programs: how many serve one rank. limit: looks at a
    flag before a wait gives up. One exchange of a workspace and direction is under way at a time.
    """

    signature: Signature
    layouts: tuple[Layout, Layout]
    memory: Memory
    scratch: tuple[Tensor, ...]
    programs: int
    limit: int
    delay_ns: int
    virtual: bool
    kernel: Any
    libraries: dict[str, str]
    plans: dict[Hashable, Tensor] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        signature: Signature,
        layouts: tuple[Layout, Layout],
        memory: Memory,
        dialect: Dialect,
        programs: int,
        limit: int,
        delay_ns: int,
    ) -> Workspace:
        """Load the kernel and allocate scratch memory."""
        libraries = {"libnvshmem_device": device_library()} if dialect == "nvshmem" else {}
        device, homes = memory.bases.device, len(memory.parts)
        scratch = tuple(
            torch.empty(
                max(1, homes * panels * t.scratch_words), dtype=torch.float32, device=device
            )
            for t, panels in zip(layouts[0].tilings, layouts[0].panels, strict=True)
        )
        module = load_source(exchange_source(signature, layouts[0], dialect))
        return cls(
            signature,
            layouts,
            memory,
            scratch,
            programs,
            limit,
            delay_ns,
            homes > 1,
            module.exchange,
            libraries,
        )

    def launch(
        self,
        plan: Tensor,
        tensors: Sequence[dict[str, Tensor]],
        reverse: bool,
        composed: bool,
        tag: int,
        heads: tuple[int, int, int],
    ) -> None:
        """Start the kernel on the current stream.

        plan: see `plan`. tensors: for each state its arguments by name, stacked by rank where
        several are played. tag: 31 bits that the ranks' exchanges must agree in. heads: how many a
        group of lanes has, the first one to exchange, and how many.
        """
        layout = self.layouts[reverse]
        served = self.signature.lanes // heads[0] * heads[2]
        programs = min(self.programs, served * sum(t.tiles for t in layout.tilings))
        arguments: list[Tensor] = []
        for i, (t, given) in enumerate(zip(layout.tilings, tensors, strict=True)):
            named = {**given, "scratch": self.scratch[i]}
            for argument in state_arguments(t, self.signature.entry, i):
                arguments.append(named[argument.rsplit("_", 1)[0]])
        offsets = [layout.errors, layout.flags, layout.credits, layout.sent, layout.epochs]
        for pair in zip(layout.slots_at, layout.staging_at, strict=True):
            offsets += pair
        options: dict[str, Any] = {}
        if not INTERPRETED:
            options["num_warps"] = 8 if any(t.dense for t in layout.tilings) else 4
            if self.virtual:
                options["launch_cooperative_grid"] = True
            if self.libraries:
                options["extern_libs"] = self.libraries
            options |= sound_options(self.memory.bases.device)
        self.kernel[(programs * len(plan),)](
            self.memory.bases,
            plan,
            programs,
            plan.shape[1],
            self.signature.lanes,
            *heads,
            layout.size,
            self.limit,
            tag,
            *offsets,
            *arguments,
            COMPOSED=composed,
            PRECISION="ieee" if INTERPRETED else "tf32x3",
            DELAY=self.delay_ns,
            **options,
        )

    def warm(self, plan: Tensor) -> None:
        """Run every variant of the kernel on zeros, so that none is compiled or loaded later.

        plan: of ranks that exchange nothing and have one segment. A rank that loads a kernel while
        another of its kernels waits could keep both waiting.
        """
        device, lead = self.memory.bases.device, (len(plan), 1, 1, self.signature.lanes)
        tensors = []
        for form in self.signature.states:
            dims, decay = form.dims, form.decay or ()
            shapes = {"local": dims, "decay": decay, "matrix": (dims[0], dims[0]), "entry": dims}
            given = {n: torch.zeros(*lead, *dims, device=device) for n, dims in shapes.items()}
            tensors.append({**given, "entering": torch.empty_like(given["local"])})
        dense = any(form.dense for form in self.signature.states)
        chained = dense and self.layouts[0].strategy == "chain"
        every = (self.signature.lanes, 0, self.signature.lanes)
        with assembling(device):
            for composed in (False, True) if chained else (False,):
                self.launch(plan, tensors, False, composed, 0, every)
        _synchronise(device)

    def plan(self, key: Hashable, places: Callable[[], Sequence[Place]]) -> Tensor:
        """Rows of the ranks that this process plays, in scan order, on the device.

        key: of all that `places` depends on; each different plan is made and copied once.
        """
        found = self.plans.get(key)
        if found is None:
            if len(self.plans) >= PLANS_KEPT:
                self.plans.clear()
            rows = torch.tensor([place.row() for place in places()], dtype=torch.int64)
            found = self.plans[key] = rows.to(self.memory.bases.device)
        return found

    def alarms(self) -> list[Tensor]:
        """The words that are not zero if a wait expired on some rank, of both directions."""
        return [self._words(reverse)[:1] for reverse in (False, True)]

    def records(self, reverse: bool) -> list[Record]:
        """What ranks reported."""
        size = self.layouts[reverse].size
        rows = self._words(reverse).view(size + 1, RECORD_WORDS)[1:].tolist()
        found = [Record.read(rank, row) for rank, row in enumerate(rows)]
        return [record for record in found if record is not None]

    def clear(self) -> None:
        """Forget all epochs, flags and records; no rank may be exchanging."""
        for part in self.memory.parts:
            part.zero_()

    def _words(self, reverse: bool) -> Tensor:
        layout = self.layouts[reverse]
        words = RECORD_WORDS * (layout.size + 1)
        part = self.memory.parts[0]
        return part[layout.errors : layout.errors + WORD * words].view(torch.int64)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

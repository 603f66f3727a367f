"""One variant on virtual ranks of one GPU: times of its calls, errors, bits."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from flexla_dist.comm.chooser.heap_transport import timed
from flexla_dist.comm.device_exchange import DeviceExchanger
from flexla_dist.errors import FlexlaError
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import CallInputs, make_inputs
from scaling_runs.virtual_judge import Results, differs, first_heads, judge, reference
from scaling_runs.virtual_run import VirtualRanks
from scaling_runs.weak_cases import compiled

REPEATS = 5  # calls that are compared bit by bit
HEADS_CHECKED = 2
MOST_IN_GRAPH = 1 << 17  # tokens of all ranks: a graph has memory of its own
LEAST_CALLS = 5  # that are timed, however long they take


def make_call(options: argparse.Namespace, variant: str, tokens: int) -> CallInputs:
    """Seeded arguments of the whole sequence."""
    return make_inputs(
        get_variant(variant),
        batch=options.batch,
        tokens=tokens,
        heads=options.heads,
        value_heads=options.heads,
        sizes={"K": options.size, "V": options.size},
        dtype=getattr(torch, options.dtype),
        device=options.device,
    )


class Measurement:
    """One variant on W virtual ranks."""

    def __init__(self, options: argparse.Namespace, variant: str, ranks: int, tokens: int):
        self.options, self.variant, self.tokens = options, variant, tokens
        self.call = make_call(options, variant, ranks * tokens)
        torch.cuda.empty_cache()  # inputs were drawn in float64
        self.ranks = VirtualRanks(compiled(variant), self.call, ranks, options.groups)
        like = self.call.inputs["v"]
        generator = torch.Generator(like.device).manual_seed(5)
        drawn = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
        self.seed = drawn
        self.seeds = self.ranks.seeds(self.seed)
        self.in_graphs = ranks * tokens <= MOST_IN_GRAPH
        self._want: Results | None = None

    def exchanger(self, strategy: str, **settings: Any) -> DeviceExchanger:
        """An exchange with the programs that were asked for."""
        return self.ranks.exchanger(strategy, programs=self.options.programs, **settings)

    def checks(self, strategy: str) -> dict[str, object]:
        """Columns: errors against the operator in float64 on two heads, and whether bits repeat."""
        exchanger = self.exchanger(strategy)
        first = self.ranks.run(exchanger, self.seed)
        exchanger.check()
        wrong = [differs(first, self.ranks.run(exchanger, self.seed)) for _ in range(REPEATS - 1)]
        same = not torch.stack(wrong).any().item()
        if self._want is None:
            self._want = reference(self.ranks.op, *first_heads(self.call, self.seed, HEADS_CHECKED))
        errors = judge(first, self._want, self.call, getattr(torch, self.options.dtype))
        found: dict[str, object] = {"rel_err": max(errors.ratios.values()), "used": errors.used}
        found |= {"same_bits": "same" if same else "DIFFERENT"}
        return found | {"ok": "yes" if same and errors.good else f"NO: {errors.worst}"}

    def both(self, exchanger: DeviceExchanger) -> None:
        """Forward and backward."""
        forward, entering = self.ranks.forward_with_states(exchanger)
        self.ranks.backward(exchanger, forward, entering, self.seeds)

    def alone(self) -> None:
        """Forward and backward of shards by themselves."""
        self.ranks.alone_backward(self.ranks.alone(), self.seeds)

    def timed(self, direction: str, exchanger: DeviceExchanger | None) -> dict[str, object]:
        """Columns of times; without an exchanger, of shards alone."""
        call: Callable[[], object]
        if exchanger is None:
            call = self.ranks.alone if direction == "fwd" else self.alone
        elif direction == "fwd":
            call = partial(self.ranks.forward, exchanger)
        else:
            call = partial(self.both, exchanger)
        for _ in range(2):
            call()
        graph = captured(call) if self.in_graphs and not self.options.no_graph else None
        again = call if graph is None else graph.replay
        rep = max(self.options.milliseconds, LEAST_CALLS * 1e3 * timed(again, self.ranks.device))
        times = triton.testing.do_bench(again, warmup=rep / 5, rep=rep, quantiles=[0.5, 0.2, 0.8])
        named = dict(zip(("median_ms", "p20_ms", "p80_ms"), times, strict=True))
        return {**named, "launch": "host" if graph is None else "graph"}


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """A call as a graph, so that the host's time does not show; None, said, where it cannot be."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
    except (RuntimeError, FlexlaError) as why:
        print(f"no graph, timed from the host: {str(why).splitlines()[0][:200]}", flush=True)
        return None
    return graph


def state_mib(m: Measurement) -> float:
    """MiB of the states that one hop of a chain carries."""
    return sum(s[:1].numel() * 4 for s in m.ranks.problems[0].zero_state()) / 2**20

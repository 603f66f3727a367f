"""One point of the grid on this rank: inputs, the call that is timed, its check, its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexla_dist.comm.element import Element, element_tensors, with_tensors, zero_state
from flexla_dist.comm.tag import Tag
from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.parallel.local_call import as_element
from flexla_dist.parallel.runtime import runtime_of
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.budget import BOUNDS, SHARDED, measure
from flexla_dist.testing.inputs import CallInputs, make_inputs
from scaling_runs.baselines import (
    Refused,
    Settings,
    Sharding,
    Traffic,
    counted,
    get_system,
    sizes_of,
)
from scaling_runs.baselines.device import device_exchange
from scaling_runs.baselines.node import ScanAttend
from scaling_runs.baselines.shard import executor_of
from scaling_runs.baselines.ulysses import HeadAttend, exchange_heads, exchange_tokens
from scaling_runs.weak_grid import Point

CHECKED_TOKENS = 40


class CheckFailed(AssertionError):
    """A system whose results or bytes are not what they must be, at a point that is not timed."""


@dataclass
class Setup:
    """This rank's part: the group of the point, its device, the settings of systems."""

    group: Any
    device: torch.device
    settings: Settings
    nodes: tuple[int, ...]


@cache
def compiled(variant: str) -> LinearAttentionOp:
    """The operator of a variant; all points share it."""
    return compile(get_variant(variant))


class Case:
    """The operator alone at one point."""

    def __init__(self, point: Point, setup: Setup, given: CallInputs | None = None) -> None:
        """given: the inputs, where another case of the same call has them."""
        self.point, self.setup = point, setup
        self.system, self.op = get_system(point.system), compiled(point.variant)
        self.sharding = Sharding.of(setup.group, point.lengths)
        self.attend = self.system.prepare(self.op, self.sharding, setup.settings)
        self.given = given or inputs_of(
            point, self.sharding.tokens, setup.device, 1 + self.sharding.ranks.rank
        )
        self._seed: Tensor | None = None

    def call(self) -> Callable[[], object]:
        """What is timed: forward, and backward where the point says so."""
        given, attend = self.given, self.attend

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(given.inputs, given.params, given.scalars)

        def both() -> object:
            output = attend(given.inputs, given.params, given.scalars)
            if self._seed is None:
                self._seed = torch.randn_like(output)
            leaves = [*given.inputs.values(), *given.params.values()]
            return torch.autograd.grad(output, leaves, self._seed)

        return forward if self.point.direction == "fwd" else both

    def traffic(self) -> tuple[Traffic, Traffic | None]:
        """Bytes of one call: counted, and by formula (None where there is none)."""
        call = self.call()
        call()
        with counted() as found:
            call()
        formula = self.system.formula
        if formula is None:
            return found, None
        given = self.given
        sizes = sizes_of(
            self.op,
            given.inputs,
            given.params,
            given.scalars,
            self.point.lengths,
            self.setup.nodes,
        )
        rank = self.sharding.ranks.rank
        expected = formula(self.setup.settings)(sizes, rank, False)
        if self.point.direction == "fwdbwd":
            expected = expected.plus(formula(self.setup.settings)(sizes, rank, True))
        return found, expected

    def exchange(self) -> Callable[[], object]:
        """The exchange of states alone, of one forward pass. Raises Refused where there is none."""
        element = example_element(self.op, self.given)
        zero = zero_state(element)
        if isinstance(self.attend, ScanAttend):
            scan, line = self.attend.scan, self.sharding.line(False)
            return lambda: scan.start(element, zero, line)()
        if isinstance(self.attend, HeadAttend):
            return self._exchange_heads()
        if self.system.family != "ours":
            raise Refused(f"{self.system.name} has no exchange apart from its local pass")
        strategy, settings = self.system.strategy, self.setup.settings
        size = settings.node_size if strategy in ("auto", "hierarchical") else None
        if self.system.engine == "device":
            return device_exchange(self.setup.group, element, strategy, size)
        exchanger = runtime_of(self.setup.group).exchanger(strategy, size)
        crossing = (True,) * (self.sharding.ranks.size - 1)
        return lambda: exchanger.prefix(element, crossing, Tag(), zero)

    def _exchange_heads(self) -> Callable[[], object]:
        """All inputs to the ranks of their heads, and a tensor of the output's size back."""
        sharding = self.sharding
        inputs = [x.detach() for x in self.given.inputs.values()]
        by_dtype = [
            [x for x in inputs if x.dtype == d] for d in sorted({x.dtype for x in inputs}, key=str)
        ]
        like = max(inputs, key=lambda x: x.numel())

        def run() -> None:
            with torch.no_grad():
                for same in by_dtype:
                    exchange_heads(sharding, same)
                exchange_tokens(sharding, [whole])

        whole = exchange_heads(sharding, [like])[0]
        return run


def inputs_of(point: Point, tokens: int, device: torch.device, seed: int) -> CallInputs:
    """Seeded inputs of `tokens` tokens that want gradients."""
    return make_inputs(
        get_variant(point.variant),
        batch=point.B,
        tokens=tokens,
        heads=point.heads,
        value_heads=point.heads,
        sizes=point.sizes,
        dtype=getattr(torch, point.dtype),
        device=device,
        seed=seed,
    )


def example_element(op: Any, given: CallInputs) -> Element:
    """An element of a call's structure with numbers of order one."""
    token = {n: x.detach()[:, :1].contiguous() for n, x in given.inputs.items()}
    params = {n: x.detach() for n, x in given.params.items()}
    problem = op.bind(token, params, given.scalars)
    executor = executor_of(op, [*token.values(), *params.values()])
    element = as_element(executor.summary(problem, -1))
    numbers = [torch.rand_like(t) * 0.1 for t in element_tensors(element)]
    return with_tensors(element, numbers, False)


def check_system(point: Point, setup: Setup, known: Known | None = None) -> float | None:
    """Largest error of outputs and gradients of a small call against the unsharded operator in
    float64; None for a floor. On the CPU the call is float64, float32 where kernels carry the
    states; on a GPU of the point's dtype. known: of other comparisons, see `Comparison`.

    Raises CheckFailed on every rank where the error of any is out of bounds.
    """
    system = get_system(point.system)
    if not system.exact:
        return None
    size = dist.get_world_size(setup.group)
    lengths = tuple(
        CHECKED_TOKENS + (0 if point.system == "fla_cp" else 3 * r) for r in range(size)
    )
    comparison = Comparison(point, setup, lengths, known)
    worst = max(comparison.errors(comparison.sharded()).values())
    found = torch.tensor([worst], dtype=torch.float64, device=setup.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=setup.group)
    if not float(found) <= 1.0:
        raise CheckFailed(
            f"{point.system} {point.variant} on {size} ranks: an error is {float(found):.3g} times "
            f"its bound for {comparison.dtype} (output {comparison.bounds.output:g}); not timed"
        )
    return float(found) * comparison.bounds.output


@dataclass(frozen=True)
class Whole:
    """An unsharded call: its arguments, the gradient of its output, and its results in float64."""

    call: CallInputs
    seed: Tensor
    want: dict[str, Tensor]


Known = dict[tuple, Whole]


class Comparison:
    """A system's call on shards of these lengths beside the unsharded operator in float64.

    known: unsharded calls and results of other comparisons, where this one's are found or left.
    """

    def __init__(
        self,
        point: Point,
        setup: Setup,
        lengths: tuple[int, ...],
        known: Known | None = None,
    ) -> None:
        cpu = setup.device.type == "cpu"
        system, self.group = get_system(point.system), setup.group
        double = cpu and system.engine != "device"
        self.dtype = torch.float64 if double else getattr(torch, point.dtype)
        self.bounds = SHARDED[self.dtype] if cpu else BOUNDS[self.dtype]
        self.sharding = Sharding.of(setup.group, lengths)
        self._attend = system.prepare(compiled(point.variant), self.sharding, setup.settings)
        sizes = {n: s if not cpu else min(s, 16) for n, s in point.sizes.items()}
        batch = min(point.B, 2)
        call = (point.variant, self.dtype, setup.device, batch, sum(lengths), point.heads)
        key = (*call, *sizes.values())
        known = {} if known is None else known
        if key not in known:
            known[key] = self._unsharded(point, setup.device, batch, sizes)
        self._whole = known[key]

    def _unsharded(
        self, point: Point, device: torch.device, batch: int, sizes: dict[str, int]
    ) -> Whole:
        whole = make_inputs(
            get_variant(point.variant),
            batch=batch,
            tokens=sum(self.sharding.lengths),
            heads=point.heads,
            value_heads=point.heads,
            sizes=sizes,
            dtype=self.dtype,
            device=device,
            seed=3,
        )
        return Whole(whole, *_results(compiled(point.variant), whole))

    def sharded(self) -> dict[str, Tensor]:
        """This rank's output and gradients; those of parameters are sums over the ranks."""
        found = _sharded(self._attend, self.sharding, self._whole)
        for name, value in found.items():
            if name.removeprefix("d") in self._whole.call.params:
                dist.all_reduce(value, group=self.group)
        return found

    def errors(self, got: dict[str, Tensor]) -> dict[str, float]:
        """Of this rank's part, as multiples of their bounds."""
        here = slice(self.sharding.offset, self.sharding.offset + self.sharding.tokens)
        found = {}
        for name, value in got.items():
            whole = name.removeprefix("d") in self._whole.call.params
            want = self._whole.want[name]
            expected = want if whole else want[:, here]
            found[name] = measure(value, expected).ratio / self.bounds.of(name)
        return found


def _sharded(attend: Any, sharding: Sharding, whole: Whole) -> dict[str, Tensor]:
    here, call = slice(sharding.offset, sharding.offset + sharding.tokens), whole.call
    inputs = {n: x.detach()[:, here].clone().requires_grad_() for n, x in call.inputs.items()}
    params = {n: x.detach().clone().requires_grad_() for n, x in call.params.items()}
    output = attend(inputs, params, call.scalars)
    output.backward(whole.seed[:, here])
    found = {"o": output.detach()}
    for name, x in {**inputs, **params}.items():
        found[f"d{name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    return found


def _results(op: Any, whole: CallInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A gradient of the output, the same on all ranks, and output and gradients in float64."""
    wide = {n: x.detach().double().requires_grad_() for n, x in whole.inputs.items()}
    params = {n: x.detach().double().requires_grad_() for n, x in whole.params.items()}
    output, _ = op(**wide, **params, **whole.scalars, executor="torch")
    generator = torch.Generator().manual_seed(9)
    seed = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    seed = seed.to(output.device, next(iter(whole.inputs.values())).dtype)
    output.backward(seed.double())
    leaves = {**wide, **params}
    return seed, {"o": output.detach()} | {f"d{n}": x.grad for n, x in leaves.items()}

"""One shape of `single_gpu.py`: its call, its float64 reference, its timed implementations."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from flexla_dist.compiler.aot import CompileTask
from flexla_dist.ops.op import compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.budget import measure
from flexla_dist.testing.inputs import CallInputs
from scaling_runs.implementations import SOFTMAX, Fla, Implementation, Unavailable
from scaling_runs.machine import Machine
from scaling_runs.measure import POINT_SECONDS, Timing, measure_call
from scaling_runs.rows import RowStore
from scaling_runs.single_calls import (
    Point,
    Shape,
    Work,
    first_heads,
    fits,
    gradient_seed,
    label_of,
    make_call,
    our_call,
)

COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "variant", "direction"),
    *("B", "T", "H", "K", "V", "dtype", "impl", "impl_version", "plan"),
    *("median_ms", "p20_ms", "p80_ms", "host_us", "peak_mib", "rel_err"),
    *("HV", "note"),
)
KEY = ("gpu", "variant", "direction", "B", "T", "H", "K", "V", "dtype", "impl", "HV")


class Reference:
    """Output and gradients of the first heads in float64; of softmax attention nothing."""

    def __init__(self, shape: Shape, call: CallInputs, seed: Tensor):
        self.results: dict[str, Tensor] = {}
        if shape.variant == SOFTMAX:
            return
        op = compile(get_variant(shape.variant), executor="torch")

        def wide(x: Tensor) -> Tensor:
            return x.detach().double().requires_grad_()

        leaves = {name: wide(first_heads(shape, x)) for name, x in call.inputs.items()}
        leaves |= {name: wide(x[: shape.checked]) for name, x in call.params.items()}
        output = op(**leaves, **call.scalars)[0]
        gradient = first_heads(shape, seed).double()
        found = torch.autograd.grad(output, list(leaves.values()), gradient)
        self.results = {"o": output.detach()}
        self.results |= {f"d{n}": g for n, g in zip(leaves, found, strict=True)}

    @property
    def mib(self) -> float:
        """Memory that the results hold."""
        return sum(x.nbytes for x in self.results.values()) / 2**20

    def error(self, shape: Shape, got: dict[str, Tensor]) -> float | None:
        """Largest RMSE ratio of the results that both have."""
        ratios = []
        for name in self.results.keys() & got.keys():
            x = got[name]
            if shape.variant == "hgrn" and x.dim() == 3:
                x = x.unsqueeze(2)
            x = first_heads(shape, x) if x.dim() >= 3 else x[: shape.checked]
            ratios.append(measure(x, self.results[name]).ratio)
        return max(ratios, default=None)


class Case:
    """One implementation at one shape; a call of it is what is timed."""

    def __init__(self, forward: Callable[[], Tensor], call: CallInputs, seed: Tensor | None):
        self.forward, self.seed = forward, seed
        self.leaves = {**call.inputs, **call.params}

    def __call__(self) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Forward, and backward where the output has a gradient."""
        if self.seed is None:
            with torch.no_grad():
                return self.forward(), ()
        output = self.forward()
        gradient = self.seed.view_as(output)
        leaves = list(self.leaves.values())
        return output, torch.autograd.grad(output, leaves, gradient, allow_unused=True)

    def results(self) -> dict[str, Tensor]:
        """Output and gradients by name."""
        output, grads = self()
        named = zip(self.leaves, grads, strict=False)
        return {"o": output.detach()} | {f"d{n}": g for n, g in named if g is not None}


class Bench:
    """Measures shapes and keeps rows."""

    def __init__(
        self,
        every: dict[str, Implementation],
        store: RowStore,
        machine: Machine,
        device: str = "cuda",
        limit_s: float = POINT_SECONDS,
    ):
        self.every, self.store, self.machine, self.device = every, store, machine, device
        self.limit_s = limit_s
        self.written: list[dict[str, str]] = []

    def missing(self, shape: Shape, names: Sequence[str]) -> list[str]:
        """Implementations without a row of today at this commit."""
        found = {name: self.store.get(self._key(shape, name)) for name in names}
        return [name for name, row in found.items() if row is None or not self._is_new(row)]

    def _is_new(self, row: Mapping[str, str]) -> bool:
        return row["date"] == self.machine.date and self.machine.measured_same_code(row)

    def work_of(self, point: Point, options: argparse.Namespace) -> Work:
        """What is to be measured of the directions of one call."""
        work = {}
        for shape in point.shapes:
            fitting = [name for name in point.impls if fits(shape, name)]
            work[shape] = fitting if options.again else self.missing(shape, fitting)
        return {shape: names for shape, names in work.items() if names}

    def _key(self, shape: Shape, name: str) -> dict[str, str]:
        sizes = {column: str(value) for column, value in vars(shape).items()}
        return {"gpu": self.machine.gpu, **sizes, "HV": str(shape.HV or ""), "impl": name}

    def run(self, work: Work, errors: bool) -> None:
        """Measure the directions of one call in turn."""
        first = next(iter(work))
        try:
            call = make_call(first, self.device)
            seed = gradient_seed(first, call)
        except torch.cuda.OutOfMemoryError:
            for shape, names in work.items():
                for name in names:
                    self._out_of_memory(shape, name, "arguments alone")
            return
        reference = self._reference(first, call, seed) if errors else None
        for shape, names in work.items():
            for name in names:
                gc.collect()
                torch.cuda.empty_cache()
                self._run(shape, name, call, seed, reference)

    def _reference(self, shape: Shape, call: CallInputs, seed: Tensor) -> Reference | None:
        try:
            return Reference(shape, call, seed)
        except torch.cuda.OutOfMemoryError:
            print(f"{label_of(shape, 'float64')}: out of memory, errors are left out", flush=True)
            return None

    def _out_of_memory(self, shape: Shape, name: str, what: str) -> None:
        """A row without numbers."""
        label = label_of(shape, name)
        print(f"{label}: out of memory: {what}", flush=True)
        row = {**self.machine.columns(), **self._key(shape, name)}
        self.written.append(self.store.put({**row, "note": f"out of memory: {what}"}))

    def _run(
        self,
        shape: Shape,
        name: str,
        call: CallInputs,
        seed: Tensor,
        reference: Reference | None,
    ) -> None:
        label = label_of(shape, name)
        wanted = seed if shape.direction == "fwdbwd" else None
        impl = self.every[name]
        try:
            prepared = impl.prepare(shape.variant, call, shape.direction)
            with impl.lifted(prepared.version) if isinstance(impl, Fla) else nullcontext():
                case = Case(prepared.forward, call, wanted)
                error = None if reference is None else reference.error(shape, case.results())
                timing = measure_call(case, limit_s=self.limit_s)
        except Unavailable as why:
            print(f"{label}: {why}", flush=True)
            return
        except torch.cuda.OutOfMemoryError as full:
            text = " ".join(str(full).split())
            self._out_of_memory(shape, name, text.partition("GPU 0")[0].strip()[:120])
            return
        except Exception as failure:
            text = " ".join(str(failure).split())[:300]
            print(f"{label}: FAILED {type(failure).__name__}: {text}", flush=True)
            if "illegal memory access" in text:
                raise
            return
        plan = prepared.plan() if name == "ours" else ""
        held = 0.0 if reference is None else reference.mib
        row = result_row(prepared.version, plan, timing, held, error)
        row = {**self.machine.columns(), **self._key(shape, name), **row}
        self.written.append(self.store.put(row))
        print(
            f"{label}: {row['median_ms']} ms, host {row['host_us']} us, "
            f"{row['peak_mib']} MiB, error {row['rel_err']}",
            flush=True,
        )


def result_row(
    version: str, plan: str, timing: Timing, held_mib: float, error: float | None
) -> dict[str, str]:
    """The measured columns; `held_mib` of the peak belong to the reference."""
    return {
        "impl_version": version,
        "plan": plan,
        "median_ms": f"{timing.median_ms:.4f}",
        "p20_ms": f"{timing.p20_ms:.4f}",
        "p80_ms": f"{timing.p80_ms:.4f}",
        "host_us": f"{timing.host_us:.0f}",
        "peak_mib": f"{timing.peak_mib - held_mib:.0f}",
        "rel_err": "" if error is None else f"{error:.3e}",
    }


def compile_task(work: Work) -> CompileTask | None:
    """Our kernels of the directions of one call, if they are wanted."""
    ours = [shape for shape, names in work.items() if "ours" in names]
    if not ours:
        return None
    shape = ours[0]
    graphs, problem = our_call(shape)
    directions = {"fwd": ("forward",), "fwdbwd": ("forward", "backward")}
    wanted = max((directions[shape.direction] for shape in ours), key=len)
    return CompileTask(graphs, problem, wanted)

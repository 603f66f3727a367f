"""One rank of one step of `multi_gpu.sh`; `multi_gpu.py` starts it on every rank."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from flexla_dist.comm import nodes_of_size
from flexla_dist.train.config import MeshConfig, TrainConfig
from flexla_dist.train.launch import Ranks, start
from scaling_runs import multi_gpu_check, multi_gpu_links, multi_gpu_train, weak_scaling
from scaling_runs.baselines import Settings
from scaling_runs.compiling import CompileCount
from scaling_runs.machine import describe_machine
from scaling_runs.multi_gpu_ranks import WRONG
from scaling_runs.multi_gpu_rows import Rows
from scaling_runs.multi_gpu_sizes import SIZES, Sizes, Stages
from scaling_runs.weak_cases import Setup


@dataclass
class Part:
    """This rank's part in a step.

    rows: kept by the first rank, None on the others.
    """

    options: argparse.Namespace
    sizes: Sizes
    ranks: Ranks
    rows: Rows | None

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def setup(self) -> Setup:
        """As the systems take it."""
        size, world = self.sizes.node_size(self.ranks.world), self.ranks.world
        settings = Settings(node_size=size, timeout=self.sizes.timeout)
        return Setup(self.group, self.ranks.device, settings, nodes_of_size(world, size or world))

    def agreed(self, flag: bool) -> bool:
        """What the first rank says."""
        found = torch.tensor([float(flag)])
        dist.broadcast(found, src=0)
        return bool(found)

    def to_do(self, step: str, **name: object) -> bool:
        """Whether a row is to be measured: there is time, and no row of this commit. Notes that it
        was begun. Collective."""
        wanted = self.rows is not None and not self.rows.known(step, **name)
        late = time.time() > self.options.until
        if not self.agreed(wanted and not late):
            return False
        self.put(step, "begun", **name)
        return True

    def put(self, step: str, status: str, **columns: object) -> None:
        """Keep and show a row, on the first rank."""
        if self.rows is None:
            return
        row = self.rows.put(step, status, **columns)
        if status != "begun":
            shown = (*("engine", "strategy", "variant", "quantity", "bytes"), "value", "unit")
            text = " ".join(row[name] for name in (*shown, "status", "note") if row[name])
            print(f"{step}: {text}", flush=True)

    def gathered(self, value: float) -> list[float]:
        """A number of every rank."""
        found = torch.zeros(self.ranks.world, dtype=torch.float64)
        found[self.ranks.rank] = value
        dist.all_reduce(found)
        return found.tolist()


def weak(part: Part, stages: Stages) -> int:
    """Points of the weak grid; rows go to the file of `weak_scaling.py`."""
    words = ["--results", str(part.options.results), "--launcher", "torchrun"]
    words += ["--time-limit", f"{part.options.until - time.time():.1f}"]
    if part.options.commit:
        words += ["--commit", part.options.commit]
    wrong = weak_scaling.Program(stages, weak_scaling.parse(words), part.ranks).run()
    return WRONG if wrong else 0


STEPS: dict[str, Callable[[Part], int]] = {
    "check": multi_gpu_check.check,
    "check_nvshmem": multi_gpu_check.check_nvshmem,
    "links": multi_gpu_links.links,
    "weak": lambda part: weak(part, part.sizes.weak(part.ranks.world)),
    "weak_more": lambda part: weak(part, part.sizes.weak_more(part.ranks.world)),
    "other_code": lambda part: weak(part, part.sizes.other_code(part.ranks.world)),
    "long": lambda part: weak(part, part.sizes.long(part.ranks.world)),
    "train": multi_gpu_train.train,
    "killed_device": lambda part: multi_gpu_train.killed(part, "device"),
    "killed_host": lambda part: multi_gpu_train.killed(part, "host"),
}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=tuple(STEPS))
    parser.add_argument("--sizes", choices=tuple(SIZES), default="full")
    parser.add_argument("--until", type=float, required=True, help="time to begin nothing after")
    parser.add_argument("--results", type=Path, required=True, help="folder of the CSV files")
    parser.add_argument("--folder", type=Path, required=True, help="for what ranks leave behind")
    parser.add_argument("--attempt", type=int, default=1, help="of the step; another order from 2")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks share the first GPU")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Join the ranks and run the step."""
    options = parse(words)
    sizes = SIZES[options.sizes]
    if options.attempt > 1:
        sizes = sizes.turned()
    torch.set_num_threads(1)
    ranks = _start_on_one_gpu() if options.one_gpu else _start(sizes)
    rows = None
    if ranks.rank == 0:
        machine = describe_machine(options.commit)
        carrier = dist.get_backend_config().replace(",", " ")
        rows = Rows(options.results, machine, ranks.world, sizes.name, carrier)
    part, count = Part(options, sizes, ranks, rows), CompileCount()
    code = STEPS[options.step](part)
    tell_compiled(part, count)
    if not options.step.startswith("killed"):
        dist.all_reduce(torch.zeros(1))  # the first rank holds the store: it is the last to go
    return code


def tell_compiled(part: Part, count: CompileCount) -> None:
    """A row of the kernels that were not in Triton's cache: step `compile` is to make them all."""
    if part.rows is not None and count.found + count.compiled:
        names = " ".join(sorted(set(count.names)))
        name = {"quantity": f"{part.options.step}: kernels compiled", "unit": ""}
        note = f"{count.found} found" + (f"; {names}" if names else "")
        part.rows.put("step", "ok", **name, value=count.compiled, note=note[:300])


def _start(sizes: Sizes) -> Ranks:
    return start(
        TrainConfig(
            device=sizes.device, threads=1, launcher="torchrun", mesh=MeshConfig(timeout=600.0)
        )
    )


def _start_on_one_gpu() -> Ranks:
    """All ranks on the first GPU; NCCL would refuse that."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), device)


def run() -> None:
    """End this process with the step's status, whatever its device still waits for."""
    code = 1
    try:
        code = main()
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destructors of communicators wait for ranks that are gone


if __name__ == "__main__":
    run()

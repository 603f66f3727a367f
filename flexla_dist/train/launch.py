"""From whoever started the ranks to a `torch.distributed` world and the dp x cp mesh."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flexla_dist.train.arguments import ArgumentProblem
from flexla_dist.train.config import MeshConfig, TrainConfig

LAUNCHERS = ("torchrun", "mpi", "slurm", "single")
_MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class Ranks:
    """This process among all: its rank, how many there are, its place on its node, its device."""

    rank: int
    world: int
    local: int
    device: torch.device


def detect_launcher(environment: Mapping[str, str]) -> str:
    """Who started this process, by the variables that each launcher sets."""
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return "torchrun"
    if any(name in environment for name in _MPI_VARIABLES):
        return "mpi"
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        return "slurm"
    return "single"


def start(config: TrainConfig) -> Ranks:
    """Join the world of ranks; device, threads and process group are set up afterwards.

    torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; under mpirun mpi4py is
    asked; under `srun` with one task a rank it is SLURM_*, with MASTER_ADDR and MASTER_PORT from
    the batch script. Alone it is a world of one.
    """
    auto = config.launcher == "auto"
    launcher = detect_launcher(os.environ) if auto else config.launcher
    rank, world, local, method = _PLACES[launcher]()
    device = _device(config.device, local)
    if config.threads:
        torch.set_num_threads(config.threads)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=max(config.mesh.timeout, 30.0))
    if method is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(
            backend, init_method=method, rank=rank, world_size=world, timeout=timeout
        )
    return Ranks(rank, world, local, device)


def make_mesh(config: MeshConfig, ranks: Ranks) -> DeviceMesh:
    """The mesh (dp, cp): ranks of one sequence are neighbours. Raises ArgumentProblem where it does
    not fit the number of ranks."""
    dp = sequence_groups(config, ranks.world)
    return init_device_mesh(ranks.device.type, (dp, config.cp), mesh_dim_names=("dp", "cp"))


def sequence_groups(config: MeshConfig, world: int) -> int:
    """mesh.dp on `world` ranks. Raises ArgumentProblem where the mesh does not fit them."""
    cp, started = config.cp, "1 rank" if world == 1 else f"{world} ranks"
    if cp < 1 or config.dp < 0:
        raise ArgumentProblem(
            f"mesh.cp = {cp}, mesh.dp = {config.dp}; expected mesh.cp of at least 1, and "
            "mesh.dp of at least 1, or 0 for all ranks that are there"
        )
    if world % cp:
        raise ArgumentProblem(
            f"mesh.cp = {cp} does not divide the {started} that {_were(world)} started; "
            f"{_how_to_start(cp)}, or share no sequence: --mesh.cp 1 --mesh.dp {world}"
        )
    dp = config.dp or world // cp
    if dp * cp != world:
        raise ArgumentProblem(
            f"mesh.dp * mesh.cp = {dp} * {cp} = {dp * cp}, but {started} {_were(world)} started; "
            f"{_how_to_start(dp * cp)}, or set --mesh.dp 0, which takes all that are there"
        )
    return dp


def _were(world: int) -> str:
    return "was" if world == 1 else "were"


def _how_to_start(ranks: int) -> str:
    return (
        f"start {ranks} with `launch/torchrun_single_node.sh --ranks {ranks} -- SETTINGS` or "
        f"`torchrun --standalone --nproc_per_node={ranks} -m flexla_dist.train SETTINGS`"
    )


def _device(wanted: str, local: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local >= count:
        raise ArgumentProblem(
            f"local rank {local} has no GPU of its own: this node has {count}; start at most that "
            "many ranks a node, or set device to cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


# Rank, world size, rank on this node, and how to meet the others (None: there are none).
Place = tuple[int, int, int, str | None]


def _torchrun() -> Place:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return int(_variable("RANK")), int(_variable("WORLD_SIZE")), local, "env://"


def _slurm() -> Place:
    method = f"tcp://{_variable('MASTER_ADDR')}:{_variable('MASTER_PORT')}"
    local = int(os.environ.get("SLURM_LOCALID", "0"))
    return int(_variable("SLURM_PROCID")), int(_variable("SLURM_NTASKS")), local, method


def _mpi() -> Place:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ArgumentProblem(
            f"started by MPI, but mpi4py cannot be used ({error}); "
            "install it with: pip install mpi4py"
        ) from None
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    method = f"tcp://{_own_address()}:{_free_port()}" if world.rank == 0 else None
    method = world.bcast(method, root=0)
    local = node.rank
    node.Free()
    return world.rank, world.size, local, method


def _single() -> Place:
    return 0, 1, 0, None


_PLACES = {"torchrun": _torchrun, "mpi": _mpi, "slurm": _slurm, "single": _single}


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ArgumentProblem(
            f"the environment variable {name} is not set; start the program with torchrun, with "
            "mpirun, or from launch/slurm.sbatch"
        )
    return value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _own_address() -> str:
    """An address of this host that the other nodes can reach, or the loopback one."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
    return address

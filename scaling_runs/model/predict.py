"""From a system, a call and a cluster to a time."""

from __future__ import annotations

from dataclasses import dataclass

from scaling_runs.model.clusters import Cluster, ModelProblem
from scaling_runs.model.direction import Direction
from scaling_runs.model.events import Process, Simulation
from scaling_runs.model.network import Network
from scaling_runs.model.programs import PROGRAMS
from scaling_runs.model.workload import Workload

NO_DENSE = ("zeco",)


@dataclass(frozen=True)
class Prediction:
    """Seconds of the slowest rank."""

    system: str
    seconds: float


def simulate(system: str, load: Workload, cluster: Cluster, direction: str) -> Prediction:
    """Time of one call of `load.ranks` ranks that start together; direction `fwd` or `fwdbwd`.

    Raises ModelProblem for a system without a program, and for one that cannot do the call.
    """
    if system not in PROGRAMS:
        raise ModelProblem(f"no program for {system!r}; there are {', '.join(PROGRAMS)}")
    if system in NO_DENSE and load.bytes.element >= 2 * load.bytes.state:
        raise ModelProblem(f"{system} cannot carry a dense M")
    simulation = Simulation()
    network = Network(simulation, cluster, load.ranks)
    kernels = load.kernels
    passes = [Direction(network, load, False, kernels.summary, kernels.forward)]
    if direction == "fwdbwd":
        passes.append(Direction(network, load, True, kernels.adjoint, kernels.backward))
    program = PROGRAMS[system]

    def rank(number: int) -> Process:
        for one in passes:
            at = load.ranks - 1 - number if one.reverse else number
            yield from program(one, at)

    ends = [simulation.spawn(rank(number)) for number in range(load.ranks)]
    simulation.run()
    times = [end.time for end in ends]
    if any(time is None for time in times):
        raise ModelProblem(f"the program of {system} waits for a message that nobody sends")
    return Prediction(system, max(time for time in times if time is not None))

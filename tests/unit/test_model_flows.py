"""Messages of the model: shared ports, connections, and words of receives."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scaling_runs.model.clusters import Cluster, Link, with_notices
from scaling_runs.model.events import Delay, Process, Simulation
from scaling_runs.model.flows import Flows, Port
from scaling_runs.model.network import Network
from scaling_runs.model.predict import simulate
from scaling_runs.model.workload import Bytes, Kernels, Workload

Message = tuple[float, str, tuple[int, ...], float]


def ends(messages: Sequence[Message], ports: int = 4) -> list[float]:
    """When messages have left the wire; each: when it is posted, connection, ports, seconds."""
    simulation = Simulation()
    flows, wires, found = Flows(simulation), [Port() for _ in range(ports)], {}

    def post(number: int, message: Message) -> Process:
        begin, connection, through, seconds = message
        yield Delay(begin)
        yield flows.carry(connection, tuple(wires[n] for n in through), seconds)
        found[number] = simulation.now

    for number, message in enumerate(messages):
        simulation.spawn(post(number, message))
    simulation.run()
    return [found[number] for number in range(len(messages))]


def test_a_message_alone_takes_its_seconds() -> None:
    assert ends([(1.0, "a", (0, 1), 2.0), (1.0, "b", (2, 3), 5.0)]) == [3.0, 6.0]


def test_connections_share_a_port_evenly() -> None:
    assert ends([(0.0, "a", (0, 1), 2.0), (0.0, "b", (0, 2), 2.0)]) == [4.0, 4.0]
    assert ends([(0.0, "a", (0, 1), 1.0), (0.0, "b", (0, 2), 3.0)]) == [2.0, 4.0]
    assert ends([(0.0, "a", (0, 1), 4.0), (2.0, "b", (0, 2), 1.0)]) == pytest.approx([5.0, 4.0])


def test_a_connection_keeps_its_order() -> None:
    assert ends([(0.0, "a", (0, 1), 2.0), (0.0, "a", (0, 1), 1.0)]) == [2.0, 3.0]


def test_who_waits_at_one_port_holds_no_other() -> None:
    """Two streams into port 0; a third leaves one sender at what the port of the two leaves it."""
    found = ends(
        [(0.0, "a", (1, 0), 2.0), (0.0, "b", (2, 0), 2.0), (0.0, "c", (2, 3), 2.0)],
    )
    assert found == [4.0, 4.0, 4.0]
    three = [(0.0, name, (n, 0), 1.0) for name, n in (("a", 1), ("b", 2), ("c", 3))]
    more = ends([*three, (0.0, "d", (3, 4), 2.0)], ports=5)
    assert more == pytest.approx([3.0, 3.0, 3.0, 3.0])  # d has the 2/3 that c cannot use


def test_a_message_waits_for_word_of_its_receive() -> None:
    links = {kind: Link(1.0, 1.0) for kind in ("message", "device")} | {"notice": Link(0.5, 1.0)}
    for kind, arrives in (("message", 4.0 + 0.5 + 2.0 + 1.0), ("device", 2.0 + 1.0)):
        simulation, found = Simulation(), []
        network = Network(simulation, Cluster("two", 2, links, {}), 2)
        network.send(kind, 0, 1, 2.0, "m")

        def late(network: Network = network, found: list[float] = found) -> Process:
            yield Delay(4.0)
            arrival = network.receive("m")
            yield arrival
            assert arrival.time is not None
            found.append(arrival.time)

        simulation.spawn(late())
        simulation.run()
        assert found == [arrives]


def load(ranks: int, state: int = 10) -> Workload:
    kernels = Kernels(1.0, 2.0, 3.0, 4.0, 0.0, 0.0)
    return Workload(ranks, 1, Bytes(state, state, 0, 0), kernels, 4)


def test_a_gather_by_messages_fills_all_ports() -> None:
    """Each rank sends and receives P - 1 elements of a second: as long as its port needs."""
    cluster = Cluster("slow", 64, {"message": Link(0.25, 10.0)}, {})
    for ranks in (2, 4, 7):
        found = simulate("all_gather", load(ranks), cluster, "fwd").seconds
        assert found == pytest.approx(1 + (ranks - 1) * 1.0 + 0.25 + 2, abs=1e-9)


def test_streams_gather_by_a_collective() -> None:
    links = {"message": Link(100.0, 10.0), "gather": Link(0.5, 10.0)}
    found = simulate("all_gather", load(4), Cluster("gpus", 64, links, {}, streams=True), "fwd")
    assert found.seconds == pytest.approx(1 + 3 * 1.5 + 2)


def test_rounds_that_nobody_awaits_yet_slow_nothing() -> None:
    """The first of four ranks posts its second round at once; it leaves when that is awaited."""
    cluster = Cluster("slow", 64, {"message": Link(0.0, 10.0)}, {})
    assert simulate("log_scan", load(4), cluster, "fwd").seconds == pytest.approx(1 + 2 * 1.0 + 2)


def test_measured_links_have_notices() -> None:
    """There and back is a notice and two messages, of which a link's alpha is half."""
    links = {"p2p": Link(3.0, 5.0), "message": Link(4.0, 5.0), "gather": Link(7.0, 5.0)}
    found = with_notices(links)
    assert found["notice"].alpha == found["p2p"].alpha == pytest.approx(2.0)
    assert found["message"].alpha == pytest.approx(3.0) and found["gather"] == links["gather"]
    assert with_notices({"gather": Link(7.0, 5.0)}) == {"gather": Link(7.0, 5.0)}

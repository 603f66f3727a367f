"""Options and fixtures of every test."""

from collections.abc import Iterator

import pytest
import torch

from flexla_dist.testing.poison import poisoned_memory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the larger grids as well")
    parser.addoption(
        "--accept-golden",
        action="store_true",
        help="write tests/unit/golden anew from what is generated",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="a larger grid: --long runs it"))
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs one CUDA device"))
        if item.get_closest_marker("multigpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tests run beside each other and with several ranks: one thread for each process."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poison_uninitialised_memory() -> Iterator[None]:
    with poisoned_memory():
        yield

"""The fixture that poisons uninitialised memory reaches the package and nothing else."""

import torch


def _run_in(module_name: str, source: str) -> torch.Tensor:
    namespace = {"__name__": module_name, "torch": torch}
    exec(source, namespace)
    return namespace["x"]


def test_package_sees_nan() -> None:
    for source in ("x = torch.empty(3)", "x = torch.zeros(3).new_empty(2)"):
        assert _run_in("flexla_dist.somewhere", source).isnan().all()


def test_integers_and_others_are_untouched() -> None:
    assert _run_in("flexla_dist.somewhere", "x = torch.empty(3, dtype=torch.int64)").shape == (3,)
    assert _run_in("elsewhere", "x = torch.empty_like(torch.zeros(2)).zero_()").eq(0).all()

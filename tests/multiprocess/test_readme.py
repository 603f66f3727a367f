"""The code of the README, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.parallel import global_token_count, sequence_loss, shift_labels
from flexla_dist.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"<!-- run: ([\w ,]+) -->\n```python\n(.*?)```", re.DOTALL)
BLOCKS = [(where, code) for where, code in BLOCK.findall((ROOT / "README.md").read_text())]
VARIANT = BLOCKS[0][1]
LONGEST = {
    "spec = LinearAttentionSpec(": 15,
    "SequenceParallelLA(": 10,
    "class MyLayer": 25,
    "global_token_count(": 27,
}


def block(mark: str) -> tuple[str, str]:
    """The only block with these words."""
    found = [item for item in BLOCKS if mark in item[1]]
    assert len(found) == 1, mark
    return found[0]


def execute(rank: int, world: int, source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(source, "README.md", "exec"), names)
    return names


def run_block(rank: int, world: int, source: str) -> None:
    execute(rank, world, source)
    if world > 1:
        assert not dist.is_initialized(), "the block leaves its process group behind"


def lines_of_code(source: str) -> int:
    return len([line for line in source.splitlines() if line.strip()])


def test_blocks_are_there_and_short() -> None:
    assert len(BLOCKS) == len(LONGEST)
    for mark, longest in LONGEST.items():
        assert lines_of_code(block(mark)[1]) <= longest, mark


@pytest.mark.parametrize("mark", LONGEST)
def test_block_runs(mark: str) -> None:
    where, code = block(mark)
    assert where in ("one process", "two processes", "two processes, after one process")
    if where.endswith("after one process"):
        code = f"{VARIANT}\n{code}"
    run_ranks(run_block, 1 if where == "one process" else 2, code)


def whole_step(names: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Loss and parameters of the loop's step, computed on whole sequences."""
    torch.manual_seed(0)
    model = LinearAttentionModel(ModelConfig(layers=1, width=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    documents = torch.tensor(names["documents"])
    labels = [shift_labels(ids, documents) for ids in names["batches"]]
    count = global_token_count(labels, None)
    total = 0.0
    for ids, label in zip(names["batches"], labels, strict=True):
        loss = sequence_loss(model(ids, documents), label, None, count=count)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total, dict(model.named_parameters())


def step_equals_one_rank(rank: int, world: int, source: str) -> None:
    names = execute(rank, world, source)
    loss, parameters = whole_step(names)
    assert names["loss_to_print"] == pytest.approx(loss, abs=1e-5)
    for name, got in names["model"].module.named_parameters():
        torch.testing.assert_close(got, parameters[name], atol=1e-5, rtol=1e-4, msg=name)


def test_own_loop_takes_the_step_of_one_rank() -> None:
    run_ranks(step_equals_one_rank, 2, block("global_token_count(")[1])


def test_files_that_are_named_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"(?:launch|configs|flexla_dist)/[\w./]*\w", text):
        assert (ROOT / name).exists(), name

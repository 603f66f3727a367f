"""Settings of the training program: YAML, overrides, mistakes."""

from pathlib import Path

import pytest

from flexla_dist.train.arguments import ArgumentProblem, parse, valid_keys
from flexla_dist.train.config import TrainConfig
from flexla_dist.train.loop import sequences_per_rank

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


def test_defaults() -> None:
    assert parse([]) == TrainConfig()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = parse(["--config", str(path)])
    assert sequences_per_rank(config, config.mesh.dp or 1) >= 1
    assert config.out != TrainConfig().out


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("steps: 7\nmodel:\n  width: 32\n  variant: gla\n")
    config = parse(["--config", str(file), "--model.width", "64", "--mesh.cp=4"])
    assert (config.steps, config.model.width, config.model.variant) == (7, 64, "gla")
    assert config.mesh.cp == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--model.widht", "3"],
            "unknown setting 'model.widht'; the nearest valid one is 'model.width'",
        ),
        (["--stepz=3"], "unknown setting 'stepz'; the nearest valid one is 'steps'"),
        (["--lr=3"], "nearest valid one is 'optim.lr'"),
        (["--qqqqqqqq=3"], "--help lists all"),
        (["--model.width", "abc"], "model.width: Expected a int. Got value: abc"),
        (["--mesh.wrapper", "ddpx"], r"mesh.wrapper: Expected one of \['ddp', 'fsdp'\]"),
        (["--data"], "--data wants at least one"),
        (["--data", "no/such/file"], "no such file or folder: no/such/file"),
    ],
)
def test_mistakes_on_the_command_line(words: list[str], text: str) -> None:
    with pytest.raises(ArgumentProblem, match=text):
        parse(words)


@pytest.mark.parametrize(
    ("yaml", "text"),
    [
        (
            "model:\n  widht: 3\n",
            "unknown setting 'model.widht'; the nearest valid one is 'model.width'",
        ),
        ("stepz: 3\n", "unknown setting 'stepz'; the nearest valid one is 'steps'"),
        ("optim:\n  lr: fast\n", "optim.lr: Expected a float. Got value: fast"),
        ("modle:\n  width: 3\n", "nearest valid one is 'model.width'"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, yaml: str, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml)
    with pytest.raises(ArgumentProblem, match=text):
        parse(["--config", str(file)])


def test_data_takes_paths(tmp_path: Path) -> None:
    (tmp_path / "a b.txt").write_text("x")
    config = parse(["--data", str(tmp_path / "a b.txt"), str(tmp_path), "--steps", "3"])
    assert config.data.paths == [str(tmp_path / "a b.txt"), str(tmp_path)]
    assert config.steps == 3


def test_every_setting_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for key in valid_keys():
        assert f"--{key} " in text, key


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--batch", "6", "--accumulation", "4"], "batch = 6 is not a multiple"),
        (["--batch", "4", "--data.packed", "true"], "set accumulation to 4"),
    ],
)
def test_numbers_that_do_not_fit(words: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sequences_per_rank(parse(words), 1)

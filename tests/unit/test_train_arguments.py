"""Settings of the training program: YAML, overrides, mistakes."""

from pathlib import Path

import pytest
import torch

from flexla_dist.train.arguments import ArgumentProblem, parse, valid_keys
from flexla_dist.train.config import TrainConfig
from flexla_dist.train.loop import sequences_per_rank
from flexla_dist.train.program import main

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
        ("steps: 3\nmodel:\n  widht: 3\n", r"a\.yaml, line 3: unknown setting 'model.widht'"),
        ("steps: 3\noptim:\n  lr: fast\n", r"a\.yaml, line 3: optim\.lr: Expected a float"),
        ("steps: 3\nmodel:\n\twidth: 3\n", r"a\.yaml, line 3: not YAML: .*tab|cannot start"),
        ("- 1\n", r"a\.yaml, line 1: expected settings"),
        ("steps: 3\noptim: 3\n", r"a\.yaml, line 2: optim is a group of settings"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, yaml: str, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml)
    with pytest.raises(ArgumentProblem, match=text):
        parse(["--config", str(file)])


def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("optim:\n  lr: 0.1\n")
    with pytest.raises(ArgumentProblem, match=r"^optim\.lr: Expected a float"):
        parse(["--config", str(file), "--optim.lr", "fast"])
    with pytest.raises(ArgumentProblem, match=r"^--config: no such file: "):
        parse(["--config", str(tmp_path / "none.yaml")])


SMALL = ["--out", "{out}", "--data.paths=[{out}/a.py]"]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--check_settings"], 0, ""),
        (["--check_settings=2", "--mesh.cp=2"], 0, ""),
        (["--check_settings", "--help"], 3, ""),
        (["--check_settings=two"], 2, "expected the number of ranks"),
        (["--check_settings=1", "--mesh.cp=2"], 2, "--ranks 2 -- SETTINGS` or `torchrun"),
        (["--check_settings=1", "--mesh.cp=2"], 2, "--mesh.cp 1 --mesh.dp 1"),
        (["--check_settings=2", "--mesh.dp=3"], 2, "3 * 1 = 3, but 2 ranks were started"),
        (["--check_settings", "--mesh.cp=0"], 2, "expected mesh.cp of at least 1"),
        (["--check_settings", "--data.paths=[/none]"], 2, "no such file or folder: /none"),
        (["--check_settings", "--model.variant=mine"], 2, "parallelize_sequence (README"),
        (["--check_settings", "--checkpoint.resume=latest"], 2, "no complete checkpoint"),
    ],
)
def test_settings_are_checked_without_training(
    tmp_path: Path, words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * 10_000)
    assert main([*(word.format(out=tmp_path) for word in SMALL), *words]) == status
    shown = capsys.readouterr().err
    assert text in shown and len(shown.splitlines()) == (status == 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]


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


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("--steps=0", "steps: got 0, expected at least 1"),
        ("--batch=0", "batch: got 0, expected at least 1"),
        ("--accumulation=0", "accumulation: got 0, expected at least 1"),
        ("--log_every=0", "log_every: got 0, expected at least 1"),
        ("--eval.sequences=0", "eval.sequences: got 0, expected at least 1"),
        ("--data.length=-5", "data.length: got -5, expected at least 1"),
        ("--checkpoint.keep=0", "checkpoint.keep: got 0, expected at least 1"),
        ("--model.heads=0", "model.heads: got 0, expected at least 1"),
        ("--model.vocab=100", "model.vocab: got 100, expected at least 256"),
        ("--threads=-1", "threads: got -1, expected at least 0"),
        ("--mesh.timeout=0", "mesh.timeout: got 0.0, expected more than 0"),
        ("--optim.beta1=1", "optim.beta1: got 1.0, expected from 0 to below 1"),
        ("--data.held_out=1.5", "data.held_out: got 1.5, expected a fraction above 0 and below"),
        ("--data.held_out=0", "data.held_out: got 0.0, expected a fraction above 0 and below"),
        ("--sample.prompt=", "sample.prompt: got '', expected at least one character"),
    ],
)
def test_numbers_out_of_range(tmp_path: Path, word: str, text: str) -> None:
    with pytest.raises(ArgumentProblem) as problem:
        parse([word])
    assert str(problem.value).startswith(text)
    key, _, value = word.removeprefix("--").rpartition("=")
    group, _, name = key.rpartition(".")
    line = f"{name}: {value or repr(value)}"
    file = tmp_path / "a.yaml"
    file.write_text(f"{group}:\n  {line}\n" if group else f"{line}\n")
    with pytest.raises(ArgumentProblem, match=r"a\.yaml, line [12]: " + key):
        parse(["--config", str(file)])


@pytest.mark.parametrize(
    ("size", "out", "text"),
    [
        (0, "run", "data: the training text has 0 bytes, fewer than one sequence"),
        (1, "run", "data: the training text has 0 bytes, fewer than one sequence"),
        (60_000, "a.py", "a.py is a file; give --out another folder"),
        (60_000, "a.py/run", "a.py is a file; give --out another folder"),
        (60_000, "/proc/run", "out: /proc/run cannot be written"),
    ],
)
def test_files_and_folders_are_checked_before_ranks_start(
    tmp_path: Path, size: int, out: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("x" * size)
    words = [f"--data.paths=[{tmp_path / 'a.py'}]", "--out", str(tmp_path / out)]
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert text in shown and "Traceback" not in shown and len(shown.splitlines()) == 1
    assert not torch.distributed.is_initialized()

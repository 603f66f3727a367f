"""The program `flexla-dist train`: settings, ranks, data, training, and the screen at the end."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from flexla_dist.errors import FlexlaError
from flexla_dist.layers import generate
from flexla_dist.layers.recipes import RECIPES
from flexla_dist.train import arguments, checkpoint, launch
from flexla_dist.train.arguments import ArgumentProblem
from flexla_dist.train.checkpoint import CheckpointProblem
from flexla_dist.train.config import TrainConfig
from flexla_dist.train.data import Sampler, check_texts, entropies, load_texts
from flexla_dist.train.limits import problem_of_folder
from flexla_dist.train.loop import Result, Trainer, sequences_per_rank
from flexla_dist.train.report import Reporter, RunReporter, SilentReporter

CHECK = "--check_settings"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit status is 0, 2 for settings that do not fit, 1 for a failure."""
    ranks = None
    words = list(sys.argv[1:] if argv is None else argv)
    status = 0
    try:
        if any(word.partition("=")[0] == CHECK for word in words):
            return _only_check(words)
        config = arguments.parse(words)
        _check_before_ranks(config)
        ranks = launch.start(config)
        train(config, ranks)
    except (ArgumentProblem, ValueError, TypeError) as error:
        print(f"{_who(ranks)}: {error}", file=sys.stderr, flush=True)
        if not isinstance(error, ArgumentProblem | CheckpointProblem | FlexlaError):
            _show_trace()
        status = 2
    except Exception:
        print(f"{_who(ranks)} failed:", file=sys.stderr, flush=True)
        traceback.print_exc()
        status = 1
    _leave(ranks, status)
    return status


def _leave(ranks: launch.Ranks | None, status: int) -> None:
    """Leave the world of ranks. One rank of several ends its process here: the backend's threads
    (after a failure, collectives that the others no longer join) can abort the orderly end of the
    interpreter, and everything is written by now."""
    if ranks is not None and ranks.world > 1:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and status == 0:
            mpi.Finalize()  # mpirun takes a rank that leaves without it for a failed one
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if dist.is_initialized():
        dist.destroy_process_group()


def _only_check(words: list[str]) -> int:
    """`--check_settings[=RANKS]`: 0 when a run may start, 3 when --help or the like was answered.

    Launchers ask this once, before they start ranks that would all tell the same mistake.
    """
    number = [word.partition("=")[2] for word in words if word.partition("=")[0] == CHECK][-1]
    if number and not number.isdecimal():
        raise ArgumentProblem(f"{CHECK}={number}: expected the number of ranks")
    try:
        config = arguments.parse([word for word in words if word.partition("=")[0] != CHECK])
    except SystemExit as end:
        if end.code:
            raise
        return 3
    check_settings(config, int(number or 0))
    return 0


def check_settings(config: TrainConfig, world: int = 0) -> None:
    """ArgumentProblem or CheckpointProblem unless a run may start on `world` ranks (0: as many as
    the mesh wants). Starts and writes nothing."""
    _check_before_ranks(config)
    ranks = world or config.mesh.cp * max(1, config.mesh.dp)
    sequences_per_rank(config, launch.sequence_groups(config.mesh, ranks))


def _check_before_ranks(config: TrainConfig) -> None:
    """What can be told without knowing how many ranks there are."""
    _check_model(config)
    check_texts(config.data, config.seed)
    problem = problem_of_folder(Path(config.out))
    if problem is not None:
        raise ArgumentProblem(problem)
    _checkpoint_to_resume(config)


def _check_model(config: TrainConfig) -> None:
    try:
        config.model.layer()
    except ValueError as error:
        own = ""
        if config.model.variant not in RECIPES:
            own = (
                "; a variant of your own is trained by a loop of your own: put its operator in a "
                "layer and call parallelize_sequence (README, 'Your own variant in a layer, "
                "sharded')"
            )
        raise ArgumentProblem(f"model: {error}{own}") from None


def train(config: TrainConfig, ranks: launch.Ranks) -> Result:
    """Train as the settings say, on the ranks that were started."""
    _check_model(config)
    mesh = launch.make_mesh(config.mesh, ranks)
    sequences_per_rank(config, mesh["dp"].size())
    training, held_out = load_texts(config.data, config.seed)
    source = _checkpoint_to_resume(config)
    dist.barrier()
    if source is None and ranks.rank == 0 and config.checkpoint.overwrite:
        checkpoint.clear(Path(config.out))
    trainer = Trainer(
        config,
        mesh,
        ranks.device,
        Sampler(training, config.data, config.seed),
        Sampler(held_out, config.data, config.seed),
    )
    if source is not None:
        trainer.resume(source)
    reporter: Reporter = SilentReporter()
    if ranks.rank == 0:
        reporter = RunReporter(Path(config.out), trainer.progress.step, config.tensorboard)
    reporter.note(_headline(trainer, ranks, len(training.data), len(held_out.data)))
    try:
        result = trainer.run(reporter)
    finally:
        reporter.close()
    if ranks.rank == 0:
        print(_closing(config, result, *entropies(held_out)), flush=True)
    dist.barrier()
    return result


def _checkpoint_to_resume(config: TrainConfig) -> Path | None:
    out = Path(config.out)
    if config.checkpoint.resume == "latest":
        return checkpoint.find(out)
    if config.checkpoint.resume is not None:
        return checkpoint.find(Path(config.checkpoint.resume))
    existing = checkpoint.newest(out)
    if existing is not None and not config.checkpoint.overwrite:
        raise ArgumentProblem(
            f"{out} holds the checkpoint {existing.name} of an earlier run; "
            "--checkpoint.resume latest goes on from it, --out FOLDER writes elsewhere, "
            "--checkpoint.overwrite true deletes it"
        )
    return None


def _headline(trainer: Trainer, ranks: launch.Ranks, training: int, held_out: int) -> str:
    config, mesh = trainer.config, trainer.mesh
    count = sum(p.numel() for p in trainer.model.parameters())
    begin = f", from step {trainer.progress.step}" if trainer.progress.step else ""
    return (
        f"{config.model.variant}: {config.model.layers} layers of width {config.model.width}, "
        f"{count / 1e6:.2f} M parameters, {config.precision}\n"
        f"{ranks.world} ranks on {ranks.device.type}: dp {mesh['dp'].size()} x cp "
        f"{mesh['cp'].size()}, each holds {config.data.length // mesh['cp'].size()} of the "
        f"{config.data.length} tokens of a sequence\n"
        f"text: {training / 1e6:.1f} MB to train on, {held_out / 1e6:.2f} MB held out{begin}"
    )


def _closing(config: TrainConfig, result: Result, unigram: float, bigram: float) -> str:
    lines = [
        "",
        f"{result.progress.step} steps in {result.progress.seconds:.0f} s",
        "held-out text             bits per byte",
        f"  this model              {result.bits_per_byte:.3f}",
        f"  bigram entropy          {bigram:.3f}",
        f"  unigram entropy         {unigram:.3f}",
        f"checkpoint: {result.checkpoint}",
    ]
    if config.sample.tokens:
        lines += [f"sample at temperature {config.sample.temperature:g}:", "-" * 78]
        lines += [
            sample_text(
                result.checkpoint,
                config.sample.prompt,
                config.sample.tokens,
                config.sample.temperature,
                config.seed,
            ),
            "-" * 78,
        ]
    return "\n".join(lines)


def sample_text(
    folder: Path, prompt: str, tokens: int, temperature: float, seed: int, device: str = "cpu"
) -> str:
    """The prompt and the text that the model of a checkpoint continues it with."""
    if not prompt:
        raise ArgumentProblem("the prompt is empty; give at least one character to continue")
    model = checkpoint.load_model(folder).to(device)
    start = torch.tensor([list(prompt.encode())], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    text = generate(model, start, tokens, temperature, generator)
    return bytes(text[0].tolist()).decode(errors="replace")


def _who(ranks: launch.Ranks | None) -> str:
    if ranks is None or ranks.world == 1:
        return "flexla-dist train"
    return f"flexla-dist train, rank {ranks.rank} of {ranks.world}"


def _show_trace() -> None:
    """The place of an error that the package did not raise on purpose."""
    frame = traceback.extract_tb(sys.exc_info()[2])[-1]
    print(f"  at {frame.filename}:{frame.lineno}, in {frame.name}", file=sys.stderr, flush=True)

"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexla_dist.parallel import (
    global_token_count,
    mean_loss,
    sequence_context,
    sequence_loss,
    shard_sequence,
)
from flexla_dist.train import checkpoint
from flexla_dist.train.arguments import ArgumentProblem
from flexla_dist.train.checkpoint import Progress
from flexla_dist.train.config import TrainConfig
from flexla_dist.train.data import Batch, Sampler
from flexla_dist.train.evaluate import held_out_bits
from flexla_dist.train.optim import learning_rate, make_optimizer
from flexla_dist.train.report import Reporter
from flexla_dist.train.wrap import build_model, clip_gradients, gradients_reduced


class TrainingDiverged(RuntimeError):
    """Loss or gradient are no longer finite; no checkpoint was written since."""


@dataclass(frozen=True)
class Result:
    """What a finished run leaves: how far it came, its held-out loss, its checkpoint."""

    progress: Progress
    bits_per_byte: float
    checkpoint: Path


class Trainer:
    """One rank's part in a run: `run` takes it from where it is to its end.

    The objective of a step is the mean over all counted labels of its `batch` sequences, however
    they are spread over micro-batches, sequence groups and the ranks of a group.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: DeviceMesh,
        device: torch.device,
        training: Sampler,
        held_out: Sampler,
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.device = device
        self.training = training
        self.held_out = held_out
        self.per_rank = sequences_per_rank(config, mesh["dp"].size())
        self.model: nn.Module = build_model(config, mesh, device)
        self.optimizer = make_optimizer(self.model, config.optim)
        self.progress = Progress()

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint."""
        self.progress = checkpoint.load(folder, self.config, self.model, self.optimizer)

    def run(self, reporter: Reporter) -> Result:
        """Train to the end, evaluate and save there, and on the way as the settings say."""
        config = self.config
        bits, saved = math.nan, Path(config.out)
        evaluated = written = -1
        measured = self.progress
        while (fraction := self._fraction()) < 1.0:
            begun = time.perf_counter()
            loss, norm, rate = self._step(fraction)
            self.progress = replace(
                self.progress,
                step=self.progress.step + 1,
                samples=self.progress.samples + config.batch,
                seconds=self.progress.seconds + time.perf_counter() - begun,
            )
            step = self.progress.step
            if step % config.log_every == 0:
                metrics = self._metrics(loss, norm, rate, measured)
                reporter.step(metrics, self._done())
                measured = self.progress
            else:
                reporter.advance(self._done())
            if config.eval.every and step % config.eval.every == 0:
                bits, evaluated = self._evaluate(reporter), step
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                saved, written = self._save(), step
        if evaluated != self.progress.step:
            bits = self._evaluate(reporter)
        if written != self.progress.step:
            saved = self._save()
        return Result(self.progress, bits, saved)

    # -- one optimiser step -------------------------------------------------------------------

    def _step(self, fraction: float) -> tuple[Tensor, float, float]:
        """One optimiser step: this rank's loss, the gradient's norm, the learning rate."""
        config = self.config
        rate = learning_rate(config.optim, self.progress.step, fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = [self._batch(number) for number in range(config.accumulation)]
        count = global_token_count([self._shard(batch.labels) for batch in batches], self.mesh)
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with gradients_reduced(self.model, reduce=last):
                total += self._backward(batch, count)
        norm = clip_gradients(self.model, config.optim.clip)
        if not math.isfinite(norm):
            raise TrainingDiverged(
                f"the gradient's norm is {norm} at step {self.progress.step + 1}; the last "
                "checkpoint is intact: go on from it with a smaller optim.lr or optim.clip"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm, rate

    def _backward(self, batch: Batch, count: Tensor) -> Tensor:
        mixed = self.config.precision == "bf16"
        with sequence_context(self.mesh["cp"], cu_seqlens=batch.cu_seqlens):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
                logits = self.model(self._shard(batch.tokens))
            loss = sequence_loss(logits, self._shard(batch.labels), self.mesh, count=count)
            loss.backward()
        return loss.detach()

    def _batch(self, number: int) -> Batch:
        """The sequences of this rank's group in micro-batch `number` of the current step."""
        group, groups = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        first = self.progress.samples + (number * groups + group) * self.per_rank
        return self.training.training(first, self.per_rank)

    def _shard(self, tokens: Tensor) -> Tensor:
        return shard_sequence(tokens, self.mesh["cp"]).to(self.device)

    # -- around it ----------------------------------------------------------------------------

    def _done(self) -> float:
        """How much of the run is done by this rank's clock, in [0, 1]."""
        steps, limit = self.config.steps, self.config.time_limit
        spent = self.progress.seconds / limit if limit else 0.0
        return min(1.0, max(self.progress.step / steps if steps else 1.0, spent))

    def _fraction(self) -> float:
        """`_done`, the same on all ranks: with a time limit by the clock of the first."""
        if not self.config.time_limit:
            return self._done()
        value = torch.tensor([self._done()], dtype=torch.float64, device=self.device)
        dist.broadcast(value, src=0)
        return float(value)

    def _metrics(self, loss: Tensor, norm: float, rate: float, since: Progress) -> dict[str, float]:
        """Numbers of the last step; the speed is that of the steps since `since`."""
        mean = float(mean_loss(loss, self.mesh))
        tokens = (self.progress.samples - since.samples) * self.config.data.length
        return {
            "step": self.progress.step,
            "loss": mean,
            "bits_per_byte": mean / math.log(2.0),
            "grad_norm": norm,
            "lr": rate,
            "tokens_per_second": tokens / max(self.progress.seconds - since.seconds, 1e-9),
            "seconds": self.progress.seconds,
        }

    def _evaluate(self, reporter: Reporter) -> float:
        bits = held_out_bits(
            self.model,
            self.held_out,
            self.mesh,
            self.config.eval.sequences,
            self.per_rank,
            self.device,
        )
        reporter.evaluation({"step": self.progress.step, "held_out_bits_per_byte": bits})
        return bits

    def _save(self) -> Path:
        return checkpoint.save(self.config, self.model, self.optimizer, self.progress)


def sequences_per_rank(config: TrainConfig, groups: int) -> int:
    """Sequences of a micro-batch for each sequence group; ArgumentProblem where they are no whole
    number."""
    shares = groups * config.accumulation
    if config.batch < 1 or config.batch % shares:
        raise ArgumentProblem(
            f"batch = {config.batch} is not a multiple of mesh.dp * accumulation = {groups} * "
            f"{config.accumulation}"
        )
    count = config.batch // shares
    if config.data.packed and count != 1:
        raise ArgumentProblem(
            f"data.packed needs one sequence a rank and micro-batch, got {count}; set accumulation "
            f"to {config.batch // groups}"
        )
    return count

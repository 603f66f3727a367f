"""Settings of a training run: typed dataclasses, one definition for YAML, command line and help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flexla_dist.layers import ModelConfig


@dataclass(frozen=True)
class DataConfig:
    """What is learned: bytes of text files.

    Args:
        paths: files and folders to read; empty means the Python sources of the standard library.
        suffixes: endings of the files taken from folders.
        held_out: fraction of the files kept for evaluation.
        length: tokens of a sequence, over all ranks of a sequence group.
        packed: mark the files inside a sequence as documents: nothing is remembered from one to
            the next. Needs one sequence per rank and micro-batch.
    """

    paths: list[str] = field(default_factory=list)
    suffixes: list[str] = field(default_factory=lambda: [".py"])
    held_out: float = 0.05
    length: int = 2048
    packed: bool = False


@dataclass(frozen=True)
class MeshConfig:
    """How ranks share the work: dp * cp of them.

    Args:
        cp: ranks that share one sequence.
        dp: groups of such ranks, each with sequences of its own; 0 takes all ranks that are there.
        strategy: how states travel between the ranks of a sequence.
        backend: who carries them: torch.distributed ("host"), kernels ("device"), or "auto".
        node_size: ranks on one node, for the hierarchical strategy; null asks the hosts.
        wrapper: replicate the parameters (ddp) or shard them too (fsdp).
        timeout: seconds after which a rank that waits for another gives up.
    """

    cp: int = 1
    dp: int = 0
    strategy: Literal["auto", "chain", "log_scan", "hierarchical", "all_gather"] = "auto"
    backend: Literal["auto", "host", "device"] = "auto"
    node_size: int | None = None
    wrapper: Literal["ddp", "fsdp"] = "ddp"
    timeout: float = 120.0


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, warm-up and cosine.

    Args:
        lr: peak learning rate.
        final_lr: fraction of the peak at the last step.
        warmup: steps of linear warm-up.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        weight_decay: decay of the matrices; norms, gates and biases have none.
        clip: largest norm of the whole gradient.
    """

    lr: float = 3e-3
    final_lr: float = 0.05
    warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.05
    clip: float = 1.0


@dataclass(frozen=True)
class EvalConfig:
    """Held-out loss.

    Args:
        every: steps between evaluations; 0 evaluates at the end only.
        sequences: held-out sequences of an evaluation, spread evenly over the text.
    """

    every: int = 0
    sequences: int = 32


@dataclass(frozen=True)
class SampleConfig:
    """The text generated at the end.

    Args:
        tokens: bytes to generate; 0 for none.
        prompt: text to continue.
        temperature: 0 takes the likeliest byte.
    """

    tokens: int = 240
    prompt: str = "def "
    temperature: float = 0.7


@dataclass(frozen=True)
class CheckpointConfig:
    """Saved states.

    Args:
        every: steps between checkpoints; 0 saves at the end only.
        keep: newest checkpoints that are kept.
        resume: "latest" continues the run in `out`; a path continues from that run or checkpoint;
            null starts anew. Another cp and dp than the ones saved with are fine.
        overwrite: when starting anew, delete the checkpoints of an earlier run in `out`.
    """

    every: int = 0
    keep: int = 2
    resume: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    Args:
        out: folder of checkpoints, metrics.jsonl and TensorBoard files.
        seed: of parameters, data order and the split into files to train on and held-out files.
        steps: optimiser steps.
        time_limit: seconds of training; when they run out first, the schedule ends there. 0: none.
        batch: sequences of an optimiser step, over all ranks.
        accumulation: micro-batches that an optimiser step is split in.
        precision: of matrix products; fp32, or bf16 by autocast.
        checkpoint_activations: recompute activations in the backward pass to save memory.
        device: auto takes a GPU where there is one.
        threads: CPU threads of a rank; 0 leaves PyTorch's choice.
        launcher: who started the ranks; auto looks.
        log_every: steps between lines of metrics.
        tensorboard: write TensorBoard files too.
        model: shape of the model.
        data: what is learned.
        mesh: how ranks share the work.
        optim: the optimiser.
        eval: held-out loss.
        sample: the text generated at the end.
        checkpoint: saved states.
    """

    out: str = "runs/train"
    seed: int = 0
    steps: int = 1000
    time_limit: float = 0.0
    batch: int = 8
    accumulation: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    checkpoint_activations: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0
    launcher: Literal["auto", "torchrun", "mpi", "slurm", "single"] = "auto"
    log_every: int = 10
    tensorboard: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

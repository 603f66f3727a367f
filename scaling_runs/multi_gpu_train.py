"""Steps 5 and 6: training that equals one GPU, and how soon ranks hear that one was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from flexla_dist.comm.open_engine import EngineRefused
from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.parallel import (
    check_exchanges,
    parallelize_sequence,
    sequence_context,
    sequence_loss,
    shard_sequence,
    shift_labels,
)
from flexla_dist.parallel.runtime import runtime_of
from scaling_runs.multi_gpu_ranks import WRONG
from scaling_runs.weak_scaling import short_text

if TYPE_CHECKING:
    from scaling_runs.multi_gpu_part import Part

VOCABULARY = 32
RATE = 0.3
BOUNDS = {"cuda": 1e-3, "cpu": 5e-5}  # one process in float32 is 1.5e-5 away from one in float64
QUIET_STEPS = 3  # before a rank is killed
KILLED = "killed.json"


def make_model(part: Part, variant: str) -> LinearAttentionModel:
    """Two layers with the same numbers on every rank."""
    sizes = part.sizes
    width = sizes.train_heads * sizes.train_dim
    torch.manual_seed(0)
    config = ModelConfig(
        variant=variant,
        layers=2,
        width=width,
        heads=sizes.train_heads,
        key_dim=sizes.train_dim,
        value_dim=sizes.train_dim,
        mlp_width=2 * width,
        vocab=VOCABULARY,
        conv_width=4,
    )
    return LinearAttentionModel(config).to(part.ranks.device)


def make_batch(part: Part, step: int) -> tuple[Tensor, Tensor]:
    """Ids whose next token follows from the last one, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (1, 1), generator=generator)
    ids = (start + 3 * torch.arange(part.sizes.train_tokens)) % VOCABULARY
    return ids.to(part.ranks.device), shift_labels(ids).to(part.ranks.device)


def train(part: Part) -> int:
    """Losses and parameters after the steps, against those of one device."""
    wrong = 0
    for variant in part.sizes.trained:
        for engine in part.sizes.engines:
            name = {"engine": engine, "variant": variant, "quantity": "difference to one GPU"}
            if part.to_do("train", **name):
                wrong += not _train_both(part, name)
    return WRONG if wrong else 0


def _train_both(part: Part, name: dict[str, str]) -> bool:
    try:
        losses, parameters = train_shards(part, name["variant"], name["engine"])
    except EngineRefused as why:
        part.put("train", "refused", **name, note=short_text(why))
        return True
    except Exception as why:
        part.put("train", "failed", **name, note=short_text(why))
        raise
    expected, others = train_whole(part, name["variant"])
    gaps = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    apart = [relative(p, q) for p, q in zip(parameters, others, strict=True)]
    worst = part.gathered(max(*gaps, *apart))
    bound = BOUNDS[part.ranks.device.type]
    good = max(worst) <= bound
    part.put(
        "train",
        "ok" if good else "wrong",
        **name,
        value=max(worst),
        unit="relative",
        bound=bound,
        first=worst[0],
        middle=worst[len(worst) // 2],
        last=worst[-1],
        note=f"{len(losses)} steps, loss {losses[0]:.4g} to {losses[-1]:.4g}",
    )
    return good


def train_whole(part: Part, variant: str) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of one device, which has the whole sequence."""
    model = make_model(part, variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(part.sizes.train_steps):
        ids, labels = make_batch(part, step)
        loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.detach() for p in model.parameters()]


def train_shards(part: Part, variant: str, engine: str) -> tuple[list[float], list[Tensor]]:
    """The same on shards."""
    group, world = part.group, part.ranks.world
    model = parallelize_sequence(make_model(part, variant), group=group, backend=engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(part.sizes.train_steps):
        loss = training_step(part, model, step)
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
        total = loss / world
        dist.all_reduce(total)
        losses.append(float(total))
    return losses, [p.detach() for p in model.parameters()]


def training_step(part: Part, model: torch.nn.Module, step: int) -> Tensor:
    """Forward and backward of this rank's shard; its part of the loss."""
    group = part.group
    ids, labels = make_batch(part, step)
    model.zero_grad()
    with sequence_context(group, step=step):
        logits = model(shard_sequence(ids, group))
        loss = sequence_loss(logits, shard_sequence(labels, group), group)
        loss.backward()
    return loss.detach()


def own_step(part: Part, model: torch.nn.Module, step: int) -> None:
    """Forward and backward with a loss for which ranks do not meet."""
    ids, _ = make_batch(part, step)
    model.zero_grad()
    with sequence_context(part.group, step=step):
        model(shard_sequence(ids, part.group)).square().mean().backward()


def relative(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


def killed(part: Part, engine: str) -> int:
    """The middle rank is killed between two layers, while the others go on to the second.

    Each of them leaves a file that says when it raised, and what; `multi_gpu.py` reads them, as the
    group is broken. The loss is a rank's own, so that states alone are waited for.
    """
    rank, world = part.ranks.rank, part.ranks.world
    _tell(part, "the group is ready")
    model = make_model(part, part.sizes.trained[0])
    parallelize_sequence(model, group=part.group, backend=engine)
    runtime_of(part.group).set_timeout(60.0)  # much longer than a rank needs to notice
    try:
        for step in range(QUIET_STEPS):
            own_step(part, model, step)
    except EngineRefused as why:
        if rank == 0:
            _leave(part, f"rank{rank}.json", {"error": short_text(why)})
        return 0
    dist.barrier()
    _tell(part, f"{QUIET_STEPS} quiet steps are done")
    if rank == world // 2:
        model.blocks[0].register_forward_hook(lambda *_: _die(part))
    found = _hear(part, model)
    if part.ranks.device.type == "cuda":
        torch.cuda.synchronize()
    _leave(part, f"rank{rank}.json", {**found, "rest": time.time()})
    _tell(part, "the device is at rest")
    if rank == 0:
        time.sleep(3.0)  # this process holds the store, by which the others hear
    return 0


def _hear(part: Part, model: torch.nn.Module) -> dict[str, object]:
    """Run the step in which a rank is killed. What was raised and when, left behind at once: what
    follows may hang."""
    name = f"rank{part.ranks.rank}.json"
    said = "nothing was raised by the step"
    try:
        own_step(part, model, QUIET_STEPS)
        _tell(part, said)
        _leave(part, name, {"at": time.time(), "error": said})
        check_exchanges(part.group)
        said = "nothing was raised"
    except Exception as why:
        said = short_text(why)
    found: dict[str, object] = {"at": time.time(), "error": said}
    _leave(part, name, found)
    _tell(part, said)
    return found


def _tell(part: Part, text: str) -> None:
    """To the log at once: a rank that hangs or is killed says nothing afterwards."""
    print(f"{time.strftime('%H:%M:%S')} {part.options.step}, rank {part.ranks.rank}: {text}",
          flush=True)  # fmt: skip


def _die(part: Part) -> None:
    """Be killed, as by the system; the time is noted."""
    _leave(part, KILLED, {"at": time.time(), "rank": part.ranks.rank})
    _tell(part, "is killed now")
    os.kill(os.getpid(), signal.SIGKILL)


def _leave(part: Part, name: str, content: dict[str, object]) -> None:
    path = part.options.folder / name
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)

"""What ranks run between which one is killed or late: a model of two layers with a convolution.

Its states go by either engine, and the rows before a shard over NCCL with both.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from flexla_dist.comm.errors import ExchangeError
from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.parallel import (
    check_exchanges,
    exchange_plan,
    parallelize_sequence,
    sequence_context,
    shard_sequence,
)
from flexla_dist.parallel.runtime import runtime_of

QUIET_STEPS = 2
TOKENS, VOCABULARY = 1024, 32
LATE_LIMIT, LATE_SECONDS = 3.0, 9.0
REST_SECONDS = 10.0  # in which the device must be done once the error was raised


def model_of(rank: int, engine: str, conv_width: int = 4) -> LinearAttentionModel:
    """The model on this rank's GPU, sharded."""
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    config = ModelConfig(
        variant="simple_gla",
        layers=2,
        width=128,
        heads=2,
        key_dim=64,
        value_dim=64,
        mlp_width=128,
        vocab=VOCABULARY,
        conv_width=conv_width,
    )
    model = LinearAttentionModel(config).to(f"cuda:{rank}")
    parallelize_sequence(model, group=dist.group.WORLD, backend=engine)
    return model


def step_of(model: torch.nn.Module, step: int) -> None:
    """Forward and backward with a loss for which ranks do not meet."""
    group = dist.group.WORLD
    ids = (torch.arange(TOKENS)[None] + step) % VOCABULARY
    model.zero_grad()
    with sequence_context(group, step=step):
        own = shard_sequence(ids.cuda(), group)
        model(own).square().mean().backward()


def quiet_steps(model: LinearAttentionModel, engine: str) -> None:
    """Steps in which all is well; afterwards nothing is looked after."""
    for step in range(QUIET_STEPS):
        step_of(model, step)
    check_exchanges(dist.group.WORLD)
    torch.cuda.synchronize()
    dist.barrier()
    plans = [plan for m in model.modules() if (plan := exchange_plan(m) if _wrapped(m) else None)]
    assert plans and all(plan.engine == engine for plan in plans), [str(p) for p in plans]


def _wrapped(module: torch.nn.Module) -> bool:
    try:
        exchange_plan(module)
    except Exception:
        return False
    return True


def between_layers(model: LinearAttentionModel, action: Callable[[], None]) -> None:
    """Do something after the first layer's forward pass."""
    model.blocks[0].register_forward_hook(lambda *_: action())


def rest_of_device() -> str:
    """ "" once the device has done all it was given, else what it still does."""
    done = threading.Event()
    device = torch.cuda.current_device()

    def wait() -> None:
        torch.cuda.synchronize(device)
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    return "" if done.wait(REST_SECONDS) else f"the device is busy after {REST_SECONDS:g} s more"


def heard(step: Callable[[], None], begin: Callable[[], float]) -> tuple[str, str, float, str]:
    """Type and text of what a step raises, seconds after `begin`, and what the device still does;
    whether it is raised again by the check."""
    try:
        step()
        kind, text = "nothing", ""
    except ExchangeError as error:
        kind, text = type(error).__name__, str(error)
    seconds = time.time() - begin()
    problems = rest_of_device()
    if kind != "nothing":
        try:
            check_exchanges(dist.group.WORLD)
            problems += "; the check raised nothing"
        except ExchangeError:
            pass
    return kind, text, seconds, problems


def killed(rank: int, size: int, engine: str, folder: str) -> None:
    """The middle rank is killed between layers; the others say what they heard in files."""
    model = model_of(rank, engine)
    runtime_of(dist.group.WORLD).set_timeout(60.0)
    quiet_steps(model, engine)
    note = Path(folder) / "killed"

    def die() -> None:
        torch.cuda.synchronize()
        note.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == size // 2:
        between_layers(model, die)
    found = heard(lambda: step_of(model, QUIET_STEPS), lambda: float(note.read_text()))
    (Path(folder) / f"rank{rank}").write_text("\n".join(map(str, found[2:])))
    raise AssertionError(f"{found[0]}: {found[1]}")


def late(rank: int, size: int, engine: str, conv_width: int) -> tuple[str, str, float, str]:
    """The last rank comes later than a wait may last."""
    model = model_of(rank, engine, conv_width)
    group = dist.group.WORLD
    runtime_of(group).set_timeout(60.0)
    quiet_steps(model, engine)
    runtime_of(group).set_timeout(LATE_LIMIT)
    if rank == size - 1:
        between_layers(model, lambda: time.sleep(LATE_SECONDS))
    start = time.time()
    return heard(lambda: step_of(model, QUIET_STEPS), lambda: start)

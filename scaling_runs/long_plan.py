"""Bytes that a GPU holds in a training step on a sequence cut over many of them, part by part.

Contract: formulas in the model's sizes, no measurement; `tests/unit/test_long_plan.py` compares
them with measured peaks. D is the width, C = 2 H K + HV V the channels of q, k and v, Cv = HV V, M
the width of the MLP. A number is wide (float32 whatever the precision) or narrow (bfloat16 in bf16
runs, else float32); a GPU has B T / P tokens.

    numbers a token that a block keeps for backward   wide                  narrow
      two RMSNorms: input, normalised, 1/rms          2 (2 D + 1)
      what linear maps read (bf16: cast for each)                           2 D, bf16: (r + 1) D
      short convolution, and q, k, v                                        4 C
      g: two values on the way, and g                 3 HV
      gated delta: unit q, k, their norms; beta       HV                    2 H K + 4 H
      gated norm: o, normalised, result, 1/rms        3 Cv + HV
      gate, silu(gate), product                                             3 Cv
      SwiGLU                                                                4 M
    r: linear maps that read the block's input, 3, with beta 4.

With checkpoints a block keeps its input, D wide, and one block at a time is computed again. In
backward the worst moment is at the loss (3 vocabulary wide, 1 narrow), at the last norm, in the
last MLP (D wide, 2 M narrow), or in the last attention (D + Cv wide, bf16: D + 3 Cv, and Cv narrow)
when its block's MLP is freed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2
from typing import NamedTuple

import torch

from flexla_dist.comm.channel import PENDING_BYTES, PENDING_SENDS
from flexla_dist.compiler.executor.bind import outline
from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.layers.linear_attention import variant_op
from flexla_dist.layers.recipes import RECIPES

VARIANTS = ("simple_gla", "gated_delta_rule")
STRATEGIES = ("chain", "log_scan", "hierarchical", "all_gather")
EXECUTORS = ("torch", "triton")
CHUNK = 64


class PlanProblem(ValueError):
    """A plan that cannot be made."""


class Numbers(NamedTuple):
    """Wide and narrow numbers."""

    wide: float = 0
    narrow: float = 0

    def plus(self, other: Numbers) -> Numbers:
        """The sum of both."""
        return Numbers(self.wide + other.wide, self.narrow + other.narrow)

    def minus(self, other: Numbers) -> Numbers:
        """What is left without the other."""
        return Numbers(self.wide - other.wide, self.narrow - other.narrow)


@dataclass(frozen=True)
class LongCase:
    """A training step: `batch` sequences of `tokens` over `ranks` GPUs.

    strategy, node_size: of the exchange. executor: "torch" or "triton". sharded: parameters,
    gradients and optimiser cut over the ranks (FSDP2), else whole on each (DDP).
    """

    model: ModelConfig
    tokens: int
    ranks: int
    batch: int = 1
    bf16: bool = True
    checkpoint: bool = True
    executor: str = "triton"
    strategy: str = "chain"
    node_size: int = 8
    sharded: bool = True

    def __post_init__(self) -> None:
        for name, got, known in (
            ("variant", self.model.variant, VARIANTS),
            ("strategy", self.strategy, STRATEGIES),
            ("executor", self.executor, EXECUTORS),
        ):
            if got not in known:
                raise PlanProblem(
                    f"{name} is {got!r}; the formulas are for {', '.join(known)}: give one of them"
                )
        if min(self.tokens, self.ranks, self.batch, self.node_size) < 1:
            raise PlanProblem(
                f"tokens {self.tokens}, ranks {self.ranks}, batch {self.batch}, node_size "
                f"{self.node_size}: each must be at least 1"
            )

    @property
    def local(self) -> int:
        """Tokens of one sequence on one GPU."""
        return ceil(self.tokens / self.ranks)

    def bytes(self, numbers: Numbers) -> float:
        """Bytes of so many numbers a token."""
        each = 4 * numbers.wide + (2 if self.bf16 else 4) * numbers.narrow
        return self.batch * self.local * each


def plan_memory(case: LongCase) -> dict[str, float]:
    """Bytes on one GPU by part; their sum is the peak."""
    whole, block = parameters_of(case.model)
    share = case.ranks if case.sharded else 1
    gathered = 4 * (2 * block + whole - case.model.layers * block) if case.sharded else 0
    kept, again = _activations(case)
    return {
        "inputs": 16 * case.batch * case.local,  # ids and labels
        "parameters": 4 * whole / share + gathered + (2 * whole if case.bf16 else 0),
        "gradients": 4 * whole / share + (8 * block if case.sharded else 0),
        "optimizer": 8 * whole / share,
        "activations": kept,
        "one block again": again,
        "state history": _history(case),
        "backward": _backward(case),
        "exchange": _exchange(case),
    }


@cache
def parameters_of(model: ModelConfig) -> tuple[int, int]:
    """Parameters of the model and of one block."""
    with torch.device("meta"):
        made = LinearAttentionModel(replace(model, layers=1))
    block = sum(p.numel() for p in made.blocks[0].parameters())
    whole = sum(p.numel() for p in made.parameters())
    return whole + (model.layers - 1) * block, block


def block_numbers(case: LongCase) -> Numbers:
    """Numbers a token that a block keeps for backward, states apart; see the table above."""
    m, heads = case.model, case.model.layer().num_value_heads
    delta = RECIPES[m.variant].beta
    values = heads * m.value_dim
    channels = 2 * m.heads * m.key_dim + values
    readers = (5 if delta else 4) if case.bf16 else 2
    found = Numbers(2 * (2 * m.width + 1), readers * m.width)
    found = found.plus(Numbers(3 * heads, 4 * channels))
    if delta:
        found = found.plus(Numbers(heads, 2 * m.heads * m.key_dim + 4 * m.heads))
    found = found.plus(Numbers(3 * values + heads, 3 * values))
    return found.plus(Numbers(0, 4 * m.mlp_width))


def head_numbers(case: LongCase) -> Numbers:
    """Numbers a token that the last norm keeps."""
    return Numbers(2 * case.model.width + 1, case.model.width)


def state_bytes(case: LongCase) -> float:
    """Bytes of one layer's state of all sequences."""
    m = case.model
    return 4.0 * case.batch * m.layer().num_value_heads * m.key_dim * m.value_dim


def element_bytes(case: LongCase) -> float:
    """Bytes of a state and its M."""
    m, rows = case.model, case.batch * case.model.layer().num_value_heads
    dense = RECIPES[m.variant].beta
    return state_bytes(case) + 4.0 * rows * (m.key_dim**2 if dense else 1)


def _activations(case: LongCase) -> tuple[float, float]:
    """(kept over the whole forward pass, of the block that is computed again)."""
    block, layers = case.bytes(block_numbers(case)), case.model.layers
    head = case.bytes(head_numbers(case))
    if not case.checkpoint:
        return layers * block + head, 0.0
    entering = case.bytes(Numbers(case.model.width, 0))
    return layers * entering + head, block - entering


def _history(case: LongCase) -> float:
    """States beside those that enter shards: of a call's slabs, kept for backward (torch), or of
    all chunks and their gradients while one layer's backward runs (triton)."""
    m, states = case.model, state_bytes(case)
    if case.executor == "triton":
        return 2 * ceil(case.local / CHUNK) * states
    heads = m.layer().num_value_heads
    spec_op = variant_op(RECIPES[m.variant].spec)
    rows = (case.batch, case.local)
    shapes = {"q": (m.heads, m.key_dim), "k": (m.heads, m.key_dim), "v": (heads, m.value_dim)}
    inputs = {
        name: torch.empty(*rows, *shapes.get(name, (heads,)), device="meta")
        for name in spec_op.spec.inputs
    }
    known = outline(spec_op.spec, inputs, {}, None, CHUNK)
    saved = spec_op.executor("torch").saved_shapes(known)
    one = sum(4 * torch.Size(s.shape).numel() for s in saved)
    return one * (1 if case.checkpoint else m.layers)


def _backward(case: LongCase) -> float:
    """What backward adds at its worst moment to what is kept; negative parts are freed by then."""
    m, heads = case.model, case.model.layer().num_value_heads
    values, vocab, width = heads * m.value_dim, m.vocab, m.width
    logits = Numbers(0, vocab)  # the caller holds them
    mlp = Numbers(2 * width + 1, 4 * m.mlp_width + width)
    freed_head = head_numbers(case)
    inside = [
        Numbers(width, 2 * m.mlp_width),
        Numbers(2 * width, 0),
        Numbers(width + (3 if case.bf16 else 1) * values, values).minus(mlp),
    ]
    before_blocks = [Numbers(3 * vocab, 0), Numbers(3 * width, 0)]
    block_again = _activations(case)[1]
    at_head = max(case.bytes(logits.plus(x)) for x in before_blocks) - block_again
    in_block = max(case.bytes(logits.plus(x).minus(freed_head)) for x in inside)
    return max(at_head, in_block)


def _exchange(case: LongCase) -> float:
    """States that entered the layers, messages that are under way, convolution halos."""
    if case.ranks == 1:
        return case.model.layers * state_bytes(case)
    m, state, element = case.model, state_bytes(case), element_bytes(case)
    narrow = 2 if case.bf16 else 4
    channels = 2 * m.heads * m.key_dim + m.layer().num_value_heads * m.value_dim
    halo = 2 * case.batch * max(0, m.conv_width - 1) * channels * narrow
    near = min(case.node_size, case.ranks)
    moving = {
        "chain": 3 * state,
        "log_scan": (2 + ceil(log2(case.ranks))) * element,
        "hierarchical": (2 + ceil(log2(near))) * element + 3 * state,
        "all_gather": (2 + case.ranks) * element,
    }[case.strategy]
    size = state if case.strategy == "chain" else element
    sent = 0 if case.strategy == "all_gather" else min(PENDING_BYTES + size, PENDING_SENDS * size)
    return m.layers * state + moving + sent + halo

"""What `single_gpu.py` measures: the same call by different libraries.

Contract: `prepare` gives a function of no arguments that runs forward and returns the output of a
call, or says why it cannot (`Unavailable`). Arguments are those of `flexla_dist`'s variant.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import flexla_dist
from flexla_dist.ops.op import LinearAttentionOp, compile
from flexla_dist.spec.variants import get_variant
from flexla_dist.testing.inputs import CallInputs
from scaling_runs import plain_chunk

SOFTMAX = "softmax_attention"
COMPILE_MAX_TOKENS = 16384
Forward = Callable[[], Tensor]


class Unavailable(Exception):
    """This implementation cannot run this case; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """A forward call ready to run, how the row names it, and what plan it follows."""

    forward: Forward
    version: str
    plan: Callable[[], str] = str


class Implementation(Protocol):
    """One library."""

    def prepare(self, variant: str, call: CallInputs, direction: str) -> Prepared:
        """Raises Unavailable."""


class Ours:
    """flexla_dist on the triton executor."""

    def __init__(self) -> None:
        self._ops: dict[str, LinearAttentionOp] = {}

    def prepare(self, variant: str, call: CallInputs, direction: str) -> Prepared:
        """The compiled operator."""
        if variant == SOFTMAX:
            raise Unavailable("not a linear attention")
        op = self._ops.setdefault(variant, compile(get_variant(variant), executor="triton"))
        arguments = {**call.inputs, **call.params, **call.scalars}
        return Prepared(
            lambda: op(**arguments)[0], flexla_dist.__version__, lambda: plan_text(op.last_plan)
        )


def plan_text(plan: object) -> str:
    """A plan in one word a fact: `chunk_size=64 kernels=fused configurations=estimate`."""
    if plan is None:
        return ""
    facts = {k: v for k, v in vars(plan).items() if k not in ("executor", "num_sequences")}
    if "configurations" in facts:  # where those of its kernels are from, each place once
        sources = {source.split(" (")[0] for _, source in facts["configurations"]}
        facts["configurations"] = "+".join(sorted(sources)).replace(" ", "_")
    return " ".join(f"{name}={value}" for name, value in facts.items())


class Fla:
    """Flash Linear Attention's chunk operators with their Triton back ends."""

    FUNCTIONS: Mapping[str, tuple[str, str]] = {
        "linear_attn": ("linear_attn", "chunk_linear_attn"),
        "simple_gla": ("simple_gla", "chunk_simple_gla"),
        "retention": ("retention", "chunk_retention"),
        "gla": ("gla", "chunk_gla"),
        "delta_rule": ("delta_rule", "chunk_delta_rule"),
        "gated_delta_rule": ("gated_delta_rule", "chunk_gated_delta_rule"),
        "kda": ("kda", "chunk_kda"),
        "hgrn": ("hgrn", "chunk_hgrn"),
    }
    GUARD = ("fla.ops.common.chunk_o", "TRITON_ABOVE_3_7_1")
    GUARDED = ("simple_gla", "gated_delta_rule")
    GROUPED = ("gated_delta_rule", "kda")  # take fewer heads of q and k than of v

    def __init__(self, lift_guard: bool):
        self.lift_guard = lift_guard

    def prepare(self, variant: str, call: CallInputs, direction: str) -> Prepared:
        """The function of the same name; raises Unavailable where FLA is missing or refuses."""
        if variant not in self.FUNCTIONS:
            raise Unavailable("no such function")
        try:
            fla = importlib.import_module("fla")
            folder, name = self.FUNCTIONS[variant]
            function = getattr(importlib.import_module(f"fla.ops.{folder}"), name)
        except ImportError as missing:
            raise Unavailable(f"not installed: {missing}") from missing
        version = str(fla.__version__)
        if direction == "fwdbwd" and variant in self.GUARDED and self._guarded():
            if not self.lift_guard:
                raise Unavailable("FLA refuses this backward here; --lift-fla-guard times it")
            version += " guard lifted"
        arguments: dict[str, Any] = {**call.inputs, **call.scalars}
        spread = group_sizes(call.inputs) if variant not in self.GROUPED else {}
        if spread:
            version += " heads repeated"
        if variant == "hgrn":
            x, g = arguments["x"], arguments["g"]
            return Prepared(lambda: function(x.squeeze(2), g.squeeze(2))[0], version)
        if variant == "linear_attn":
            arguments["normalize"] = False
        elif variant == "retention":
            del arguments["g"]

        def forward() -> Tensor:
            wide = {n: arguments[n].repeat_interleave(by, dim=2) for n, by in spread.items()}
            return function(**(arguments | wide))[0]

        return Prepared(forward, version)

    def _guarded(self) -> bool:
        module = importlib.import_module(self.GUARD[0])
        return bool(module.IS_NVIDIA_HOPPER and not getattr(module, self.GUARD[1]))

    @contextmanager
    def lifted(self, version: str) -> Iterator[None]:
        """Within the block, a backward that FLA refuses on this Triton runs all the same."""
        if "guard lifted" not in version:
            yield
            return
        module = importlib.import_module(self.GUARD[0])
        before = getattr(module, self.GUARD[1])
        setattr(module, self.GUARD[1], True)
        try:
            yield
        finally:
            setattr(module, self.GUARD[1], before)


def group_sizes(inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """Inputs that have fewer heads than others, and how many heads read each of theirs."""
    most = max(x.shape[2] for x in inputs.values())
    return {name: most // x.shape[2] for name, x in inputs.items() if x.shape[2] < most}


class FlashQla:
    """FlashQLA's gated delta rule; needs tilelang."""

    VARIANT = "gated_delta_rule"

    def prepare(self, variant: str, call: CallInputs, direction: str) -> Prepared:
        """Raises Unavailable for other variants and where it is not installed."""
        if variant != self.VARIANT:
            raise Unavailable("gated delta rule only")
        try:
            library = importlib.import_module("flash_qla")
        except (ImportError, ValueError) as missing:  # ValueError: not for this device
            raise Unavailable(f"not installed: {missing}") from missing
        arguments = {**call.inputs, **call.scalars}
        return Prepared(
            lambda: library.chunk_gated_delta_rule(**arguments)[0], str(library.__version__)
        )


class TorchCompile:
    """torch.compile of the plain chunk form, where there is one without a loop over chunks."""

    def prepare(self, variant: str, call: CallInputs, direction: str) -> Prepared:
        """Raises Unavailable for other variants and for lengths whose square is too large."""
        forms = {"linear_attn": plain_chunk.linear_attn, "simple_gla": plain_chunk.simple_gla}
        if variant not in forms:
            raise Unavailable("no plain chunk form without a loop")
        tokens = next(iter(call.inputs.values())).shape[1]
        if tokens > COMPILE_MAX_TOKENS or tokens % plain_chunk.CHUNK:
            raise Unavailable(f"T = {tokens}: the plain form is quadratic in chunks")
        torch._dynamo.reset()  # a fresh allowance of compilations for every shape
        function = torch.compile(forms[variant], dynamic=False)
        arguments = {**call.inputs, **call.scalars}
        return Prepared(lambda: function(**arguments), torch.__version__)


class Sdpa:
    """Causal softmax attention by PyTorch, for the scale of things."""

    def prepare(self, variant: str, call: CallInputs, direction: str) -> Prepared:
        """Takes only the variant `softmax_attention`."""
        if variant != SOFTMAX:
            raise Unavailable("softmax attention only")
        scale = call.scalars["scale"]

        def forward() -> Tensor:
            q, k, v = (call.inputs[name].transpose(1, 2) for name in "qkv")
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale
            )
            return out.transpose(1, 2)

        return Prepared(forward, torch.__version__)


def implementations(lift_fla_guard: bool) -> dict[str, Implementation]:
    """All by the name that the column impl has."""
    return {
        "ours": Ours(),
        "fla": Fla(lift_fla_guard),
        "flashqla": FlashQla(),
        "torch_compile": TorchCompile(),
        "sdpa": Sdpa(),
    }

"""A training step with any system: a model whose layers exchange states by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from flexla_dist.layers import LinearAttentionModel, ModelConfig
from flexla_dist.layers.model import Block
from flexla_dist.layers.recipes import RECIPES
from flexla_dist.parallel.runtime import runtime_of
from flexla_dist.parallel.site import Site
from scaling_runs.baselines import Attend, Refused, Settings, Sharding, System, get_system
from scaling_runs.weak_cases import Setup
from scaling_runs.weak_grid import Point


class SystemExchange:
    """What a layer gets from outside its tokens: rows from the package, states from a system."""

    cu_seqlens = None

    def __init__(self, rows: Any, attend: Callable[[Any], Attend]) -> None:
        self._rows, self._attend = rows, attend

    def convolve_halo(self, x: Tensor, width: int) -> Tensor:
        """The `width` tokens before x."""
        return self._rows.convolve_halo(x, width)

    def attend(
        self,
        op: Any,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        scalars: Mapping[str, float],
    ) -> Tensor:
        """The operator's output by the system."""
        return self._attend(op)(inputs, params, scalars)


def use_system(
    model: LinearAttentionModel, system: System, sharding: Sharding, settings: Settings
) -> None:
    """Let every layer of the model exchange its states by a system."""
    group = sharding.ranks.group
    prepared: dict[Any, Attend] = {}

    def attend_of(op: Any) -> Attend:
        if op not in prepared:
            prepared[op] = system.prepare(op, sharding, settings)
        return prepared[op]

    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        site = Site(group, f"layer {number}", timeout=settings.timeout)

        def before(
            layer: nn.Module, args: tuple, kwargs: dict[str, Any], site: Site = site
        ) -> tuple[tuple, dict[str, Any]]:
            runtime_of(group).remember_lengths(sharding.lengths)
            return args, {"exchange": SystemExchange(site.open(args[0]), attend_of)}

        block.attn.register_forward_pre_hook(before, with_kwargs=True)


class StepCase:
    """Forward, backward, gradient all-reduce and optimiser step of a small model at one point."""

    def __init__(self, point: Point, setup: Setup, layers: int) -> None:
        if point.variant not in RECIPES:
            raise Refused(f"{point.variant} has no layer; those that have: {', '.join(RECIPES)}")
        self.point, self.device = point, setup.device
        width = point.H * point.V
        config = ModelConfig(
            variant=point.variant,
            layers=layers,
            width=width,
            heads=point.H,
            key_dim=point.K,
            value_dim=point.V,
            mlp_width=2 * width,
        )
        torch.manual_seed(0)
        model = LinearAttentionModel(config).to(setup.device)
        sharding = Sharding.of(setup.group, point.lengths)
        self.sharding, self.total = sharding, point.B * point.total
        use_system(model, get_system(point.system), sharding, setup.settings)
        ids = [setup.device.index] if setup.device.type == "cuda" else None
        self.model = DistributedDataParallel(model, device_ids=ids, process_group=setup.group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        whole = torch.randint(
            256, (point.B, point.total + 1), generator=torch.Generator().manual_seed(1)
        )
        here = slice(sharding.offset, sharding.offset + sharding.tokens)
        self.tokens = whole[:, :-1][:, here].contiguous().to(setup.device)
        self.labels = whole[:, 1:][:, here].contiguous().to(setup.device)

    def loss(self) -> Tensor:
        """This rank's share of the mean loss, made for averaged gradients."""
        mixed = self.point.dtype in ("bfloat16", "float16")
        with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
            logits = self.model(self.tokens)
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), self.labels.flatten(), reduction="sum"
        )
        return total * (self.sharding.ranks.size / self.total)

    def __call__(self) -> None:
        """One optimiser step."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

"""`parallelize_sequence`: every supported layer of a model wrapped, everything else looked at.

Contract: a model that comes back computes on shards what it computed on whole sequences. A module
that mixes tokens in a way that nothing here understands would silently see only its shard, so it
is refused by its path. What acts on every token alone (linear layers, norms over features,
embeddings) passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules import batchnorm, conv, instancenorm, pooling

from flexla_dist.errors import UnsupportedLayerError
from flexla_dist.parallel.adapters import find_adapter
from flexla_dist.parallel.engine import HeadGroups
from flexla_dist.parallel.mesh import MeshOrGroup
from flexla_dist.parallel.runtime import DEFAULT_TIMEOUT
from flexla_dist.parallel.wrap import SequenceParallelLA, is_sequence_parallel

Model = TypeVar("Model", bound=nn.Module)

_MIXING = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.RNNBase,
    batchnorm._BatchNorm,
    instancenorm._InstanceNorm,
    nn.GroupNorm,
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    pooling._LPPoolNd,
    pooling._AdaptiveAvgPoolNd,
    pooling._AdaptiveMaxPoolNd,
)
_MIXING_NAMES = ("attention", "attn", "mamba", "rwkv", "retention", "deltanet", "ssm", "recurrent")


def parallelize_sequence(
    model: Model,
    mesh: MeshOrGroup | None = None,
    *,
    group: ProcessGroup | None = None,
    strategy: str = "auto",
    node_size: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    trusted: Iterable[str] = (),
    backend: str = "auto",
    groups: HeadGroups = None,
) -> Model:
    """Wrap every supported layer of a model with `SequenceParallelLA`; returns the same model.

    trusted: paths of modules, such as "blocks.3.mixer", that are known to work on shards and are
    not looked into. The other arguments are those of `SequenceParallelLA`. Call it before FSDP or
    DDP. Raises UnsupportedLayerError, before anything is changed, when a module mixes tokens and
    is not supported, when a layer is wrapped already, or when the model has no supported layer.
    """
    allowed = set(trusted)
    known = {path for path, _ in model.named_modules()}
    if missing := allowed - known:
        raise UnsupportedLayerError(f"trusted names modules that do not exist: {sorted(missing)}")
    found: list[tuple[str, nn.Module]] = []
    refused: list[str] = []
    for path, module in _outermost(model, allowed):
        if find_adapter(module) is not None:
            found.append((path, module))
        elif reason := _mixes_tokens(module):
            refused.append(f"{path or 'the model itself'}: {reason}")
    if refused:
        raise UnsupportedLayerError(
            "these modules mix tokens, and would see only one rank's shard of the sequence:\n  "
            + "\n  ".join(refused)
            + "\nGive them an adapter with register_adapter, or list them in trusted= when they "
            "already work on shards"
        )
    if wrapped := [path for path, module in found if is_sequence_parallel(module)]:
        raise UnsupportedLayerError(f"sharded already: {', '.join(wrapped)}; unwrap them first")
    if not found:
        raise UnsupportedLayerError(
            f"{type(model).__name__} has no layer that can be sharded; supported are layers with a "
            "compiled `op` whose forward takes `exchange`, and classes with a registered adapter"
        )
    for path, module in found:
        SequenceParallelLA(
            module,
            mesh,
            group=group,
            strategy=strategy,
            node_size=node_size,
            timeout=timeout,
            name=f"{path or 'model'} ({type(module).__name__})",
            backend=backend,
            groups=groups,
        )
    return model


def _outermost(model: nn.Module, trusted: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules in order, once each, without the insides of supported and trusted ones."""
    seen: set[int] = set()
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        if path in trusted or id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        if find_adapter(module) is None:
            prefix = f"{path}." if path else ""
            children = [(prefix + name, child) for name, child in module.named_children()]
            stack.extend(reversed(children))


def _mixes_tokens(module: nn.Module) -> str | None:
    """Why a module is taken to mix tokens, None where it is not."""
    name = type(module).__name__
    if isinstance(module, _MIXING):
        return f"{name} mixes tokens"
    if isinstance(module, conv._ConvNd):
        if max(module.kernel_size) > 1:
            return f"{name} of {max(module.kernel_size)} taps reads tokens of another rank"
        return None
    own = not type(module).__module__.startswith("torch.nn")
    if (
        own
        and any(word in name.lower() for word in _MIXING_NAMES)
        and _has_no_children_of_own(module)
    ):
        return f"{name} is no layer that is known here, and by its name it mixes tokens"
    return None


def _has_no_children_of_own(module: nn.Module) -> bool:
    """Whether no supported layer is inside, which would explain the name of its container."""
    return not any(
        find_adapter(child) is not None for child in module.modules() if child is not module
    )

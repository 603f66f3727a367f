"""`SequenceParallelLA`: a layer that computes on one rank's tokens as if it had the whole sequence.

Contract: the module stays the same object with the same parameters, buffers and names; only its
`forward` is replaced, by an instance attribute that `unwrap` removes. With one rank the layer's own
forward stays in place, until documents are packed by a `sequence_context`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flexla_dist.errors import ShardingError, UnsupportedLayerError
from flexla_dist.parallel.adapters import LayerAdapter, adapter_of
from flexla_dist.parallel.context import current_plan
from flexla_dist.parallel.documents import read_cu_seqlens
from flexla_dist.parallel.eager import eager
from flexla_dist.parallel.engine import ExchangePlan, HeadGroups
from flexla_dist.parallel.mesh import MeshOrGroup, sequence_group
from flexla_dist.parallel.recompute import recomputing
from flexla_dist.parallel.runtime import DEFAULT_TIMEOUT
from flexla_dist.parallel.site import Site

MARKER = "_sequence_parallel"
Layer = TypeVar("Layer", bound=nn.Module)


class ShardedForward:
    """The forward of a wrapped layer, and its marker.

    A copy of the layer has a ShardedForward of its own, over the same group. Pickling leaves the
    group behind: the loaded layer refuses to run until it is wrapped or unwrapped.
    """

    def __init__(self, layer: nn.Module, adapter: LayerAdapter, site: Site) -> None:
        self.layer = layer
        self.adapter = adapter
        self.site = site
        self.replaced = layer.__dict__.get("forward")

    def install(self) -> None:
        """Put this in the place of the layer's forward; with one rank only mark the layer."""
        self.layer.__dict__[MARKER] = self
        if self.site.runtime.size > 1:
            self.wake()
        else:
            self.site.runtime.sleeping.add(self)

    def wake(self) -> None:
        """Replace the layer's forward."""
        self.site.runtime.sleeping.discard(self)
        if self.layer.__dict__.get(MARKER) is self:
            self.layer.__dict__["forward"] = self

    def remove(self) -> None:
        """Give the layer its forward back."""
        self.site.runtime.sleeping.discard(self)
        self.layer.__dict__.pop(MARKER, None)
        if self.layer.__dict__.get("forward") is self:
            del self.layer.__dict__["forward"]
            if self.replaced is not None:
                self.layer.__dict__["forward"] = self.replaced

    @property
    def original(self) -> Any:
        """The layer's own forward, bound to it."""
        if self.replaced is not None:
            return self.replaced
        return type(self.layer).forward.__get__(self.layer)

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        whole = self.site.runtime.size == 1 and kwargs.get("cu_seqlens") is not None
        if whole or kwargs.get("exchange") is not None:
            return self.original(*args, **kwargs)
        with self.site.guard():
            kwargs = self._without_documents(kwargs)
            tokens = self.adapter.tokens(self.layer, args, kwargs)
            exchange = self.site.open(tokens)
            return self.adapter.forward(self.layer, self.original, exchange, args, kwargs)

    def _without_documents(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords without cu_seqlens, which must be those of the context."""
        kwargs = {name: value for name, value in kwargs.items() if name != "exchange"}
        given: Tensor | None = kwargs.pop("cu_seqlens", None)
        if given is None or recomputing():
            return kwargs
        plan = current_plan(self.site.group)
        if plan is None or not plan.packed:
            raise ShardingError(
                f"{self.site.name} was given cu_seqlens, but its tokens are sharded: packed "
                "documents are described by sequence_context(mesh, cu_seqlens=...) around the "
                "forward pass"
            )
        if read_cu_seqlens(given) != plan.starts:
            raise ShardingError(
                f"{self.site.name} was given cu_seqlens that differ from those of its "
                "sequence_context; pass the global ones, or none"
            )
        return kwargs

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedForward:
        clone = ShardedForward.__new__(ShardedForward)
        memo[id(self)] = clone
        clone.adapter, clone.site = self.adapter, self.site.copy()
        clone.layer = deepcopy(self.layer, memo)
        clone.replaced = deepcopy(self.replaced, memo)
        if clone.site.runtime.size == 1:
            clone.site.runtime.sleeping.add(clone)
        return clone

    def __reduce__(self) -> tuple[Any, ...]:
        return DetachedForward, (self.site.name,)


class DetachedForward:
    """What a pickled wrapped layer has in the place of its forward: a clear refusal."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ShardingError(
            f"{self.name} was sharded over ranks when it was pickled, and groups cannot be "
            "pickled: wrap it again with SequenceParallelLA(layer, mesh), or unwrap(layer) to use "
            "it whole"
        )


def SequenceParallelLA(
    layer: Layer,
    mesh: MeshOrGroup | None = None,
    *,
    group: ProcessGroup | None = None,
    strategy: str = "auto",
    node_size: int | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    name: str | None = None,
    backend: str = "auto",
    groups: HeadGroups = None,
) -> Layer:
    """Let a linear-attention layer work on sequences sharded over a group; returns the same module.

    State, state gradient, convolution halo and positions cross the cuts; parameters, buffers and
    names stay as they are. Every rank of the group must call the layer in the same order.

    Args:
        layer: a layer of this package, or of a class with a registered adapter.
        mesh, group: exactly one of the two, the ranks over which the sequence is cut, in order.
        strategy: "auto", "chain", "log_scan", "hierarchical" or "all_gather".
        node_size: consecutive ranks that share a node; by default host names tell.
        timeout: seconds that a rank of the group waits for another at most.
        name: what messages call the layer; by default its class.
        backend: "device": states are exchanged by kernels in symmetric memory; "host": by
            torch.distributed; "auto": by kernels where states are plain fp32 ones on GPUs that
            share a symmetric heap. `exchange_plan` tells what ran.
        groups: of heads. Kernels exchange the states of one group beside those that compute
            another. How many groups there are, or a tuple of the heads in each; None: all heads at
            once, as the host engine always does.
    Raises UnsupportedLayerError for other layers and for a layer that is wrapped already,
    ShardingError for a wrong mesh. The first call raises EngineRefused, a ShardingError and
    HeapError, on every rank if backend="device" cannot be had.
    """
    if not isinstance(layer, nn.Module):
        raise UnsupportedLayerError(
            f"expected a torch.nn.Module, got {type(layer).__name__}; for a compiled operator use "
            "SequenceParallelOp"
        )
    if is_sequence_parallel(layer):
        raise UnsupportedLayerError(
            f"{type(layer).__name__} is sharded already; unwrap(layer) first to change its group"
        )
    adapter = adapter_of(layer)
    chosen = sequence_group(mesh, group)
    _forget_detached(layer)
    what = name or type(layer).__name__
    site = Site(chosen, what, strategy, node_size, timeout, backend, groups)
    ShardedForward(layer, adapter, site).install()
    return layer


def is_sequence_parallel(layer: nn.Module) -> bool:
    """Whether a layer was wrapped by `SequenceParallelLA`."""
    return isinstance(layer.__dict__.get(MARKER), ShardedForward)


def exchange_plan(layer: nn.Module) -> ExchangePlan | None:
    """How the states of a wrapped layer's last call crossed the ranks, None if none has.

    Raises UnsupportedLayerError for a layer that is not wrapped.
    """
    marker = layer.__dict__.get(MARKER)
    if not isinstance(marker, ShardedForward):
        raise UnsupportedLayerError(
            f"{type(layer).__name__} is not sharded: wrap it with SequenceParallelLA(layer, mesh)"
        )
    return marker.site.last_plan


def unwrap(layer: Layer) -> Layer:
    """Undo `SequenceParallelLA`; returns the same module."""
    marker = layer.__dict__.get(MARKER)
    if isinstance(marker, ShardedForward):
        marker.remove()
    elif isinstance(marker, DetachedForward):
        _forget_detached(layer)
    else:
        raise UnsupportedLayerError(f"{type(layer).__name__} is not sharded, nothing to unwrap")
    return layer


def _forget_detached(layer: nn.Module) -> None:
    for key in (MARKER, "forward"):
        if isinstance(layer.__dict__.get(key), DetachedForward):
            del layer.__dict__[key]

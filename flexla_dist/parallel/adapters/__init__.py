"""How layers are told about their exchange: one adapter for every kind of layer.

Contract: an adapter knows where the tokens of a layer's call are and how to run the layer with a
`SequenceExchange`. Layers of this package take `exchange` themselves and need none; adapters of
layers of other packages are registered by class and found along the class's bases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from flexla_dist.errors import UnsupportedLayerError
from flexla_dist.parallel.site import SequenceExchange

Forward = Callable[..., Any]


class LayerAdapter(Protocol):
    """Runs one kind of layer on a shard."""

    def tokens(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The input [B, T_local, ...] among the arguments of a call."""

    def forward(
        self,
        layer: nn.Module,
        original: Forward,
        exchange: SequenceExchange,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The layer's result for these arguments; `original` is its own forward."""


class ExchangeAdapter:
    """Layers that have a compiled `op` and take `exchange` as a keyword of their forward."""

    def tokens(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The first argument, given by place or by name."""
        if args:
            return args[0]
        first = list(inspect.signature(type(layer).forward).parameters)[1]
        if first not in kwargs:
            raise TypeError(f"{type(layer).__name__}: the argument {first!r} is missing")
        return kwargs[first]

    def forward(
        self,
        layer: nn.Module,
        original: Forward,
        exchange: SequenceExchange,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The layer's own forward, with the exchange."""
        return original(*args, **kwargs, exchange=exchange)


_EXCHANGE_ADAPTER = ExchangeAdapter()
_ADAPTERS: dict[type, LayerAdapter] = {}


def register_adapter(cls: type, adapter: LayerAdapter) -> None:
    """Let layers of class `cls`, and of its subclasses, be sharded by `adapter`."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"expected a subclass of torch.nn.Module, got {cls!r}")
    _ADAPTERS[cls] = adapter


def find_adapter(layer: nn.Module) -> LayerAdapter | None:
    """The adapter of a layer, None where it has none."""
    for base in type(layer).__mro__:
        if base in _ADAPTERS:
            return _ADAPTERS[base]
    takes = inspect.signature(type(layer).forward).parameters
    if hasattr(layer, "op") and "exchange" in takes:
        return _EXCHANGE_ADAPTER
    return None


def adapter_of(layer: nn.Module) -> LayerAdapter:
    """The adapter of a layer; UnsupportedLayerError names what is supported."""
    adapter = find_adapter(layer)
    if adapter is None:
        known = ", ".join(cls.__name__ for cls in _ADAPTERS)
        raise UnsupportedLayerError(
            f"{type(layer).__name__} cannot be sharded over the sequence. Supported are layers "
            "with a compiled `op` whose forward takes `exchange`, as those of flexla_dist.layers"
            + (f", and {known}" if known else "")
            + "; for others write an adapter and register_adapter(cls, adapter)"
        )
    return adapter

"""Where a layer gets what lies before its tokens: nothing, a decoding cache, or another rank.

A layer never knows which. It asks its `SequenceExchange` for the tokens before its own and hands it
the compiled operator with its inputs. `flexla_dist.parallel` has the one that talks to other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flexla_dist.layers.convolution import Starts

State = Tensor | tuple[Tensor, ...]


class SequenceExchange(Protocol):
    """What a layer needs from outside its own tokens."""

    @property
    def cu_seqlens(self) -> Starts:
        """Document starts [N+1] of the local tokens, or None when nothing is packed."""

    def convolve_halo(self, x: Tensor, width: int) -> Tensor:
        """The `width` tokens before x [B, T, D], as [B, width, D]: zero before the first document's
        start. The gradient goes back to whoever owns those tokens."""

    def attend(
        self,
        op: Any,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        scalars: Mapping[str, float],
    ) -> Tensor:
        """The operator's output [B, T, HV, V] for these inputs, entered by the right state."""


@dataclass
class LocalExchange:
    """The whole sequence is here: zeros before it, and the operator as it is."""

    cu_seqlens: Starts = None

    def convolve_halo(self, x: Tensor, width: int) -> Tensor:
        return x.new_zeros(x.shape[0], width, x.shape[2])

    def attend(
        self,
        op: Any,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        scalars: Mapping[str, float],
    ) -> Tensor:
        output, _ = op(**inputs, **params, **scalars, cu_seqlens=self.cu_seqlens)
        return output


@dataclass
class LayerCache:
    """What one layer remembers between decoded tokens: the last tokens before its convolution,
    [B, W-1, channels], and the state of the operator. None is the start of a sequence."""

    tail: Tensor | None = None
    state: State | None = None


@dataclass
class DecodeExchange:
    """Continues the sequence of a `LayerCache`, which it updates."""

    cache: LayerCache
    cu_seqlens: None = None

    def convolve_halo(self, x: Tensor, width: int) -> Tensor:
        halo = self.cache.tail
        if halo is None:
            halo = x.new_zeros(x.shape[0], width, x.shape[2])
        self.cache.tail = torch.cat([halo, x], dim=1)[:, -width:]
        return halo

    def attend(
        self,
        op: Any,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        scalars: Mapping[str, float],
    ) -> Tensor:
        tokens = next(iter(inputs.values())).shape[1]
        if tokens == 1:
            output, state = op.recurrent_step(self.cache.state, **inputs, **params, **scalars)
        else:
            output, state = op(
                **inputs,
                **params,
                **scalars,
                initial_state=self.cache.state,
                output_final_state=True,
            )
        self.cache.state = state
        return output

"""Sequences sharded over ranks: cut, exchange, layers that take part, loss.

mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
parallelize_sequence(model, mesh["cp"])
with sequence_context(mesh["cp"], cu_seqlens=cu_seqlens):
    logits = model(shard_sequence(ids, mesh["cp"]))
    loss = sequence_loss(logits, shard_sequence(labels, mesh["cp"]), mesh)
    loss.backward()
"""

from __future__ import annotations

from flexla_dist.parallel.adapters import LayerAdapter, register_adapter
from flexla_dist.parallel.context import SequenceContext, position_ids, sequence_context
from flexla_dist.parallel.documents import LocalDocuments, local_cu_seqlens, shard_lengths
from flexla_dist.parallel.engine import ExchangePlan
from flexla_dist.parallel.loss import (
    global_token_count,
    mean_loss,
    sequence_loss,
    shift_labels,
)
from flexla_dist.parallel.parallelize import parallelize_sequence
from flexla_dist.parallel.plan import SequencePlan
from flexla_dist.parallel.runtime import check_exchanges, use_heap
from flexla_dist.parallel.shard import shard_sequence, unshard_sequence
from flexla_dist.parallel.sharded_op import SequenceParallelOp
from flexla_dist.parallel.site import SequenceExchange
from flexla_dist.parallel.wrap import (
    SequenceParallelLA,
    exchange_plan,
    is_sequence_parallel,
    unwrap,
)

__all__ = [
    "ExchangePlan",
    "LayerAdapter",
    "LocalDocuments",
    "SequenceContext",
    "SequenceExchange",
    "SequenceParallelLA",
    "SequenceParallelOp",
    "SequencePlan",
    "check_exchanges",
    "exchange_plan",
    "global_token_count",
    "is_sequence_parallel",
    "local_cu_seqlens",
    "mean_loss",
    "parallelize_sequence",
    "position_ids",
    "register_adapter",
    "sequence_context",
    "sequence_loss",
    "shard_lengths",
    "shard_sequence",
    "shift_labels",
    "unshard_sequence",
    "unwrap",
    "use_heap",
]

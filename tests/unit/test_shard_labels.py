"""Labels shifted inside documents, and the loss of one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from flexla_dist.errors import ShardingError
from flexla_dist.parallel.loss import global_token_count, sequence_loss, shift_labels


def test_labels_stop_at_document_ends() -> None:
    ids = torch.arange(10).view(1, 10)
    assert shift_labels(ids).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, -100]]
    labels = shift_labels(ids, torch.tensor([0, 3, 3, 4, 10]))
    assert labels.tolist() == [[1, 2, -100, -100, 5, 6, 7, 8, 9, -100]]
    batch = shift_labels(torch.arange(6).view(2, 3), ignore_index=-1)
    assert batch.tolist() == [[1, 2, -1], [4, 5, -1]]
    assert shift_labels(torch.zeros(1, 0, dtype=torch.long)).shape == (1, 0)
    with pytest.raises(ShardingError, match="before it is sharded"):
        shift_labels(ids, [0, 5])


def test_loss_of_one_process_is_the_mean() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (2, 5))
    labels[0, 2:] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(sequence_loss(logits, labels, None), expected)
    count = global_token_count([labels, labels], None)
    assert count.item() == 14
    torch.testing.assert_close(sequence_loss(logits, labels, None, count=count), expected / 2)
    assert sequence_loss(logits.bfloat16(), labels, None).dtype == torch.float32


def test_masked_and_empty_shards_stay_in_the_graph() -> None:
    for tokens in (0, 3):
        logits = torch.randn(1, tokens, 7, requires_grad=True)
        labels = torch.full((1, tokens), -100)
        loss = sequence_loss(logits, labels, None)
        assert loss.item() == 0.0
        loss.backward()
        assert logits.grad is not None and logits.grad.abs().sum() == 0


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ShardingError, match="same shard"):
        sequence_loss(torch.zeros(1, 4, 7), torch.zeros(1, 3, dtype=torch.long), None)
    with pytest.raises(ShardingError, match="no labels"):
        global_token_count([], None)

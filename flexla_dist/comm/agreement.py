"""Small values that ranks compare or collect once per plan."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import torch

from flexla_dist.comm.channel import Channel
from flexla_dist.comm.errors import RankMismatch
from flexla_dist.comm.links import all_gather_flat

_HASH_WORDS = 2
_TEXT_LIMIT = 200


def agree(
    channel: Channel, name: str, values: Sequence[int | str], fields: Sequence[str] | None
) -> None:
    """Raise RankMismatch on every rank unless all have the same values.

    One all-gather of 16 bytes; the texts are gathered only to say what differs.
    """
    if fields is not None and len(fields) != len(values):
        raise ValueError(
            f"agree({name!r}): {len(fields)} field names {tuple(fields)} for {len(values)} values"
        )
    names = [f"value {i}" for i in range(len(values))] if fields is None else list(fields)
    entries = [f"{field}={value!r}" for field, value in zip(names, values, strict=True)]
    digest = hashlib.sha256("\n".join([name, *entries]).encode()).digest()
    words = [
        int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(_HASH_WORDS)
    ]
    gathered = gather_integers(channel, f"agree({name})", words)
    if all(other == gathered[0] for other in gathered):
        return
    texts = gather_texts(channel, f"agree({name})", "\n".join([name, *entries]))
    raise RankMismatch(_explain(channel, name, [text.split("\n") for text in texts]))


def gather_integers(channel: Channel, what: str, values: Sequence[int]) -> list[list[int]]:
    """The integers of every rank; all ranks give the same number of them."""
    device = channel.ranks.control_device()
    own = torch.tensor(list(values), dtype=torch.int64, device=device)
    size = channel.ranks.size
    gathered = torch.empty(size * own.numel(), dtype=torch.int64, device=device)
    channel.collective(
        what,
        gathered,
        partial(all_gather_flat, gathered, own, channel.ranks.group),
    )
    return gathered.view(size, -1).tolist()


def gather_texts(channel: Channel, what: str, text: str) -> list[str]:
    """The text of every rank."""
    data = text.encode()
    longest = max(length for [length] in gather_integers(channel, what, [len(data)]))
    padded = data.ljust(longest, b"\0")
    rows = gather_integers(channel, what, list(padded)) if longest else []
    texts = [bytes(row).rstrip(b"\0").decode() for row in rows]
    return texts or [""] * channel.ranks.size


def _explain(channel: Channel, name: str, texts: list[list[str]]) -> str:
    """Which entries differ, and who says what."""
    lines = [f"ranks disagree in {name}:"]
    longest = max(len(entries) for entries in texts)
    for i in range(longest):
        said = [entries[i] if i < len(entries) else "nothing" for entries in texts]
        if all(entry == said[0] for entry in said):
            continue
        by_entry: dict[str, list[str]] = {}
        for rank, entry in enumerate(said):
            by_entry.setdefault(entry[:_TEXT_LIMIT], []).append(channel.ranks.name(rank))
        versions = [f"{entry} on {', '.join(ranks)}" for entry, ranks in by_entry.items()]
        lines.append("  " + "; ".join(versions))
    lines.append("give every rank of the group the same values")
    return "\n".join(lines)

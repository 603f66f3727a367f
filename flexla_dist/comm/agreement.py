"""Small values that ranks compare or collect once per plan.

Contract: all of it travels in blocks of one size, which begin with the name of the operation. So
ranks in different operations meet safely, see at once that they do, and tell each other in words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from flexla_dist.comm.channel import Channel
from flexla_dist.comm.errors import RankMismatch
from flexla_dist.comm.lookout import Lookout, own_place

BLOCK_WORDS = 64
_HEADER_WORDS = 3  # hash of the operation's name (two words), number of values
_PAYLOAD_WORDS = BLOCK_WORDS - _HEADER_WORDS
_HASH_WORDS = 2
_TEXT_LIMIT = 200
_OPERATION_LIMIT = 900


def agree(
    channel: Channel, name: str, values: Sequence[int | str], fields: Sequence[str] | None
) -> None:
    """Raise RankMismatch on every rank unless all have the same values.

    One all-gather of a block; the texts are gathered only to say what differs.
    """
    if fields is not None and len(fields) != len(values):
        raise ValueError(
            f"agree({name!r}): {len(fields)} field names {tuple(fields)} for {len(values)} values"
        )
    names = [f"value {i}" for i in range(len(values))] if fields is None else list(fields)
    entries = [f"{field}={value!r}" for field, value in zip(names, values, strict=True)]
    words = _hash_words("\n".join(entries))
    gathered = gather_integers(channel, f"agree({name})", words)
    if all(other == gathered[0] for other in gathered):
        return
    texts = gather_texts(channel, f"agree({name})", "\n".join(entries))
    raise RankMismatch(_explain(channel, name, [text.split("\n") for text in texts]))


def open_messages(channel: Channel, device: torch.device) -> None:
    """Let all ranks open their channel for messages about tensors on `device`, if they have not.

    They meet by a block first: where blocks travel over the CPU, a rank that does not come ends in
    an error within the usual time, while NCCL would wait for it as long as its own limit lasts.
    """
    if channel.on_streams(device):
        look_after(channel)
    if not channel.is_open(device):
        gather_integers(channel, f"opening of messages on {device.type}", ())
        channel.open(device)


def look_after(channel: Channel) -> Lookout:
    """What looks after this rank's waits on its device; all ranks call it together, and at its
    first call they tell each other where they run."""
    if channel.works.lookout is None:
        places = gather_texts(channel, "processes of the ranks", own_place())
        channel.works.look_after(Lookout(channel.ranks, places))
    assert channel.works.lookout is not None
    return channel.works.lookout


def gather_integers(channel: Channel, what: str, values: Sequence[int]) -> list[list[int]]:
    """The integers of every rank; RankMismatch unless all ranks collect as many under this name."""
    header = [*_hash_words(what), len(values)]
    found: list[list[int]] = [[] for _ in range(channel.ranks.size)]
    for start in range(0, max(1, len(values)), _PAYLOAD_WORDS):
        part = list(values[start : start + _PAYLOAD_WORDS])
        blocks = _gather_blocks(channel, what, header, part)
        if any(block[:_HEADER_WORDS] != header for block in blocks):
            _refuse_different_operations(channel)
        for row, block in zip(found, blocks, strict=True):
            row += block[_HEADER_WORDS : _HEADER_WORDS + len(part)]
    return found


def gather_texts(channel: Channel, what: str, text: str) -> list[str]:
    """The text of every rank."""
    data = text.encode()
    sizes = [size for [size] in gather_integers(channel, f"{what}, sizes of texts", [len(data)])]
    data = data.ljust(-(-max(sizes) // 8) * 8, b"\0")
    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    rows = gather_integers(channel, f"{what}, texts", words)
    joined = [b"".join(word.to_bytes(8, "little", signed=True) for word in row) for row in rows]
    return [row[:size].decode(errors="replace") for row, size in zip(joined, sizes, strict=True)]


def _gather_blocks(
    channel: Channel, what: str, header: list[int], part: list[int]
) -> list[list[int]]:
    padding = [0] * (_PAYLOAD_WORDS - len(part))
    device = channel.ranks.control_device()
    own = torch.tensor([*header, *part, *padding], dtype=torch.int64, device=device)
    found = channel.gather_blocks(what, own).tolist()
    channel.watch.raise_error()  # on a device, what a wait that was ended left is no block
    return found


def _hash_words(text: str) -> list[int]:
    digest = hashlib.sha256(text.encode()).digest()
    return [
        int.from_bytes(digest[8 * i : 8 * i + 8], "little", signed=True) for i in range(_HASH_WORDS)
    ]


def _refuse_different_operations(channel: Channel) -> None:
    """Every rank has seen the same headers, so every rank comes here."""
    operations = gather_texts(
        channel, "what every rank does", channel.watch.operation[:_OPERATION_LIMIT]
    )
    channel.watch.differ(operations)


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

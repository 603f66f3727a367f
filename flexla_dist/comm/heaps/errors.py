"""Errors of symmetric memory; each says what was wrong, what was got, and what to do."""

from __future__ import annotations

from flexla_dist.comm.errors import ExchangeError, RankMismatch


class HeapError(ExchangeError):
    """Symmetric memory cannot be had, or was used after it was closed."""


class HeapArgumentError(HeapError, ValueError):
    """A heap was asked for with a wrong kind, device, size or label."""


class HeapMismatch(HeapError, RankMismatch):
    """Ranks ask a heap for different things at the same place of the program; all of them raise."""

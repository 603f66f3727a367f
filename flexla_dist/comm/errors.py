"""Errors of the communication layer; each names the ranks and the operation concerned."""

from __future__ import annotations

from flexla_dist.errors import FlexlaError


class ExchangeError(FlexlaError, RuntimeError):
    """Base of all errors raised while ranks exchange something."""


class ExchangeTimeout(ExchangeError):
    """A rank waited longer than its limit for a peer."""


class RemoteRankError(ExchangeError):
    """Another rank failed or left; the message holds its rank and its error."""


class RankMismatch(ExchangeError, ValueError):
    """Ranks disagree: about a value that must be equal, or about which operation comes next."""


class TagMismatch(ExchangeError):
    """A message arrived that belongs to another step, layer, call or direction."""

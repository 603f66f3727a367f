"""Every error that a user of the package can meet.

Contract: an error says what was wrong, what was got, what was expected and what to do; it carries
the user's own source line where there is one. Mistakes in a spec or in arguments derive from
ValueError or TypeError, so that ordinary handlers catch them; `assert` is kept for mistakes of the
package itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pickle import PicklingError


@dataclass(frozen=True)
class SourceLine:
    """Place in the user's file: `file:line` in function `function`, with its text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}, in {self.function}\n    {self.text}"


class FlexlaError(Exception):
    """Base of all errors that the package raises on purpose."""


class SpecError(FlexlaError, ValueError):
    """A LinearAttentionSpec is not well formed (names, dims, heads, callables)."""


class SpecPicklingError(FlexlaError, PicklingError):
    """A spec was to be pickled, but one of its callables has no module and name to find it by."""


class TraceError(SpecError):
    """A callable cannot be traced, or breaks a rule of its stage."""

    def __init__(
        self, message: str, *, spec: str = "", stage: str = "", origin: SourceLine | None = None
    ):
        self.spec, self.stage, self.origin = spec, stage, origin
        where = f"{spec}.{stage}: " if spec and stage else ""
        tail = f"\n  at {origin}" if origin is not None else ""
        super().__init__(f"{where}{message}{tail}")


class NotAffineError(TraceError):
    """`decay_mode` is not affine in the state, couples states, or mixes columns."""


class PaddingError(TraceError):
    """`decay_mode` is not the identity on a chunk of padding."""


class NumericsWarning(UserWarning):
    """A spelling that is right on paper and overflows in floating point."""


class NumericsError(TraceError):
    """`strict=True` turned a NumericsWarning into an error."""


class CheckError(FlexlaError, ValueError):
    """`compile(check=True)`: a stage depends on the chunk size, or the recurrence differs."""


class ArgumentError(FlexlaError, ValueError):
    """A call of a compiled operator got a wrong shape, length, name or value."""


class ArgumentTypeError(FlexlaError, TypeError):
    """A call of a compiled operator got a wrong dtype or type."""


class DoubleBackwardError(FlexlaError, RuntimeError):
    """A second derivative was asked for; only first derivatives are derived."""


class ExecutorError(FlexlaError, ValueError):
    """The executor asked for is unknown or cannot run here."""


class TuningError(FlexlaError, ValueError):
    """A tuning database cannot be read or written, or an entry in it is not well formed."""


class TuningWarning(UserWarning):
    """An entry of a tuning database cannot be used here; the estimate is used instead."""


class CacheFolderError(FlexlaError, OSError):
    """Generated source cannot be written to the user's cache folder."""


class ShardingError(FlexlaError, ValueError):
    """Shards, documents or ranks do not fit together (lengths, cu_seqlens, groups, shapes)."""


class UnsupportedLayerError(FlexlaError, TypeError):
    """A layer cannot be sharded over the sequence, or is sharded already."""


class RecomputeError(FlexlaError, RuntimeError):
    """Activation checkpointing ran a sharded layer again in a way that cannot be matched."""


class TransformError(FlexlaError, RuntimeError):
    """A torch.func transform that operators do not support."""


class MissingOperatorError(FlexlaError, ValueError):
    """A compiled graph calls an operator that no longer exists."""

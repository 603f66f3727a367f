"""Names of arguments that graphs have beside the user's."""

from __future__ import annotations

VALID = "valid"
SHIFT = "shift"  # m - m', of log-scaled states
FRESH = "fresh"
LOG_SCALE = "m"


def state_argument(name: str) -> str:
    """Placeholder of a state entering the chunk."""
    return f"state_{name}"

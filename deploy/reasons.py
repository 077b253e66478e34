"""How long a reason of the audit may be. Loads nothing: every start of the command imports it."""

from __future__ import annotations

MAX_REASON = 2_000
"""Characters."""


def cut_reason(reason: str) -> str:
    """Leave out what a reason has beyond `MAX_REASON`. Pure."""
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"

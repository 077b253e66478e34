"""What the approval service of an operator said, and what that means for a move. Pure.

It may only veto: `deny` takes the candidate out, `wait` and every failure to answer hold the move,
and `allow` lets happen what the evidence has decided already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["ramp", "promotion"]
Answer = Literal["asked", "allow", "deny", "wait", "error"]
"""asked: it has not answered yet; error: it could not be asked, or its answer was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Approval:
    """One move that waits for the service, or did."""

    before: Stage
    since: float
    """Unix seconds since which the move waits."""
    answer: Answer = "asked"
    reason: str = ""
    """The service's words, or what is wrong and what to do."""
    at: float = 0.0
    """When it last answered, or failed to; 0: not yet."""
    asked: int = 0
    """Calls so far."""


def verdict(
    known: Approval | None, stage: Stage, *, holds_s: float, max_wait_s: float, now: float
) -> Literal["begin", "go", "deny", "wait", "give_up"]:
    """Return what a move that wants approval does now.

    begin: the service is to be asked. holds_s: how long an answer holds: an older `allow` was about
        older evidence. max_wait_s: time after which nobody waits any more. now: Unix seconds.
    """
    if known is None or known.before != stage:
        return "begin"
    if known.answer == "deny":
        return "deny"
    if known.answer == "allow" and 0.0 <= now - known.at <= holds_s:
        return "go"
    return "give_up" if now - known.since > max_wait_s else "wait"


def described(known: Approval | None, stage: Stage) -> str:
    """Say what a move waits for."""
    said = {
        "allow": "it allowed it, and is asked again about the newest evidence",
        "wait": f"it says wait ({known.reason})" if known is not None else "",
        "error": f"it gave no answer ({known.reason})" if known is not None else "",
    }.get(known.answer if known is not None and known.before == stage else "", "it is being asked")
    return f"waits for the approval service before the {stage}: {said}"

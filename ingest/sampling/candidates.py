"""What becomes of a group after a round of sampling. Pure.

A round asks for every candidate that is missing. Some come back, some do not; from what is there
and why the rest is not, the group is complete, set aside, or tried again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ingest.records import Answer
from sidecar.backoff import Backoff

Miss = Literal["held_back", "engine_down", "adapter_gone", "prompt_mismatch", "failed"]
"""Why a candidate is missing. held_back: users came first; prompt_mismatch: vLLM rendered another
prompt than the one that was answered; failed: the reply was an error or could not be believed."""

MAX_ROUNDS = 5
"""Rounds that may leave candidates missing through the group's own fault."""
RETRIES = Backoff(first_s=5.0, last_s=300.0)
"""Between the rounds of a group."""
MIN_ANSWERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One candidate asked for: an answer, or why there is none."""

    answer: Answer | None = None
    miss: Miss | None = None
    tokens: int = 0
    """Sampled for it, kept or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """sampled: to the judge; set_aside: for `reason`; retry: a round was used up; wait: it was
    not, nothing was wrong with the group."""

    action: Literal["sampled", "set_aside", "retry", "wait"]
    reason: str = ""


def conclude(
    answers: Sequence[Answer], *, size: int, rounds: int, misses: Collection[Miss]
) -> Conclusion:
    """Decide a group after a round.

    answers: all that it has now. rounds: those used up before this one.
    misses: why each candidate of this round that is not there is missing.
    """
    if len(answers) >= size:
        return _complete(answers)
    if "adapter_gone" in misses:
        return Conclusion(action="set_aside", reason="adapter_gone")
    if "held_back" in misses or "engine_down" in misses:
        return Conclusion(action="wait")
    if len(misses) == size - _served(answers) and set(misses) == {"prompt_mismatch"}:
        # Not one matched: the rendering has changed since, and trying again will not mend it.
        return Conclusion(action="set_aside", reason="prompt_mismatch")
    if rounds + 1 < MAX_ROUNDS:
        return Conclusion(action="retry")
    if len(answers) >= MIN_ANSWERS:
        return _complete(answers)
    return Conclusion(action="set_aside", reason="sampling_failed")


def back_off_s(rounds: int) -> float:
    """How long to leave a group alone after so many rounds, in seconds: 5, 10, 20, ... 300."""
    return RETRIES.wait_s(rounds)


def all_identical(answers: Sequence[Answer]) -> bool:
    """Whether a judge would see one answer over and over. The ids of tool calls do not count."""
    return len({_as_seen(answer.message) for answer in answers}) <= 1


def _complete(answers: Sequence[Answer]) -> Conclusion:
    if all_identical(answers):
        return Conclusion(action="set_aside", reason="identical_answers")
    return Conclusion(action="sampled")


def _served(answers: Sequence[Answer]) -> int:
    return sum(answer.origin == "served" for answer in answers)


def _as_seen(message: bytes) -> bytes:
    try:
        said = msgspec.json.decode(message, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return message
    calls = [call.get("function") for call in said.get("tool_calls") or ()]
    seen = [said.get("content") or "", said.get("reasoning") or "", calls]
    return msgspec.json.encode(seen, order="sorted")

"""Decide about a group after a round of sampling. Pure.

A round requests the missing candidates in steps (`next_step`). From the answers, and from the
reasons why others failed, follows whether the group is complete, set aside, or sampled again.

Equal answers earn no advantage over each other, so a group whose first `ALIKE_ENOUGH` answers look
alike is set aside before it has its size. The number weighs two uses of a token: of a group whose
first k of G answers are alike, the G - k others come to show a difference with a share s(k), and
a new group, for its G - 1 candidates, with a share y. Going on is worth it while
s(k) / (G - k) > y / (G - 1). docs/log.md has s(k) and y as measured on recorded traffic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ingest.judge_prompt.shown import looks, shown_answer
from ingest.records import Answer
from sidecar.backoff import Backoff

Miss = Literal[
    "held_back",
    "engine_down",
    "engine_busy",
    "adapter_away",
    "adapter_gone",
    "refused",
    "prompt_mismatch",
    "private",
    "failed",
]
"""Reasons for a missing candidate. held_back: users came first; engine_busy: vLLM takes no request
for now; adapter_away: vLLM lacks the adapter, which control loads again; adapter_gone: it is not
loaded again; refused: vLLM refuses the request itself; prompt_mismatch: vLLM used another prompt
than the one of the served answer; private: the project's privacy policy keeps the answer out of
training, or out of the store; failed: the reply was an error or invalid."""

WAITS: frozenset[Miss] = frozenset({"held_back", "engine_down", "engine_busy", "adapter_away"})
"""Misses that pass, and are not the group's fault."""
OF_ALL: frozenset[Miss] = WAITS | {"adapter_gone", "refused"}
"""Misses that every candidate of the round would share: after one, no other is requested."""
MAX_ROUNDS = 5
"""Most rounds that leave candidates missing through the group's own fault."""
RETRIES = Backoff(first_s=5.0, last_s=300.0)
"""Pauses between the rounds of a group."""
MIN_ANSWERS = 2
ALIKE_ENOUGH = 4
"""Answers, served ones counted, that must look alike before the rest of the group is not sampled.
Groups of this size or a smaller one are always sampled whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The result of one requested candidate: an answer, or why there is none."""

    answer: Answer | None = None
    miss: Miss | None = None
    tokens: int = 0
    """Tokens sampled for it, whether it was kept or not."""
    prompt_tokens: int = 0
    """Tokens of the prompt that vLLM read for it."""
    wait_s: float = 0.0
    """Seconds that vLLM asked to be left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """Decision about a group after a round.

    sampled: complete, goes to the judge. set_aside: for `reason`. retry: one of its rounds is used
    up. wait: no round is used up, since nothing is wrong with the group.
    """

    action: Literal["sampled", "set_aside", "retry", "wait"]
    reason: str = ""


def conclude(
    answers: Sequence[Answer], *, size: int, rounds: int, misses: Collection[Miss]
) -> Conclusion:
    """Decide a group after a round.

    answers: all answers that the group has now. rounds: rounds used up before this one.
    misses: the reason for each missing candidate of this round.
    """
    if len(answers) >= size:
        return _complete(answers)
    if pointless(answers, size=size):
        return Conclusion(action="set_aside", reason="identical_answers")
    if "adapter_gone" in misses:
        return Conclusion(action="set_aside", reason="adapter_gone")
    if "refused" in misses:
        return _with_what_there_is(answers, "request_refused")
    if not WAITS.isdisjoint(misses):
        return Conclusion(action="wait")
    if len(misses) == size - _served(answers) and set(misses) == {"prompt_mismatch"}:
        # No candidate matched: the rendering has changed since, and a retry would not help.
        return Conclusion(action="set_aside", reason="prompt_mismatch")
    if set(misses) == {"private"}:
        # A retry would draw from the same distribution again; the others are enough to compare.
        return _with_what_there_is(answers, "private")
    if rounds + 1 < MAX_ROUNDS:
        return Conclusion(action="retry")
    return _with_what_there_is(answers, "sampling_failed")


def next_step(answers: Sequence[Answer], *, size: int, missing: int) -> int:
    """Return how many candidates to request at once now; 0: no more in this round.

    answers: all answers that the group has by now. missing: candidates that this round has not
        requested yet.
    While all answers look alike only as many are requested as it takes to call the rest pointless.
    """
    if missing <= 0 or len(answers) >= size or pointless(answers, size=size):
        return 0
    if size <= ALIKE_ENOUGH or not answers or not all_identical(answers):
        return missing
    return min(missing, ALIKE_ENOUGH - len(answers))


def pointless(answers: Sequence[Answer], *, size: int) -> bool:
    """Return True when so many answers look alike that the others are not worth their tokens."""
    return ALIKE_ENOUGH <= len(answers) < size and all_identical(answers)


def back_off_s(rounds: int) -> float:
    """Return the pause after this many rounds, in seconds: 5, 10, 20, ... 300."""
    return RETRIES.wait_s(rounds)


def all_identical(answers: Sequence[Answer]) -> bool:
    """Return True when all answers look equal to a judge. The ids of tool calls do not count, nor
    how the JSON of their arguments is written."""
    return len({_as_seen(answer.message) for answer in answers}) <= 1


def _with_what_there_is(answers: Sequence[Answer], reason: str) -> Conclusion:
    """Conclude a group that gets no more answers. reason: why, if they are too few."""
    if len(answers) >= MIN_ANSWERS:
        return _complete(answers)
    return Conclusion(action="set_aside", reason=reason)


def _complete(answers: Sequence[Answer]) -> Conclusion:
    if all_identical(answers):
        return Conclusion(action="set_aside", reason="identical_answers")
    return Conclusion(action="sampled")


def _served(answers: Sequence[Answer]) -> int:
    return sum(answer.origin == "served" for answer in answers)


def _as_seen(message: bytes) -> str | bytes:
    """Reasoning counts: a judge may be shown it (`judge.show_reasoning`)."""
    try:
        parsed = msgspec.json.decode(message, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return message
    return looks(shown_answer(parsed, show_reasoning=True))

"""Read a judge's reply: one finite score for each id, matched by id, or an error to show it. Pure.

The form may vary (a code fence, text before and after, thinking), the scores may not: one that is
missing, duplicate, unknown or out of range refuses the whole reply, because a group with one wrong
score teaches the wrong thing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from ingest.errors import JudgeReplyError

MAX_REPLY_CHARACTERS = 200_000
"""Longest reply that is read: sixteen explanations fit in a hundredth of it."""

_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
"""Thinking at the start of the reply only: an explanation may quote these tags."""
_DECODER = json.JSONDecoder()


def parse_reply(
    text: str, ids_in_order: Sequence[str], order: Sequence[int]
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Parse the scores of a reply.

    ids_in_order, order: [G] of the `RulerPrompt` that was sent.
    Returns: ([G] scores 0..1, [G] explanations), both in the order of the prompt's `answers`.
    Raises: JudgeReplyError; its message names the defect and may be shown to the judge.
    """
    found = _read_entries(_scores_in(text), ids_in_order)
    missing = [wanted for wanted in ids_in_order if wanted not in found]
    if missing:
        raise JudgeReplyError(f"these ids have no score: {', '.join(missing)}")
    by_place = dict(zip(order, ids_in_order, strict=True))
    answers = [found[by_place[place]] for place in range(len(order))]
    return tuple(score for score, _ in answers), tuple(words for _, words in answers)


def _scores_in(text: str) -> list[Any]:
    """Return the "scores" list of the one object in the text that has it."""
    if len(text) > MAX_REPLY_CHARACTERS:
        raise JudgeReplyError(f"the reply is longer than {MAX_REPLY_CHARACTERS} characters")
    found = [
        value["scores"] for value in _objects(_THINKING.sub("", text, count=1)) if "scores" in value
    ]
    if not found:
        raise JudgeReplyError('the reply holds no JSON object with a "scores" list')
    if any(not _same(other, found[0]) for other in found[1:]):
        raise JudgeReplyError('the reply holds more than one "scores" list; send one object only')
    if not isinstance(found[0], list):
        raise JudgeReplyError('"scores" is not a list')
    return found[0]


def _objects(text: str) -> list[dict[str, Any]]:
    """List every JSON object in the text, left to right, without nested ones."""
    objects: list[dict[str, Any]] = []
    start = text.find("{")
    while start >= 0:
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            # ValueError also covers an integer that is too long, which is no JSONDecodeError.
            end = start + 1
        else:
            objects.append(value)
        start = text.find("{", end)
    return objects


def _same(one: Any, other: Any) -> bool:  # Any: decoded JSON; NaN must equal itself here
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _read_entries(entries: Sequence[Any], ids: Sequence[str]) -> dict[str, tuple[float, str]]:
    found: dict[str, tuple[float, str]] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise JudgeReplyError('an entry of "scores" is not an object')
        name = entry.get("id")
        if not isinstance(name, str) or name not in ids:
            raise JudgeReplyError(f"{_short(name)} is not one of the ids")
        if name in found:
            raise JudgeReplyError(f"id {name} is scored twice")
        found[name] = (_score(name, entry.get("score")), _words(entry.get("explanation")))
    return found


def _score(name: str, value: Any) -> float:
    # bool is an int in Python, and `true` is not a score.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JudgeReplyError(f"the score of id {name} is {_short(value)}, not a number")
    if (isinstance(value, float) and not math.isfinite(value)) or not 0 <= value <= 1:
        raise JudgeReplyError(f"the score of id {name} is {_short(value)}, not from 0 to 1")
    return float(value)


def _words(value: Any) -> str:
    """Return an explanation that every store can hold: without lone surrogates and NUL.

    A missing explanation becomes empty: only the score is required.
    """
    if not isinstance(value, str):
        return ""
    return value.encode("utf-8", "replace").decode().replace("\x00", "")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

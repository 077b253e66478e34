"""Read a judge's reply: one finite score for each id, matched by id, or an error to show it. Pure.

The form may vary (a code fence, text before and after, thinking, a bare list of entries, a map from
id to score or to an object with the score, a number in quotes, a comma too many). The scores may
not: one that is missing, duplicate, unknown or out of range refuses the whole reply, because a
group with one wrong score teaches the wrong thing. Scores without ids are refused too: their order
may be any.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ingest.errors import JudgeReplyError
from ingest.judge_prompt.shown import unique_names

MAX_REPLY_CHARACTERS = 200_000
"""Longest reply that is read: sixteen explanations fit in a hundredth of it."""

_DRAFT = re.compile(r"[^{\[<]*<think(?:ing)?>", re.IGNORECASE)
_THINKING = re.compile(_DRAFT.pattern + r".*?</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
"""Thinking before the first JSON value only: an explanation may quote these tags."""
_START = re.compile(r"\{|\[(?=\s*\{)")
"""Where an object or a list of objects may begin."""
_MAX_STARTS = 2_000
"""Attempts to read a value in one text."""
_MAX_WASTED = 4 * MAX_REPLY_CHARACTERS
"""Characters that failed attempts may decode in one reply. Brackets that are nested and never
closed are decoded to the end from each one."""
_LAST_COMMA = re.compile(r'("(?:[^"\\]|\\.)*+(?:"|\Z))|,(?=\s*[}\]])', re.DOTALL)
"""A comma before a closing bracket; strings are passed over."""
_NUMBER = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,20})?")


_DECODER = json.JSONDecoder(object_pairs_hook=unique_names)


def parse_reply(
    text: str, ids_in_order: Sequence[str], order: Sequence[int]
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """Parse the scores of a reply.

    ids_in_order, order: [G] of the `RulerPrompt` that was sent.
    Returns: ([G] scores 0..1, [G] explanations), both in the order of the prompt's `answers`.
    Raises: JudgeReplyError; its message names the defect and may be shown to the judge.
    """
    found = _read_entries(_scores_in(text, ids_in_order), ids_in_order)
    missing = [wanted for wanted in ids_in_order if wanted not in found]
    if missing:
        raise JudgeReplyError(f"these ids have no score: {', '.join(missing)}")
    by_place = dict(zip(order, ids_in_order, strict=True))
    answers = [found[by_place[place]] for place in range(len(order))]
    return tuple(score for score, _ in answers), tuple(words for _, words in answers)


def _scores_in(text: str, ids: Sequence[str]) -> list[Any]:
    """Return the entries of the one value in the text that holds scores."""
    if len(text) > MAX_REPLY_CHARACTERS:
        raise JudgeReplyError(f"the reply is longer than {MAX_REPLY_CHARACTERS} characters")
    at = 0
    while (thinking := _THINKING.match(text, at)) is not None:
        at = thinking.end()
    text = text[at:]
    if _DRAFT.match(text):
        raise JudgeReplyError("the reply ends inside its thinking; close it, then give the scores")
    attempts = _Attempts()
    found = _all_entries(text, ids, attempts)
    if not found and (mended := _LAST_COMMA.sub(r"\1", text)) != text:
        found = _all_entries(mended, ids, attempts)
    if not found:
        raise JudgeReplyError('the reply holds no JSON object with a "scores" list')
    if any(not _same(other, found[0]) for other in found[1:]):
        raise JudgeReplyError('the reply holds more than one "scores" list; send one object only')
    return found[0]


def _all_entries(text: str, ids: Sequence[str], attempts: _Attempts) -> list[list[Any]]:
    values = attempts.values(text)
    return [entries for value in values if (entries := _entries(value, ids)) is not None]


def _entries(value: Any, ids: Sequence[str]) -> list[Any] | None:
    """Return the entries that a value holds; None when it is about something else."""
    if isinstance(value, dict) and "scores" in value:
        value = value["scores"]
        if not isinstance(value, dict | list):
            raise JudgeReplyError('"scores" is not a list')
    elif isinstance(value, dict):
        if not any(name in ids for name in value):
            return None
    elif not any(isinstance(entry, dict) and entry.get("id") in ids for entry in value):
        return None
    if isinstance(value, dict):
        return [_named(name, score) for name, score in value.items()]
    return list(value)


def _named(name: str, value: Any) -> dict[str, Any]:
    """Return the entry of a map from id to a score, or to an object with the score."""
    if isinstance(value, dict) and value.get("id", name) == name:
        return {**value, "id": name}
    return {"id": name, "score": value}


class _Attempts:
    """Attempts to read values of one reply, of which failed ones are bounded in all."""

    def __init__(self) -> None:
        self._wasted = 0

    def values(self, text: str) -> Iterator[Any]:
        """Read the JSON objects and lists of objects in the text, left to right, no nested ones."""
        end = 0
        for _ in range(_MAX_STARTS):
            start = _START.search(text, end)
            if start is None:
                return
            try:
                value, end = _DECODER.raw_decode(text, start.start())
            except JudgeReplyError:
                raise
            except (ValueError, RecursionError) as error:
                # ValueError also covers an integer that is too long, which is no JSONDecodeError.
                end = start.end()
                self._wasted += _stopped_at(error, text) - start.start()
                if self._wasted > _MAX_WASTED:
                    break
            else:
                yield value
        raise JudgeReplyError("the reply holds too many brackets that belong to no JSON object")


def _stopped_at(error: ValueError | RecursionError, text: str) -> int:
    """Return how far a failed attempt may have decoded: to the end, unless the error tells."""
    if not isinstance(error, json.JSONDecodeError) or error.msg.startswith("Unterminated"):
        return len(text)  # an unterminated string is known by its beginning
    return error.pos


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
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
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

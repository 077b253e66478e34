"""Read groups with known scores or preferences from JSON lines. Pure: takes the text.

One object a line:

    {"id": "refund-1",                      optional: the line's number
     "task": "refund question",             optional
     "messages": [...], "tools": [...],     what all answers follow; tools are optional
     "candidates": [{"message": {"role": "assistant", ...}, "score": 0.98, "kind": "faithful"},
                    ...],                   2 or more; `kind` is optional
     "preferences": [[0, 1], ...]}          (better, worse) by index, from 0; instead of scores

Either every candidate has a score, on any scale, or none has and there are preferences. Blank lines
are passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ingest.calibration.records import Candidate, KnownGroup
from ingest.errors import CalibrationFileError

KNOWN = frozenset({"id", "task", "messages", "tools", "candidates", "preferences"})
KNOWN_OF_CANDIDATE = frozenset({"message", "score", "kind"})


def read_groups(text: str, name: str) -> list[KnownGroup]:
    """Read all groups of a file.

    name: how the file is called in errors.
    Raises: CalibrationFileError.
    """
    groups: dict[str, KnownGroup] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            group = _group(_object(_json(line), "the line"), str(number))
            if group.group_id in groups:
                raise CalibrationFileError(f"id {_quote(group.group_id)} is there twice")
        except CalibrationFileError as error:
            raise CalibrationFileError(f"{name} line {number}: {error}") from None
        groups[group.group_id] = group
    if not groups:
        raise CalibrationFileError(f"{name}: holds no group; write one JSON object a line")
    return list(groups.values())


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationFileError(f"is not JSON ({error}); write one object a line") from None


def _group(value: Mapping[str, Any], number: str) -> KnownGroup:
    _refuse_unknown(value, KNOWN, "")
    candidates = tuple(
        _candidate(one, f"candidates[{index}]")
        for index, one in enumerate(_list(value, "candidates"))
    )
    if len(candidates) < 2:
        raise CalibrationFileError(
            f"candidates: {len(candidates)} of them; a judge compares 2 or more"
        )
    context = [_object(one, "messages") for one in _list(value, "messages")]
    if not context:
        raise CalibrationFileError("messages: is empty; give the prompt that all answers follow")
    scored = sum(one.score is not None for one in candidates)
    if "preferences" in value and scored:
        raise CalibrationFileError("preferences: are there beside scores; give one of the two")
    if "preferences" not in value and scored < len(candidates):
        raise CalibrationFileError(
            f"score: {scored} of {len(candidates)} candidates have one; give every candidate a "
            "score, or none of them and preferences"
        )
    preferences = _list(value, "preferences") if "preferences" in value else []
    return KnownGroup(
        group_id=_text(value.get("id", number), "id"),
        task=_text(value.get("task", ""), "task"),
        context=tuple(context),
        tools=tuple(_object(one, "tools") for one in _list(value, "tools", optional=True)),
        candidates=candidates,
        preferences=tuple(_preference(one, len(candidates)) for one in preferences),
    )


def _candidate(value: Any, field: str) -> Candidate:
    found = _object(value, field)
    _refuse_unknown(found, KNOWN_OF_CANDIDATE, f"{field}.")
    score = found.get("score")
    if score is not None and not _is_number(score):
        raise CalibrationFileError(f"{field}.score: {_quote(score)} is not a finite number")
    return Candidate(
        kind=_text(found.get("kind", ""), f"{field}.kind"),
        message=_object(found.get("message"), f"{field}.message"),
        score=None if score is None else float(score),
    )


def _preference(value: Any, count: int) -> tuple[int, int]:
    sound = (
        isinstance(value, list)
        and len(value) == 2
        and all(type(one) is int and 0 <= one < count for one in value)
        and value[0] != value[1]
    )
    if not sound:
        raise CalibrationFileError(
            f"preferences: {_quote(value)} is not [index of the better, index of the worse], each "
            f"from 0 to {count - 1}"
        )
    return value[0], value[1]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _refuse_unknown(value: Mapping[str, Any], known: frozenset[str], prefix: str) -> None:
    if unknown := sorted(set(value) - known):
        raise CalibrationFileError(
            f"{prefix}{unknown[0]}: no such field; known: {', '.join(sorted(known))}"
        )


def _list(value: Mapping[str, Any], field: str, *, optional: bool = False) -> list[Any]:
    found = value.get(field)
    if found is None and optional:
        return []
    if not isinstance(found, list):
        raise CalibrationFileError(f"{field}: {_quote(found)} is not a list")
    return found


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CalibrationFileError(f"{field}: {_quote(value)} is not an object")
    return value


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise CalibrationFileError(f"{field}: {_quote(value)} is not a text")
    return value


def _quote(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Facts about answers that need no judge. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from deploy.evidence.quality import FLAWS, Flaw
from ingest.reward_watch.traits import traits_of


def is_short(message: Mapping[str, Any], finish_reason: str | None) -> bool:
    """Return True for an answer that the token limit cut, or without content and tool calls."""
    if finish_reason == "length":
        return True
    content = message.get("content")
    says_something = bool(content.strip()) if isinstance(content, str) else bool(content)
    return not says_something and not message.get("tool_calls")


def flaws_of(
    message: Mapping[str, Any], finish_reason: str | None, request: Mapping[str, Any]
) -> frozenset[Flaw]:
    """Return the kinds of flaws of an answer (`deploy.evidence.quality`).

    request: the chat request, for its tools and its format; empty: neither is known to be wrong.
    """
    found: set[Flaw] = set()
    if is_short(message, finish_reason):
        found.add("short")
    encoded = msgspec.json.encode(message)
    traits = traits_of(encoded, finish_reason=finish_reason, tools=request.get("tools"))
    whole = finish_reason != "length"
    if traits.invalid_call or (whole and not fits_format(message, request.get("response_format"))):
        found.add("invalid")
    if traits.refusal or traits.repetition:
        found.add("evasive")
    return frozenset(found)


def fits_format(message: Mapping[str, Any], wanted: object) -> bool:
    """Return False when the request asks for JSON and the content is none. vLLM enforces a schema
    while it samples, so here only the JSON is read."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    content = message.get("content")
    if kind not in ("json_object", "json_schema") or not isinstance(content, str):
        return True
    if not content.strip():
        return True  # it is empty, which is a flaw of its own
    try:
        msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True


def excess(
    candidate: Sequence[Collection[str]], champion: Sequence[Collection[str]]
) -> dict[str, float]:
    """Return for each kind the candidate's share of flawed answers minus the champion's.

    candidate, champion: the flaws of each answer. Returns: nothing without answers of both.
    """
    if not candidate or not champion:
        return {}
    return {kind: _share(candidate, kind) - _share(champion, kind) for kind in FLAWS}


def _share(answers: Sequence[Collection[str]], kind: str) -> float:
    return sum(kind in flaws for flaws in answers) / len(answers)

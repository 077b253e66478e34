"""Facts about answers that need no judge. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from deploy.evidence.quality import FLAWS, Flaw
from ingest.reward_watch.traits import traits_of
from ingest.verifiers.bounded import fits
from sidecar.replies.parts import answer_text


def is_short(message: Mapping[str, Any], finish_reason: str | None) -> bool:
    """Return True for an answer that the token limit cut, or without words and tool calls."""
    if finish_reason == "length":
        return True
    return not answer_text(message).strip() and not message.get("tool_calls")


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
    """Return False when the request asks for JSON and the content is none, or does not fit its
    schema as far as bounded work can tell (`ingest.verifiers.bounded`)."""
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    content = message.get("content")
    if kind not in ("json_object", "json_schema") or not isinstance(content, str):
        return True
    if not content.strip():
        return True  # it is empty, which is a flaw of its own
    named = wanted.get("json_schema") if isinstance(wanted, dict) else None
    schema = named.get("schema") if kind == "json_schema" and isinstance(named, dict) else None
    return fits(content, True if schema is None else schema)


def excess(
    candidate: Sequence[Collection[str]], champion: Sequence[Collection[str]]
) -> dict[str, float]:
    """Return for each kind the candidate's share of flawed answers minus the champion's.

    candidate, champion: the flaws of each answer. Returns: nothing without answers of both.
    """
    if not candidate or not champion:
        return {}
    return {kind: _share(candidate, kind) - _share(champion, kind) for kind in FLAWS}


NARROW = 0.5
"""Share of the champion's uncertainty under which the candidate's counts as narrow, if it is also
under `COLLAPSED`."""
COLLAPSED = 0.1
"""Nats a token. An answer of 15 tokens then comes again with a chance of exp(-1.5), 22%, and the
answers of a group are alike. Less uncertainty than before is no harm by itself: it is what learning
does, and a supervised adapter has half of the base's or less on most prompts (docs/log.md)."""
CERTAIN = 0.01
"""Nats a token; where the other is no more uncertain than this, nothing can be narrower."""


def narrowing(
    candidate: Sequence[float | None], champion: Sequence[float | None]
) -> dict[str, float]:
    """Return 1 when the candidate's answers are nearly certain and at most half as uncertain as the
    champion's, -1 when the champion's are, else 0: its mean is 0 between two that do not differ.

    candidate, champion: mean negative log-probability a token of each answer, in nats; at
        temperature 1 it estimates the entropy. Returns: nothing without answers of both.
    """
    return _signed("narrow", _narrower, candidate, champion)


def _narrower(one: float, other: float) -> bool:
    return one < COLLAPSED and one < NARROW * other and other >= CERTAIN


LONG = 2.0
"""Times the champion's length over which the candidate's answers count as long. What a run adds is
some percent; twice the length is what rewards for length do (docs/canary.md)."""
LEAST_MORE = 16.0
"""Tokens, in the mean, by which long answers are longer: two words in place of one are no harm."""


def lengthening(
    candidate: Sequence[int | None], champion: Sequence[int | None]
) -> dict[str, float]:
    """Return 1 when the candidate's answers are more than twice as long as the champion's, -1 when
    the champion's are, else 0: its mean is 0 between two that do not differ.

    candidate, champion: tokens of each answer. Returns: nothing without answers of both.
    """
    return _signed("long", _longer, candidate, champion)


def _longer(one: float, other: float) -> bool:
    return one > LONG * other and one - other >= LEAST_MORE


def _signed(
    kind: str,
    worse: Callable[[float, float], bool],
    candidate: Sequence[float | None],
    champion: Sequence[float | None],
) -> dict[str, float]:
    """Return the kind -> 1 when the candidate's mean is worse than the champion's, -1 when the
    champion's is worse, else 0; nothing without figures of both."""
    known = [[one for one in arm if one is not None] for arm in (candidate, champion)]
    if not all(known):
        return {}
    ours, theirs = (sum(arm) / len(arm) for arm in known)
    return {kind: float(worse(ours, theirs)) - float(worse(theirs, ours))}


def _share(answers: Sequence[Collection[str]], kind: str) -> float:
    return sum(kind in flaws for flaws in answers) / len(answers)

"""What a judge does not take, learned by asking. Pure.

LiteLLM knows what its named models take; of an alias, a deployment's name or a server of one's own
nobody knows. A refusal (400, 422, 501) that names an optional part of the request is repeated
without that part. One that names nothing is repeated without one part after another, and at last
without all, as long as the judge has answered nothing yet: later such a refusal is about the
question. What was left out when the judge answered is left out from then on.

`max_tokens` is renamed `max_completion_tokens` before it is left out, and a system message becomes
the beginning of the user's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sidecar.hiding import beginning

SCHEMA: Final = "response_format"
"""Parameter that names the JSON schema of a reply."""
LIMITS: Final = ("max_tokens", "max_completion_tokens")
"""Parameters that limit the tokens of a reply; ours is the first."""
SYSTEM: Final = "system"
"""The role of the judge's instructions."""
SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "reasoning_effort", "thinking", "verbosity",
)  # fmt: skip
"""Parameters that an operator may give, without which scores are scores all the same."""
MOST_TRIES: Final = 8
"""Requests of one call that are repeated for what they carry."""
_REFUSED: Final = frozenset({400, 422, 501})
_NAMES: Final[Mapping[str, re.Pattern[str]]] = {
    SCHEMA: re.compile(r"(?i)response_?format|json_?schema|structured.?output|guided_"),
    LIMITS[0]: re.compile(r"(?i)max_(?:completion_)?tokens"),
    LIMITS[1]: re.compile(r"(?i)max_(?:completion_)?tokens"),
    SYSTEM: re.compile(
        r"(?i)system['\"` ]{1,3}(?:role|message|prompt|instruction)|developer instruction"
        r"|role['\"`: ]{1,4}system|roles must alternate"
    ),
    **{name: re.compile(rf"(?i)(?<!\w){name}(?!\w)") for name in SAMPLING},
}
_OF_ACCOUNT: Final = re.compile(r"(?i)\bkey\b|credential|unauthori[sz]ed|quota|balance|billing")
"""What a refusal of the account, and of no part of the request, says."""


def is_refusal(error: BaseException) -> bool:
    """Return True when the server, or LiteLLM in its place, refused what a request says."""
    return getattr(error, "status_code", None) in _REFUSED


def without(request: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return a request without these parts."""
    made = dict(request)
    for name in (SCHEMA, *SAMPLING):
        if name in left_out:
            made.pop(name, None)
    if LIMITS[0] in left_out and LIMITS[0] in made:
        made.setdefault(LIMITS[1], made.pop(LIMITS[0]))
    if LIMITS[1] in left_out:
        made.pop(LIMITS[1], None)
    if SYSTEM in left_out:
        made["messages"] = _as_user(made["messages"])
    return made


def next_forms(
    request: Mapping[str, Any],
    left_out: Collection[str],
    error: BaseException,
    *,
    needed: Iterable[str],
    search: bool,
) -> list[frozenset[str]]:
    """Return what to leave out next, in order; nothing when the refusal is not about a part.

    request: whole. left_out: what was left out when it was refused. needed: parts that stay.
    search: try one part after another when the refusal names none.
    """
    said, done = beginning(str(error)), frozenset(left_out)
    named = [name for name, pattern in _NAMES.items() if pattern.search(said)]
    sent = without(request, done)
    may = [name for name in _NAMES if name not in needed and _holds(sent, name)]
    if named:
        found = [name for name in named if name in may]
        return [done | {found[0]}] if found else []
    if not search or not may or _OF_ACCOUNT.search(said):
        return []
    every = done.union(may, [LIMITS[1]] if LIMITS[0] in may and LIMITS[1] not in needed else [])
    return list(dict.fromkeys([*(done | {name} for name in may), every]))


def _holds(request: Mapping[str, Any], name: str) -> bool:
    if name == SYSTEM:
        return any(one.get("role") == SYSTEM for one in request["messages"])
    return name in request


def _as_user(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put system messages before the text of the user's message that follows them."""
    made: list[dict[str, Any]] = []
    said: list[str] = []
    for one in messages:
        if one["role"] == SYSTEM:
            said.append(one["content"])
        elif said and one["role"] == "user":
            made.append({**one, "content": "\n\n".join([*said, one["content"]])})
            said = []
        else:
            made.append(dict(one))
    return [*made, *({"role": "user", "content": text} for text in said)]

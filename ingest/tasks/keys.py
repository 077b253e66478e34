"""What makes sessions attempts at one task, and who of them is compared with whom. Pure.

The strongest thing that a session has in common with others is its key: the name that the client
gave the task, an equal first prompt, or a first message that is equal but for names and numbers.
A group is of one key, one adapter version and one project. A leave-one-out baseline over sessions
of one policy does not depend on what the session did, whatever their openings; so a weaker key
costs variance, and no bias.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ingest.grouping.features import opening_key
from ingest.sessions.node import MAX_CALLERS, MAX_OPENINGS
from sidecar.routing.opening import without_notes

KeyKind = Literal["header", "prompt", "template", "rehearsal"]
IDLE_S = 3_600.0  # a session without a turn for so long is over, unless a client said so before
WINDOW_S: Final = 86_400.0
"""Sessions of a group began within a day of each other: the world that they met was the same."""
PREFIX: Final = "tg_"
"""Beginning of the id of a group of sessions."""
KEY_BYTES: Final = 16
TEXT_CHARS: Final = 2_000
"""Characters of a first message that a template reads."""
_NAMED: Final = re.compile(r"(?<![.!?:]\s)(?<!^)(?<=[\s(])[A-Z][\w'-]*(?:\s+[A-Z][\w'-]*)*")
"""Words with a capital that begin no sentence: names, mostly."""
_VARIABLE: Final = re.compile(
    r"\S+@\S+|https?://\S+|\"[^\"]*\"|[0-9a-f]{8,}|\b[A-Z]*[-_]?[\d.,:/#-]*\d[\w.,:/-]*"
)
"""Addresses, quotations, ids, numbers, dates and times: what a template fills in."""
_SPACE: Final = re.compile(r"\W+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskKey:
    """What sessions of one task share."""

    kind: KeyKind
    digest: str
    """Of project, kind and value: the task's name itself is not kept in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstExchange:
    """What the first answered chat of a session tells of its task."""

    project: str
    task: str = ""
    origin: str = "user"
    prompt_key: str | None = None
    request: Mapping[str, Any] | None = None
    """None: it was not read, so no template is made of it."""
    repeats: bool = False
    """Its prompt was seen often enough for a group of equal prompts."""


def task_key(first: FirstExchange, *, weakest: str) -> TaskKey | None:
    """Return the key of a session; None when it has none that is strong enough.

    weakest: setting `tasks.key`. Where templates may form groups, an equal prompt counts only if it
        repeats: nearly every prompt has a key, and few come again.
    """
    if first.origin == "rehearsal":
        return _key(first.project, "rehearsal", first.task) if first.task else None
    if first.task:
        return _key(first.project, "header", first.task)
    if weakest == "header":
        return None
    if first.prompt_key is not None and (weakest == "prompt" or first.repeats):
        return _key(first.project, "prompt", first.prompt_key)
    if weakest != "template" or first.request is None:
        return None
    text = template_of(first.request)
    opening = opening_key(first.project, first.request)
    return _key(first.project, "template", f"{opening}\0{text}") if text else None


def _key(project: str, kind: KeyKind, value: str) -> TaskKey:
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for text in (project, kind, value):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return TaskKey(kind=kind, digest=digest.hexdigest())


def template_of(request: Mapping[str, Any]) -> str:
    """Return a request's first user message without names, numbers, quotations, and what agents
    write anew for each request; "" when it has no text."""
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, Mapping) and message.get("role") == "user":
            text = without_notes(_text(message.get("content")))[:TEXT_CHARS]
            text = _NAMED.sub("0", _VARIABLE.sub("0", text))
            return _SPACE.sub(" ", text.lower()).strip()
    return ""


def _text(content: Any) -> str:  # Any: JSON
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content or () if isinstance(part, Mapping)]
    return " ".join(part for part in parts if isinstance(part, str))


def caller_of(user: str, key_id: str, address_hash: str) -> str:
    """Return who asked, as `task_member.caller` has it; "" when nothing names anybody."""
    if user:
        return f"user:{user}"
    if key_id:
        return f"key:{key_id}"
    return f"address:{address_hash}" if address_hash else ""


# Whether a session may become a member.

MOST_EXCHANGES: Final = 512
"""Exchanges of a session that may become a member: an agent's longest runs have fewer, and the
learner holds a session in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An exchange of a session, without its bodies."""

    exchange_id: str
    began_at: float
    stored_at: float
    parent: str | None
    adapter: str
    held_out: bool
    answered: bool
    """A chat with a reply."""
    trainable: bool
    task: str
    origin: str
    caller: tuple[str, str, str]
    """Project, key and user."""


def why_excluded(steps: Sequence[Step]) -> str | None:
    """Return why a session becomes a member of no group; None when nothing speaks against it.

    steps: all of it, or the first `MOST_EXCHANGES` and one more.
    """
    answered = [one for one in steps if one.answered]
    if any(one.held_out for one in steps):
        return "held_out"
    if len(steps) > MOST_EXCHANGES:
        return "too_long"
    # The session tree lets in no more: one that is full may hold what belongs to others.
    if len({one.caller for one in steps}) >= MAX_CALLERS:
        return "too_many_callers"
    if sum(one.parent is None for one in steps) >= MAX_OPENINGS:
        return "too_many_openings"
    if len({one.adapter for one in answered}) != 1:
        return "several_adapters" if answered else "no_answer"
    if len({one.origin for one in steps}) > 1:
        return "several_origins"
    if len({one.task for one in steps if one.task}) > 1:
        return "several_tasks"
    if not any(one.trainable for one in answered):
        return "untrainable"
    return None


# Who is compared with whom.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A session that may become a member now."""

    session_id: str
    caller: str
    began_at: float


def draw(
    ready: Sequence[Ready], *, kind: KeyKind, size: int, known: Collection[str] = ()
) -> tuple[Ready, ...]:
    """Choose the sessions of a group, the oldest that fit; () when there are too few.

    ready: of one key and one adapter version. known: callers of the project's newest sessions.
    Users are named by people: no group holds two sessions of one user, or who asks often would be
    compared with himself alone. They are compared in a named task where nobody else is known, and
    in rehearsals. A key or an address names an application, through which many may ask: its
    sessions are spread as evenly as the others allow.
    """
    order = sorted(ready, key=lambda one: (one.began_at, one.session_id))
    callers = {*known, *(one.caller for one in order)}
    alone = kind == "rehearsal" or (kind == "header" and len(callers) == 1)
    for first in range(len(order) - size + 1):
        window = [one for one in order[first:] if one.began_at < order[first].began_at + WINDOW_S]
        chosen = _spread(window, size, alone=alone)
        if len(chosen) == size:
            return chosen
    return ()


def _spread(window: Sequence[Ready], size: int, *, alone: bool) -> tuple[Ready, ...]:
    """Take sessions in rounds, one of each caller a round; of a user only in the first one."""
    taken: Counter[str] = Counter()
    rounds = []
    for one in window:
        rounds.append((taken[one.caller], one))
        taken[one.caller] += 1
    fit = [
        (number, one)
        for number, one in rounds
        if number == 0 or alone or not one.caller.startswith("user:")
    ]
    fit.sort(key=lambda item: item[0])
    chosen = [one for _, one in fit[:size]]
    return tuple(sorted(chosen, key=lambda one: (one.began_at, one.session_id)))


def group_id_of(session_ids: Sequence[str]) -> str:
    """Return the id of a group: a session is in one group at most, so its members name it."""
    digest = hashlib.blake2b(
        "\0".join(session_ids).encode("utf-8", "surrogatepass"), digest_size=13
    )
    return f"{PREFIX}{digest.hexdigest()}"

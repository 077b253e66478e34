"""What the session tree is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ingest.sessions.messages import Conversation, Message

How = Literal["answered", "asked", "retry", "kept", "called", "prefix", "trace", "header", "root"]
"""How the place was found. `answered`: the request repeats a whole conversation and its last reply;
`asked`: all but the wording of the last reply; `retry`: it repeats a request; `kept`: it repeats
messages of a conversation that was shortened, or a summary that was made of it; `called`: its text
is an argument of a tool call; `prefix`: it repeats an earlier part of a conversation; `trace`,
`header`: only the name that the client sent; `root`: nothing is known of it."""

Full = Literal["too_many_callers", "too_many_openings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An exchange as the tree needs it."""

    exchange_id: str
    at: float
    """When the request began, Unix seconds."""
    project: str
    key_id: str
    user: str
    session_header: str
    """The session that the client named; "" when it named none."""
    trace_id: str
    turn_id: str
    """Equal for a request and its retries; "" when not known."""
    conversation: Conversation
    replies: tuple[Message, ...]
    """One for each choice."""


@dataclass(frozen=True, slots=True)
class Kin:
    """Where an exchange stands, and who stands beside it, by their ids."""

    session: str
    parent: str | None
    """The exchange that it continues."""
    siblings: tuple[str, ...]
    """Next before and after it, of those that continue the same exchange, or begin the same
    session."""


@dataclass(frozen=True, slots=True)
class Family:
    """Exchanges that continue one exchange, or begin a session, by their ids."""

    session: str
    parent: str | None
    children: tuple[str, ...]
    """The newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an exchange stands."""

    exchange_id: str
    session: str
    """The exchange id of the session's first exchange, or the client's name for it."""
    parent: str | None
    """The exchange that this one continues."""
    turn: int
    """0 for an exchange without a parent, else the parent's and one."""
    branch: int
    """0 for the first exchange that continues the parent, 1 for the second one, and so on."""
    segment: int
    """0 in a session's beginning; one more whenever the client has shortened the conversation."""
    how: How
    held_out: bool = False
    """Its session is never trained on."""
    shares_opening: bool = False
    """It is the opening of its session, and of others that are on the other side of the held-out
    rule: it must be neither trained on nor asked in an exam."""
    moved_from: str | None = None
    """The session that it stood in before; None for an exchange that is new."""
    full: Full | None = None
    """Why the session that was found did not take it, so that it begins one of its own. Not
    stored."""

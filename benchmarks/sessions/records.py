"""What a stream of requests holds, and what a session finder says about it.

The truth follows these rules:

- The parent of a request is the request whose reply stands last in its input. A summary stands for
  the reply of the request that wrote it. A request with no such reply has no parent.
- A sub-agent belongs to the session of the agent that called it. The parent of its first request is
  the request whose reply made the call.
- A repeated request (a retry, a regeneration, another sample of the same prompt) is a sibling: it
  has the parent of the first one. Of an edited conversation, the parent is the last turn that both
  branches share.
- A first request has no parent to share. It belongs to the session of an equal earlier one only
  when that one got no reply (a retry). Otherwise it begins a session: nothing tells a regenerated
  first reply from a second conversation that begins alike.
- Agents with different system prompts or tools that are asked the same begin different sessions.
- A session header, or else a trace id, names the session; parents go by content all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request as it reached the sidecar."""

    exchange_id: str
    at: float
    """When it arrived, in Unix seconds."""
    handed_at: float
    """When its record was handed over, in Unix seconds."""
    project: str
    key_id: str
    user: str
    """The client's `user` field or header; "" if none is sent."""
    session_header: str
    """"" : none is sent."""
    trace_id: str
    """"" : none is sent."""
    surface: str
    """chat, responses or messages."""
    request: bytes
    """The JSON body."""
    replies: tuple[bytes, ...]
    """Assistant messages as JSON in the form of chat completions, one for each choice; empty when
    the request got no whole reply."""
    true_session: str
    true_parent: str | None
    """An exchange id."""


HELD_OUT = 0.1
"""Share of sessions held out when leaks are counted."""
Side = Literal["held_out", "trained", "neither"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a finder says of one request. It may say it again later: the last word counts. For leaks
    the word counts that stands when the request is decided, and every later one."""

    exchange_id: str
    session: str
    parent: str | None
    """An exchange id."""
    at: float = 0.0
    """When it says so, in Unix seconds."""
    side: Side | None = None
    """None: by a hash of the session."""


Finder = Callable[[Iterable[SentRequest]], Iterable[Placement]]
"""Reads a stream in its order: requests of many conversations, each handed over when its reply
ended. Scoring hides the truth from it."""

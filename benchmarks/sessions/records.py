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


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request as it reached the sidecar."""

    exchange_id: str
    at: float
    """When it arrived, in Unix seconds."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a finder says of one request. It may say it again later: the last word counts, but for
    leaks every word does, because a request may have been trained on by then."""

    exchange_id: str
    session: str
    parent: str | None
    """An exchange id."""


Finder = Callable[[Iterable[SentRequest]], Iterable[Found]]
"""Reads a stream in its order: requests of many conversations, each handed over when its reply
ended. Scoring hides the truth from it."""

"""How a client writes its requests: who it is, and what it changes from one request to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The client of one conversation."""

    surface: str = "chat"
    project: str = "default"
    key_id: str = "key-1"
    user: str = ""
    session_header: str = ""
    trace_id: str = ""
    clock: bool = False
    """The system prompt tells the time."""
    marks: Literal["", "blocks", "last"] = ""
    """`cache_control` stands on the last user message. blocks: all texts are content blocks; last:
    only the marked one, the others are plain."""
    loose_json: bool = False
    """Key order, white space and escapes change with each request, in arguments of calls too."""
    new_call_ids: bool = False
    """Ids of tool calls are written anew in each request."""
    loose_content: bool = False
    """Replies come back trimmed, `null` as "" or left out, a text as a content block."""
    thinks: Literal["", "field", "tag"] = ""
    """The model reasons and the client leaves the reasoning out of what it replays. field: it is in
    `reasoning`; tag: in the content, between <think> and </think>."""
    choices: int = 1
    """`n`; the client goes on with the last choice."""

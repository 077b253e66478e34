"""Which conversation a request belongs to, with or without the agent's help. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def session_key(*, header: str | None, user: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Name the session of a request: the same for every turn of one conversation.

    header: the agent's own `x-sidecar-session`, which wins when it is sent.
    user: `x-sidecar-user` or the body's `user`; two users that open alike stay apart.
    messages: the request's messages. The opening, up to and including the first user message,
    names the conversation, because every later turn repeats it. White space at the ends and the
    order of keys do not count.
    Returns: "h:" + header, or "m:" + 32 hex digits.
    """
    if header:
        return f"h:{header}"
    opening: list[list[str]] = []
    for message in messages:
        role = str(message.get("role", ""))
        opening.append([role, _text(message.get("content"))])
        if role == "user":
            break
    canonical = json.dumps([user, opening], ensure_ascii=False, separators=(",", ":"))
    return "m:" + hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _text(content: Any) -> str:  # Any: a client may send anything here, and it still needs a key
    if isinstance(content, str):
        return content.strip()
    return json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))

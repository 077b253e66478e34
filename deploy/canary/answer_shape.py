"""Facts about one answer that need no judge. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_short(message: Mapping[str, Any], finish_reason: str | None) -> bool:
    """Return True for an answer that the token limit cut, or without content and tool calls."""
    if finish_reason == "length":
        return True
    content = message.get("content")
    says_something = bool(content.strip()) if isinstance(content, str) else bool(content)
    return not says_something and not message.get("tool_calls")

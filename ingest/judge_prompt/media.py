"""Images, sound and files in a message: the judge sees what kind and how large, never the bytes.

As base64 text one image of 1 MB is about 300,000 tokens of which a judge understands none. The
placeholder holds a digest, so that two messages with different images do not look the same. A URL
is left as it is. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

DEPTH: Final = 4
"""Levels of a content part that are searched; the deepest known, a file in an Anthropic block, is
at level 2."""
LEAST_CHARACTERS: Final = 256
"""Shorter base64 is left: it costs less than the placeholder is worth."""
DATA_FIELDS: Final = frozenset({"data", "file_data", "b64_json"})
KIND_FIELDS: Final = ("media_type", "mime_type", "mimeType", "format")
"""Fields beside the data that name its kind: Anthropic's, Gemini's and OpenAI's."""


def without_media(content: Any) -> Any:  # Any: JSON
    """Return the content with a placeholder for each image, sound or file that it carries.

    content: the `content` of a chat message. Text, and parts without data, are kept.
    Returns: the same object when there is nothing to replace.
    """
    if not isinstance(content, list):
        return content
    shown = [_replaced(part, DEPTH) if isinstance(part, Mapping) else part for part in content]
    return content if all(a is b for a, b in zip(shown, content, strict=True)) else shown


def _replaced(part: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    kind = next((part[name] for name in KIND_FIELDS if isinstance(part.get(name), str)), "")
    made: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, str) and name != "text":
            made[name] = _placeholder(value, kind if name in DATA_FIELDS else "")
        elif isinstance(value, Mapping) and depth > 1:
            made[name] = _replaced(value, depth - 1)
        else:
            made[name] = value
    return part if all(made[name] is part[name] for name in part) else made


def _placeholder(value: str, kind: str) -> str:
    """Return what stands for a data URL, or for base64 of a named kind; another text as it is."""
    if value[:5].lower() == "data:":
        head, comma, data = value.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            return value
        kind = head[5:].partition(";")[0] or "text/plain"
    elif kind and len(value) >= LEAST_CHARACTERS:
        data = value
    else:
        return value
    size = len(data) * 3 // 4 - data[-2:].count("=")
    digest = hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"[{kind}, {size} bytes, sha256 of its base64 {digest}; not shown]"

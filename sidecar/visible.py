"""Write text so that a terminal shows it and obeys none of it. Pure.

What a person or a model wrote may hold escape codes, line breaks, or marks that reorder a line.
Each becomes the escape that Python's `repr` would write: `\\x1b`, `\\n`, `\\u202e`.
"""

from __future__ import annotations

import unicodedata

_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control characters, format characters (those of direction among them), lone surrogates, line and
paragraph separators."""
_JOINERS = frozenset("\u200c\u200d")
"""Format characters that Persian, Hindi and emoji need inside words; they move nothing."""


def visible(text: str) -> str:
    """The text on one line, without any character that a terminal acts upon."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if unicodedata.category(character) not in _HIDDEN_CATEGORIES or character in _JOINERS:
        return character
    return character.encode("unicode_escape").decode()

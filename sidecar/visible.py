"""Escape text so that a terminal shows it and does not act on it. Pure.

Text from people or models may hold escape codes, line breaks, invisible letters, or marks that
reorder a line. Each becomes the escape of Python's `repr`: `\x1b`, `\n`, `\u202e`, `\u3164`.
"""

from __future__ import annotations

import unicodedata

_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control characters, format characters (those of direction among them), lone surrogates, line and
paragraph separators."""
_JOINERS = frozenset("\u200c\u200d")
"""Format characters that Persian, Hindi and emoji need inside words; they are harmless."""
_EMPTY_LETTERS = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
)
"""Letters, marks and a symbol that are drawn as nothing: Unicode's default ignorable ones of other
categories, and the empty Braille pattern."""
_SELECTORS = frozenset(map(chr, (*range(0xFE00, 0xFE0E), *range(0xE0100, 0xE01F0))))
"""Variation selectors but the two that emoji need: marks that are drawn as nothing, enough of them
to write a hidden text with."""


def visible(text: str) -> str:
    """Return the text on one line, without characters that a terminal acts on or draws as
    nothing."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if character in _JOINERS or not _is_hidden(character):
        return character
    return character.encode("unicode_escape").decode()


def _is_hidden(character: str) -> bool:
    return (
        unicodedata.category(character) in _HIDDEN_CATEGORIES
        or character in _EMPTY_LETTERS
        or character in _SELECTORS
    )


# A number with its noun, for sentences that people read. Pure.


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 group`, `2 groups`, `1,000 groups`.

    plural: what stands behind every number but 1, where it is not the noun with an s. Both may be
    more than a noun: `group waits`, `groups wait`.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

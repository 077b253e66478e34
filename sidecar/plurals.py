"""A number with its noun, for sentences that people read. Pure."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 group`, `2 groups`, `1,000 groups`.

    plural: what stands behind every number but 1, where it is not the noun with an s. Both may be
    more than a noun: `group waits`, `groups wait`.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"

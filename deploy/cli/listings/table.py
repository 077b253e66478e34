"""A table for a terminal: columns as wide as what stands in them, the last one wrapped. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

GAP = "  "
LEAST = 20
"""Characters that the last column has at least, however narrow the terminal is."""
WHOLE = 10_000
"""A width in which nothing is wrapped: for output that goes to a file or to another program."""


def table_lines(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int = WHOLE
) -> list[str]:
    """Return the lines of a table; "none" without rows.

    The last column is wrapped to `width` characters a line: nothing is cut off.
    """
    if not rows:
        return ["none"]
    shown = [[" ".join(cell.split()) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[k]) for row in shown) for k in range(len(heads) - 1)]
    left = sum(widths) + len(GAP) * len(widths)
    lines = []
    for row in shown:
        first = GAP.join(map(str.ljust, row, widths)) + GAP if widths else ""
        parts = textwrap.wrap(row[-1], max(LEAST, width - left)) or [""]
        lines += [
            f"{first if place == 0 else ' ' * left}{part}".rstrip()
            for place, part in enumerate(parts)
        ]
    return lines

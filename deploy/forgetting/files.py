"""Blank lines of logs, spans and exports that are about what is forgotten.

A line is overwritten with blanks where it stands: the file keeps its length, so a process that
appends to it at the same time is not disturbed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is looked at in pieces of this length."""
_WORD = re.compile(rb"[A-Za-z0-9_-]+")
_OWN = ("limits-",)
"""Beginnings of files that hold no content."""


def files_with_lines(state_dir: Path, spans_file: str) -> Iterator[Path]:
    """The files that may quote content: logs, spans, and exports that stand in `state_dir`."""
    yield from sorted((state_dir / "logs").glob("*.log*"))
    exports = sorted(state_dir.glob("*.jsonl"))
    yield from (path for path in exports if not path.name.startswith(_OWN))
    spans = Path(spans_file)
    if spans_file and spans.is_file() and spans not in exports:
        yield spans


def blank_lines(path: Path, ids: Collection[str], mention: re.Pattern[bytes]) -> int:
    """Overwrite each line that holds one of these ids as a word, or mentions the target.

    Returns: the number of lines. Raises: OSError.
    """
    words = {one.encode("utf-8", "surrogatepass") for one in ids}
    blanked = 0
    with path.open("r+b", buffering=2**20) as file:
        while line := file.readline(MAX_LINE_BYTES):
            if mention.search(line) or not words.isdisjoint(_WORD.findall(line)):
                end = file.tell()
                body = line.rstrip(b"\n")
                file.seek(end - len(line))
                file.write(b" " * len(body))
                file.seek(end)
                blanked += 1
    return blanked


def count_mentions(path: Path, mention: re.Pattern[bytes]) -> int:
    """Count the lines that mention the target. Raises: OSError."""
    with path.open("rb", buffering=2**20) as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        return sum(mention.search(line) is not None for line in lines)

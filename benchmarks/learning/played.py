"""What the runs of a finished night did, kept in its folder: a broken-off call goes on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from benchmarks.learning.play import Played

FILE = "played.json"


def write(played: Sequence[Played], folder: Path, options: Mapping[str, object]) -> None:
    """Write `<folder>/played.json`, whole or not at all."""
    made = folder / f"{FILE}.new"
    made.write_text(
        json.dumps({"options": dict(options), "played": [asdict(one) for one in played]})
    )
    made.replace(folder / FILE)


def kept(folder: Path, options: Mapping[str, object]) -> list[Played] | None:
    """Return the runs that a folder holds. None: it holds none of these options."""
    if not (folder / FILE).exists():
        return None
    found = json.loads((folder / FILE).read_text())
    if found["options"] != dict(options):
        return None
    return msgspec.convert(found["played"], list[Played])

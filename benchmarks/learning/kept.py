"""What a night has made so far, kept in its folder: a broken-off call goes on from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

Value = TypeVar("Value")
OPTIONS = "options.json"


class Kept:
    """Values by name, each in a file of its own."""

    def __init__(self, folder: Path, options: Mapping[str, object], *, resume: bool) -> None:
        """folder: emptied, unless `resume` and it holds a night of the same options."""
        self.folder = folder
        said = json.dumps(dict(options))
        told = folder / OPTIONS
        if not resume or not told.exists() or told.read_text() != said:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            told.write_text(said)

    def get(self, name: str, kind: type[Value]) -> Value | None:
        path = self.folder / f"{name}.json"
        return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None

    def put(self, name: str, value: Value) -> Value:
        """Write a value, whole or not at all. Returns: it."""
        made = self.folder / f"{name}.new"
        made.write_bytes(msgspec.json.encode(value))
        made.replace(self.folder / f"{name}.json")
        return value

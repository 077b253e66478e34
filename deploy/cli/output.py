"""What every part of the `sidecar` command shares: how it prints, and which store it may open.

What people and models wrote (reasons, names, errors) is printed without the characters that a
terminal obeys, each record on lines of its own; JSON escapes them by itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from sidecar.errors import StoreError
from sidecar.hiding import hide_in_url
from sidecar.visible import visible

Output = Annotated[str, typer.Option("--output", "-o", help="text or json")]


def say(line: str) -> None:
    """Print one line."""
    print(visible(line), flush=True)


def say_json(value: Any) -> None:  # Any: JSON
    """Print JSON in ASCII. It escapes every other control character but DEL by itself."""
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"), flush=True)


def note(text: str) -> None:
    """Print one line for the person, not for a program that reads the output."""
    print(f"sidecar: {visible(text)}", file=sys.stderr)


def print_found(found: Any, output: str) -> None:  # Any: JSON of the admin API, or like it
    """Print one record, or the `items` of a listing. output: `text` or `json`."""
    if output == "json":
        say_json(found)
        return
    items = found.get("items") if isinstance(found, dict) else None
    for block in items if items is not None else [found]:
        for line in _lines(block):
            say(line)


def _lines(block: Any, indent: int = 0) -> list[str]:
    """Indented `key: value` lines; lists and objects below their key."""
    pad = "  " * indent
    lines: list[str] = []
    for key, value in block.items():
        if isinstance(value, dict) and value:
            lines += [f"{pad}{key}:", *_lines(value, indent + 1)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{pad}{key}:")
            for item in value:
                lines += _lines(item, indent + 1)
        else:
            lines.append(f"{pad}{key}: {value}")
    return lines


def require_store(url: str) -> None:
    """An SQLite file that is not there would be made, empty, and the real one left alone."""
    from sqlalchemy import make_url

    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        raise StoreError(
            f"store {hide_in_url(url)}: no such file; check store.url, or name --config"
        )

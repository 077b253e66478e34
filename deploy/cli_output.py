"""What every part of the `sidecar` command shares: how it prints, and which store it may open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ingest.errors import StoreError

Output = Annotated[str, typer.Option("--output", "-o", help="text or json")]


def say(text: str) -> None:
    print(text, flush=True)


def print_found(found: Any, output: str) -> None:  # Any: JSON of the admin API, or like it
    """Print one record, or the `items` of a listing. output: `text` or `json`."""
    if output == "json":
        say(json.dumps(found, indent=2))
        return
    items = found.get("items") if isinstance(found, dict) else None
    for block in items if items is not None else [found]:
        say(_as_text(block))


def _as_text(block: Any, indent: int = 0) -> str:
    """Indented `key: value` lines; lists and objects below their key."""
    pad = "  " * indent
    lines = []
    for key, value in block.items():
        if isinstance(value, dict) and value:
            lines += [f"{pad}{key}:", _as_text(value, indent + 1)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{pad}{key}:")
            lines += [_as_text(item, indent + 1) for item in value]
        else:
            lines.append(f"{pad}{key}: {value}")
    return "\n".join(lines)


def require_store(url: str) -> None:
    """An SQLite file that is not there would be made, empty, and the real one left alone."""
    from sqlalchemy import make_url

    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        raise StoreError(f"store {url}: no such file; check store.url, or name --config")

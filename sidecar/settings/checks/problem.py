"""What a check yields, and the check that a table can be sent as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

Problem = tuple[tuple[str, ...], str]
"""The key, section first, and what is wrong with it."""
DEFAULT_PROJECT = "default"
"""Project of traffic that the sidecar has no keys for (`access.mode`)."""
MAX_DEPTH = 32
"""Deepest nesting of tables and lists. Python cannot recurse through a thousand."""


def unsendable(key: tuple[str, ...], value: Any) -> Iterator[Problem]:  # Any: of TOML
    """Yield why a table cannot be sent as JSON."""
    if _deeper_than(MAX_DEPTH, value):
        yield key, f"nests deeper than {MAX_DEPTH} levels; give a flatter table"
    elif not _is_json(value):
        yield (
            key,
            "is sent as JSON and holds what JSON cannot (a date, nan, inf, no Unicode); correct it",
        )


def _is_json(value: Any) -> bool:  # Any: of TOML
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _deeper_than(levels: int, value: Any) -> bool:  # Any: JSON
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, one) for one in inner)


def is_changed(section: BaseModel, name: str) -> bool:
    """Tell whether a setting is another than its default."""
    return bool(
        getattr(section, name)
        != type(section).model_fields[name].get_default(call_default_factory=True)
    )


def is_given(section: BaseModel, name: str) -> bool:
    """Tell whether the file or the environment names a setting, be it with its default."""
    return name in section.model_fields_set

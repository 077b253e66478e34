"""Is what came through the sidecar what came from vLLM? Pure.

Nothing is left out. Ids that the server or the client draws at random become `<id 1>`, `<id 2>` in
the order in which they are met, so that the same id must still stand in the same places; times
become `<time>`. All else must be equal: values, order, types, and what is null or missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

RANDOM_IDS = re.compile(
    r"(?:chatcmpl-tool-|chatcmpl-|cmpl-|resp_|msg_|fc_|modelperm-)[0-9a-f]{16}(?![0-9a-f])"
    r"|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
)
"""vLLM's, and the UUIDs that LangChain and pydantic-ai draw for their own runs."""
TIMES_IN_TEXT = re.compile(r"\"created(?:_at)?\":\d{10}|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z")
TIME_KEYS = frozenset({"created", "created_at", "completed_at"})
MISSING = "<missing>"


def differences(direct: Any, through: Any) -> list[str]:
    """Where the two are not the same, as `path: what vLLM gave != what the sidecar gave`."""
    return list(_differences("", canonical(direct), canonical(through)))


def canonical(value: Any) -> Any:
    """The value with ids numbered and times taken out."""
    numbers: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return numbers.setdefault(match.group(), f"<id {len(numbers) + 1}>")

    return _canonical(value, numbered)


def _canonical(value: Any, numbered: Callable[[re.Match[str]], str]) -> Any:
    if isinstance(value, dict):
        return {
            key: "<time>" if _is_time(key, member) else _canonical(member, numbered)
            for key, member in value.items()
        }
    if isinstance(value, list):
        return [_canonical(member, numbered) for member in value]
    if isinstance(value, str):
        return TIMES_IN_TEXT.sub("<time>", RANDOM_IDS.sub(numbered, value))
    return value


def _is_time(key: str, value: Any) -> bool:
    return key in TIME_KEYS and isinstance(value, int | float) and not isinstance(value, bool)


def _differences(path: str, direct: Any, through: Any) -> Iterator[str]:
    if isinstance(direct, dict) and isinstance(through, dict):
        if list(direct) != list(through) and set(direct) == set(through):
            yield f"{path}: keys in the order {list(direct)} != {list(through)}"
        for key in [*direct, *(key for key in through if key not in direct)]:
            pair = direct.get(key, MISSING), through.get(key, MISSING)
            yield from _differences(f"{path}.{key}", *pair)
    elif isinstance(direct, list) and isinstance(through, list):
        if len(direct) != len(through):
            yield f"{path}: {len(direct)} items != {len(through)}"
        for index, pair in enumerate(zip(direct, through, strict=False)):
            yield from _differences(f"{path}[{index}]", *pair)
    elif type(direct) is not type(through) or direct != through:
        yield f"{path}: {direct!r} != {through!r}"

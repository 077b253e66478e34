"""Leave out the oldest part of a conversation that does not fit into a judge's context. Pure.

Whole messages go first, the oldest first; a mark says how many messages and characters are left
out. System messages and the last message stay. If these do not fit either, the long texts of the
last message are cut in their middle, and only then those of the system messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingest.judge_prompt.tokens import estimate_tokens

MARK_TOKENS = 48
"""Room for the mark."""
LAST_TOKENS = 256
"""The last message is cut down to this before a system message is cut."""
LEAST_CHARACTERS = 64
"""Texts up to this length (roles, names, ids) are never cut."""
SYSTEM = ("system", "developer")
Write = Callable[[Mapping[str, Any]], str]
"""Writes a message as one line of the prompt."""


class NoRoomLeftError(ValueError):
    """The messages do not fit, however much of them is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elided:
    """The lines of a conversation, as many as fit."""

    lines: tuple[str, ...]
    left_out_messages: int = 0
    left_out_characters: int = 0
    """Characters of the lines of those messages, and of texts that were cut."""

    @property
    def is_whole(self) -> bool:
        return not self.left_out_messages and not self.left_out_characters


def elide(messages: Sequence[Mapping[str, Any]], *, room: float, write: Write) -> Elided:
    """Write the messages into at most `room` tokens, by estimate.

    room: tokens; infinite when no limit is known.
    Raises: NoRoomLeftError.
    """
    lines = [write(message) for message in messages]
    if room == float("inf"):
        return Elided(lines=tuple(lines))
    costs = [_cost(line) for line in lines]
    if sum(costs) <= room:
        return Elided(lines=tuple(lines))
    if room <= MARK_TOKENS or not lines:
        raise NoRoomLeftError
    stays = {
        place
        for place, message in enumerate(messages)
        if message.get("role") in SYSTEM or place == len(messages) - 1
    }
    left = room - MARK_TOKENS - sum(costs[place] for place in stays)
    if left < 0:
        kept, cut = _shortened(messages, lines, costs, stays, room - MARK_TOKENS, write)
        return _joined(lines, kept, cut)
    kept = {place: lines[place] for place in stays}
    for place in reversed(range(len(messages))):
        if place in stays:
            continue
        left -= costs[place]
        if left < 0:
            break
        kept[place] = lines[place]
    return _joined(lines, kept, 0)


def _joined(lines: Sequence[str], kept: Mapping[int, str], cut: int) -> Elided:
    gone = [place for place in range(len(lines)) if place not in kept]
    characters = sum(len(lines[place]) for place in gone) + cut
    mark = json.dumps(
        {"left_out": f"{len(gone)} older messages; {characters} characters in all"}
        if gone
        else {"left_out": f"{cut} characters, from the middle of long texts"}
    )
    at = gone[0] if gone else 0
    shown: list[str] = []
    for place in range(len(lines)):
        if place == at:
            shown.append(mark)
        if place in kept:
            shown.append(kept[place])
    return Elided(lines=tuple(shown), left_out_messages=len(gone), left_out_characters=characters)


def _shortened(
    messages: Sequence[Mapping[str, Any]],
    lines: Sequence[str],
    costs: Sequence[int],
    stays: set[int],
    room: float,
    write: Write,
) -> tuple[dict[int, str], int]:
    """Cut the messages that stay. Returns: their lines, and the characters that were cut."""
    *systems, last = sorted(stays)
    of_systems = sum(costs[place] for place in systems)
    for_last = min(costs[last], max(room - of_systems, LAST_TOKENS))
    made = {last: _cut(messages[last], for_last, write) if for_last < costs[last] else lines[last]}
    left = room - _cost(made[last])
    for number, place in enumerate(systems):
        share = left if of_systems <= left else left / (len(systems) - number)
        whole = costs[place] <= share
        made[place] = lines[place] if whole else _cut(messages[place], share, write)
        left -= _cost(made[place])
        of_systems -= costs[place]
    if left < 0:
        raise NoRoomLeftError
    return made, sum(max(0, len(lines[place]) - len(made[place])) for place in made)


def _cut(message: Mapping[str, Any], room: float, write: Write) -> str:
    """Write a message with its long texts cut, as little as fits. Raises: NoRoomLeftError."""
    low, high = LEAST_CHARACTERS, max(LEAST_CHARACTERS, int(room * 8))
    found = write(_capped(message, low))
    if _cost(found) > room:
        raise NoRoomLeftError
    while high - low > max(8, low // 50):  # within 2% of the longest that fits
        middle = (low + high) // 2
        tried = write(_capped(message, middle))
        if _cost(tried) <= room:
            low, found = middle, tried
        else:
            high = middle
    return found


def _capped(value: Any, most: int) -> Any:  # Any: JSON
    """Cut every text of a value to about `most` characters: the beginning and the end of it."""
    if isinstance(value, str):
        if len(value) <= max(most, LEAST_CHARACTERS):
            return value
        half = most // 2
        mark = f" [... {len(value) - 2 * half} characters left out ...] "
        return value[:half] + mark + value[len(value) - half :]
    if isinstance(value, Mapping):
        return {name: _capped(one, most) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_capped(one, most) for one in value]
    return value


def _cost(line: str) -> int:
    return estimate_tokens(line) + 1  # its line break

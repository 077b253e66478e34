"""Calls of services outside that are being made, each a task of its own: one that hangs delays no
other."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


async def end_turns(turns: dict[Name, asyncio.Task[None]], *, within_s: float) -> None:
    """Wait a while for the tasks and take out those that have ended; the others go on.

    They are cancelled with the caller. Raises: the error of one that failed.
    """
    if not turns:
        return
    try:
        await asyncio.wait(turns.values(), timeout=within_s)
    except asyncio.CancelledError:
        for turn in turns.values():
            turn.cancel()
        raise
    ended = [turns.pop(name) for name, turn in [*turns.items()] if turn.done()]
    failed = [error for turn in ended if (error := turn.exception()) is not None]
    if failed:
        raise failed[0]

"""Ask the scoring process which of N answers is the best, within a time limit.

Every failure (no process, timeout, invalid reply) is returned as a reason within the time limit and
never raised; the first answer is used then. After several failures in a row the client pauses, and
`ready` is False, so that no answers are sampled in vain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sidecar.backoff import Backoff, Waits
from sidecar.scoring.wire import (
    MAX_QUESTION_BYTES,
    MAX_REPLY_BYTES,
    Material,
    NoPick,
    Verdict,
    WireError,
    encode_frame,
    read_frame,
    read_verdict,
)
from sidecar.unix_socket import kernel_path

FAILURES_IN_A_ROW = 3
PAUSES = Backoff(first_s=1.0, last_s=30.0)
"""Pauses while the failures go on."""
FAILURES = frozenset({"away", "timeout", "disconnect", "garbage", "judge_down", "failed"})
"""Reasons that concern the judge or the scoring process, not only this question."""
TELLS_NOTHING = frozenset({"busy", "too_large"})


class Picker(Protocol):
    """Chooses among answers."""

    @property
    def ready(self) -> bool:
        """False when asking would fail now."""

    async def pick(self, material: Material, deadline_s: float) -> Verdict:
        """Return the best answer, or why there is none, within `deadline_s` seconds.

        Raises nothing but its own cancellation, which ends the wait and not the judge call.
        """


class SocketPicker:
    """A `Picker` that asks through the scoring process's unix socket. For one event loop."""

    def __init__(
        self,
        path: Path,
        *,
        concurrency: int,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """concurrency: questions asked at once; max_waiting: questions that wait for their turn."""
        self._path = path
        self._slots = asyncio.Semaphore(concurrency)
        self._room = concurrency + max_waiting
        self._held = 0
        self._pause = Pause(clock)

    @property
    def ready(self) -> bool:
        return self._held < self._room and not self._pause.lasts

    async def pick(self, material: Material, deadline_s: float) -> Verdict:
        """See `Picker.pick`."""
        if self._held >= self._room:
            return NoPick(reason="queue_full")
        self._held += 1
        try:
            async with asyncio.timeout(deadline_s), self._slots:
                verdict = await self._ask(material)
        except TimeoutError:
            verdict = NoPick(reason="timeout")
        finally:
            self._held -= 1
        reason = verdict.reason if isinstance(verdict, NoPick) else ""
        if reason not in TELLS_NOTHING:
            self._pause.note(failed=reason in FAILURES)
        return verdict

    async def _ask(self, material: Material) -> Verdict:
        question = encode_frame(material)
        if len(question) > MAX_QUESTION_BYTES:
            return NoPick(reason="too_large")
        try:
            with kernel_path(self._path) as name:
                reader, writer = await asyncio.open_unix_connection(name)
        except OSError:  # no such socket, or no listener
            return NoPick(reason="away")
        try:
            writer.write(question)
            await writer.drain()
            body = await read_frame(reader, limit=MAX_REPLY_BYTES)
        except OSError:
            return NoPick(reason="disconnect")
        except WireError:
            return NoPick(reason="disconnect" if reader.at_eof() else "garbage")
        finally:
            writer.close()
        try:
            return read_verdict(body, answers=len(material.answers))
        except WireError:
            return NoPick(reason="garbage")


class Pause:
    """Decides when to stop asking for a while. Pure; the caller passes the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures = 0
        self._waits = Waits(PAUSES)
        self._until = 0.0

    @property
    def lasts(self) -> bool:
        return self._failures >= FAILURES_IN_A_ROW and self._clock() < self._until

    def note(self, *, failed: bool) -> None:
        """Record the result of a question. The pause grows once each time it has ended, not once a
        question, because questions in flight together fail together."""
        if not failed:
            self._failures = 0
            self._waits.reset()
            return
        self._failures += 1
        if self._failures < FAILURES_IN_A_ROW or self.lasts:
            return
        self._until = self._clock() + self._waits.next_s()

"""Ask the scoring process which of N answers is the best, within a time limit.

Every failure (no process, timeout, invalid reply) is returned as a reason within the time limit and
never raised; the first answer is used then. After several failures in a row the client pauses, and
`ready` is False, so that no answers are sampled in vain.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from sidecar.backoff import Backoff, Waits
from sidecar.unix_socket import kernel_path

# The protocol between the relay and the scoring process for best of N.

SOCKET_NAME = "best-of.sock"
CONCURRENCY = 8
"""Requests that score judges at once (beyond: `busy`), and questions of one proxy at once."""
MAX_WAITING = 32
"""Requests of one proxy that wait for the judge; beyond, they are relayed without best of N."""
MAX_QUESTION_BYTES = 8 * 2**20
"""Longest question, in bytes: a conversation and its answers. A judge could not read a longer
one."""
MAX_REPLY_BYTES = 64 * 2**10
MAX_ANSWERS = 8

NO_PICK_REASONS = frozenset(
    {
        "busy",
        "judge_down",
        "judge_spent",
        "unreadable",
        "identical_answers",
        "judge_refused",
        "judge_rubbish",
        "not_redacted",
        "failed",
    }
)
"""Reasons for which the scoring process may decline; any other text is an error."""

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The other side sent an invalid frame. Raised and handled inside each process."""


class NothingSaidError(WireError):
    """The other side closed without sending anything, as a health check does."""


class Material(msgspec.Struct, frozen=True, kw_only=True):
    """relay -> scoring. One request and its answers, to be judged relative to each other."""

    exchange_id: str
    request: bytes
    """The client's request body, JSON: messages and tools."""
    answers: tuple[bytes, ...]
    """[N] assistant messages as JSON, in the order of the choices."""
    keep: bool
    """False: the client turned recording off (`x-sidecar-capture: off`), so nothing is stored."""
    project: str = "default"
    """Project of the client's key, whose rubric the judge is given."""


class Pick(msgspec.Struct, frozen=True, kw_only=True, tag="pick"):
    """scoring -> relay. The best answer."""

    index: int
    scores: tuple[float, ...]
    """[N] unitless, 0..1, comparable only with each other."""


class NoPick(msgspec.Struct, frozen=True, kw_only=True, tag="no_pick"):
    """No answer was chosen; the first one is used."""

    reason: str


Verdict = Pick | NoPick

_encoder = msgspec.msgpack.Encoder()
_material = msgspec.msgpack.Decoder(Material)
_verdict: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Pick | NoPick)


def socket_path(state_dir: Path) -> Path:
    """Return the path of the scoring process's socket."""
    return state_dir / SOCKET_NAME


def encode_frame(record: Material | Verdict) -> bytes:
    """Return a record with its length in front."""
    body = _encoder.encode(record)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, *, limit: int) -> bytes:
    """Return the body of the next frame.

    limit: bytes; a longer frame is not read.
    Raises: WireError when the frame is longer or cut off, NothingSaidError when the connection
    closed before it, OSError.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > limit:
            raise WireError(f"a frame of {length} bytes; the limit is {limit}")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == _LENGTH.size:
            raise NothingSaidError("closed without a word") from error
        raise WireError(f"closed after {len(error.partial)} bytes of a frame") from error


def read_material(body: bytes) -> Material:
    """Decode a question. Raises: WireError."""
    try:
        material = _material.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"not a question: {error}") from error
    if not 2 <= len(material.answers) <= MAX_ANSWERS:
        raise WireError(f"{len(material.answers)} answers; there may be 2 to {MAX_ANSWERS}")
    return material


def read_verdict(body: bytes, *, answers: int) -> Verdict:
    """Decode the answer to a question about this many answers. Raises: WireError."""
    try:
        verdict = _verdict.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"not a verdict: {error}") from error
    if isinstance(verdict, NoPick):
        if verdict.reason not in NO_PICK_REASONS:
            raise WireError("a reason that is not one of ours")
        return verdict
    in_range = 0 <= verdict.index < answers and len(verdict.scores) == answers
    if not in_range or not all(0.0 <= score <= 1.0 for score in verdict.scores):
        raise WireError("a pick that does not fit the question")
    return verdict


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
        concurrency: int = CONCURRENCY,
        max_waiting: int = MAX_WAITING,
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

"""What the relay and the scoring process say to each other about best of N, and in which bytes.

Over a unix socket in `state_dir`, one question a connection: a frame there, a frame back, close.
A frame is four bytes of length, big-endian, and that many bytes of msgpack. A connection of its own
for each question costs some 50 us beside seconds of sampling, and nothing can fall out of step.
"""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import msgspec

SOCKET_NAME = "best-of.sock"
MAX_QUESTION_BYTES = 8 * 2**20
"""Of a question: a conversation and its answers. Longer ones no judge would read either."""
MAX_REPLY_BYTES = 64 * 2**10
MAX_ANSWERS = 8

NO_PICK_REASONS = frozenset(
    {
        "busy",
        "judge_down",
        "unreadable",
        "identical_answers",
        "judge_refused",
        "judge_rubbish",
        "failed",
    }
)
"""Why the scoring process may decline; anything else from it is not believed."""

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The other side said something that is not a frame of ours; never leaves its room."""


class NothingSaidError(WireError):
    """The other side closed without a word: somebody only looked whether anybody listens."""


class Material(msgspec.Struct, frozen=True, kw_only=True):
    """relay -> scoring. One request and its answers, to be judged against each other."""

    exchange_id: str
    request: bytes
    """The client's request body, JSON: messages and tools."""
    answers: tuple[bytes, ...]
    """[N] assistant messages as JSON, by choice index."""
    keep: bool
    """False: the client wants nothing recorded (`x-sidecar-capture: off`), so judge and forget."""


class Pick(msgspec.Struct, frozen=True, kw_only=True, tag="pick"):
    """scoring -> relay. The best answer."""

    index: int
    scores: tuple[float, ...]
    """[N] unitless, 0..1, comparable with each other only."""


class NoPick(msgspec.Struct, frozen=True, kw_only=True, tag="no_pick"):
    """Nobody chose, so the first answer is the one."""

    reason: str


Verdict = Pick | NoPick

_encoder = msgspec.msgpack.Encoder()
_material = msgspec.msgpack.Decoder(Material)
_verdict: msgspec.msgpack.Decoder[Verdict] = msgspec.msgpack.Decoder(Pick | NoPick)


def socket_path(state_dir: Path) -> Path:
    """Where the scoring process listens."""
    return state_dir / SOCKET_NAME


def encode_frame(record: Material | Verdict) -> bytes:
    """A record with its length in front."""
    body = _encoder.encode(record)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, *, limit: int) -> bytes:
    """The next frame's body.

    limit: bytes; a longer frame is not read.
    Raises: WireError when it is longer or the other side closed before its end, NothingSaidError
        when it closed before the beginning; OSError.
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
    """Unpack a question. Raises: WireError."""
    try:
        material = _material.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise WireError(f"not a question: {error}") from error
    if not 2 <= len(material.answers) <= MAX_ANSWERS:
        raise WireError(f"{len(material.answers)} answers; there may be 2 to {MAX_ANSWERS}")
    return material


def read_verdict(body: bytes, *, answers: int) -> Verdict:
    """Unpack an answer to a question about so many answers. Raises: WireError."""
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

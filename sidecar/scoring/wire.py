"""The protocol between the relay and the scoring process for best of N.

It uses a unix socket in `state_dir`, with one question a connection: a frame there, a frame back,
close. A frame is a four-byte big-endian length and that many bytes of msgpack. A connection costs
about 50 us, little beside seconds of sampling, and the two sides cannot get out of step.
"""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import msgspec

SOCKET_NAME = "best-of.sock"
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

"""The protocol between the scoring process and a process in which verifiers run.

It uses the child's standard input and output. A frame is a four-byte big-endian length and that
many bytes of msgpack. For each `Task` the child sends one `Loaded` or `NotLoaded`, and after a
`Loaded` one `Found` for each answer, in their order. The child may run hostile code, so the parent
believes no length and no value of it.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, BinaryIO

import msgspec

from ingest.verifiers.records import FailureReason

MAX_TASK_BYTES = 64 * 2**20
"""Longest task, in bytes: the request of a group and its answers."""
MAX_REPLY_BYTES = 64 * 2**10
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other side sent an invalid frame, or closed."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier is made of."""

    name: str
    kind: str
    params: bytes
    """JSON object: keyword arguments."""
    entry_point: str = ""
    digest: str = ""
    """SHA-256 hex of kind, entry point and parameters."""


class AnswerSent(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a task."""

    message: bytes
    finish_reason: str | None
    tokens: int | None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """parent -> child. Answers to one request, for one verifier; none: it is only loaded."""

    spec: Spec
    request: bytes = b"{}"
    project: str = "default"
    answers: tuple[AnswerSent, ...] = ()


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """child -> parent. The verifier is ready."""

    version: str


class NotLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="not_loaded"):
    """child -> parent. The verifier cannot be made."""

    why: str


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    """child -> parent. What was found of the next answer."""

    score: float | None = None
    why: str = ""
    failed: FailureReason | None = None


Reply = Loaded | NotLoaded | Found
_encoder = msgspec.msgpack.Encoder()
_task = msgspec.msgpack.Decoder(Task)
_reply: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Loaded | NotLoaded | Found)


def encode_frame(record: Task | Reply) -> bytes:
    """Return a record with its length in front. Raises: FrameError when a task is too long."""
    body = _encoder.encode(record)
    if len(body) > MAX_TASK_BYTES:
        raise FrameError(f"{len(body)} bytes; the limit is {MAX_TASK_BYTES}")
    return _LENGTH.pack(len(body)) + body


def read_task(pipe: BinaryIO) -> Task | None:
    """Read the next task; None when the parent has closed the pipe."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    return _task.decode(body) if len(body) == length else None


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read the child's next reply. Raises: FrameError when it is none, or the child is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_REPLY_BYTES:
            raise FrameError(f"a reply of {length} bytes")
        return _reply.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise FrameError("the process ended") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameError(f"no reply: {error}") from error


def plain(value: Any) -> bytes:  # Any: JSON
    """Return a value as JSON whose bytes depend on the value alone."""
    return msgspec.json.encode(value, order="deterministic")

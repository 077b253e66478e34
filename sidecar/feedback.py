"""Feedback and outcomes: routes at the proxy, records, and their way into the outbox.

Numbers are numbers (`true` is none), finite and bounded; unknown fields, NUL and halves of
surrogate pairs are refused, because no store could hold them or nobody would see the mistake.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Final, Literal, Protocol

import msgspec
import structlog
from msgspec import Meta

from sidecar.access.denials import OWN_KEY_ID, OWN_PROJECT, OWN_USER
from sidecar.bounds import SHORTENED, fitted
from sidecar.errors import UNREADABLE_JSON, OutboxError, UnstorableError
from sidecar.metrics.proxy import Metrics
from sidecar.routing.session_key import DEFAULT_PROJECT, header_name, session_key, short_name
from sidecar.store.codec import is_storable_text

# The record of one piece of feedback, or of one outcome, on its way from the proxy to ingest.

Kind = Literal["feedback", "outcome"]
TargetKind = Literal["exchange", "session", "trace", "task"]
ID_PREFIX: Final = "fb_"
_TAG_FIELD: Final = "record"
_MARK: Final = b"\xa6" + _TAG_FIELD.encode()
"""The tag's name in msgpack: a text of 6 bytes. It is the first key of the map."""
_MARK_WITHIN: Final = 10
"""The map's own head has at most 3 bytes."""
LONGEST: Final = {
    "feedback_id": 64,
    "project": 64,
    "key_id": 64,
    "source": 255,
    "target": 255,
    "label": 64,
    "comment": 4_000,
}
"""Longest texts in characters, as `sidecar.store.models`."""


class Feedback(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag_field=_TAG_FIELD,
    tag="feedback",
):
    """proxy -> ingest. One piece of feedback, or one outcome, as a client sent it."""

    feedback_id: str
    """`fb_` and 32 hex digits; the same for each delivery with the same `Idempotency-Key`."""
    kind: Kind
    target_kind: TargetKind
    target: str
    """An exchange id, a session as `exchange.session_id` names it, a W3C trace id, or a task as
    `exchange.task` has it: then the newest session of it that had begun is meant."""
    project: str
    """Project of the caller's API key. Feedback is joined to exchanges of this project alone."""
    key_id: str = ""
    source: str = ""
    """Who judges, in the words of the caller. Of one source the newest on a target counts."""
    received_at: float
    """Unix seconds, by the clock of the proxy."""
    score: float | None = None
    """-1 (bad) to 1 (good); None for an outcome."""
    success: bool | None = None
    reward: float | None = None
    """`value` of the request."""
    cost: float | None = None
    """At least 0, in the unit that the caller uses."""
    done: bool | None = None
    """True: the client says that the session is over."""
    label: str = ""
    comment: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Feedback)


def encode_feedback(record: Feedback) -> bytes:
    """Pack a record for the bus."""
    return _encoder.encode(record)


def is_feedback(payload: bytes) -> bool:
    """Return True for a payload of the bus that holds no exchange but a `Feedback`."""
    return _MARK in payload[:_MARK_WITHIN]


def decode_feedback(payload: bytes) -> Feedback:
    """Unpack a record from the bus; other programs may write there, so its values are checked.

    Raises: msgspec.MsgspecError when it is none, UnstorableError when no store holds a value.
    """
    record = _decoder.decode(payload)
    for name, longest in LONGEST.items():
        text = getattr(record, name)
        if len(text) > longest or not is_storable_text(text):
            raise UnstorableError(f"{name} is longer than {longest} characters or holds a NUL")
    for name in ("received_at", "score", "reward", "cost"):
        number = getattr(record, name)
        if number is not None and not math.isfinite(number):
            raise UnstorableError(f"{name} is {number}; it must be a finite number")
    return record


def id_of_key(project: str, kind: Kind, idempotency_key: str) -> str:
    """Return the id of the record that a client names by an idempotency key. Pure.

    Projects never share an id; all API keys of one project do.
    """
    parts = "\0".join((project, kind, idempotency_key))
    return ID_PREFIX + sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:32]


MAX_BODY_BYTES: Final = 16 * 1024
"""A comment of 4,000 characters takes at most 12,000 bytes."""
MAX_KEY_BYTES: Final = 256
LONGEST_SESSION_BYTES: Final = 1_024
"""Longest name that a client may give a session or a task; of a long one the store keeps a
digest."""
LONGEST_MESSAGE: Final = 300
LARGEST: Final = 1e12
"""Bound of rewards and costs: sums of a million of them are still exact to a millionth."""
_EXCHANGE_ID: Final = re.compile(r"ex_[0-9A-HJKMNP-TV-Z]{26}", re.ASCII)
_TARGETS: Final = ("exchange_id", "session_id", "trace_id", "task_id")
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)
_STORED_NAME: Final = ("h:", "hx:")
_IS_STORED_NAME: Final = re.compile(r"h:.+|hx:[0-9a-f]{64}", re.DOTALL)
_PATH: Final = re.compile(r"`\$\.?([^`]*)`")


class FeedbackRefusedError(Exception):
    """The request is refused. The message tells the client what to change."""

    def __init__(self, status: int, reason: str, message: str, param: str | None = None) -> None:
        """reason: label of the metric. param: the field that is wrong."""
        super().__init__(message)
        self.status, self.reason, self.param = status, reason, param


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sends feedback, as the relay found it."""

    project: str
    key_id: str = ""
    user: str = ""
    """Value of `x-sidecar-user`."""


Label = Annotated[str, Meta(max_length=LONGEST["label"])]
Comment = Annotated[str, Meta(max_length=LONGEST["comment"])]
Source = Annotated[str, Meta(min_length=1, max_length=64)]
Amount = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]


class _Targets(msgspec.Struct, forbid_unknown_fields=True):
    exchange_id: str | None = None
    session_id: str | None = None
    trace_id: str | None = None
    task_id: str | None = None
    label: Label = ""
    comment: Comment = ""
    source: Source | None = None


class _FeedbackBody(_Targets, kw_only=True, forbid_unknown_fields=True):
    score: Annotated[float, Meta(ge=-1, le=1)]


class _OutcomeBody(_Targets, kw_only=True, forbid_unknown_fields=True):
    success: bool | None = None
    value: Amount | None = None
    reward: Amount | None = None
    """An older name of `value`."""
    cost: Annotated[float, Meta(ge=0, le=LARGEST)] | None = None
    done: bool | None = None


_FEEDBACK: Final = msgspec.json.Decoder(_FeedbackBody)
_OUTCOME: Final = msgspec.json.Decoder(_OutcomeBody)


def read_feedback(
    kind: Kind,
    body: bytes,
    caller: Caller,
    *,
    idempotency_key: str,
    fresh_id: str,
    now: float,
) -> Feedback:
    """Make the record of a request.

    idempotency_key: "" when the client sent none; then the record's id is made of `fresh_id`, hex
    digits that nobody else has. now: Unix seconds.
    Raises: FeedbackRefusedError.
    """
    if len(body) > MAX_BODY_BYTES:
        raise FeedbackRefusedError(413, "too_large", f"The body is longer than {MAX_BODY_BYTES}.")
    read = _decode(kind, body)
    for name in ("label", "comment", "source"):
        if not is_storable_text(getattr(read, name) or ""):
            raise _invalid(name, "holds a NUL character")
    target_kind, target = _target(read, caller.project)
    outcome = read if isinstance(read, _OutcomeBody) else None
    value = _value(outcome) if outcome is not None else None
    _check_key(idempotency_key)
    return Feedback(
        feedback_id=id_of_key(caller.project, kind, idempotency_key)
        if idempotency_key
        else ID_PREFIX + fresh_id,
        kind=kind,
        target_kind=target_kind,
        target=target,
        project=caller.project,
        key_id=caller.key_id,
        source=_source(read.source, caller),
        received_at=now,
        score=read.score if isinstance(read, _FeedbackBody) else None,
        success=outcome.success if outcome is not None else None,
        reward=value,
        cost=outcome.cost if outcome is not None else None,
        done=outcome.done if outcome is not None else None,
        label=read.label,
        comment=read.comment,
    )


def _value(outcome: _OutcomeBody) -> float | None:
    """Return the number of an outcome that says something; None: it has none, which is not 0."""
    if outcome.value is not None and outcome.reward is not None:
        raise _invalid("reward", "is an older name of value; give one of them")
    value = outcome.value if outcome.value is not None else outcome.reward
    if outcome.success is value is outcome.cost is None and not outcome.done:
        raise _invalid("success", "give at least one of success, value, cost and done (true)")
    return value


def _decode(kind: Kind, body: bytes) -> _FeedbackBody | _OutcomeBody:
    try:
        return (_FEEDBACK if kind == "feedback" else _OUTCOME).decode(body)
    except msgspec.ValidationError as error:
        where = _PATH.search(str(error))
        param = where[1] if where is not None else None
        message = f"{str(error)[:LONGEST_MESSAGE]}."
        raise FeedbackRefusedError(422, "invalid", message, param or None) from error
    except UNREADABLE_JSON as error:
        raise FeedbackRefusedError(400, "not_json", f"The body is not JSON: {error}.") from error


def _target(read: _Targets, project: str) -> tuple[TargetKind, str]:
    given = {name: value for name in _TARGETS if (value := getattr(read, name)) is not None}
    if len(given) != 1:
        raise _invalid("exchange_id", f"give exactly one of {', '.join(_TARGETS)}")
    ((name, value),) = given.items()
    if name == "exchange_id":
        if _EXCHANGE_ID.fullmatch(value) is None:
            raise _invalid(name, "is no exchange id, as the header x-sidecar-exchange-id has it")
        return "exchange", value
    if name == "trace_id":
        value = value.lower()
        if _TRACE_ID.fullmatch(value) is None or value == "0" * 32:
            raise _invalid(name, "is no W3C trace id: 32 hex digits, not all of them 0")
        return "trace", value
    # As the header's value is read, in which blanks around a name are no part of it.
    value = value.strip() if name == "task_id" else value.strip(" \t")
    if not value or not is_storable_text(value) or len(value.encode()) > LONGEST_SESSION_BYTES:
        raise _invalid(name, f"must have 1 to {LONGEST_SESSION_BYTES} bytes and no NUL character")
    if name == "task_id":
        return "task", fitted(value, SHORTENED["task"])
    if _EXCHANGE_ID.fullmatch(value) is not None or value.startswith(_STORED_NAME):
        if value.startswith("h") and _IS_STORED_NAME.fullmatch(value) is None:
            raise _invalid(name, "is no stored name: `h:` and a name, or `hx:` and 64 hex digits")
        if len(value) > LONGEST["target"]:
            raise _invalid(name, f"has over {LONGEST['target']} characters, as no stored name has")
        return "session", value  # as `sidecar exchanges` shows it
    return "session", session_key(header=value, user="", project=project)


def _source(named: str | None, caller: Caller) -> str:
    if named is not None:
        return named
    if caller.user:
        return source_of_user(caller.user)
    return f"key:{caller.key_id}" if caller.key_id else ""


def source_of_user(name: str) -> str:
    """Return the `source` of feedback that a user sent and that names none. name: `short_name` of
    `x-sidecar-user`."""
    return short_name(f"user:{name}")


def _check_key(key: str) -> None:
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise FeedbackRefusedError(
            400,
            "idempotency_key",
            f"Idempotency-Key is longer than {MAX_KEY_BYTES} bytes.",
            "Idempotency-Key",
        )


def _invalid(param: str, why: str) -> FeedbackRefusedError:
    return FeedbackRefusedError(422, "invalid", f"{param}: {why}.", param)


# Write feedback to the outbox: many records in one commit, each answered once it is on disk.

MAX_WAITING: Final = 256
"""Records that wait for a commit; further ones are refused. A commit takes milliseconds."""
BATCH: Final = 64
LOCKED_S: Final = 1.0
"""Longest wait of one attempt for the lock of the file; writers hold it for milliseconds."""
WAIT_S: Final = 5.0
"""Longest wait of a record, whatever holds it up: a disk whose syncs take seconds, for one."""


class RecordSink(Protocol):
    """What stores packed records: `sidecar.capture.outbox.Outbox`. One thread at a time."""

    def append(self, records: list[tuple[str, bytes]]) -> int:
        """Store (id, payload) pairs and return how many were stored, from the front.

        Raises: OutboxError when none was stored.
        """

    def close(self) -> None: ...


class FeedbackWriter:
    """For one event loop: `put`, and `stop` at the end."""

    def __init__(self, sink: RecordSink, *, wait_s: float = WAIT_S) -> None:
        self._sink = sink
        self._wait_s = wait_s
        self._waiting: deque[tuple[tuple[str, bytes], asyncio.Future[None]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def put(self, record: Feedback) -> None:
        """Return once the record is on the disk.

        Raises: OutboxError when it is not, after `wait_s` at the latest; nobody can tell whether it
            will be after a failed or a slow sync.
        """
        if len(self._waiting) >= MAX_WAITING:
            raise OutboxError("busy", f"{MAX_WAITING} records wait to be written")
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(((record.feedback_id, encode_feedback(record)), done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._drain())
        try:
            await asyncio.wait_for(done, self._wait_s)
        except TimeoutError:
            raise OutboxError("slow", f"a record waited for {self._wait_s:g} s") from None

    async def stop(self) -> None:
        """Write what waits, and close the file."""
        if self._task is not None:
            await self._task
        await asyncio.to_thread(self._sink.close)

    def _batch(self) -> list[tuple[tuple[str, bytes], asyncio.Future[None]]]:
        """Take the next records; those whose requests were answered already are left out."""
        batch: list[tuple[tuple[str, bytes], asyncio.Future[None]]] = []
        while self._waiting and len(batch) < BATCH:
            one = self._waiting.popleft()
            if not one[1].done():
                batch.append(one)
        return batch

    async def _drain(self) -> None:
        while self._waiting:
            batch = self._batch()
            if not batch:
                return
            error: OutboxError | None = None
            kept = 0
            try:
                kept = await asyncio.to_thread(self._sink.append, [row for row, _ in batch])
                if kept < len(batch):
                    error = OutboxError("outbox_full", "the outbox is full (bus.max_bytes)")
            except OutboxError as failure:
                error = failure
            if error is not None and error.reason == "locked":
                # The others would wait as long for the same lock.
                batch += self._waiting
                self._waiting.clear()
            for number, (_, done) in enumerate(batch):
                if done.done():  # the request was cancelled
                    continue
                if number < kept or error is None:
                    done.set_result(None)
                else:
                    done.set_exception(error)


# The two routes of feedback: `POST /sidecar/v1/feedback` and `POST /sidecar/v1/outcomes`.

log = structlog.get_logger()
RANDOM_BYTES: Final = 16
MayAsk = Callable[[bytes | None], Awaitable[int | None]]
"""Ask vLLM whether it knows this `Authorization`. Returns: the status of its reply; None: it gave
none."""


class FeedbackReceiver:
    """Answers the requests of one proxy process."""

    def __init__(
        self,
        writer: FeedbackWriter,
        metrics: Metrics,
        *,
        may_ask: MayAsk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """may_ask: None when the relay itself checks the API keys, or asks for none."""
        self._writer = writer
        self._metrics = metrics
        self._may_ask = may_ask
        self._clock = clock

    async def take(self, kind: Kind, body: bytes, headers: dict[bytes, bytes]) -> str:
        """Write the record of a request to the disk. headers: by lower-case name.

        Returns: its id. Raises: FeedbackRefusedError, counted by its reason.
        """
        try:
            await self._check_sender(headers.get(b"authorization"))
            record = read_feedback(
                kind,
                body,
                _caller(headers),
                idempotency_key=header_name(headers.get(b"idempotency-key")),
                fresh_id=os.urandom(RANDOM_BYTES).hex(),
                now=self._clock(),
            )
            await self._write(record)
        except FeedbackRefusedError as error:
            self._metrics.feedback_refused.inc((error.reason,))
            raise
        self._metrics.feedback_accepted.inc((kind,))
        return record.feedback_id

    async def stop(self) -> None:
        await self._writer.stop()

    async def _write(self, record: Feedback) -> None:
        try:
            await self._writer.put(record)
        except OutboxError as error:
            log.warning("feedback_not_written", reason=error.reason, error=str(error))
            raise FeedbackRefusedError(
                503,
                error.reason,
                f"The sidecar cannot write feedback now ({error.reason}); send it again.",
            ) from error

    async def _check_sender(self, authorization: bytes | None) -> None:
        if self._may_ask is None:
            return
        status = await self._may_ask(authorization)
        if status is None:
            raise FeedbackRefusedError(
                503, "vllm_away", "vLLM, which checks the keys, gave no answer; send it again."
            )
        if status != 200:
            raise FeedbackRefusedError(
                401 if status == 401 else 403, "vllm_denied", "vLLM does not accept this key."
            )


def _caller(headers: dict[bytes, bytes]) -> Caller:
    return Caller(
        project=headers.get(OWN_PROJECT, b"").decode("ascii", "replace") or DEFAULT_PROJECT,
        key_id=headers.get(OWN_KEY_ID, b"").decode("ascii", "replace"),
        user=short_name(header_name(headers.get(OWN_USER))),
    )

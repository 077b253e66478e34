"""Read the body of a feedback request. Pure.

Numbers are numbers (`true` is none), finite and bounded; unknown fields, NUL and halves of
surrogate pairs are refused, because no store could hold them or nobody would see the mistake.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from sidecar.errors import UNREADABLE_JSON
from sidecar.feedback.record import ID_PREFIX, LONGEST, Feedback, Kind, TargetKind, id_of_key
from sidecar.routing.session_key import session_key, short_name
from sidecar.store.values import is_storable_text

MAX_BODY_BYTES: Final = 16 * 1024
"""A comment of 4,000 characters takes at most 12,000 bytes."""
MAX_KEY_BYTES: Final = 256
LONGEST_SESSION_BYTES: Final = 1_024
"""Longest name that a client may give a session; over 255 bytes the store keeps a digest."""
LONGEST_MESSAGE: Final = 300
LARGEST: Final = 1e12
"""Bound of rewards and costs: sums of a million of them are still exact to a millionth."""
_EXCHANGE_ID: Final = re.compile(r"ex_[0-9A-HJKMNP-TV-Z]{26}", re.ASCII)
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
    label: Label = ""
    comment: Comment = ""
    source: Source | None = None


class _FeedbackBody(_Targets, kw_only=True, forbid_unknown_fields=True):
    score: Annotated[float, Meta(ge=-1, le=1)]


class _OutcomeBody(_Targets, kw_only=True, forbid_unknown_fields=True):
    success: bool | None = None
    reward: Amount | None = None
    cost: Annotated[float, Meta(ge=0, le=LARGEST)] | None = None


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
    if outcome is not None and outcome.success is outcome.reward is outcome.cost is None:
        raise _invalid("success", "give at least one of success, reward and cost")
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
        reward=outcome.reward if outcome is not None else None,
        cost=outcome.cost if outcome is not None else None,
        label=read.label,
        comment=read.comment,
    )


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
    given = {
        name: value
        for name in ("exchange_id", "session_id", "trace_id")
        if (value := getattr(read, name)) is not None
    }
    if len(given) != 1:
        raise _invalid("exchange_id", "give exactly one of exchange_id, session_id and trace_id")
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
    value = value.strip(" \t")  # as the header, in which blanks around a name are no part of it
    if not value or not is_storable_text(value) or len(value.encode()) > LONGEST_SESSION_BYTES:
        raise _invalid(name, f"must have 1 to {LONGEST_SESSION_BYTES} bytes and no NUL character")
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

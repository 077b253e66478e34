"""The record of one piece of feedback, or of one outcome, on its way from the proxy to ingest.

It travels on the bus beside the exchanges, as msgpack with the tag `record`, which no exchange has.
"""

from __future__ import annotations

import math
from hashlib import sha256
from typing import Final, Literal

import msgspec

from sidecar.errors import UnstorableError
from sidecar.store.values import is_storable_text

Kind = Literal["feedback", "outcome"]
TargetKind = Literal["exchange", "session", "trace"]
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
    """An exchange id, a session as `exchange.session_id` names it, or a W3C trace id."""
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
    cost: float | None = None
    """At least 0, in the unit that the caller uses."""
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

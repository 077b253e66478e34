"""Bound the values of an exchange to what every store holds. Pure.

The proxy does it where it makes the record, and ingest again, because other programs may write on
the bus. A text that names something else (an adapter, a project) is refused when it is too long:
cut, it would name another. Other texts are shortened, with a digest that keeps two of them apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Final

import msgspec

from sidecar.errors import UnstorableError
from sidecar.records import Choice, Exchange, Sampling, Timings

REFUSED: Final = {
    "exchange_id": 64,
    "public_model": 255,
    "adapter": 255,
    "fallback_from": 255,
    "project": 64,
    "key_id": 64,
}
"""Longest text in characters, as `sidecar.store.models`; a longer one is refused."""
PROJECT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of projects, as keys and settings give them."""
SHORTENED: Final = {
    "session_key": 255,
    "user": 255,
    "replica": 255,
    "turn_id": 64,
    "trace_id": 64,
    "address_hash": 64,
    "task": 64,
    "origin": 16,
    "untrainable_reason": 48,
}
"""Longest text in characters; a longer one is shortened. The reason leaves room for the words that
`selection` and the counters, of 64 characters, put before it."""
LONGEST_FINISH_REASON: Final = 32
INTEGERS: Final = {
    "status": 32,
    "completion_tokens": 32,
    "returned_index": 32,
    "retry_count": 32,
    "request_bytes": 64,
    "reply_bytes": 64,
}
"""Bits of the column, signed. A number outside is refused."""
UNREADABLE_SAMPLING: Final = "unreadable_sampling"
"""Why an exchange is not learned from whose sampling parameter is no finite number."""
_DIGEST_CHARACTERS: Final = 16
_DAMAGED: Final = "\ufffd"
"""What stands for NUL and halves of surrogate pairs, and for bytes that are not UTF-8."""


def bound(exchange: Exchange) -> tuple[Exchange, tuple[str, ...]]:
    """Return the exchange as every store holds it, and what was changed, by reason.

    A reason is a field and `_shortened`, `_cleaned` (U+FFFD stands for NUL and halves of surrogate
    pairs) or `_not_finite` (the number is gone).
    Raises: UnstorableError for an exchange that cannot be stored.
    """
    if _is_plain(exchange):
        return exchange, ()
    return _bound(exchange)


def _is_plain(exchange: Exchange) -> bool:
    """Return True when nothing is to be changed or refused: nearly always, and in 4 us.

    False for some others too, which `_bound` then finds unchanged.
    """
    sampling, timings = exchange.sampling, exchange.timings
    reasons = [choice.finish_reason or "" for choice in exchange.choices]
    texts = "".join(
        (
            *(
                exchange.exchange_id,
                exchange.public_model,
                exchange.adapter,
                exchange.fallback_from,
            ),
            *(exchange.project, exchange.key_id, exchange.session_key, exchange.user),
            *(exchange.replica, exchange.turn_id, exchange.trace_id, exchange.address_hash),
            *(exchange.task, exchange.origin),
            *(exchange.untrainable_reason or "", *reasons),
        )
    )
    # Not finite when one of them is not; or when they add up to more than a float holds.
    numbers = (
        exchange.propensity
        + timings.started_at
        + timings.total_s
        + timings.overhead_s
        + (timings.queue_s or 0.0)
        + (timings.first_byte_s or 0.0)
        + (timings.per_token_s or 0.0)
        + (sampling.temperature or 0.0)
        + (sampling.top_p or 0.0)
        + (sampling.min_p or 0.0)
        + (sampling.presence_penalty or 0.0)
        + (sampling.frequency_penalty or 0.0)
        + (sampling.repetition_penalty or 0.0)
    )
    return (
        texts.isascii()
        and "\0" not in texts
        and len(exchange.exchange_id) <= 64
        and len(exchange.public_model) <= 255
        and len(exchange.adapter) <= 255
        and len(exchange.fallback_from) <= 255
        and len(exchange.project) <= 64
        and len(exchange.key_id) <= 64
        and len(exchange.session_key) <= 255
        and len(exchange.user) <= 255
        and len(exchange.replica) <= 255
        and len(exchange.turn_id) <= 64
        and len(exchange.trace_id) <= 64
        and len(exchange.address_hash) <= 64
        and len(exchange.task) <= 64
        and len(exchange.origin) <= 16
        and len(exchange.untrainable_reason or "") <= 48
        and all(len(reason) <= LONGEST_FINISH_REASON for reason in reasons)
        and math.isfinite(numbers)
        and 0 <= exchange.status <= _LARGEST
        and 0 <= (exchange.completion_tokens or 0) <= _LARGEST
        and 0 <= exchange.returned_index <= _LARGEST
        and 0 <= exchange.retry_count <= _LARGEST
        and 0 <= exchange.request_bytes <= _LARGEST
        and 0 <= exchange.reply_bytes <= _LARGEST
    )


_LARGEST: Final = 2**31 - 1


def _bound(exchange: Exchange) -> tuple[Exchange, tuple[str, ...]]:
    """`bound` for an exchange that is not plain."""
    changes: dict[str, object] = {}
    reasons: list[str] = []
    for name, longest in REFUSED.items():
        text = getattr(exchange, name)
        if len(text) > longest:
            raise UnstorableError(f"{name} has {len(text)} characters; the store holds {longest}")
        if not _is_clean(text) or _DAMAGED in text:
            raise UnstorableError(
                f"{name} holds a NUL character, half of a surrogate pair or U+FFFD, which marks "
                "damaged names"
            )
    for name, longest in SHORTENED.items():
        text = getattr(exchange, name)
        if text is not None and (reason := _fault(text, longest)):
            changes[name] = fitted(text, longest)
            reasons.append(f"{name}_{reason}")
    for name, bits in INTEGERS.items():
        number = getattr(exchange, name)
        if number is not None and not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
            raise UnstorableError(f"{name} is {number}; the store holds {bits} bits")
    for name, number in (
        ("propensity", exchange.propensity),
        ("started_at", exchange.timings.started_at),
    ):
        if not math.isfinite(number):
            raise UnstorableError(f"{name} is {number}; it must be a finite number")
    if gone := list(_not_finite(exchange.sampling)):
        changes["sampling"] = msgspec.structs.replace(exchange.sampling, **dict.fromkeys(gone))
        changes.setdefault("untrainable_reason", exchange.untrainable_reason or UNREADABLE_SAMPLING)
        reasons += [f"{name}_not_finite" for name in gone]
    if gone := list(_not_finite(exchange.timings)):
        known = {name: _EMPTY_TIMINGS[name] for name in gone}
        changes["timings"] = msgspec.structs.replace(exchange.timings, **known)
        reasons += [f"{name}_not_finite" for name in gone]
    choices = [_bound_choice(choice) for choice in exchange.choices]
    if any(reason for _, reason in choices):
        changes["choices"] = tuple(choice for choice, _ in choices)
        reasons += [f"finish_reason_{reason}" for _, reason in choices if reason]
    if not changes:
        return exchange, ()
    return msgspec.structs.replace(exchange, **changes), tuple(reasons)


_EMPTY_TIMINGS: Final = {
    name: None if name in ("queue_s", "first_byte_s", "per_token_s") else 0.0
    for name in Timings.__struct_fields__
}


def _bound_choice(choice: Choice) -> tuple[Choice, str]:
    """Return the choice and why it was changed; "" when it was not."""
    text = choice.finish_reason
    if text is None or not (reason := _fault(text, LONGEST_FINISH_REASON)):
        return choice, ""
    shorter = fitted(text, LONGEST_FINISH_REASON)
    return msgspec.structs.replace(choice, finish_reason=shorter), reason


def _not_finite(values: Sampling | Timings) -> Iterator[str]:
    for name in values.__struct_fields__:
        number = getattr(values, name)
        if isinstance(number, float) and not math.isfinite(number):
            yield name


def _fault(text: str, longest: int) -> str:
    if len(text) > longest:
        return "shortened"
    return "" if _is_clean(text) else "cleaned"


def _is_clean(text: str) -> bool:
    if "\0" in text:
        return False
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def fitted(text: str, longest: int) -> str:
    """The text without NUL and surrogates; a long one is cut, with a digest of all of it."""
    clean = "".join(
        _DAMAGED if letter == "\0" or "\ud800" <= letter <= "\udfff" else letter for letter in text
    )
    if len(clean) <= longest:
        return clean
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{clean[: longest - _DIGEST_CHARACTERS - 1]}~{digest}"

"""Sort what LiteLLM raises by what it means, and say it without secrets.

LiteLLM's own class and status are not enough: a page of HTML under status 200 and a message of null
come as "internal server error" from one provider, as "connection error" or "bad request" from
another. The exception that httpx raised is still in the chain, so the chain is asked first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime

import httpx

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from sidecar.hiding import HIDDEN, hide_in_text, hide_values

ERROR_CHARACTERS = 300
CHAIN_LENGTH = 16
"""Exceptions looked at, from the one that was caught to the one that caused it."""
LIMITED = frozenset({429, 529})
TRY_AGAIN = frozenset({408, 409, 425})
_KEY_LIKE = re.compile(r"(?i)\b(?:sk-|bearer\s+|api[-_]key[=:]\s*)[^\s,'\"]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""A provider's error is shown on terminals, and must not drive them."""


def sort_error(error: BaseException, text: str, *, now: float) -> JudgeUnavailableError:
    """The error of ours for one of LiteLLM's.

    text: what to say; see `explain`. now: unix seconds, for a `Retry-After` that is a date.
    """
    chain = list(_chain(error))
    response = next((e.response for e in chain if isinstance(e, httpx.HTTPStatusError)), None)
    if response is not None:
        wait_s = retry_after_s(response.headers, now)
        return _by_status(response.status_code, text, wait_s)
    if any(isinstance(e, httpx.TransportError | OSError) for e in chain):
        return JudgeUnavailableError(text)
    # No reply with an error's status and no broken connection: LiteLLM refused to send the request,
    # or the reply came and could not be read, which LiteLLM calls 500 or 200.
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and status > 300 and status != 500:
        return _by_status(status, text, None)
    return JudgeGarbledError(f"{text} (the reply is no chat completion that LiteLLM can read)")


def _by_status(status: int, text: str, wait_s: float | None) -> JudgeUnavailableError:
    if status in LIMITED or wait_s is not None:
        return JudgeBusyError(text, retry_after_s=wait_s or 0.0)
    if status in TRY_AGAIN or status >= 500:
        return JudgeUnavailableError(text)
    return JudgeRejectedError(text)


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that the server asks to be left alone; None when it does not say so readably."""
    said = headers.get("retry-after", "").strip()
    try:
        seconds = float(said)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(said).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def explain(error: BaseException, *, model: str, secrets: Sequence[str]) -> str:
    """One line: which judge, and what LiteLLM and the provider say; no key in it, storable.

    secrets: values that the text may quote; those that look like keys are hidden without it.
    """
    # Before and after the lines are joined: a key may have several.
    said = hide_values(str(error).split("Traceback (most recent call last)")[0], secrets)
    said = _CONTROL.sub("?", storable(" ".join(said.split()))) or type(error).__name__
    said = hide_in_text(_KEY_LIKE.sub(HIDDEN, hide_values(said, secrets)))
    return f"judge {model}: {said[:ERROR_CHARACTERS]}"


def storable(text: str) -> str:
    """The text without what a store or a request cannot hold: lone surrogates and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(CHAIN_LENGTH):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__

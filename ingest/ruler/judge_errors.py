"""Translate LiteLLM's errors to ours, with messages that hold no secrets.

LiteLLM's own class and status are not enough: an HTML page with status 200, or a message of null,
becomes "internal server error" with one provider, and "connection error" or "bad request" with
another. The exception that httpx raised is still in the chain of causes, so it decides first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import httpx

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from sidecar.backoff import retry_after_s
from sidecar.hiding import HIDDEN, beginning, hide_in_text, hide_values

ERROR_CHARACTERS = 300
CHAIN_LENGTH = 16
"""Longest chain of causes that is examined, from the caught exception on."""
LIMITED = frozenset({429, 529})
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, ConnectionRefusedError)
"""Errors after which the provider has not seen the request."""
PAYMENT_REQUIRED = 402
TRY_AGAIN = frozenset({408, 409, 425})
_KEY_LIKE = re.compile(r"(?i)\b(?:sk-|bearer\s+|api[-_]key[=:]\s*)[^\s,'\"]+")
_NO_KEY = re.compile(
    r"(?i)missing credentials|missing .{0,200}\bapi[ _]key|api_key .{0,200}must be set"
)
"""What a provider's client says before it sends anything. The gaps are bounded: a text that repeats
a first word would take quadratic time."""
_NO_CREDIT = re.compile(r"(?i)insufficient[_ ](?:quota|balance|credits?|funds)|balance is too low")
"""What providers say when an account is used up. Not "exceeded your current quota" alone: with some
that is a limit a minute."""
_SSL = re.compile(r" ssl:(?:<[^<>]{0,200}>|default|None|True|False)")
"""What aiohttp says of its settings where nobody answers; it helps nobody."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters. A provider's error is shown on terminals and must not control them."""


def sort_error(error: BaseException, text: str, *, now: float) -> JudgeUnavailableError:
    """Translate one of LiteLLM's errors to ours.

    text: the message; see `explain`. now: Unix seconds, for a `Retry-After` that is a date.
    """
    chain = list(_chain(error))
    response = next((e.response for e in chain if isinstance(e, httpx.HTTPStatusError)), None)
    if response is not None:
        wait_s = retry_after_s(response.headers, now)
        return _by_status(response.status_code, text, wait_s, used_up=_is_used_up(chain))
    if any(isinstance(e, httpx.TransportError | OSError) for e in chain):
        unsent = any(isinstance(e, _UNSENT) for e in chain)
        return JudgeUnavailableError(text, maybe_paid=not unsent)
    # Neither an error status nor a broken connection: LiteLLM refused to send the request, or could
    # not read the reply, which it reports as 500 or 200.
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and status > 300 and status != 500:
        return _by_status(status, text, None, used_up=_is_used_up(chain))
    if any(_NO_KEY.search(beginning(str(e))) for e in chain):
        return JudgeRejectedError(
            f"{text} (nothing was sent: set the API key of the judge's provider in the environment)"
        )
    return JudgeGarbledError(
        f"{text} (the reply is no chat completion that LiteLLM can read)", maybe_paid=True
    )


def _is_used_up(chain: Sequence[BaseException]) -> bool:
    return any(_NO_CREDIT.search(beginning(str(one))) for one in chain)


def _by_status(
    status: int, text: str, wait_s: float | None, *, used_up: bool
) -> JudgeUnavailableError:
    if status == PAYMENT_REQUIRED or (used_up and status in (400, 403, 429)):
        return JudgeNoCreditError(text)
    if status in LIMITED or wait_s is not None:
        return JudgeBusyError(text, retry_after_s=wait_s or 0.0)
    if status in TRY_AGAIN or status >= 500:
        return JudgeUnavailableError(text)
    return JudgeRejectedError(text)


def explain(error: BaseException, *, model: str, secrets: Sequence[str]) -> str:
    """Describe an error in one storable line without keys: the judge and the provider's message.

    secrets: values to hide in the text; values that look like keys are hidden anyway.
    """
    # Secrets are hidden before and after the lines are joined: a key may span several lines.
    message = beginning(str(error)).split("Traceback (most recent call last)")[0]
    message = hide_values(_SSL.sub("", message), secrets)
    message = _CONTROL.sub("?", storable(" ".join(message.split()))) or type(error).__name__
    message = hide_in_text(_KEY_LIKE.sub(HIDDEN, hide_values(message, secrets)))
    return f"judge {model}: {message[:ERROR_CHARACTERS]}"


def storable(text: str) -> str:
    """Remove what a store or a request cannot hold: lone surrogates and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(CHAIN_LENGTH):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__

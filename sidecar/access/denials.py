"""What a client is told about its key and limits; which headers and pages are refused. Pure.

`kind` is an error type of the Messages surface, `code` an error code of the OpenAI surfaces; each
surface writes the one that its clients read. A denial never repeats the key that was sent, and does
not show whether the key id or the secret was wrong.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from sidecar.access.limits import Allowance, LimitState
from sidecar.settings.kinds import is_loopback

Header = tuple[bytes, bytes]
WHO_RUNS_IT = "ask the operator of this sidecar for one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """Why a request is refused, and the reply to it."""

    reason: str
    """The label `reason` of `sidecar_access_denied_total`."""
    status: int
    message: str
    kind: str
    code: str
    headers: tuple[Header, ...] = ()


def _unauthorized(reason: str, message: str) -> Denial:
    return Denial(
        reason=reason,
        status=401,
        message=message,
        kind="authentication_error",
        code="invalid_api_key",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def _forbidden(reason: str, message: str) -> Denial:
    return Denial(
        reason=reason,
        status=403,
        message=message,
        kind="permission_error",
        code="insufficient_permissions",
    )


NO_KEY = _unauthorized(
    "no_key",
    "Missing API key: send `Authorization: Bearer <key>` or `x-api-key: <key>`. If you have none, "
    f"{WHO_RUNS_IT} (`sidecar keys create`).",
)
MALFORMED = _unauthorized(
    "malformed",
    "Malformed API key: send `Authorization: Bearer <key>` once.",
)
TWO_KEYS = _unauthorized(
    "two_keys",
    "`Authorization` and `x-api-key` hold different keys: send one header, or the same key in "
    "both.",
)
UNKNOWN = _unauthorized(
    "unknown",
    f"Unknown API key: check that you copied all of it, or {WHO_RUNS_IT} (`sidecar keys create`).",
)
REVOKED = _unauthorized(
    "revoked",
    f"This API key was revoked: {WHO_RUNS_IT} (`sidecar keys create`).",
)
EXPIRED = _unauthorized(
    "expired",
    f"This API key has expired: {WHO_RUNS_IT} (`sidecar keys create`).",
)
MAY_NOT_ASK = _forbidden(
    "scope_infer",
    "This API key lacks the scope `infer`, which model requests need: use another key.",
)
NOT_OPERATOR = _forbidden(
    "scope_operate",
    "`x-sidecar-adapter` needs a key with the scope `operate`: remove the header, or use such a "
    "key (`sidecar keys create --scope operate`).",
)
NOT_REHEARSED = _forbidden(
    "rehearsal",
    "`x-sidecar-rehearsal` is not valid for this `x-sidecar-session` and `x-sidecar-task`, or the "
    "time of the attempt is over: send the three headers as the attempt was given them, or none.",
)
FOREIGN_PAGE = _forbidden(
    "foreign_origin",
    "A web page of another site sent this request, and no key is asked for here. Send it from a "
    'program, or have the operator of this sidecar ask for keys (access.mode = "keys").',
)
KEYS_UNKNOWN = Denial(
    reason="keys_unknown",
    status=503,
    message="The sidecar has not been able to read its API keys since it started, so it cannot "
    "check yours. Try again; the proxy's log shows the operator the cause (`api_keys_kept`).",
    kind="api_error",
    code="keys_unknown",
    headers=((b"retry-after", b"1"),),
)


def over_limit(allowance: Allowance, state: LimitState, headers: tuple[Header, ...]) -> Denial:
    """The 429 of a key whose limit is used up. headers: those of `rate_headers`."""
    seconds = max(1, math.ceil(state.retry_after_s))
    if state.refused == "tokens_per_day":
        spent = f"its {allowance.tokens_per_day} tokens of today (UTC)"
    else:
        spent = f"its {allowance.requests_per_minute} requests per minute"
    return Denial(
        reason=state.refused or "",
        status=429,
        message=f"This API key has used up {spent}. Try again in {seconds} s, or ask the operator "
        "of this sidecar for a higher limit.",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers=((b"retry-after", b"%d" % seconds), *headers),
    )


def rate_headers(allowance: Allowance, state: LimitState) -> tuple[Header, ...]:
    """The headers that OpenAI documents under "Rate limits in headers", for the key's limits."""
    requests: tuple[Header, ...] = ()
    tokens: tuple[Header, ...] = ()
    if allowance.requests_per_minute is not None:
        requests = (
            (b"x-ratelimit-limit-requests", b"%d" % allowance.requests_per_minute),
            (b"x-ratelimit-remaining-requests", b"%d" % state.requests_left),
            (b"x-ratelimit-reset-requests", duration(state.requests_reset_s)),
        )
    if allowance.tokens_per_day is not None:
        tokens = (
            (b"x-ratelimit-limit-tokens", b"%d" % allowance.tokens_per_day),
            (b"x-ratelimit-remaining-tokens", b"%d" % state.tokens_left),
            (b"x-ratelimit-reset-tokens", duration(state.tokens_reset_s)),
        )
    return requests + tokens


def duration(seconds: float) -> bytes:
    """Format seconds as OpenAI does: `20ms`, `1s`, `6m0s`, `13h4m2s`.

    Rounded up, so that a client that waits this long has waited long enough.
    """
    if seconds < 1.0:
        return b"%dms" % math.ceil(seconds * 1000)
    whole = math.ceil(seconds)
    if whole < 60:
        return b"%ds" % whole
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return b"%dm%ds" % (minutes, rest)
    return b"%dh%dm%ds" % (*divmod(minutes, 60), rest)


# Headers that say who sends a request. In lower case, as the relay compares names.

AUTHORIZATION: Final = b"authorization"
X_API_KEY: Final = b"x-api-key"
"""Where Anthropic's SDK puts the key."""
HOST: Final = b"host"
ORIGIN: Final = b"origin"
"""The web page that has its browser send the request; other clients do not send it."""
OWN_PROJECT: Final = b"x-sidecar-project"
OWN_KEY_ID: Final = b"x-sidecar-key-id"
"""Written by the relay alone, for the sidecar's own application: what a client sends under a name
that begins with `x-sidecar-` is never passed on."""
OWN_USER: Final = b"x-sidecar-user"
"""Sent by clients; the relay passes its value on to the application."""


# Recognise web pages of other sites, where no key says who asks. Pure.

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z._-]+)(?::[0-9]{1,5})?")


def host_name(host: str) -> str | None:
    """Return the host of a `Host` header without its port; None when it is malformed."""
    match = _HOST.fullmatch(host)
    return None if match is None else match[1].strip("[]").lower()


def is_other_site(origin: str | None, host: str | None) -> bool:
    """True if a page of another site asks. origin: None: no page asks. Raises: ValueError when it
    is no URL."""
    return origin is not None and urlsplit(origin).netloc != host


def is_foreign_page(origin: bytes | None, host: bytes | None, *, local: bool) -> bool:
    """True if a web page asks that is not of this listener. local: it is on the loopback."""
    if origin is None:
        return False
    try:
        name = (host or b"").decode("ascii")
        if is_other_site(origin.decode("ascii"), name):
            return True
    except ValueError:
        return True
    return local and not is_loopback(host_name(name) or "")

"""Admit requests: check the API key, the scopes and the limits of each.

`access.mode` is one of three. `open`: no key is needed; for a loopback listener. `keys`: the
sidecar's own keys, from the store; vLLM never sees them. `upstream`: vLLM checks the caller's
credentials; the sidecar knows nothing of the caller, so no limits apply. Where no key is asked for,
or none was sent, web pages of other sites are refused (`origins`).

`Access.admit` runs on the event loop for every request, so a known key without limits must cost
next to nothing: `Credentials`, read once for a head that repeats, holds the SHA-256 of the key, and
that leads to an admission made beforehand. A key seen for the first time is compared in constant
time (`KeyRing.find`). Nothing here logs or repeats what a client sent as a key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import Literal, Protocol

from sidecar.access.denials import (
    AUTHORIZATION,
    EXPIRED,
    FOREIGN_PAGE,
    HOST,
    KEYS_UNKNOWN,
    MALFORMED,
    MAY_NOT_ASK,
    NO_KEY,
    NOT_OPERATOR,
    NOT_REHEARSED,
    ORIGIN,
    REVOKED,
    TWO_KEYS,
    UNKNOWN,
    X_API_KEY,
    Denial,
    Header,
    is_foreign_page,
    over_limit,
    rate_headers,
)
from sidecar.access.keys import MAX_PRESENTED_BYTES, KeyRing
from sidecar.access.limits import Allowance, Limiter
from sidecar.metrics.proxy import Metrics
from sidecar.rehearsals import HEADERS, REHEARSAL_HEADER, Tickets
from sidecar.routing.session_key import DEFAULT_PROJECT
from sidecar.settings import Settings
from sidecar.settings.kinds import is_loopback

ADAPTER = b"x-sidecar-adapter"
Mode = Literal["open", "keys", "upstream"]


class Keep(Enum):
    """The type of `KEEP`."""

    KEEP = "keep"


BEST_OF_MAX = 4  # largest x-sidecar-best-of of a caller without a key; a key has its own
KEEP = Keep.KEEP
"""Pass the caller's `Authorization` and `x-api-key` on as they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What an admitted request may do, and how it is counted."""

    project: str = DEFAULT_PROJECT
    key_id: str = ""
    """Empty when the request needed no key of the sidecar's."""
    operator: bool = False
    """May name an adapter by `x-sidecar-adapter`."""
    best_of_max: int = 1
    headers: tuple[Header, ...] = ()
    """Headers to add to the reply, whatever its status."""
    replace_authorization: bytes | Keep | None = field(default=None, repr=False)
    """The `Authorization` that vLLM gets; None: none. Unless it is `KEEP`, the caller's
    `Authorization` and `x-api-key` are both dropped."""
    allowance: Allowance | None = None
    """None: the key has no limits."""
    rehearsed_by: str = ""
    """The request is of a rehearsal, and this adapter answers; empty: a user's."""


class Keys(Protocol):
    """The API keys as last read from the store: an attribute, never a query."""

    @property
    def ring(self) -> KeyRing | None:
        """None until the store was read once."""
        ...


class Credentials:
    """What a request's head says of its sender. Made once for a head that repeats."""

    __slots__ = ("denial", "digest", "host", "names_adapter", "origin", "presented", "rehearsal")

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        """headers: by lower-case name, at least those that this module names. A header that came
        twice must be joined with a comma, which makes it no key."""
        presented = _presented(headers)
        self.presented = presented if isinstance(presented, bytes) else b""
        self.denial = presented if isinstance(presented, Denial) else None
        """Why the headers hold no key; None when they hold one."""
        self.digest = sha256(self.presented).digest()
        self.names_adapter = ADAPTER in headers
        self.rehearsal: dict[bytes, bytes] | None = None
        """What says that this is a rehearsal; None: a user's request."""
        if REHEARSAL_HEADER in headers:
            self.rehearsal = {name: headers.get(name, b"") for name in HEADERS}
        self.origin = headers.get(ORIGIN)
        self.host = headers.get(HOST)


class Access:
    """Decides who is admitted. For one thread, the relay's."""

    def __init__(
        self,
        mode: Mode,
        *,
        keys: Keys | None,
        limiter: Limiter,
        denied: Callable[[str], None],
        upstream_key: str | None = None,
        anyone_operates: bool = False,
        best_of_max: int = 1,
        tickets: Tickets | None = None,
    ) -> None:
        """keys: given in mode `keys`, and only there. upstream_key: vLLM's own key, for that mode.
        denied: counts a denial by its reason. anyone_operates, best_of_max: apply in the other
        modes; only a loopback listener may let everybody operate. tickets: None: nothing is
        rehearsed."""
        self._keys = keys
        self._limiter = limiter
        self._denied = denied
        self._to_vllm = f"Bearer {upstream_key}".encode() if upstream_key else None
        self._anyone = Admission(
            operator=anyone_operates and mode == "open",
            best_of_max=best_of_max,
            replace_authorization=KEEP,
        )
        self._tickets = tickets
        self._open = mode == "open"
        self._local = anyone_operates
        self._ring: KeyRing | None = None
        self._known: dict[bytes, tuple[Admission, float]] = {}
        """SHA-256 of a key that `_ring` knows -> its admission, and when it expires: Unix seconds,
        infinity for never."""

    def admit(self, shown: Credentials, now: float, of_model: bool = True) -> Admission | Denial:
        """Admit a request or say why not. Counts it against the key's requests per minute.

        now: unix seconds. of_model: the model is asked; a rehearsal's ticket is for that alone.
        """
        admission = self._judge(shown, now)
        if not of_model and isinstance(admission, Admission) and admission.rehearsed_by:
            admission = NOT_REHEARSED
        if isinstance(admission, Denial):
            self._denied(admission.reason)
        elif admission.allowance is not None:
            return self._metered(admission, now)
        return admission

    def reject(self, shown: Credentials, now: float) -> Denial | None:
        """Why these credentials are refused; None when they are good. Counts nothing against a
        key's limits."""
        admission = self._judge(shown, now)
        if isinstance(admission, Denial):
            self._denied(admission.reason)
            return admission
        return None

    def charge(self, admission: Admission, tokens: int, now: float) -> None:
        """Count the prompt and completion tokens of a finished reply."""
        allowance = admission.allowance
        if allowance is not None and allowance.tokens_per_day is not None and tokens > 0:
            self._limiter.charge(admission.key_id, allowance, tokens, now)

    def _judge(self, shown: Credentials, now: float) -> Admission | Denial:
        if shown.rehearsal is not None:
            return self._rehearse(shown.rehearsal, now)
        keys = self._keys
        if keys is None:
            no_key = self._open or shown.denial is NO_KEY
            if no_key and is_foreign_page(shown.origin, shown.host, local=self._local):
                return FOREIGN_PAGE
            admission = self._anyone
            return NOT_OPERATOR if shown.names_adapter and not admission.operator else admission
        ring = keys.ring
        if ring is not self._ring:
            self._ring = ring
            self._known = {}
        if shown.denial is not None:
            # Before the keys are read, the sidecar cannot tell anybody that a key is wrong.
            return shown.denial if ring is not None else KEYS_UNKNOWN
        known = self._known.get(shown.digest)
        if known is None:
            found = self._recognise(shown.presented)
            if isinstance(found, Denial):
                return found
            known = self._known[shown.digest] = found
        admission, expires_at = known
        if now >= expires_at:
            return EXPIRED
        return NOT_OPERATOR if shown.names_adapter and not admission.operator else admission

    def _rehearse(self, shown: Mapping[bytes, bytes], now: float) -> Admission | Denial:
        """A ticket stands for a key. What the caller sent as a key is not looked at, so that no
        key's limits count the request."""
        attempt = self._tickets.read(shown, now) if self._tickets is not None else None
        if attempt is None:
            return NOT_REHEARSED
        return Admission(
            project=attempt.project,
            operator=True,  # the adapter that answers is no secret: the ticket names it
            replace_authorization=self._to_vllm or self._anyone.replace_authorization,
            rehearsed_by=attempt.adapter,
        )

    def _recognise(self, presented: bytes) -> tuple[Admission, float] | Denial:
        if self._ring is None:
            return KEYS_UNKNOWN
        key = self._ring.find(presented)
        if key is None:
            return UNKNOWN
        if key.revoked:
            return REVOKED
        if "infer" not in key.scopes:
            return MAY_NOT_ASK
        allowance = Allowance(
            requests_per_minute=key.requests_per_minute, tokens_per_day=key.tokens_per_day
        )
        admission = Admission(
            project=key.project,
            key_id=key.key_id,
            operator="operate" in key.scopes,
            best_of_max=key.best_of_max,
            replace_authorization=self._to_vllm,
            allowance=None if allowance == Allowance() else allowance,
        )
        return admission, math.inf if key.expires_at is None else key.expires_at

    def _metered(self, admission: Admission, now: float) -> Admission | Denial:
        """Take one request from the key's allowance."""
        allowance = admission.allowance
        assert allowance is not None
        standing = self._limiter.take(admission.key_id, allowance, now)
        headers = rate_headers(allowance, standing)
        if standing.refused is not None:
            denial = over_limit(allowance, standing, headers)
            self._denied(denial.reason)
            return denial
        # Not dataclasses.replace: it costs three times as much.
        return Admission(
            project=admission.project,
            key_id=admission.key_id,
            operator=admission.operator,
            best_of_max=admission.best_of_max,
            headers=headers,
            replace_authorization=admission.replace_authorization,
            allowance=allowance,
        )


def _presented(headers: Mapping[bytes, bytes]) -> bytes | Denial:
    """The key in the headers, or why there is none."""
    authorization, api_key = headers.get(AUTHORIZATION), headers.get(X_API_KEY)
    if authorization is None:
        if api_key is None:
            return NO_KEY
        key = api_key.strip()
    else:
        if authorization.startswith(b"Bearer "):
            key = authorization[7:]
        else:
            scheme, _, key = authorization.partition(b" ")
            if scheme.lower() != b"bearer":
                return MALFORMED
        key = key.strip()
        if api_key is not None and api_key.strip() != key:
            return TWO_KEYS
    if not key or len(key) > MAX_PRESENTED_BYTES:
        return MALFORMED
    return key


def open_access(
    settings: Settings, keys: Keys | None, limiter: Limiter, metrics: Metrics
) -> Access:
    """The access that the settings ask for.

    keys: a `KeySource` when `access.mode` is `keys`, else None.
    """
    api_key = settings.serving.api_key
    return Access(
        settings.access.mode,
        keys=keys,
        limiter=limiter,
        denied=lambda reason: metrics.access_denied.labels(reason).inc(),
        upstream_key=api_key.get_secret_value() if api_key is not None else None,
        # Who can reach the loopback can reach the admin API and the store anyway.
        anyone_operates=is_loopback(settings.proxy.host),
        best_of_max=BEST_OF_MAX,
        tickets=Tickets(settings.state_dir),
    )

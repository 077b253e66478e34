"""Who may ask the model, as whom, and how much: the one object that the relay asks.

Three modes (`access.mode`). `open`: no key is asked for; for a loopback listener. `keys`: keys of
the sidecar's own, from the store; vLLM never sees them. `upstream`: the caller's own credentials
go on to vLLM, which judges them; nothing is known of the caller, so no limits apply.

`admit` runs on the event loop for every request, and a known key without limits must cost next to
nothing: the SHA-256 of what was presented leads to an answer made beforehand. A key that is met
for the first time is compared in constant time (`KeyRing.find`).
Nothing here holds, logs or repeats what a client presented.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from typing import Literal, Protocol

import structlog

from sidecar.access.denials import (
    EXPIRED,
    KEYS_UNKNOWN,
    MALFORMED,
    MAY_NOT_ASK,
    NO_KEY,
    NOT_OPERATOR,
    REVOKED,
    TWO_KEYS,
    UNKNOWN,
    Denial,
    Header,
    over_limit,
    rate_headers,
)
from sidecar.access.header_names import AUTHORIZATION, X_API_KEY
from sidecar.access.keys import MAX_PRESENTED_BYTES, ApiKey, KeyRing
from sidecar.access.limits import Allowance, Limiter, MemoryLimiter
from sidecar.access.limits_file import FileLimiter
from sidecar.metrics.hot import LabelledCounter
from sidecar.metrics.proxy import Metrics
from sidecar.routing.session_key import DEFAULT_PROJECT
from sidecar.settings import Settings
from sidecar.settings.addresses import is_loopback

log = structlog.get_logger()
ADAPTER = b"x-sidecar-adapter"
Mode = Literal["open", "keys", "upstream"]


class Keep(Enum):
    """The type of `KEEP`."""

    KEEP = "keep"


KEEP = Keep.KEEP
"""Pass the caller's `Authorization` and `x-api-key` on as they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that may go on."""

    project: str = DEFAULT_PROJECT
    key_id: str = ""
    """Empty when no key of ours was asked for."""
    operator: bool = False
    """May name an adapter by `x-sidecar-adapter`."""
    best_of_max: int = 1
    headers: tuple[Header, ...] = ()
    """To be added to the reply, whatever its status."""
    replace_authorization: bytes | Keep | None = field(default=None, repr=False)
    """What vLLM is sent as `Authorization`; None: nothing. Unless it is `KEEP`, the caller's
    `Authorization` and `x-api-key` must both be dropped."""
    allowance: Allowance | None = None
    """None: the key has no limits."""


class Keys(Protocol):
    """Where the keys are read: an attribute, never a query."""

    @property
    def ring(self) -> KeyRing | None:
        """None: the store was not seen yet."""
        ...


class _Holder:
    __slots__ = ("admission", "expires_at")

    def __init__(self, admission: Admission, expires_at: float) -> None:
        self.admission = admission
        self.expires_at = expires_at
        """Infinity when it never does."""


class Credentials:
    """What a request shows of its sender: read once for each head, as heads repeat."""

    __slots__ = ("denial", "digest", "names_adapter", "presented")

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        presented = _presented(headers)
        self.presented = presented if isinstance(presented, bytes) else b""
        self.denial = presented if isinstance(presented, Denial) else None
        """Why this is no key at all."""
        self.digest = sha256(self.presented).digest()
        self.names_adapter = ADAPTER in headers


class Access:
    """Asked by one thread: the relay's."""

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
    ) -> None:
        """keys: needed in mode `keys`, and only there. upstream_key: vLLM's own, for that mode.
        denied: counts a denial by its reason. anyone_operates, best_of_max: of requests without a
        key of ours; only the loopback may let everybody operate."""
        if (mode == "keys") != (keys is not None):
            raise ValueError("mode `keys` goes with a source of keys, and no other mode does")
        self._keys = keys
        self._limiter = limiter
        self._denied = denied
        self._to_vllm = f"Bearer {upstream_key}".encode() if upstream_key else None
        self._anyone = Admission(
            operator=anyone_operates and mode == "open",
            best_of_max=best_of_max,
            replace_authorization=KEEP,
        )
        self._ring: KeyRing | None = None
        self._known: dict[bytes, _Holder] = {}
        """SHA-256 of a key that was presented and found good, under `_ring`."""

    def admit(self, headers: Mapping[bytes, bytes], now: float) -> Admission | Denial:
        """Let a request through or not. Counts it against the key's requests per minute.

        headers: by lower-case name, the names in this module at least. One that came twice must
        be joined with a comma: then it is no key.
        now: unix seconds.
        """
        return self.let_in(Credentials(headers), now)

    def let_in(self, shown: Credentials, now: float) -> Admission | Denial:
        """As `admit`, of credentials that were read already."""
        admission = self._judge(shown, now)
        if isinstance(admission, Denial):
            self._denied(admission.reason)
        elif admission.allowance is not None:
            return self._metered(admission, now)
        return admission

    def reject(self, shown: Credentials, now: float) -> Denial | None:
        """Who will not be let in, before the body of the request is here. Nothing is counted
        against a key's limits."""
        admission = self._judge(shown, now)
        if isinstance(admission, Denial):
            self._denied(admission.reason)
            return admission
        return None

    def charge(self, admission: Admission, tokens: int, now: float) -> None:
        """After the reply: what it cost, prompt and completion."""
        allowance = admission.allowance
        if allowance is not None and allowance.tokens_per_day is not None and tokens > 0:
            self._limiter.charge(admission.key_id, allowance, tokens, now)

    def close(self) -> None:
        self._limiter.close()

    def _judge(self, shown: Credentials, now: float) -> Admission | Denial:
        keys = self._keys
        if keys is None:
            admission = self._anyone
            return NOT_OPERATOR if shown.names_adapter and not admission.operator else admission
        ring = keys.ring
        if ring is not self._ring:
            self._ring = ring
            self._known = {}
        if shown.denial is not None:
            # Without the store's keys nobody can be told that theirs is wrong.
            return shown.denial if ring is not None else KEYS_UNKNOWN
        holder = self._known.get(shown.digest)
        if holder is None:
            found = self._recognise(shown.presented)
            if isinstance(found, Denial):
                return found
            holder = self._known[shown.digest] = found
        if now >= holder.expires_at:
            return EXPIRED
        if shown.names_adapter and not holder.admission.operator:
            return NOT_OPERATOR
        return holder.admission

    def _recognise(self, presented: bytes) -> _Holder | Denial:
        if self._ring is None:
            return KEYS_UNKNOWN
        key = self._ring.find(presented)
        if key is None:
            return UNKNOWN
        if key.revoked:
            return REVOKED
        if "infer" not in key.scopes:
            return MAY_NOT_ASK
        expires_at = math.inf if key.expires_at is None else key.expires_at
        return _Holder(self._admission_of(key), expires_at)

    def _admission_of(self, key: ApiKey) -> Admission:
        limited = key.requests_per_minute is not None or key.tokens_per_day is not None
        allowance = Allowance(
            requests_per_minute=key.requests_per_minute, tokens_per_day=key.tokens_per_day
        )
        return Admission(
            project=key.project,
            key_id=key.key_id,
            operator="operate" in key.scopes,
            best_of_max=key.best_of_max,
            replace_authorization=self._to_vllm,
            allowance=allowance if limited else None,
        )

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
    """The key that the client shows, from either header."""
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


def open_access(settings: Settings, keys: Keys | None, metrics: Metrics) -> Access:
    """The access that the settings ask for. Opens the limits' file in `state_dir`.

    keys: a `KeySource` when `access.mode` is `keys`, else None.
    """
    api_key = settings.serving.api_key
    limiter: Limiter = MemoryLimiter()
    if settings.access.mode == "keys":
        limiter = FileLimiter(
            settings.state_dir / "limits",
            unchecked=_counted(metrics.limits_unchecked, "limits_unchecked"),
            lost=_counted(metrics.limits_lost, "limits_lost"),
        )
    return Access(
        settings.access.mode,
        keys=keys,
        limiter=limiter,
        denied=lambda reason: metrics.access_denied.labels(reason).inc(),
        upstream_key=api_key.get_secret_value() if api_key is not None else None,
        # On the loopback, who could be kept out has the admin API and the store anyway.
        anyone_operates=is_loopback(settings.proxy.host),
        best_of_max=settings.best_of.max_n,
    )


def _counted(counter: LabelledCounter, event: str) -> Callable[[str], None]:
    """Count each time, and log the first of each reason."""
    said: set[str] = set()

    def count(reason: str) -> None:
        counter.labels(reason).inc()
        if reason not in said:
            said.add(reason)
            log.warning(event, reason=reason)

    return count

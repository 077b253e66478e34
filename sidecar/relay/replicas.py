"""The vLLM replicas behind the relay, and which of them answers a request. No IO.

A session stays with one replica, where its prefix is cached (rendezvous hashing), unless that one
has more than its share of the work in flight (bounded loads, arXiv:1608.01350); then the least
loaded one takes it. A replica that fails is left alone for a while and tried again.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Final

from sidecar.backoff import Backoff
from sidecar.relay.upstream import Endpoint, OwnFields, UpstreamPool

SHARE: Final = 1.25
"""A replica keeps its sessions up to this multiple of the mean number of requests in flight."""
FAILURES_TO_EJECT: Final = 3
EJECTION: Final = Backoff(first_s=2.0, last_s=60.0)
_64_BITS = 2**64 - 1


class Replica:
    def __init__(self, endpoint: Endpoint, *, connect_timeout_s: float) -> None:
        self.url = endpoint.url
        self.seed = int.from_bytes(hashlib.sha256(self.url.encode()).digest()[:8], "big")
        """The replica's part in `_rank`: the same in every process."""
        self.pool = UpstreamPool(endpoint, connect_timeout_s=connect_timeout_s)
        self.in_flight = 0
        self.healthy = True
        """As the last poll found it; True before the first poll."""
        self.models: frozenset[str] | None = None
        """Model names that it lists, adapters included; None: not known yet."""
        self.ejected_until = 0.0
        self.fields = OwnFields()
        self._failures = 0
        self._ejections = 0

    def serves(self, model: str) -> bool:
        return self.models is None or model in self.models

    def lacks(self, model: str) -> None:
        """Note that the replica does not know this model."""
        if self.models is not None:
            self.models -= {model}

    def answered(self) -> None:
        """Note that a reply ended, whatever its status: the replica is reachable."""
        self._failures = self._ejections = 0

    def failed(self, now: float) -> bool:
        """Note that it was unreachable or broke off a reply. Returns: True if it is ejected now.
        Asked for want of a better one while it is ejected, it is not ejected for longer: the time
        doubles with each return that fails, not with the number of requests of an outage. now:
        seconds on the monotonic clock."""
        if now < self.ejected_until:
            return False
        self._failures += 1
        if self._failures < FAILURES_TO_EJECT:
            return False
        self._failures = 0
        self._ejections += 1
        self.ejected_until = now + EJECTION.wait_s(self._ejections)
        return True

    def came_back(self) -> None:
        """Note that it is back after an outage: earlier failures no longer count, and it may have
        come back with other options."""
        self.answered()
        self.fields = OwnFields()
        self.ejected_until = 0.0

    def usable(self, now: float) -> bool:
        return self.healthy and self.ejected_until <= now


class Replicas:
    """All of them."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.become(replicas)

    def become(self, replicas: Sequence[Replica]) -> None:
        """Choose among these from now on. replicas: at least one."""
        self.all = tuple(replicas)
        self.many = len(self.all) > 1

    def choose(
        self, model: str, session_key: str, tried: Sequence[Replica], now: float
    ) -> Replica | None:
        """Choose the replica that answers. tried: those that failed this request already. When none
        is in good health any is better than a refusal. When none is known to serve `model` it is
        asked for all the same: lists are seconds old, and a 404 falls back. Returns: None when all
        were tried."""
        if not self.many:
            return None if tried else self.all[0]
        left = _best_off([replica for replica in self.all if replica not in tried], now)
        left = [replica for replica in left if replica.serves(model)] or left
        if len(left) < 2:
            return left[0] if left else None
        if session_key:
            total = sum(replica.in_flight for replica in left)
            bound = math.ceil(SHARE * (total + 1) / len(left))
            session = zlib.crc32(session_key.encode("utf-8", "surrogatepass"))
            home = max(left, key=lambda replica: _rank(session ^ replica.seed))
            if home.in_flight < bound:
                return home
        return min(left, key=lambda replica: replica.in_flight)

    def another_serves(self, model: str, tried: Sequence[Replica]) -> bool:
        """True if a replica that was not tried lists this model."""
        left = (replica for replica in self.all if replica not in tried)
        return any(replica.models is not None and model in replica.models for replica in left)

    def least_loaded(self, now: float) -> Replica:
        """Choose the least loaded healthy replica, for a request that needs no model."""
        return min(_best_off(self.all, now), key=lambda replica: replica.in_flight)

    def close(self) -> None:
        for replica in self.all:
            replica.pool.close()


def _best_off(replicas: Sequence[Replica], now: float) -> Sequence[Replica]:
    """The healthy replicas; else the reachable ones, though ejected; else all."""
    healthy = [replica for replica in replicas if replica.healthy] or replicas
    return [replica for replica in healthy if replica.usable(now)] or healthy


def _rank(joined: int) -> int:
    """A session's rank for a replica: the finalizer of splitmix64 (Steele, Lea, Flood 2014). A
    checksum of both would not do: a CRC is linear, so the ranks of two replicas would differ by a
    constant, and all the sessions of a replica that fails would go to one other. joined: a number
    of the session's, exclusive or'd with the replica's `seed`."""
    mixed = ((joined ^ (joined >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return mixed ^ (mixed >> 31)

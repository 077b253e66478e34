"""Group exchanges into user turns: a request and its retries by the client's SDK are one turn.

A retry repeats a request byte for byte. The SDKs of OpenAI and Anthropic mark it with
`x-stainless-retry-count` (0 on the original, then 1, 2, ...). Two deliberate identical requests (a
regeneration, several answers to one prompt) both have 0 and are two turns, because groups consist
of several answers to one prompt. The rules:

- With `Idempotency-Key`, requests with the same key and body are one turn.
- An original that succeeded is a turn of its own, named by its exchange. An SDK does not retry
  after a reply that it received. If a retry comes anyway, because the reply was lost on the
  network, it joins the turn when it reaches the same process.
- An original that failed, and every retry, get a name derived from project, session and body, so
  that they get the same name in every process and after a restart.

One case is not told apart: two deliberate identical requests of one session that both failed and
were both retried count as one turn. That loses a sample; no sample is counted twice.
"""

from __future__ import annotations

import hashlib

REMEMBERED = 4096
"""Originals remembered, to recognise their retries. SDKs retry within seconds."""


class Turns:
    """Gives turns their names. Remembers the originals of this process. For one thread."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._names: dict[bytes, str] = {}

    def name(
        self,
        exchange_id: str,
        *,
        project: str,
        session_key: str,
        body: bytes,
        retry_count: int,
        idempotency_key: str,
        ended_well: bool,
    ) -> str:
        """Return the turn id of an exchange. Call it once an exchange, in the order of their ends.

        ended_well: the client received a complete, successful reply, as far as the relay knows.
        """
        if idempotency_key:
            return f"key-{_digest(project, idempotency_key, body).hex()}"
        digest = _digest(project, session_key, body)
        if retry_count <= 0 and ended_well:
            known = self._names.get(digest)
            # Keep the entry of a failed original whose retry has not come yet.
            if known is None or known != _shared(digest):
                self._remember(digest, exchange_id)
            return exchange_id
        shared = _shared(digest)
        if retry_count <= 0:
            self._remember(digest, shared)
            return shared
        name = self._names.get(digest, shared)
        if ended_well:
            self._names.pop(digest, None)
        return name

    def _remember(self, digest: bytes, name: str) -> None:
        self._names.pop(digest, None)
        self._names[digest] = name
        if len(self._names) > self._remembered:
            del self._names[next(iter(self._names))]


def _shared(digest: bytes) -> str:
    return f"try-{digest.hex()}"


def _digest(project: str, scope: str, body: bytes) -> bytes:
    digest = hashlib.blake2b(body, digest_size=12)
    digest.update(f"\x00{len(scope)}:{scope}\x00{project}".encode("utf-8", "surrogateescape"))
    return digest.digest()

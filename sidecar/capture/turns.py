"""Which exchanges are one user turn: a request and its retries by the client's SDK.

A retry is the same request once more: OpenAI's and Anthropic's SDKs say so by
`x-stainless-retry-count` (0 on the original, then 1, 2, ...), and repeat the body to the byte.
Two deliberate identical requests (a regeneration, several answers to one prompt) both say 0, and
they are two turns: several answers to one prompt are what groups are made of. So:

- With `Idempotency-Key`: the same key and body are one turn.
- An original that ended well is a turn of its own, named by its exchange. An SDK sends no retry of
  a reply that it got; should one come all the same (the reply was lost on its way), it joins if
  it comes to the same process.
- An original that failed, and every retry, get a name made of project, session and body, so that
  they meet in it, in whichever process they came in, and after a restart.

What this cannot tell apart: two deliberate identical requests of one session that both failed and
were both retried are taken for one turn. That loses a sample, and never counts one twice.
"""

from __future__ import annotations

import hashlib

REMEMBERED = 4096
"""Originals whose retries would be known. SDKs retry within seconds."""


class Turns:
    """Names turns. For one thread; remembers the originals of this process."""

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
        """The turn of one exchange; call it once for each, in the order in which they ended.

        ended_well: the client got the whole of a good reply, as far as can be seen.
        """
        if idempotency_key:
            return f"key-{_digest(project, idempotency_key, body).hex()}"
        digest = _digest(project, session_key, body)
        if retry_count <= 0 and ended_well:
            known = self._names.get(digest)
            # A failed original that still waits for its retry keeps its place.
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

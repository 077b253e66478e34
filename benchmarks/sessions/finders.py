"""Two finders to compare with: the sidecar's sticky key, and a plain tree over canonical turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b

from benchmarks.sessions.canonical import conversation, reply, sender
from benchmarks.sessions.records import Finder, Placement, SentRequest
from sidecar.relay.peek import peek_request
from sidecar.routing.session_key import session_key


def by_key(stream: Iterable[SentRequest]) -> Iterator[Placement]:
    """The session is `session_key` of the request's opening; the parent is the key's last
    request."""
    last: dict[str, str] = {}
    for one in stream:
        key = session_key(
            header=one.session_header or None,
            user=one.user,
            opening=peek_request(one.request).opening({})[0],
            project=one.project,
            key_id=one.key_id,
        )
        yield Placement(exchange_id=one.exchange_id, session=key, parent=last.get(key))
        last[key] = one.exchange_id


def by_tree(stream: Iterable[SentRequest]) -> Iterator[Placement]:
    """The parent is the request whose messages and reply are the longest beginning of the request's
    messages; of equal ones, that which was taken least recently. With none, a session begins."""
    ends: dict[bytes, list[tuple[str, str]]] = {}  # digest of messages and reply -> candidates
    for one in stream:
        digest = blake2b("\x00".join(sender(one)).encode(), digest_size=16)
        candidates: list[tuple[str, str]] = []
        for message in conversation(json.loads(one.request)):
            digest.update("\x00".join((*message, "")).encode())
            if message[0] == "assistant":
                candidates = ends.get(digest.digest(), candidates)
        parent, session = None, one.exchange_id
        if candidates:
            parent, session = candidates.pop(0)
            candidates.append((parent, session))
        for raw in one.replies:
            end = digest.copy()
            end.update("\x00".join((*reply(raw), "")).encode())
            ends.setdefault(end.digest(), []).append((one.exchange_id, session))
        yield Placement(exchange_id=one.exchange_id, session=session, parent=parent)


REFERENCES: dict[str, Finder] = {"key": by_key, "tree": by_tree}

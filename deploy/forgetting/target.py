"""What an operator names, and the records that it means. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from sidecar.feedback.reading import source_of_user
from sidecar.feedback.record import Feedback, decode_feedback, is_feedback
from sidecar.records import Exchange, decode_exchange
from sidecar.routing.session_key import DEFAULT_PROJECT, header_name, session_key, short_name
from sidecar.store.keyring import BUS, NO_KEYS, Keyring

SHORT_BYTES = 6
"""Shorter names are found as whole words only."""


@dataclass(frozen=True, slots=True)
class Target:
    """A user, a session or an exchange, as an operator knows it."""

    kind: Literal["user", "session", "exchange"]
    name: str

    @property
    def stored_names(self) -> frozenset[str]:
        """The names by which the store may know it.

        A user is stored under the name that the agent sent, or its digest where that is too long. A
        session has the id that `sidecar exchanges ls` shows, or the name in `x-sidecar-session`,
        with `<project>/` before it where the project is not `default`: a name with a "/" in the
        default project is `default/<name>`, so one name never means sessions of two projects.
        """
        if self.kind == "exchange":
            return frozenset({self.name})
        sent = header_name(self.name.encode("utf-8", "surrogatepass"))
        if self.kind == "user":
            return frozenset({self.name, short_name(sent)})
        project, _, rest = sent.partition("/")
        if not rest:
            project, rest = DEFAULT_PROJECT, sent
        key = session_key(header=rest, user="", project=project)
        return frozenset({self.name, key})

    @property
    def sources(self) -> frozenset[str]:
        """What feedback names as its `source` when the user sent it: the name, or what the proxy
        writes for `x-sidecar-user`. Empty unless the target is a user."""
        if self.kind != "user":
            return frozenset()
        return self.stored_names | {source_of_user(name) for name in self.stored_names}

    @property
    def mention(self) -> re.Pattern[bytes]:
        """What a line of a log or a record that cannot be read holds when it is about it.

        A short name counts only as a word of its own: the user `7` stands in many a number.
        """
        named = {self.name, *self.stored_names}
        forms = {
            form
            for name in named
            for form in (
                name.encode("utf-8", "surrogatepass"),
                msgspec.json.encode(name)[1:-1],
                json.dumps(name)[1:-1].encode(),  # as exports write it, in ASCII
            )
            if form
        }
        return re.compile(b"|".join(map(_pattern, sorted(forms))))


def _pattern(form: bytes) -> bytes:
    escaped = re.escape(form)
    if len(form) >= SHORT_BYTES:
        return escaped
    return rb"(?<![A-Za-z0-9_])" + escaped + rb"(?![A-Za-z0-9_])"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The records on the bus that belong to a target."""

    target: Target
    session_keys: Collection[str]
    """Keys of the session's exchanges in the store."""
    until: float
    """Unix seconds: of these keys only requests that arrived before; the key is found from how a
    conversation begins, so later ones may be others."""
    told: Collection[str] = ()
    """Ids of its exchanges, sessions and traces, by which feedback may name it."""
    keyring: Keyring = NO_KEYS
    unread: Counter[str] = field(default_factory=Counter)
    """Encrypted records that could not be looked at, by the reason."""
    seen: set[str] = field(default_factory=set)
    """Ids of the target's exchanges that were looked at; the store may hold feedback on them."""

    def __call__(self, payload: bytes) -> bool:
        """Return True for a record to be removed."""
        try:
            payload = self.keyring.open(payload, BUS)
        except ValueError as error:
            self.unread[str(error)] += 1
            return False
        try:
            if is_feedback(payload):
                return self._is_told_of(decode_feedback(payload))
            exchange = decode_exchange(payload)
        except (msgspec.MsgspecError, ValueError):
            return self.target.mention.search(payload) is not None
        if not self._is(exchange):
            return False
        self.seen.add(exchange.exchange_id)
        return True

    def _is(self, exchange: Exchange) -> bool:
        names = self.target.stored_names
        if self.target.kind == "user":
            return exchange.user in names
        if self.target.kind == "exchange":
            return exchange.exchange_id in names
        if exchange.session_key in names or exchange.exchange_id in names:
            return True
        return exchange.session_key in self.session_keys and (
            exchange.timings.started_at <= self.until
        )

    def _is_told_of(self, feedback: Feedback) -> bool:
        names = self.target.stored_names
        if self.target.kind == "user":
            return feedback.source in self.target.sources or self._is_known(feedback.target)
        return feedback.target in names or self._is_known(feedback.target)

    def _is_known(self, name: str) -> bool:
        return name in self.told or name in self.seen

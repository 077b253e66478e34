"""Choose the adapter that answers a session, from the routing table. Pure.

The assignment is sticky: a session's bucket is a hash of its key. Raising the canary's weight only
moves sessions into the canary, and a session whose bucket is not below the weight stays with the
champion.

It is a module apart from the table's type, because msgspec reads the annotations of a class and
mypyc does not keep them (see setup.py).
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from msgspec import Raw, json

from sidecar.lines import line_of_adapter, public_model
from sidecar.records import BASE, Arm, Assignment
from sidecar.routing.breaker import NO_CANARY, canary_tag
from sidecar.routing.table import BUCKETS, RoutingTable, upstream_model

REMEMBERED: Final = 4096
"""Sessions whose assignment is cached for one table."""
REMEMBERED_CHARS: Final = 256
"""Longest session key that is cached, in characters: a client's own may be as long as a header. The
cache holds at most 4 MB."""


def bucket(salt: str, session_key: str) -> int:
    """Return the bucket of a session, 0..9999; the same in every process and on every machine."""
    digest = sha256(f"{salt}\x00{session_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS


class ModelName:
    """A model name as text, and as JSON as nearly every client writes it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.json = b'"%b"' % text.encode()
        self.raw = Raw(self.json)
        """Kept as `Raw`, because comparing two of them needs no conversion to bytes."""


class CompiledRouting:
    """A routing table prepared for fast look-ups."""

    def __init__(self, table: RoutingTable) -> None:
        self.table = table
        self.public_name = ModelName(table.public_model)
        self._salt, self._weight = table.salt, table.canary_weight_bp
        self._known: dict[str, tuple[Assignment, ...]] = {}
        self.splits = table.canary is not None and table.canary_weight_bp > 0
        """Different adapters answer different sessions, so a request's session must be known."""
        self.canary_as: tuple[bytes, bytes] | None = None
        """The canary's name and the one that callers without a scope read in its place, both as
        JSON: the champion's. None: nothing is split."""
        if table.canary is not None and self.splits:
            champion = upstream_model(table.public_model, table.champion)
            self.canary_as = (json.encode(table.canary), json.encode(champion))
        self.canary_tag = canary_tag(table) if self.splits else NO_CANARY
        """The breaker's tag of the canary that takes part in the split."""
        share = table.canary_weight_bp / BUCKETS if table.canary is not None else 0.0
        base = _assignment(table, BASE, "champion", 1 - share)
        self._champion: tuple[Assignment, ...] = (base,)
        if table.champion != BASE:
            self._champion = (_assignment(table, table.champion, "champion", 1 - share), base)
        self._canary: tuple[Assignment, ...] = self._champion
        if table.canary is not None:
            canary = _assignment(table, table.canary, "canary", share)
            self._canary = (canary, *self._champion)
        self.base: tuple[Assignment, ...] = (_assignment(table, BASE, "champion", 1.0),)
        """The routes of surfaces that adapters do not answer."""

    def routes(self, session_key: str) -> tuple[Assignment, ...]:
        """Return the adapter of a session, followed by its fallbacks in order: the champion, then
        the base, which is always loaded. One answers when vLLM does not know the adapter, because
        it restarted or the adapter was unloaded. The same table and key give the same answer."""
        if not self.splits:
            return self._champion
        routes = self._known.get(session_key)
        if routes is None:
            in_canary = bucket(self._salt, session_key) < self._weight
            routes = self._canary if in_canary else self._champion
            if len(session_key) <= REMEMBERED_CHARS:
                if len(self._known) >= REMEMBERED:
                    self._known.clear()
                self._known[session_key] = routes
        return routes


def pinned_assignment(table: RoutingTable, name: str, loaded: frozenset[str]) -> Assignment | None:
    """Return the adapter with this name: `base`, `champion`, `canary`, a version (`v12`), or its
    name at vLLM. None when there is no such adapter, or it is of another line of adapters: what one
    project's traffic taught is not for the others. loaded: the names that vLLM lists."""
    roles = {BASE: BASE, "champion": table.champion, "canary": table.canary}
    adapter = roles.get(name, name)
    if name in roles:
        return _assignment(table, adapter, "champion", 1.0) if adapter is not None else None
    prefix = f"{table.model}--{name}-"
    line = line_of_adapter(name)
    foreign = line != table.model and public_model(line) == table.public_model
    found = [
        model for model in loaded if (model == name and not foreign) or model.startswith(prefix)
    ]
    if len(found) != 1 or found[0] == table.public_model:
        return None
    return _assignment(table, found[0], "champion", 1.0)


def rehearsed(table: RoutingTable, adapter: str) -> Assignment:
    """Return the assignment of an attempt at a recorded task, which has no fallback."""
    return _assignment(table, adapter, "rehearsal", 1.0)


def _assignment(table: RoutingTable, adapter: str, arm: Arm, propensity: float) -> Assignment:
    return Assignment(
        adapter=adapter,
        arm=arm,
        propensity=propensity,
        upstream_model=upstream_model(table.public_model, adapter),
    )

"""Which adapter answers a session, by the routing table. Pure.

Assignment is sticky both ways: a session's bucket is a hash of its key, so raising the canary's
weight moves sessions into the canary and never out of it, and a session whose bucket is not under
the weight stays with the champion.

Apart from the table's own type: msgspec reads the annotations of a class, and a module that mypyc
compiles does not keep them (see setup.py).
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from msgspec import Raw

from sidecar.records import BASE, Arm, Assignment
from sidecar.routing.breaker import NO_CANARY, canary_tag
from sidecar.routing.table import BUCKETS, RoutingTable, upstream_model

REMEMBERED: Final = 4096
"""Sessions whose answer is known under one table."""
REMEMBERED_CHARS: Final = 256
"""Of the name of a session that is remembered: an agent's own may be as long as a head. 4 MB for
all of them at most."""


def bucket(salt: str, session_key: str) -> int:
    """A session's place in 0..9999, the same in every process and on every machine."""
    digest = sha256(f"{salt}\x00{session_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS


class ModelName:
    """A model's name as text, and as nearly every client writes it in JSON."""

    __slots__ = ("json", "raw", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.json = b'"%b"' % text.encode()
        self.raw = Raw(self.json)
        """Compared with one, another Raw need not be made bytes."""


class CompiledRouting:
    """A table with the answers that it can give worked out: what a proxy obeys."""

    __slots__ = (
        "_canary",
        "_champion",
        "_known",
        "_salt",
        "_weight",
        "base",
        "canary_tag",
        "public_name",
        "splits",
        "table",
    )

    def __init__(self, table: RoutingTable) -> None:
        self.table = table
        self.public_name = ModelName(table.model)
        self._salt, self._weight = table.salt, table.canary_weight_bp
        self._known: dict[str, tuple[Assignment, ...]] = {}
        self.splits = table.canary is not None and table.canary_weight_bp > 0
        """Sessions are answered by different adapters, so a request's session must be known."""
        self.canary_tag = canary_tag(table) if self.splits else NO_CANARY
        """The breaker's tag for the canary that takes part in the split."""
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
        """For what no adapter answers."""

    def routes(self, session_key: str) -> tuple[Assignment, ...]:
        """Who answers this session; behind it, in order, who does when vLLM does not know that
        adapter (it was restarted, or the adapter was unloaded under our feet): the champion, then
        the base, which is always there. Same table and key, same answer."""
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
    """The adapter that somebody asks for: `base`, `champion`, `canary`, a version (`v12`), or its
    name at vLLM. None when there is none such.

    loaded: the names that vLLM lists.
    """
    roles = {BASE: BASE, "champion": table.champion, "canary": table.canary}
    adapter = roles.get(name, name)
    if name in roles:
        return _assignment(table, adapter, "champion", 1.0) if adapter is not None else None
    prefix = f"{table.model}--{name}-"
    found = sorted(model for model in loaded if model == name or model.startswith(prefix))
    if len(found) != 1 or found[0] == table.model:
        return None
    return _assignment(table, found[0], "champion", 1.0)


def _assignment(table: RoutingTable, adapter: str, arm: Arm, propensity: float) -> Assignment:
    return Assignment(
        adapter=adapter,
        arm=arm,
        propensity=propensity,
        upstream_model=upstream_model(table.model, adapter),
    )

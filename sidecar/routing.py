"""The routing table: which adapter answers whom. Deploy writes it, the relay obeys it.

Pure. Assignment is sticky both ways: a session's bucket is a hash of its key, so raising the
canary's weight moves sessions into the canary and never out of it, and a session whose bucket is
not under the weight stays with the champion. (`deploy.md` section 1: recommended state machine.)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from sidecar.records import BASE, Arm

BUCKETS = 10_000
"""Weights are in basis points: 10000 = every session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """One public model name and the adapters behind it."""

    model: str
    """The public model name that agents send; also vLLM's `--served-model-name` of the base."""
    champion: str = BASE
    """vLLM adapter name, or "base"."""
    canary: str | None = None
    canary_weight_bp: int = 0
    """Share of sessions that the canary answers, in basis points, 0..10000."""
    salt: str = ""
    """One per canary, so that two canaries do not always meet the same sessions."""
    generation: int = 0
    """Grows by one with each change; a proxy never goes back."""

    def __post_init__(self) -> None:
        """Raises: ValueError for a name that could not be written into a header."""
        for name in (self.model, self.champion, self.canary or BASE):
            if not name.isprintable() or not name.isascii() or not name:
                raise ValueError(f"the adapter or model name {name!r} is not printable ASCII")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one request got."""

    adapter: str
    arm: Arm
    propensity: float
    upstream_model: str
    """What to write into the request's `model`: the adapter's name, or the base model's."""


def bucket(salt: str, session_key: str) -> int:
    """A session's place in 0..9999, the same in every process and on every machine."""
    digest = hashlib.sha256(f"{salt}\x00{session_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % BUCKETS


class CompiledRouting:
    """A table with the answers that it can give worked out: what a proxy obeys."""

    __slots__ = ("_canary", "_champion", "base", "splits", "table")

    def __init__(self, table: RoutingTable) -> None:
        self.table = table
        self.splits = table.canary is not None and table.canary_weight_bp > 0
        """Sessions are answered by different adapters, so a request's session must be known."""
        share = table.canary_weight_bp / BUCKETS if table.canary is not None else 0.0
        base = _assignment(table, BASE, "champion", 1 - share)
        self._champion: tuple[Assignment, ...] = (base,)
        if table.champion != BASE:
            self._champion = (_assignment(table, table.champion, "champion", 1 - share), base)
        self._canary = self._champion
        if table.canary is not None:
            canary = _assignment(table, table.canary, "canary", share)
            self._canary = (canary, *self._champion)
        self.base = (_assignment(table, BASE, "champion", 1.0),)
        """For what no adapter answers."""

    def routes(self, session_key: str) -> tuple[Assignment, ...]:
        """Who answers this session; behind it, in order, who does when vLLM does not know that
        adapter (it was restarted, or the adapter was unloaded under our feet): the champion, then
        the base, which is always there. Same table and key, same answer."""
        if self.splits and bucket(self.table.salt, session_key) < self.table.canary_weight_bp:
            return self._canary
        return self._champion


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


def upstream_model(model: str, adapter: str) -> str:
    """What to write into a request's `model` so that this adapter, or the base, answers it."""
    return model if adapter == BASE else adapter


def _assignment(table: RoutingTable, adapter: str, arm: Arm, propensity: float) -> Assignment:
    return Assignment(
        adapter=adapter,
        arm=arm,
        propensity=propensity,
        upstream_model=upstream_model(table.model, adapter),
    )


def encode_table(table: RoutingTable) -> str:
    """The table as JSON text, for the store."""
    return msgspec.json.encode(table).decode()


def decode_table(text: str) -> RoutingTable:
    """Read a table from the store. Raises msgspec.MsgspecError when it is not one."""
    return msgspec.json.decode(text, type=RoutingTable)

"""Which adapters of all lines the store wants loaded, and what that changes in one vLLM.

Wanted are the champion, every target of the routing table, `previous` (so that a rollback needs no
load) and the candidate once its canary has validated it. Other adapters stay while there is
capacity: beyond `max_loras` they are unloaded, the oldest first, a grace period after they were
last wanted, because proxies still use them. It is longer while a proxy has not taken the present
routing table (`deploy.registry.leases.followed`). Adapters that this registry does not know are
never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from sqlalchemy.orm import Session

from deploy.registry import canaries, routing_writer, versions
from deploy.registry.leases.followed import lines_behind
from sidecar.records import BASE
from sidecar.store.database import Database

UNLOAD_GRACE_S = 30.0
"""How long an adapter is kept after it was last wanted."""
DRAIN_S = 600.0
"""How long an adapter may go on answering after its grace: as long as the proxy waits for vLLM. As
long it stays for a proxy that follows an older table: one that is gone never takes another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """Adapters of all lines that the store wants loaded, with what a load needs."""

    wanted: tuple[str, ...]
    """Names to load, the most urgent first."""
    paths: Mapping[str, str]
    """Name -> folder of every version that is wanted or loaded, the oldest first."""
    rejected: frozenset[str]
    """Adapters that never had traffic and never will: they need no grace period."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Name -> registered digest, of the same versions."""
    followed: frozenset[str] = frozenset()
    """Those that a proxy may still send users to, because it follows an older table. None that was
    rolled back: such a proxy should rather ask for the next adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    load: tuple[str, ...]
    unload: tuple[str, ...]


def make_plan(
    desired: Desired,
    loaded: Collection[str],
    *,
    max_loras: int,
    unwanted_since: Mapping[str, float],
    now: float,
) -> Plan:
    """Plan the changes in vLLM. Pure.

    loaded: every adapter that vLLM lists, also those that are not ours.
    unwanted_since: Unix seconds, for each of our adapters that is loaded and not wanted.
    """
    spare = [name for name in desired.paths if name in loaded and name not in desired.wanted]
    rejected = [name for name in spare if name in desired.rejected]
    kept = [name for name in spare if name not in desired.rejected]
    excess = len(desired.wanted) + len(kept) - max_loras
    due = [
        name
        for name in kept
        if now - unwanted_since.get(name, now)
        >= (DRAIN_S if name in desired.followed else UNLOAD_GRACE_S)
    ]
    return Plan(load=lacking(desired, loaded), unload=(*rejected, *due[: max(0, excess)]))


def lacking(desired: Desired, loaded: Collection[str]) -> tuple[str, ...]:
    """Return the wanted adapters that vLLM does not list, the most urgent first. Pure."""
    return tuple(name for name in desired.wanted if name not in loaded)


def read_desired(
    database: Database, model: str, loaded: Collection[str] = (), *, own: Sequence[str] = ()
) -> Desired:
    """Read from the store which adapters should be loaded.

    model: name of the default line. own: names of the other lines.
    loaded: what vLLM lists; of the registered versions, only these and the wanted ones are read,
        also of a line that the settings do not name any more: it is unloaded by and by.
    """
    with database.read() as session:
        # The most urgent of each line before the less urgent of any.
        ranked = list(zip_longest(*(_names(session, line) for line in (model, *own))))
        names = [name for rank in ranked for some in rank for name in some or ()]
        wanted = tuple(dict.fromkeys(name for name in names if name != BASE))
        registered = versions.named(session, model, {*wanted, *loaded})
        spare = [one for one in registered if one.name not in wanted]
        behind = lines_behind(session) if spare else frozenset()
    return Desired(
        wanted=wanted,
        paths={one.name: one.path for one in reversed(registered)},
        rejected=frozenset(one.name for one in registered if one.state == "rejected"),
        digests={one.name: one.digest for one in registered},
        followed=frozenset(
            one.name for one in spare if one.model in behind and one.state != "rolled_back"
        ),
    )


def registered_path(_digest: str, path: str) -> str:
    """Return the path that the registry has: every machine sees the same folder there."""
    return path


def _names(session: Session, line: str) -> list[list[str]]:
    """Return the adapters that a line wants, "base" among them, the most urgent first."""
    aliases = versions.aliases_of(session, line)
    table = routing_writer.current(session, line)
    canary = canaries.active(session, line)
    tried = canary if canary is not None and canary.phase != "loading" else None
    return [
        [aliases.get("champion", BASE)],
        [] if table is None else [table.champion, table.canary or BASE],
        [] if tried is None else [tried.candidate],
        [aliases.get("previous", BASE)],
        [] if tried is None else [tried.anchor],  # the last: users do not wait for it
    ]

"""Reconcile one vLLM replica's loaded adapters with the store. `fleet` has one for each replica.

A restart of vLLM loses the adapters loaded at run time. So the store says what should be loaded,
and vLLM is compared with it on a timer and after every change. Wanted are the champion, every
target of the routing table, `previous` (so that a rollback needs no load) and the candidate once
its canary has validated it. Other adapters stay while there is capacity: beyond `max_loras` they
are unloaded, the oldest first, a grace period after they were last wanted, because proxies still
use them. It is longer while a proxy has not taken the present routing table
(`deploy.registry.leases.followed`), and while vLLM answers a request with one, or does not tell.
The store keeps since when nothing wants them, so that a restart begins no grace anew. Adapters that
this registry does not know are never touched. A control that does not hold the lease only looks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import structlog
from sqlalchemy.orm import Session

from deploy.engine.checked_load import load_checked
from deploy.engine.vllm_control import AdapterControl
from deploy.errors import AlteredAdapterError, EngineError, InvalidAdapterError, error_line
from deploy.registry import canaries, routing_writer, versions
from deploy.registry.altered import record_altered, record_restored
from deploy.registry.leases.followed import lines_behind
from deploy.registry.leases.unwanted import keep_since
from sidecar.errors import StoreError
from sidecar.records import BASE
from sidecar.store.database import Database

log = structlog.get_logger()

NOT_ASKED = "not asked yet"
UNLOAD_GRACE_S = 30.0
"""How long an adapter is kept after it was last wanted."""
DRAIN_S = 600.0
"""How long an adapter may go on answering after its grace: as long as the proxy waits for vLLM. As
long it stays for a proxy that follows an older table: one that is gone never takes another."""
ALTERED_RETRY_S = 30.0
"""Interval for reading an altered folder again: an operator may have restored it, and hashing it at
every pass would keep a core busy."""


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


@dataclass(slots=True)
class EngineView:
    """Latest view of vLLM in the control process. Kept in memory, for the status page."""

    away: str | None = NOT_ASKED
    loaded: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    """Wanted adapters that vLLM refuses -> reason."""
    replicas: dict[str, EngineView] = field(default_factory=dict)
    """Views of the replicas by base URL; set only in the combined view."""


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
    load = tuple(name for name in desired.wanted if name not in loaded)
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
    return Plan(load=load, unload=(*rejected, *due[: max(0, excess)]))


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


class Reconciler:
    """Reconciles one replica. It remembers only since when adapters are altered, or drain."""

    def __init__(
        self,
        *,
        database: Database,
        control: AdapterControl,
        model: str,
        max_loras: int,
        replica: str = "",
        own: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        acts: Callable[[], bool] = lambda: True,
        folder_of: Callable[[str, str], str] = registered_path,
    ) -> None:
        """model: name of the default line. own: names of the other lines.
        replica: base URL of the replica. acts: False while another control does.
        folder_of: (digest, registered path) -> folder on this machine; it may fetch it, and raises
            LearnerError or OSError.
        """
        self._log = log.bind(replica=replica)
        self._database = database
        self._control = control
        self._model = model
        self._own = own
        self._max_loras = max_loras
        self._clock = clock
        self._replica = replica
        self._acts = acts
        self._folder_of = folder_of
        self._draining: dict[str, float] = {}
        """Adapter -> since when it is to be unloaded and still answers, in Unix seconds."""
        self._asked_room = False
        """Its `--max-loras` is known to be enough, or was told."""
        self._altered_at: dict[str, float] = {}
        """Adapter -> when its folder was last found altered, in Unix seconds."""
        self.view = EngineView()

    async def reconcile(self) -> Plan:
        """Reconcile once. Never raises for vLLM: errors are logged and kept in `view`."""
        try:
            loaded = await self._control.loaded()
        except EngineError as error:
            self._say_away(str(error))
            return Plan(load=(), unload=())
        self._say_back()
        await self._ask_room()
        if not self._acts():
            self.view.loaded = loaded
            return Plan(load=(), unload=())
        desired = await asyncio.to_thread(
            read_desired, self._database, self._model, loaded, own=self._own
        )
        loaded -= await self._unload_altered(loaded)
        plan = await asyncio.to_thread(self._plan, desired, loaded)
        done = [name for name in plan.load if await self._load(name, desired)]
        done = await self._listed(done)
        busy = await self._busy(plan.unload, desired.rejected)
        gone = [name for name in plan.unload if name not in busy and await self._unload(name)]
        self.view.loaded = (loaded | set(done)) - set(gone)
        self.view.refused = {k: v for k, v in self.view.refused.items() if k in desired.wanted}
        return plan

    async def _ask_room(self) -> None:
        """Log once, and again after it was away, when vLLM has less room than the settings say."""
        if self._asked_room:
            return
        try:
            told = (await self._control.room()).max_loras
        except EngineError:
            return  # it answers the next pass, or is away
        self._asked_room = told is not None
        if told is not None and told < self._max_loras:
            self._log.error(
                "max_loras_too_small",
                vllm=told,
                setting=self._max_loras,
                remedy=f"start vLLM with --max-loras {self._max_loras}, or set serving.max_loras "
                f"to {told} (3 at least)",
            )

    async def _busy(self, names: Collection[str], rejected: Collection[str]) -> frozenset[str]:
        """Return those of the adapters that still answer a request: they drain first.

        Not for ever: vLLM's metrics may show a request that has ended until the next one. A vLLM
        that hides its metrics may answer with any that had users.
        """
        if not names:
            return frozenset()
        try:
            room = await self._control.room()
        except EngineError:
            return frozenset(names)  # it is asked again at the next pass
        now, known = self._clock(), frozenset(names)
        answering = room.busy if room.tells else known - frozenset(rejected)
        for name in known & answering:
            self._draining.setdefault(name, now)
        kept = {
            n: min(at, now) for n, at in self._draining.items() if n in known and n in answering
        }
        self._draining = kept
        return frozenset(n for n, at in kept.items() if now - at < DRAIN_S)

    def _plan(self, desired: Desired, loaded: frozenset[str]) -> Plan:
        now = self._clock()
        unwanted = [n for n in loaded if n in desired.paths and n not in desired.wanted]
        since = keep_since(self._database, self._replica, unwanted, now)
        return make_plan(
            desired,
            loaded,
            max_loras=self._max_loras,
            unwanted_since=since,
            now=now,
        )

    async def _load(self, name: str, desired: Desired) -> bool:
        """Load one adapter. An error is logged and does not stop the others."""
        altered_at = self._altered_at.get(name)
        if altered_at is not None and 0.0 <= self._clock() - altered_at < ALTERED_RETRY_S:
            return False  # a clock that was set back delays nothing
        try:
            await self._load_checked(name, desired)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - one bad folder must not keep the others out
            reason = error_line(error)
            if self.view.refused.get(name) != reason:
                self._log.error("adapter_not_loaded", adapter=name, reason=reason)
            self.view.refused[name] = reason
            return False
        self.view.refused.pop(name, None)
        return True

    async def _listed(self, names: Collection[str]) -> list[str]:
        """Return those of the adapters just loaded that vLLM lists. The others count as refused."""
        if not names:
            return []
        try:
            listed = await self._control.loaded()
        except EngineError:
            return list(names)  # the next pass asks again
        for name in names:
            if name not in listed:
                reason = "vLLM said that it loaded it, and does not list it; look at vLLM's log"
                self._log.error("adapter_not_loaded", adapter=name, reason=reason)
                self.view.refused[name] = reason
        return [name for name in names if name in listed]

    async def _load_checked(self, name: str, desired: Desired) -> None:
        if name not in desired.paths:
            raise InvalidAdapterError(
                f"{name} is no registered adapter of {self._model}, and a row of the store names "
                "it (an alias, the canary or the routing table); `sidecar rollback --to VERSION` "
                "writes them anew"
            )
        digest = desired.digests.get(name, "")
        path = await asyncio.to_thread(self._folder_of, digest, desired.paths[name])
        try:
            await load_checked(self._control, name, path, digest)
        except AlteredAdapterError as error:
            reason = error_line(error)
            if self.view.refused.get(name) != reason:
                await asyncio.to_thread(
                    record_altered,
                    self._database,
                    name,
                    replica=self._replica,
                    reason=reason,
                    now=self._clock(),
                )
            self.view.refused[name] = reason
            self._altered_at[name] = self._clock()
            raise
        self._altered_at.pop(name, None)
        await asyncio.to_thread(
            record_restored, self._database, name, replica=self._replica, now=self._clock()
        )
        self._log.info("adapter_loaded", adapter=name)

    async def _unload_altered(self, loaded: frozenset[str]) -> frozenset[str]:
        """Retry to unload adapters whose folder changed during their load."""
        return frozenset([n for n in self._altered_at if n in loaded and await self._unload(n)])

    async def _unload(self, name: str) -> bool:
        try:
            await self._control.unload(name)
        except EngineError as error:
            self._log.warning("adapter_not_unloaded", adapter=name, reason=str(error))
            return False
        self._log.info("adapter_unloaded", adapter=name)
        return True

    def _say_away(self, reason: str) -> None:
        if self.view.away is None or self.view.away == NOT_ASKED:
            self._log.warning("engine_away", reason=reason)
        self.view.away = reason
        self._asked_room = False
        self.view.loaded = frozenset()

    def _say_back(self) -> None:
        if self.view.away is not None:
            self._log.info("engine_reached")
        self.view.away = None

"""Reconcile the loaded adapters of every vLLM with the store; roll back what none can serve.

A restart of vLLM loses the adapters loaded at run time. So the store says what should be loaded
(`deploy.engine.reconcile`), and vLLM is compared with it on a timer and after every change. The
store keeps since when nothing wants an adapter, so that a restart begins no grace anew; one stays
also while vLLM answers a request with it, or does not tell. A control that does not hold the lease
only looks.

A load may take minutes or hang, and people decide meanwhile: before each load and each unload, and
while a load lasts, the store and the lease are read again. A load that is wanted no more, or less
urgently than another, is cut off here; vLLM may end it all the same. So an adapter counts as loaded
only after the comparison of its folder and a probe that began after the load: a vLLM in which it
has no effect loses it again, and is named. That says nothing of the version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import structlog
from sqlalchemy.orm import Session

from deploy.engine.vllm_control import (
    AdapterControl,
    Marks,
    ask_liveness,
    check_unchanged,
    in_folder_thread,
    load_checked,
)
from deploy.errors import AlteredAdapterError, EngineError, InvalidAdapterError, error_line
from deploy.records import nobody_has
from deploy.registry import audit, canaries, routing_writer, versions
from deploy.registry.candidates import record_altered, record_restored
from deploy.registry.leases import keep_since, lines_behind
from deploy.registry.rollback import roll_back_in
from deploy.text import iso
from sidecar import conditions
from sidecar.errors import StoreError
from sidecar.records import BASE
from sidecar.store.database import Database

# Which adapters of all lines the store wants loaded, and what that changes in one vLLM.

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


log = structlog.get_logger()

NOT_ASKED = "not asked yet"
ALTERED_RETRY_S = 30.0
"""Interval for trying again an adapter whose folder was altered, which an operator may have
restored, or that had no effect in this vLLM: hashing at every pass would keep a core busy."""
LOOK_S = 2.0
"""Interval of reading the desired state during a load; a change made by this control is seen at
once."""
LONG_S = 10.0
"""A load that takes longer is told. A sound one takes a second."""


@dataclass(slots=True)
class EngineView:
    """Latest view of vLLM in the control process. Kept in memory, for the status page."""

    away: str | None = NOT_ASKED
    loaded: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)
    """Wanted adapters that vLLM refuses or takes long to load, or without an effect in it ->
    reason."""
    unproven: frozenset[str] = frozenset()
    """Adapters that it lists and that have not passed the probe after their load, or whose load
    takes long: nobody knows yet whether it serves them."""
    loading: str = ""
    """The adapter that it is being given now; empty: none."""
    loading_since: float = 0.0
    """Unix seconds."""
    replicas: dict[str, EngineView] = field(default_factory=dict)
    """Views of the replicas by base URL; set only in the combined view."""


class Reconciler:
    """Reconciles one replica. It remembers which loads it began and has not proved, and since when
    adapters are unsound, or drain."""

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
        changed: asyncio.Event | None = None,
    ) -> None:
        """model: name of the default line, and of the base. own: names of the other lines.
        replica: base URL of the replica. acts: False while another control does.
        folder_of: (digest, registered path) -> folder on this machine; it may fetch it, and raises
            LearnerError or OSError.
        changed: set when somebody changed the desired state.
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
        self._unsound_at: dict[str, float] = {}
        """Adapter -> when its folder was last found altered, or the adapter without an effect, in
        Unix seconds."""
        self._loaded: set[str] = set()
        """What vLLM lists, as far as is known."""
        self._unproven: dict[str, tuple[str, Marks]] = {}
        """Adapter whose load was begun here -> folder and marks; until it passed the probe."""
        self._changed = changed or asyncio.Event()
        self.view = EngineView()

    async def reconcile(self) -> Plan:
        """Reconcile once. Never raises for vLLM: errors are logged and kept in `view`."""
        try:
            self._loaded = set(await self._control.loaded())
        except EngineError as error:
            self._say_away(str(error))
            return Plan(load=(), unload=())
        self._say_back()
        self._show()
        await self._ask_room()
        if not self._acts():
            return Plan(load=(), unload=())
        for unsound in sorted(self._loaded & self._unsound_at.keys()):
            await self._unload(unsound)
        desired = await self._read_desired()
        missing = lacking(desired, self._loaded)
        tried: set[str] = set()
        while self._acts() and (name := self._next(desired, tried)) is not None:
            if await self._bring_unless_overtaken(name, desired, tried):
                tried.add(name)
            self._show()
            desired = await self._read_desired()
        unload = (await asyncio.to_thread(self._plan, desired)).unload
        busy = await self._busy(unload, desired.rejected)
        for spare in unload:
            if spare not in busy and await self._still_goes(spare):
                await self._unload(spare)
        self._show()
        self.view.refused = {k: v for k, v in self.view.refused.items() if k in desired.wanted}
        return Plan(load=missing, unload=unload)

    def _show(self) -> None:
        self.view.loaded = frozenset(self._loaded - self._unproven.keys())
        self.view.unproven = frozenset(self._loaded & self._unproven.keys())

    async def _read_desired(self) -> Desired:
        return await asyncio.to_thread(
            read_desired, self._database, self._model, frozenset(self._loaded), own=self._own
        )

    def _next(self, desired: Desired, tried: Collection[str]) -> str | None:
        """Return the most urgent adapter that is to be loaded, or proved; None: none is."""
        for name in desired.wanted:
            there = name in self._loaded and name not in self._unproven
            if not there and name not in tried and not self._waits(name):
                return name
        return None

    def _waits(self, name: str) -> bool:
        at = self._unsound_at.get(name)  # a clock that was set back delays nothing
        return at is not None and 0.0 <= self._clock() - at < ALTERED_RETRY_S

    async def _bring_unless_overtaken(
        self, name: str, desired: Desired, tried: Collection[str]
    ) -> bool:
        """Load an adapter as long as it is wanted, and nothing else more urgently.

        Returns: False when it was cut off. Raises: StoreError.
        """
        work = asyncio.create_task(self._bring(name, desired))
        self.view.loading, self.view.loading_since = name, self._clock()
        slow = f"its load began at {iso(self._clock())} and goes on: vLLM, or the disk, may hang"
        try:
            while not await self._ended(work):
                if not await self._still_first(name, tried):
                    self._log.warning("adapter_load_cut", adapter=name)
                    return False
                took = self._clock() - self.view.loading_since
                if took >= LONG_S and name not in self.view.refused:
                    self._log.warning("adapter_loads_long", adapter=name, seconds=round(took))
                    self.view.refused[name] = slow
                    self.view.unproven |= {name}
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if self.view.refused.get(name) == slow:
                del self.view.refused[name]
            self.view.loading = ""
        return True

    async def _ended(self, work: asyncio.Task[None]) -> bool:
        """Wait for the end of a load, for a change, or for a while. Returns: True at the end."""
        changed = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({work, changed}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if not work.done():  # else a change stays set: it ends the pause after this pass
            self._changed.clear()
        return work.done()

    async def _still_first(self, name: str, tried: Collection[str]) -> bool:
        """Read again whether an adapter is the next one to be loaded, and by this control."""
        if not self._acts():
            return False
        try:
            return self._next(await self._read_desired(), tried) == name
        except StoreError:
            return True  # as long as the lease is held

    async def _still_goes(self, name: str) -> bool:
        """Read again whether nothing wants an adapter: somebody may have decided meanwhile."""
        plan = await asyncio.to_thread(self._plan, await self._read_desired())
        return self._acts() and name in plan.unload

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

    def _plan(self, desired: Desired) -> Plan:
        now, loaded = self._clock(), frozenset(self._loaded)
        unwanted = [n for n in loaded if n in desired.paths and n not in desired.wanted]
        since = keep_since(self._database, self._replica, unwanted, now)
        return make_plan(
            desired,
            loaded,
            max_loras=self._max_loras,
            unwanted_since=since,
            now=now,
        )

    async def _bring(self, name: str, desired: Desired) -> None:
        """Load one adapter, and prove it. An error is logged and does not stop the others."""
        try:
            if name not in self._loaded:
                await self._load(name, desired)
            await self._prove(name)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - one bad folder must not keep the others out
            reason = error_line(error)
            known = self.view.refused.get(name)
            self.view.refused[name] = reason
            if known != reason:
                self._log.error("adapter_not_loaded", adapter=name, reason=reason)
                if isinstance(error, AlteredAdapterError):
                    await self._record_altered(name, reason)
            return
        self._unsound_at.pop(name, None)
        self.view.refused.pop(name, None)

    async def _load(self, name: str, desired: Desired) -> None:
        if name not in desired.paths:
            raise InvalidAdapterError(
                f"{name} is no registered adapter of {self._model}, and a row of the store names "
                "it (an alias, the canary or the routing table); `sidecar rollback --to VERSION` "
                "writes them anew"
            )
        digest = desired.digests.get(name, "")
        path = await in_folder_thread(self._folder_of, digest, desired.paths[name])

        def begins(marks: Marks) -> None:
            self._unproven[name] = (path, marks)

        try:
            await load_checked(self._control, name, path, digest, begins=begins)
        except AlteredAdapterError:
            self._unsound_at[name] = self._clock()
            raise
        await asyncio.to_thread(
            record_restored, self._database, name, replica=self._replica, now=self._clock()
        )
        self._log.info("adapter_loaded", adapter=name)
        try:
            self._loaded = set(await self._control.loaded())
        except EngineError:
            self._loaded.add(name)  # the probe tells
        if name not in self._loaded:
            raise EngineError(
                "vLLM said that it loaded it, and does not list it; look at vLLM's log"
            )

    async def _prove(self, name: str) -> None:
        """Prove that an adapter is live in this vLLM, if that is not known since its load.

        Raises: AlteredAdapterError when its folder changed during a load that was cut off here;
            EngineError when the adapter is not live, or vLLM does not tell.
        """
        path, marks = self._unproven[name]
        try:
            await check_unchanged(self._control, name, path, marks)
            found = await ask_liveness(self._control, name, model=self._model)
            if not (found.live or found.unsure):  # rather ask twice than unload the champion
                found = await ask_liveness(self._control, name, model=self._model)
        except AlteredAdapterError:
            self._unsound_at[name] = self._clock()
            raise
        except EngineError as error:
            raise EngineError(f"it is loaded, and not proved live yet: {error}") from error
        if found.unsure:
            raise EngineError(f"it is loaded, and not proved live yet: {found.reason}")
        if not found.live:
            self._unsound_at[name] = self._clock()
            gone = "is unloaded again" if await self._unload(name) else "cannot be unloaded"
            raise EngineError(
                f"this vLLM is sick: the adapter has no effect in it ({found.reason}) and {gone}; "
                "restart this vLLM"
            )
        del self._unproven[name]

    async def _record_altered(self, name: str, reason: str) -> None:
        now = self._clock()
        await asyncio.to_thread(
            record_altered, self._database, name, replica=self._replica, reason=reason, now=now
        )

    async def _unload(self, name: str) -> bool:
        try:
            await self._control.unload(name)
        except EngineError as error:
            self._log.warning("adapter_not_unloaded", adapter=name, reason=str(error))
            return False
        self._log.info("adapter_unloaded", adapter=name)
        self._loaded.discard(name)
        return True

    def _say_away(self, reason: str) -> None:
        if self.view.away is None or self.view.away == NOT_ASKED:
            self._log.warning("engine_away", reason=reason)
        self.view.away = reason
        self._asked_room = False
        self.view.loaded = self.view.unproven = frozenset()

    def _say_back(self) -> None:
        if self.view.away is not None:
            self._log.info("engine_reached")
        self.view.away = None


# All vLLM replicas: one reconciler for each, and a combined view.


class Fleet:
    """The replicas of one model, by base URL."""

    def __init__(self, reconcilers: Mapping[str, Reconciler]) -> None:
        """reconcilers: by base URL, at least one."""
        self.reconcilers = dict(reconcilers)

    def view(self) -> EngineView:
        """Combine the latest views of all replicas.

        The engine is away when no replica answers. An adapter is loaded when every reachable
        replica has it, and refused when one of them refuses it.
        """
        views = {url: one.view for url, one in self.reconcilers.items()}
        up = [view for view in views.values() if view.away is None]
        away = "; ".join(str(view.away) for view in views.values())
        refused = {
            name: reason if len(views) == 1 else f"{url}: {reason}"
            for url, view in views.items()
            for name, reason in view.refused.items()
        }
        return EngineView(
            away=None if up else away,
            loaded=frozenset.intersection(*(view.loaded for view in up)) if up else frozenset(),
            refused=refused,
            replicas=views,
        )


# Roll back by itself when no vLLM can serve the champion: refused everywhere, or altered on disk.

MISSING_S = 30.0
"""As long as an operator's restored folder takes to be looked at again (`ALTERED_RETRY_S`)."""
CHECK_S = 2.0
MISSING = "champion"
"""Kind of the condition that says since when no vLLM can serve the champion."""


class ChampionGuard:
    """Checks one model. Only a control that acts calls it."""

    def __init__(
        self,
        database: Database,
        model: str,
        view: Callable[[], EngineView],
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """view: the combined view of all replicas."""
        self._database = database
        self._model = model
        self._view = view
        self._on_change = on_change
        self._clock = clock

    async def check(self) -> bool:
        """Check once. Returns: True when it rolled back. Raises: StoreError."""
        return await asyncio.to_thread(self._check)

    def _check(self) -> bool:
        with self._database.read() as session:
            aliases = versions.aliases_of(session, self._model)
        champion, previous = aliases.get("champion", BASE), aliases.get("previous", BASE)
        view, now = self._view(), self._clock()
        missing = _nobody_serves(view, champion)
        since = self._since(champion if missing else BASE, now)
        if since is None or now - since < MISSING_S:
            return False
        has_it = any(previous in one.loaded for one in view.replicas.values())
        if previous in (BASE, champion) or not has_it:
            return False  # nothing better than the base, which answers already
        why = f"no vLLM can serve {champion}: {view.refused.get(champion, 'it is not loaded')}"
        with self._database.write() as session:
            if versions.aliases_of(session, self._model) != aliases:
                return False  # somebody moved them meanwhile
            done = roll_back_in(
                session,
                self._model,
                to=previous,
                reason=why,
                actor=audit.CONTROL,
                now=now,
                ban=False,
            )
        log.error("rolled_back_by_itself", before=done.before, after=done.after, reason=why)
        self._on_change()
        return True

    def _since(self, champion: str, now: float) -> float | None:
        """Keep since when nobody serves the champion, in the store: a control that is started again
        and again counts on. champion: the base: all is well. Returns: Unix seconds; None: all is
        well."""
        with self._database.read() as session:
            kept = conditions.read(session, MISSING, self._model)
        if champion == BASE and kept is None:
            return None
        same = kept is not None and kept.data.get("adapter") == champion
        if kept is not None and same and kept.since <= now:  # else the clock was set back
            return kept.since
        with self._database.write() as session:
            if champion == BASE:
                conditions.clear(session, MISSING, self._model)
                return None
            found = conditions.Condition(
                kind=MISSING,
                line=self._model,
                state="act",
                code="champion_missing",
                message=f"no vLLM can serve the champion {champion}: the base model answers",
                to_do="correct vLLM's flags or the adapter, or roll back",
                since=now,
                data={"adapter": champion},
            )
            conditions.write(session, found, now=now)
        return now


def _nobody_serves(view: EngineView, champion: str) -> bool:
    """True when some vLLM answers, each that does refuses the champion, and none has it. Pure.

    One that has it and has not proved it yet may well serve it.
    """
    up = [one for one in view.replicas.values() if one.away is None]
    refused = all(champion in one.refused and champion not in one.unproven for one in up)
    return refused and nobody_has(champion, (one.loaded for one in up))

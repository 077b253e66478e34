"""Roll back by itself when no vLLM can serve the champion: refused everywhere, or altered on disk.

Until then the base answers the champion's users, and nobody may be watching. After MISSING_S in
which every vLLM that answers refused to load the champion and none has it, the previous champion
takes over, if one of them has that loaded. Nothing is banned: the files may be sound, and an
operator who restores them names the version in a rollback. The learner is paused, as by any
rollback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from deploy.engine.reconcile import EngineView
from deploy.records import nobody_has
from deploy.registry import audit, versions
from deploy.registry.rollback import roll_back_in
from sidecar.lines import flag_of
from sidecar.records import BASE
from sidecar.store.database import Database, get_flag, set_flag

log = structlog.get_logger()

MISSING_S = 30.0
"""As long as an operator's restored folder takes to be looked at again (`ALTERED_RETRY_S`)."""
CHECK_S = 2.0
FLAG = "champion_missing"
"""Row of the table `flag`: since when nobody serves the champion, and its name; else empty."""


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
        self._flag = flag_of(FLAG, model)

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
            kept = get_flag(session, self._flag) or ""
        at, _, name = kept.partition(" ")
        if champion == BASE and not kept:
            return None
        if champion == name and champion != BASE:
            since = _number(at)
            if since is not None and since <= now:  # else damaged, or the clock was set back
                return since
        with self._database.write() as session:
            told = "" if champion == BASE else f"{now} {champion}"
            set_flag(session, self._flag, told, now=now)
        return None if champion == BASE else now


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _nobody_serves(view: EngineView, champion: str) -> bool:
    """True when some vLLM answers, each that does refuses the champion, and none has it. Pure.

    One that has it and has not proved it yet may well serve it.
    """
    up = [one for one in view.replicas.values() if one.away is None]
    refused = all(champion in one.refused and champion not in one.unproven for one in up)
    return refused and nobody_has(champion, (one.loaded for one in up))

"""Check the metrics of the canary that ramps, and of a champion for a while after its promotion.

Each check is stored with the canary before anything is decided on it: a control that starts again
continues the rows of failures. A provider that hangs holds up its own metric alone; the guards tick
meanwhile. In the ramp the rule decides (`deploy.registry.canary_rule`). After a promotion no rule
ticks any more: here a broken guardrail rolls back to the champion before, for `WATCH_S`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import structlog
from sqlalchemy import select

from deploy.errors import error_line
from deploy.evidence.live import Check, MetricState, add_check, broken_guardrail, outcome_of
from deploy.outside.http import MetricSource, Names, OutsideError, end_turns
from deploy.records import Canary
from deploy.registry import audit, bans, canaries, versions
from deploy.registry.rollback import roll_back_in
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings, Metric
from sidecar.store.database import Database, count
from sidecar.store.models import CanaryRow

log = structlog.get_logger()

WATCH_S = 3_600.0
"""After a promotion, metrics with `mode = "guardrail"` still roll back for this long."""

EVERY_S = 1.0
"""How often the loop looks which metrics are due, and longest wait of a turn for their answers."""
STAGE = "metric"
"""Durable counter of checks, by outcome."""


class MetricChecks:
    """Checks the metrics of one model. Only a control that acts calls it."""

    def __init__(
        self,
        database: Database,
        model: str,
        source: MetricSource,
        rules: CanarySettings,
        *,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._model = model
        self._source = source
        self._rules = rules
        self._on_change = on_change
        self._clock = clock
        self._turns: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Canary and name of a metric -> the check that is being made."""

    @property
    def busy(self) -> bool:
        """True while a metric is still being checked."""
        return bool(self._turns)

    async def tick(self) -> None:
        """Check what is due, and roll back a champion whose guardrail broke.

        A provider that hangs holds up its own metric alone: that check goes on, and the others have
        their turn. Raises: StoreError.
        """
        if not self._rules.metrics:
            return
        watched = await asyncio.to_thread(self._watched)
        for canary in watched:
            self._begin(canary)
        await end_turns(self._turns, within_s=EVERY_S)
        for canary in watched:
            if canary.phase == "promoted":
                await asyncio.to_thread(self._obey, canary.canary_id)

    def _begin(self, canary: Canary) -> None:
        """Begin the checks of a canary that are due and not being made."""
        now = self._clock()
        names = Names(adapter=canary.candidate, champion=canary.champion, canary=canary.canary_id)
        for name, metric in self._rules.metrics.items():
            turn = (canary.canary_id, name)
            if turn not in self._turns and _is_due(canary.metrics.get(name), metric, now):
                self._turns[turn] = asyncio.create_task(self._look(name, metric, names))

    async def _look(self, name: str, metric: Metric, names: Names) -> None:
        check = await self._check(metric, names)
        await asyncio.to_thread(self._store, names.canary, name, check)

    def _watched(self) -> list[Canary]:
        """Return the canary that ramps, and the one that made the champion within `WATCH_S`."""
        with self._database.read() as session:
            active = canaries.active(session, self._model)
            champion = versions.champion(session, self._model)
            newest = (
                select(CanaryRow)
                .where(CanaryRow.candidate == champion, CanaryRow.state == "promoted")
                .order_by(CanaryRow.created_at.desc())
            )
            row = session.scalars(newest.limit(1)).first()
            made = canaries.to_canary(row) if row is not None else None
        found = [active] if active is not None and active.phase == "ramping" else []
        if made is not None and made.ended_at is not None:
            age_s = self._clock() - made.ended_at
            found += [made] if 0.0 <= age_s < WATCH_S else []
        return found

    async def _check(self, metric: Metric, names: Names) -> Check:
        try:
            value = await self._source.read(metric, names)
        except OutsideError as error:
            return Check(at=self._clock(), outcome="error", why=error_line(error)[:500])
        outcome = outcome_of(value, metric.min, metric.max)
        why = "the provider has no data" if outcome == "no_data" else ""
        if value is not None and math.isinf(value):
            value, why = None, "the value is infinite"  # JSON has no infinity
        shown = None if outcome == "no_data" else value
        return Check(at=self._clock(), outcome=outcome, value=shown, why=why)

    def _store(self, canary_id: str, name: str, check: Check) -> None:
        metric = self._rules.metrics[name]
        with self._database.write() as session:
            row = canaries.find_row(session, canary_id)
            known = canaries.to_canary(row).metrics
            states = {one: state for one, state in known.items() if one in self._rules.metrics}
            before = states.get(name, MetricState())
            state = replace(
                before,
                mode=metric.mode,
                min=metric.min,
                max=metric.max,
                fails_at=metric.failures,
                errs_at=metric.errors,
            )
            states[name] = add_check(state, check)
            count(session, STAGE, check.outcome)
            kept = {one: asdict(state) for one, state in states.items()}
            canaries.add_evidence(row, metrics=kept)
        if check.outcome in ("error", "failing"):
            # A warning when it begins; a dry run that fails for days would say so every minute.
            begins = (before.errors if check.outcome == "error" else before.failures) == 0
            (log.warning if begins else log.info)(
                "metric_checked",
                metric=name,
                outcome=check.outcome,
                value=check.value,
                why=check.why,
                in_a_row=max(states[name].errors, states[name].failures),
            )

    def _obey(self, canary_id: str) -> None:
        """Roll back the champion that this canary made, if a guardrail broke since."""
        with self._database.read() as session:
            canary = canaries.to_canary(canaries.find_row(session, canary_id))
        broken = broken_guardrail(canary.metrics, since=canary.ended_at or 0.0)
        if broken is None:
            return
        reason, now = f"after its promotion: {broken}", self._clock()
        with self._database.write() as session:
            aliases = versions.aliases_of(session, self._model)
            previous = aliases.get("previous", BASE)
            if aliases.get("champion") != canary.candidate or previous == canary.candidate:
                return  # somebody was faster, or there is none before it
            # A candidate that is on canary meanwhile is not banned with it.
            done = roll_back_in(
                session,
                self._model,
                to=previous,
                reason=reason,
                actor=audit.CONTROL,
                now=now,
                ban=False,
            )
            bans.ban(session, canary.candidate, now=now, actor=audit.CONTROL, reason=reason)
        log.error("rolled_back_by_itself", before=done.before, after=done.after, reason=broken)
        self._on_change()


def _is_due(state: MetricState | None, metric: Metric, now: float) -> bool:
    last = state.last if state is not None else None
    # A clock that was set back must not keep a metric from being checked.
    return last is None or not 0.0 <= now - last.at < metric.every_s

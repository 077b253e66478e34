"""The canary controller: every tick reads the active canary and advances it by one decision.

A canary's phase, clock and evidence are in the store, so a restarted controller continues where a
killed one stopped; what it keeps in memory is read from the store again, with the same result.

Each tick gathers evidence (disk, vLLM, judge, store), applies the pure rule
(`deploy.registry.canary_rule`) and writes the decision in one transaction. The decision is
discarded when an operator changed the canary meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import structlog
from sqlalchemy import func, select

from deploy.canary import ramp_counts, tick_errors
from deploy.canary.approving import with_approval
from deploy.canary.facts import guard_facts, quality_facts, step_facts
from deploy.canary.gate import Gate
from deploy.canary.judged import Judged
from deploy.canary.live_turns import LiveTurns
from deploy.canary.loading import Facts, load_everywhere
from deploy.engine.checked_load import in_folder_thread
from deploy.engine.desired import registered_path
from deploy.engine.validation import Registered, ServingLimits, validate_folder
from deploy.engine.vllm_control import AdapterControl
from deploy.errors import error_line
from deploy.records import AdapterVersion, Canary
from deploy.registry import audit, canaries, candidates, routing_writer, transitions, versions
from deploy.registry.canary_rule import (
    Decision,
    Evidence,
    GateEvidence,
    Hold,
    LoadEvidence,
    Move,
    decide,
    load_wait_s,
)
from learner.errors import SharedFolderError
from learner.runs.publish import document_digests
from sidecar.lines import Line
from sidecar.settings import Approval
from sidecar.settings import Canary as CanarySettings
from sidecar.store.database import Database
from sidecar.store.models import ExchangeRow

log = structlog.get_logger()

CLOCK_SLACK_S = 5.0
"""How far a mark of a canary may be ahead of the clock: another machine may have set it."""


class Controller:
    """Advances the canaries of one line of adapters. `tick` may be repeated at any time."""

    def __init__(
        self,
        *,
        database: Database,
        replicas: Mapping[str, AdapterControl],
        gate: Gate,
        rules: CanarySettings,
        limits: ServingLimits,
        model: str,
        line: Line | None = None,
        approval: Approval | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        folder_of: Callable[[str, str], str] = registered_path,
    ) -> None:
        """replicas: every vLLM replica, by base URL. model: name of the line.
        line: the same as a record; None: the default line of a model without others.
        approval: None asks nobody.
        folder_of: as of `deploy.engine.reconcile.Reconciler`.
        on_change: called after every transition, so that vLLM is reconciled at once."""
        self._database = database
        self._replicas = replicas
        self._gate = gate
        self._rules = rules
        self._limits = limits
        self._model = model
        self._approval = approval or Approval()
        self._judged = Judged(rules)
        self._line = line or Line(name=model)
        self._turns = LiveTurns(rules, self._line)
        self._on_change = on_change
        self._clock = clock
        self._folder_of = folder_of
        self._last_hold: tuple[object, ...] = ()

    async def tick(self) -> None:
        """Advance the active canary by one decision, or begin the next canary.

        Raises: StoreError, EngineError or another OSError, which no canary causes. Any other error
        counts against the canary, and too many of them end it.
        """
        canary = await asyncio.to_thread(self._active_canary)
        if canary is None:
            return
        try:
            moved = await self._step(canary)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - one bad candidate must not end the others
            moved = await asyncio.to_thread(self._count_error, canary, error)
        if moved:
            self._on_change()

    async def settle(self) -> None:
        """Wait, as long as a stop may take, for judgements that the store has not taken yet."""
        await self._gate.settle()

    async def _step(self, canary: Canary) -> bool:
        """Gather evidence and decide. Returns: True when the canary changed its phase or step."""
        if canary.phase == "ramping" and await asyncio.to_thread(self._obey_breaker, canary):
            return True
        if canary.paused or tick_errors.waits(canary, self._clock()):
            return False
        canary = await asyncio.to_thread(self._follow_clock, canary)
        evidence, facts = await self._gather(canary)
        if canary.tick_errors:
            facts = {**facts, "tick_errors": {}}
        now = self._clock()
        decision = decide(canary, evidence, self._rules, now)
        asked = with_approval(canary, decision, self._approval, now)
        return await asyncio.to_thread(
            self._apply, canary, asked.decision, facts | asked.facts, ban=not asked.denied
        )

    def _count_error(self, canary: Canary, error: Exception) -> bool:
        log.error(
            "canary_tick_failed",
            canary=canary.canary_id,
            candidate=canary.candidate,
            error=error_line(error),
            tries=canary.tick_errors + 1,
            exc_info=error if not canary.tick_errors else None,
        )
        with self._database.write() as session:
            return tick_errors.record(session, canary, error, now=self._clock())

    def _active_canary(self) -> Canary | None:
        with self._database.read() as session:
            table = routing_writer.current(session, self._model)
            row = canaries.active_row(session, self._model)
            canary = None if row is None else canaries.to_canary(row)
            lost = canary is not None and not canaries.is_there(session, canary.canary_id)
            waits = candidates.has_waiting(session, self._model)
        if lost:
            self._end_damaged()
            return None
        if table is None or not routing_writer.agrees(table, canary):
            self._mend_routing()
        if not waits:
            return canary
        with self._database.write() as session:
            found = candidates.begin_next(
                session, self._model, steps=self._rules.ramp, now=self._clock()
            )
        if canary is None and found is not None:
            log.info("canary_began", canary=found.canary_id, candidate=found.candidate)
        return found

    def _end_damaged(self) -> None:
        """End a canary whose row is found by its state alone: no decision could be written."""
        with self._database.write() as session:
            row = canaries.active_row(session, self._model)
            before = None if row is None else canaries.to_canary(row)
            if row is None or before is None or canaries.is_there(session, before.canary_id):
                return  # somebody was faster
            why, now = "nothing can be decided about it", self._clock()
            log.error("canary_row_damaged", canary=before.canary_id, candidate=before.candidate)
            transitions.end_damaged(session, row, before, reason=why, now=now, actor=audit.CONTROL)
        self._on_change()

    def _mend_routing(self) -> None:
        """Write a routing table anew that is damaged or absent, or that sends users to a canary
        that the store does not have any more: nobody would decide about that one."""
        with self._database.write() as session:
            table = routing_writer.write(session, self._model, now=self._clock())
        log.warning("routing_table_mended", generation=table.generation, champion=table.champion)

    def _follow_clock(self, canary: Canary) -> Canary:
        """Let a ramp go on whose clock was set back. Returns: the canary as it is now."""
        ahead = max(canary.step_started_at, canary.ramp_began_at) - self._clock()
        if canary.phase != "ramping" or ahead <= CLOCK_SLACK_S:
            return canary
        with self._database.write() as session:
            row = canaries.find_row(session, canary.canary_id)
            if (row.salt, row.generation) != (canary.salt, canary.generation):
                return canary  # an operator was faster: the next tick reads the canary again
            found = transitions.follow_clock(session, row, now=self._clock())
        log.error("clock_set_back", canary=canary.canary_id, seconds=ahead)
        return found

    def _obey_breaker(self, canary: Canary) -> bool:
        """Apply a trip of a proxy's breaker. Returns: True when the canary now records one."""
        with self._database.read() as session:
            why = canaries.breaker_trip(session, canary)
        if why is None or canary.taken_out is not None:
            return False
        with self._database.write() as session:
            row = canaries.find_row(session, canary.canary_id)
            if (row.salt, row.generation) != (canary.salt, canary.generation):
                return False  # an operator was faster: the next tick reads the canary again
            after = transitions.take_out(session, row, why=why, now=self._clock())
        log.warning(
            "canary_taken_out_by_breaker",
            canary=canary.canary_id,
            candidate=canary.candidate,
            after=after.phase,
            paused=after.paused,
            reason=why,
        )
        return True

    async def _gather(self, canary: Canary) -> tuple[Evidence, Facts]:
        if canary.phase == "loading":
            return await self._load(canary)
        if canary.phase == "gating":
            gate = await self._gate.advance(canary)
            quality = quality_facts(gate.quality, canary.proven, self._rules)
            return gate, {"gate": _gate_facts(gate), "quality": quality}
        return await asyncio.to_thread(self._read_ramp, canary)

    def _read_ramp(self, canary: Canary) -> tuple[Evidence, Facts]:
        open_from, rules = self._gate.open_from(canary), self._rules
        with self._database.read() as session:
            counts = ramp_counts.count_ramp(
                session,
                canary,
                step_min_exchanges=rules.step_min_exchanges,
                step_min_sessions=rules.step_min_sessions,
                line=self._line,
            )
            quality = self._judged.read(session, canary, open_from=open_from)
            live, behind = self._turns.read(session, canary, self._clock())
        evidence = replace(
            counts,
            guards=live.guards,
            mismatch=live.mismatch,
            behind=behind,
            quality=quality,
            carried=self._judged.carried,
            proven=canary.proven,
            away=self._gate.away(canary),
            metrics=canary.metrics,
        )
        return evidence, {
            f"step_{canary.step + 1}": step_facts(canary, evidence),
            "guards": guard_facts(live, behind, rules),
            "quality": quality_facts(quality, canary.proven, rules),
        }

    async def _load(self, canary: Canary) -> tuple[LoadEvidence, Facts]:
        version, registered, loading = await asyncio.to_thread(self._candidate, canary)
        failures, now = loading.get("failures", 0), self._clock()
        partly = loading.get("partly") is True
        waits = LoadEvidence(load_failures=failures, partly=partly)
        if failures and 0.0 <= now - loading["at"] < load_wait_s(failures):
            return replace(waits, away=loading["reason"]), {}
        try:
            path = await in_folder_thread(self._folder_of, version.digest, version.path)
        except SharedFolderError as error:  # it may pass, and says nothing of the candidate
            return replace(waits, away=error_line(error)), {}
        version = replace(version, path=path)

        async def validate() -> None:
            await in_folder_thread(validate_folder, Path(version.path), registered, self._limits)

        evidence, facts = await load_everywhere(
            self._replicas,
            version,
            model=self._line.model,
            failures=failures,
            validate=validate,
            max_base_kl=self._rules.max_base_kl,
        )
        evidence = replace(evidence, partly=evidence.partly or partly)
        if evidence.load_failures > failures:
            facts["loading"] = {
                "failures": evidence.load_failures,
                "at": now,
                "reason": evidence.away,
                "partly": evidence.partly,
            }
        return evidence, facts

    def _candidate(self, canary: Canary) -> tuple[AdapterVersion, Registered, Facts]:
        """Return the candidate, its registered digests, and the evidence of failed loads."""
        with self._database.read() as session:
            row = canaries.find_row(session, canary.canary_id)
            loading = canaries.entry(row, "loading")
            version = versions.find(session, canary.candidate)
            documents = document_digests(session, canary.candidate)
            return version, Registered(digest=version.digest, documents=documents), loading

    def _apply(self, canary: Canary, decision: Decision, facts: Facts, *, ban: bool = True) -> bool:
        """Write a decision. Returns: True when the canary changed its phase or step."""
        # A hold that repeats the last one needs no write and no lock, which others wait for.
        hold = (canary.canary_id, canary.generation, decision, facts)
        if isinstance(decision, Hold) and hold == self._last_hold:
            return False
        with self._database.write() as session:
            now = self._clock()
            if isinstance(decision, Move) and (canary.phase, decision.to) == ("gating", "ramping"):
                newest = session.scalar(select(func.max(ExchangeRow.seq))) or 0
                facts = {**facts, "ramp": {"began_at": now, "after_seq": newest}}
            applied = transitions.apply(session, canary, decision, evidence=facts, now=now, ban=ban)
        self._last_hold = hold
        if not applied:
            log.info("canary_changed_meanwhile", canary=canary.canary_id)
            return False
        if isinstance(decision, Move):
            log.info(
                "canary_moved",
                canary=canary.canary_id,
                candidate=canary.candidate,
                before=canary.phase,
                after=decision.to,
                step=decision.step,
                reason=decision.reason,
            )
        elif decision.reason != canary.reason:
            log.info("canary_holds", canary=canary.canary_id, reason=decision.reason)
        return isinstance(decision, Move)


def _gate_facts(evidence: GateEvidence) -> Facts:
    return {
        **asdict(evidence.verdict),
        "prompts": evidence.prompts,
        "pending": evidence.pending,
        "away": evidence.away,
        "judge_gives_reward": evidence.judge_gives_reward,
    }

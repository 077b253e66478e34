"""The canary controller: each tick advances the active canary by one decision.

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from deploy.canary import live_turns
from deploy.canary.client_reports import ClientReports
from deploy.canary.gate import Gate
from deploy.canary.gate_store import Judged
from deploy.canary.live_turns import LiveTurns
from deploy.canary.loading import Facts, load_everywhere
from deploy.engine.reconcile import registered_path
from deploy.engine.validation import Registered, ServingLimits, validate_folder
from deploy.engine.vllm_control import AdapterControl, in_folder_thread
from deploy.errors import error_line
from deploy.evidence.betting import Bets
from deploy.evidence.live import (
    Approval,
    ClientReportState,
    GuardState,
    Live,
    Stage,
    described,
    verdict,
)
from deploy.evidence.quality import CHART_LEVEL, Quality, Sequence, bounds
from deploy.outside.approval import APPROVAL_EVERY_S, APPROVAL_MAX_WAIT_S
from deploy.records import AdapterState, AdapterVersion, Canary
from deploy.registry import canaries, candidates, routing_writer, transitions, versions
from deploy.registry.canary_rule import (
    Decision,
    Evidence,
    GateEvidence,
    Hold,
    LoadEvidence,
    Move,
    RampEvidence,
    decide,
    load_wait_s,
)
from deploy.registry.proof_rule import CLAIMS, SPLIT_LEVEL, client_guard_words, level_of, proven
from learner.errors import SharedFolderError
from learner.runs.publish import document_digests
from sidecar.backoff import Backoff
from sidecar.lines import Line, public_model
from sidecar.settings import Approval as ApprovalSettings, Canary as CanarySettings
from sidecar.store.database import Database, count
from sidecar.store.models import COUNTED, ExchangeRow, FeedbackRow
from sidecar.visible import counted

# The evidence of a canary as JSON, as the store keeps it and people read it. Pure.

EvidenceJson = dict[str, Any]  # Any: JSON
_COUNTS = ("candidate", "champion", "champion_before")


def step_facts(canary: Canary, evidence: RampEvidence) -> EvidenceJson:
    """Return the progress of a step."""
    return {
        "weight_bp": canary.weight_bp,
        **{name: asdict(getattr(evidence, name)) for name in _COUNTS},
        "seen": evidence.seen,
        "sessions": evidence.sessions,
        "missing_in_a_row": evidence.missing_in_a_row,
        "conversations": evidence.conversations,
        "in_both_arms": evidence.in_both_arms,
    }


def guard_facts(live: Live, behind: bool) -> EvidenceJson:
    """Return what users' sessions say, by guard."""
    return {
        "sessions": {"canary": live.canary_units, "champion": live.champion_units},
        "behind": behind,
        "forgotten": live.forgotten,
        "late": dict(live.late),
        "split": _claim(live.split, SPLIT_LEVEL),
        **{kind: _guard(kind, state) for kind, state in live.guards.items()},
        **{kind: _told(kind, state) for kind, state in live.told.items()},
    }


def quality_facts(quality: Quality, before: frozenset[str], rules: CanarySettings) -> EvidenceJson:
    """Return what judged groups say. before: claims that were proven by an earlier look."""
    low, high = _interval(quality.chart)
    flaws: Mapping[str, Bets] = quality.flaws
    return {
        "groups": quality.groups,
        "lost": quality.lost,
        "unknown": quality.unknown,
        "champion_lost": quality.champion_lost,
        "low": low,
        "high": high,
        "to_anchor": {
            "candidate": _interval(quality.to_anchor),
            "champion": _interval(quality.champion_to_anchor),
        },
        "proven": sorted(before | proven(quality, rules)),
        **{name: _claim(getattr(quality, name), level_of(name)) for name in (*CLAIMS, "harm")},
        "flaws": {kind: _claim(bets, level_of(kind)) for kind, bets in flaws.items()},
    }


def _interval(chart: Sequence) -> tuple[float, float]:
    """Return the bounds of a difference, -1..1, which hold at all looks together."""
    low, high = bounds(chart, CHART_LEVEL)
    return 2.0 * low - 1.0, 2.0 * high - 1.0


def _guard(kind: str, state: GuardState) -> EvidenceJson:
    counts = {"canary": state.canary, "champion": state.champion, "callers": state.callers}
    claim = _claim(state.bets, level_of(kind))
    return counts | claim | {"nats_by_caller": state.by_caller.peak}


def _told(kind: str, state: ClientReportState) -> EvidenceJson:
    arms = {"canary": True, "champion": False}
    return _guard(kind, state) | {
        "sessions": {name: state.units[arm] for name, arm in arms.items()},
        "mean": {name: state.mean(canary=arm) for name, arm in arms.items()},
        "says": client_guard_words(kind, state) if sum(state.units.values()) else "",
    }


def _claim(bets: Bets, level: float) -> EvidenceJson:
    """Return an e-process: `nats`, the logarithm of its largest evidence so far, which decides, and
    the evidence that is the `threshold`."""
    return {
        "nats": bets.peak,
        "nats_now": bets.log_e,
        "reached_at": bets.peak_at,
        "observations": bets.observations,
        "threshold": 1.0 / level,
    }


# Put the operator's approval service between a decision and what it does. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A decision after the service was heard."""

    decision: Decision
    facts: EvidenceJson = field(default_factory=dict)
    """What the evidence keeps of it."""
    denied: bool = False
    """The service took the candidate out: no verdict on its files, which are not banned."""


def with_approval(
    canary: Canary, decision: Decision, settings: ApprovalSettings, now: float
) -> Asked:
    """Return the decision, held back or turned down where it wants approval.

    What ends a canary, and what moves it from step to step, wants none. now: Unix seconds.
    """
    stage = _stage(canary, decision)
    known = canary.approval
    if not settings.url or stage not in settings.before or stage is None:
        # A move that is no longer due waits for nothing; when it is due again, it asks anew.
        forget = isinstance(decision, Hold) and known is not None and not canary.paused
        return Asked(decision=decision, facts={"approval": {}} if forget else {})
    found = verdict(known, stage, holds_s=APPROVAL_EVERY_S, max_wait_s=APPROVAL_MAX_WAIT_S, now=now)
    hears = known is not None and known.before == stage and known.answer in ("wait", "error")
    waits = Hold(reason=described(known, stage), stops_clock=True, needs="act" if hears else "look")
    if found == "begin":
        return Asked(decision=waits, facts={"approval": asdict(Approval(before=stage, since=now))})
    if found == "wait" or known is None:
        return Asked(decision=waits)
    if found == "deny":
        state: AdapterState = "rejected" if stage == "ramp" else "rolled_back"
        reason = f"the approval service denied the {stage}: {known.reason}"
        return Asked(
            decision=Move(to="rolled_back", candidate_state=state, reason=reason), denied=True
        )
    if found == "give_up":
        reason = f"no approval of the {stage} in {APPROVAL_MAX_WAIT_S:g} s: {waits.reason}"
        return Asked(decision=Move(to="inconclusive", candidate_state="retired", reason=reason))
    assert isinstance(decision, Move)
    approved = f"{decision.reason}; approved: {known.reason}"
    return Asked(decision=replace(decision, reason=approved))


def _stage(canary: Canary, decision: Decision) -> Stage | None:
    """Return what a decision would begin, if the service may be asked about it."""
    if not isinstance(decision, Move):
        return None
    if decision.to == "promoted":
        return "promotion"
    return "ramp" if (canary.phase, decision.to) == ("gating", "ramping") else None


# Controller errors caused by a canary: too many in a row end the canary.

MAX_TICK_ERRORS = 5
"""Consecutive errors that end a canary. With the waits between them they span 30 s: longer than a
passing lack of threads or descriptors, shorter than the next candidate should wait."""
WAITS = Backoff(first_s=2.0)


def waits_for_errors(canary: Canary, now: float) -> bool:
    """Return True while the retry after an error is not due: 2 s, doubling with each error."""
    if not canary.tick_errors:
        return False
    return 0.0 <= now - canary.tick_error_at < WAITS.wait_s(canary.tick_errors)


def record(session: Session, canary: Canary, error: Exception, *, now: float) -> bool:
    """Count an error, and end the canary at the last one. Returns: True when it ended.

    Works in the caller's write transaction.
    """
    reason, tries = error_line(error), canary.tick_errors + 1
    count(session, "tick", type(error).__name__[:64])
    decision: Decision
    if tries < MAX_TICK_ERRORS:
        decision = Hold(reason=f"try {tries} of {MAX_TICK_ERRORS}: {reason}", stops_clock=True)
    else:
        state: AdapterState = "rolled_back" if canary.phase == "ramping" else "rejected"
        in_a_row = counted(tries, "try", "tries")
        decision = Move(
            to="rolled_back",
            candidate_state=state,
            reason=f"{in_a_row} in a row ended with an error, the last with {reason}",
        )
    evidence = {"tick_errors": {"count": tries, "at": now, "last": reason}}
    applied = transitions.apply(session, canary, decision, evidence=evidence, now=now, ban=False)
    return applied and isinstance(decision, Move)


# Count the conversations of a ramp whose turns met both arms, from the `exchange` table.

NEWEST = 2_000
"""Newest exchanges of each arm that are read: the share is of what happens now."""
_ROW = ExchangeRow


class _Turn(NamedTuple):
    arm: str
    propensity: float
    seq: int
    fallback_from: str

    @property
    def weight_bp(self) -> int:
        """The canary's weight when it was assigned."""
        weight = self.propensity if self.arm == "canary" else 1.0 - self.propensity
        return round(10_000 * weight)


_TURN = tuple(getattr(_ROW, name) for name in _Turn._fields)


def count_conversations(session: Session, canary: Canary, line: Line) -> tuple[int, int]:
    """Return the number of conversations among the newest exchanges of the ramp, and of those of
    them whose turns met both arms."""
    conversations, both = set[str](), set[str]()
    for arm, adapter in (("canary", canary.candidate), ("champion", canary.champion)):
        statement = (
            select(_ROW.session_id, _ROW.project, _ROW.parent_id, _ROW.placed_by, *_TURN)
            .where(
                _ROW.public_model == public_model(canary.model),
                _ROW.adapter == adapter,
                _ROW.arm == arm,
                text(COUNTED),
                _ROW.seq > canary.ramp_after_seq,
            )
            .order_by(_ROW.seq.desc())
            .limit(NEWEST)
        )
        rows = [row for row in session.execute(statement) if line.has(row.project)]
        conversations.update(row.session_id for row in rows)
        linked = {row.parent_id for row in rows if row.parent_id and row.placed_by != "called"}
        parents = {
            name: _Turn(*turn)
            for name, *turn in session.execute(
                select(_ROW.exchange_id, *_TURN).where(_ROW.exchange_id.in_(linked))
            )
        }
        for row in rows:
            parent = parents.get(row.parent_id) if row.placed_by != "called" else None
            if parent is None or parent.seq <= canary.ramp_after_seq or parent.fallback_from:
                continue
            turn = _Turn(row.arm, row.propensity, row.seq, "")
            if turn.arm != parent.arm and turn.weight_bp == parent.weight_bp:
                both.add(row.session_id)
    return len(conversations), len(both)


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
        line: Line,
        approval: ApprovalSettings | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
        folder_of: Callable[[str, str], str] = registered_path,
    ) -> None:
        """replicas: every vLLM replica, by base URL.
        approval: None asks nobody.
        folder_of: as of `deploy.engine.reconcile.Reconciler`.
        on_change: called after every transition, so that vLLM is reconciled at once."""
        self._database = database
        self._replicas = replicas
        self._gate = gate
        self._rules = rules
        self._limits = limits
        self._approval = approval or ApprovalSettings()
        self._judged = Judged(rules)
        self._line = line
        self._turns = LiveTurns(rules, line)
        self._told = ClientReports(rules.turn_wait_s, line)
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
        if canary.paused or waits_for_errors(canary, self._clock()):
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
            return record(session, canary, error, now=self._clock())

    def _active_canary(self) -> Canary | None:
        with self._database.read() as session:
            table = routing_writer.current(session, self._line.name)
            row = canaries.active_row(session, self._line.name)
            canary = None if row is None else canaries.to_canary(row)
            lost = canary is None and "canary" in versions.aliases_of(session, self._line.name)
            waits = candidates.has_waiting(session, self._line.name)
        if lost:
            self._end_lost()
            return None
        if table is None or not routing_writer.agrees(table, canary):
            self._mend_routing()
        if not waits:
            return canary
        with self._database.write() as session:
            found = candidates.begin_next(
                session, self._line.name, steps=self._rules.ramp, now=self._clock()
            )
        if canary is None and found is not None:
            log.info("canary_began", canary=found.canary_id, candidate=found.candidate)
        return found

    def _end_lost(self) -> None:
        """End a canary whose row went into quarantine."""
        with self._database.write() as session:
            candidate = transitions.end_lost(session, self._line.name, now=self._clock())
        log.error("canary_row_lost", candidate=candidate)
        self._on_change()

    def _mend_routing(self) -> None:
        """Write a routing table anew that is damaged or absent, or that sends users to a canary
        that the store does not have any more: nobody would decide about that one."""
        with self._database.write() as session:
            table = routing_writer.write(session, self._line.name, now=self._clock())
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
            counts = live_turns.count_ramp(
                session,
                canary,
                step_min_exchanges=rules.step_min_exchanges,
                step_min_sessions=rules.step_min_sessions,
                line=self._line,
            )
            quality = self._judged.read(session, canary, open_from=open_from)
            now = self._clock()
            live, behind = self._turns.read(session, canary, now)
            behind |= self._told.read(session, canary, live, now)
            conversations, in_both_arms = count_conversations(session, canary, self._line)
        evidence = replace(
            counts,
            guards=live.guards | live.told,
            conversations=conversations,
            in_both_arms=in_both_arms,
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
            "guards": guard_facts(live, behind),
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
            dict(self._replicas),  # replicas may come and go meanwhile
            version,
            model=self._line.model,
            failures=failures,
            validate=validate,
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
                told = session.scalar(select(func.max(FeedbackRow.seq))) or 0
                marks = {"began_at": now, "after_seq": newest, "after_told": told}
                facts = {**facts, "ramp": marks}
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

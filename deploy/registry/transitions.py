"""Change canaries in the store: begin, move, hold, pause, resume, abort, promote, skip a step.

Every function works in the caller's write transaction and writes all that belongs to one change:
the canary, the adapters' states, the aliases, the routing table and the audit row. `apply` is a
compare-and-set: it discards a decision on a canary that an operator has changed meanwhile.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.records import LOADS, AdapterState, Canary, Phase, version_of
from deploy.registry import (
    audit,
    bans,
    canaries,
    canaries as waiting,
    proof_rule,
    routing_writer,
    versions,
)
from deploy.registry.canary_rule import Hold, Move
from sidecar import conditions
from sidecar.lines import project_of
from sidecar.records import BASE
from sidecar.routing.breaker_rule import FEW_CALLERS
from sidecar.store.database import count
from sidecar.store.models import CanaryRow


def begin(
    session: Session,
    *,
    model: str,
    candidate: str,
    steps: tuple[int, ...],
    now: float,
    actor: str,
    reason: str = "a registered adapter waits",
    row: CanaryRow | None = None,
) -> Canary:
    """Begin the canary of a registered adapter against the current champion.

    row: the queued canary that begins; None makes a new one.
    """
    before = None if row is None else canaries.to_canary(row)
    if row is None:
        row = waiting.new_row(model=model, candidate=candidate, now=now)
        session.add(row)
    row.champion = versions.champion(session, model)
    row.state, row.reason = "loading", LOADS
    row.created_at = row.step_started_at = now
    row.generation = 1 if before is None else before.generation + 1
    anchor = versions.aliases_of(session, model).get("anchor", BASE)
    canaries.add_evidence(row, steps=list(steps), anchor=anchor)
    tries = canaries.earlier_tries(session, model, candidate, row.champion, anchor)
    if tries:
        began = tries[0].created_at
        canaries.add_evidence(row, tries=[one.canary_id for one in tries], tried_since=began)
    versions.set_state(session, candidate, "gating")
    session.flush()
    versions.move_alias(
        session, model=model, alias="canary", to=candidate, now=now, actor=actor, reason=reason
    )
    canary = canaries.to_canary(row)
    _audit(session, before, canary, now=now, actor=actor, reason=reason)
    return canary


def apply(
    session: Session,
    canary: Canary,
    decision: Hold | Move,
    *,
    evidence: Mapping[str, Any],
    now: float,
    actor: str = audit.CONTROL,
    ban: bool = True,
) -> bool:
    """Write a decision on `canary` and its evidence.

    Returns: False, with nothing written, when the row has changed since the decision was made.
    """
    row = canaries.find_row(session, canary.canary_id)
    found = canaries.to_canary(row)
    if (found.phase, found.generation, found.paused) != (
        canary.phase,
        canary.generation,
        canary.paused,
    ):
        return False
    if canaries.breaker_trip(session, canary) is not None and canary.phase == "ramping":
        return False  # the breaker tripped during the decision; the next tick rolls back
    canaries.add_evidence(row, **evidence)
    if isinstance(decision, Hold):
        _hold(session, row, decision, now)
    else:
        _move(session, row, decision, now=now, actor=actor, ban=ban)
    return True


def pause(session: Session, row: CanaryRow, *, reason: str, now: float, actor: str) -> Canary:
    """Stop all decisions and keep the traffic weight. No effect on a paused or ended canary.

    Raises: TransitionError when the canary is queued: it decides nothing yet.
    """
    before = canaries.to_canary(row)
    if before.phase == "queued":
        raise TransitionError(f"canary {row.canary_id} is queued; abort takes it out of the queue")
    if before.paused or not before.active:
        return before
    row.paused = True
    row.reason = f"paused: {reason}"
    row.generation = before.generation + 1
    _stop_clock(row, now)
    return _changed(session, row, before, now=now, actor=actor, reason=reason)


def take_out(
    session: Session, row: CanaryRow, *, why: str, now: float, actor: str = audit.CONTROL
) -> Canary:
    """Apply a trip of the proxy's breaker: roll back, or stop the traffic of a paused canary.

    A trip that few callers may have caused is no verdict: the canary is inconclusive.
    The operator who paused a canary decides about it, so it stays paused: `resume` gives the
    candidate its traffic back, `abort` ends the canary. A repeated trip has no effect.
    """
    before = canaries.to_canary(row)
    reason = f"the proxy's breaker took it out: {why}"
    if before.phase != "ramping" or before.taken_out is not None:
        return before
    if not before.paused:
        move = Move(to="rolled_back", candidate_state="rolled_back", reason=reason)
        if why.endswith(FEW_CALLERS):
            move = Move(to="inconclusive", candidate_state="retired", reason=reason)
        _move(session, row, move, now=now, actor=actor)
        return canaries.to_canary(row)
    canaries.add_evidence(row, breaker=why)
    row.reason = f"paused; {reason}"
    row.generation = before.generation + 1
    count(session, "canary", "taken_out")
    return _changed(session, row, before, now=now, actor=actor, reason=reason)


def resume(session: Session, row: CanaryRow, *, reason: str, now: float, actor: str) -> Canary:
    """Continue a paused canary, also when the breaker took the candidate out meanwhile.

    Raises: TransitionError when the canary is not paused.
    """
    before = canaries.to_canary(row)
    if not before.active or not before.paused:
        raise TransitionError(f"canary {row.canary_id} is not paused, it is {before.phase}")
    tripped = before.taken_out or canaries.breaker_trip(session, before)
    row.paused = False
    row.reason = LOADS if before.phase == "loading" else None
    row.generation = before.generation + 1
    if tripped is not None:
        # A new salt: a breaker trip excludes the old salt for good.
        row.salt = uuid.uuid4().hex
        row.evidence = {key: value for key, value in row.evidence.items() if key != "breaker"}
        row.step_started_at = now  # the replies that tripped the breaker are not judged again
        # Other sessions meet it from now on: what the earlier ones said is not added to theirs.
        ramp = {**canaries.entry(row, "ramp"), "began_at": now}
        canaries.add_evidence(row, clock={}, ramp=ramp)
    _start_clock(row, now)
    return _changed(session, row, before, now=now, actor=actor, reason=reason)


def follow_clock(session: Session, row: CanaryRow, *, now: float) -> Canary:
    """Set the marks of a ramp back to `now` when the machine's clock was set back behind them.

    A ramp and its steps count the requests that began after them: with marks of tomorrow none would
    count for a day, and a candidate that fails would keep its users. What was counted stays
    counted, and requests of before the ramp stay out by their place in the store. The step's
    minimum time begins anew. It is no transition: generation and audit stay.
    """
    ramp = canaries.entry(row, "ramp")
    before = canaries.to_canary(row)
    row.step_started_at = min(before.step_started_at, now)
    canaries.add_evidence(row, ramp={**ramp, "began_at": min(before.ramp_began_at, now)})
    return canaries.to_canary(row)


def abort(session: Session, row: CanaryRow, *, reason: str, now: float, actor: str) -> Canary:
    """End the canary and its traffic, or take it out of the queue. No effect on a canary that ended
    without promotion.

    Raises: TransitionError when the candidate was promoted: use a rollback then.
    """
    before = canaries.to_canary(row)
    if before.phase == "promoted":
        raise TransitionError(f"{row.candidate} was promoted already; use rollback")
    if before.phase == "queued":
        waiting.withdraw(session, row, reason=reason, now=now, actor=actor)
    elif before.active:
        move = Move(to="rolled_back", candidate_state="rolled_back", reason=reason)
        _move(session, row, move, now=now, actor=actor)
    return canaries.to_canary(row)


def end_lost(session: Session, model: str, *, now: float) -> str | None:
    """End what is left of a canary whose row is gone, as a damaged one: its candidate gets no
    verdict and no ban. Returns: the candidate; None: there is no such one."""
    candidate = versions.aliases_of(session, model).get("canary")
    if candidate is None or canaries.active_row(session, model) is not None:
        return None
    actor, reason = audit.CONTROL, "the row of its canary was damaged"
    versions.drop_alias(session, model=model, alias="canary", now=now, actor=actor, reason=reason)
    versions.set_state(session, candidate, "rolled_back", reason)
    count(session, "canary", "damaged")
    routing_writer.write(session, model, now=now)
    return candidate


def skip_step(session: Session, row: CanaryRow, *, reason: str, now: float, actor: str) -> Canary:
    """Waive what the present step must last and see; the next tick of control ends it.

    The guards and the evidence are not waived: nothing is promoted without what `promote_on` asks
    for. Raises: TransitionError unless the canary is ramping, not paused, and its step not waived.
    """
    before = canaries.to_canary(row)
    if "skip-step" not in allowed_actions(before):
        state = "paused" if before.paused else before.phase
        told = (
            f"step {before.step + 1} is skipped already" if before.step_waived else f"it is {state}"
        )
        raise TransitionError(f"canary {row.canary_id} has no step to skip: {told}")
    canaries.add_evidence(row, waived_step=before.step)
    row.generation = before.generation + 1
    return _changed(session, row, before, now=now, actor=actor, reason=reason)


def promote(session: Session, row: CanaryRow, *, reason: str, now: float, actor: str) -> Canary:
    """Make the candidate champion now and skip the rest of the ramp.

    Raises: TransitionError unless the canary is ramping: the gate cannot be skipped.
    """
    canary = canaries.to_canary(row)
    if canary.taken_out is not None or canaries.breaker_trip(session, canary) is not None:
        raise TransitionError(
            f"the proxy's breaker took {row.candidate} out; resume the canary before promoting it"
        )
    if row.state != "ramping":
        raise TransitionError(
            f"canary {row.canary_id} is {row.state}; only a ramping one can be promoted"
        )
    move = Move(to="promoted", candidate_state="champion", reason=reason)
    _move(session, row, move, now=now, actor=actor)
    return canaries.to_canary(row)


def allowed_actions(canary: Canary) -> list[str]:
    """List the actions that an operator may take on a canary now."""
    if canary.phase == "queued":
        return ["abort"]
    if not canary.active:
        return ["rollback"] if canary.phase == "promoted" else []
    actions = ["resume" if canary.paused else "pause", "abort"]
    if canary.phase != "ramping":
        return actions
    skips = ["skip-step"] if not canary.paused and not canary.step_waived else []
    return [*actions, "promote", *skips]


def _hold(session: Session, row: CanaryRow, hold: Hold, now: float) -> None:
    canary = canaries.to_canary(row)
    project = project_of(canary.model)
    of = "" if project is None else f" of {project}"
    found = conditions.Condition(
        kind="canary",
        line=canary.model,
        state=hold.needs,
        code="canary_waits" if hold.needs == "ok" else "canary_held",
        message=f"the trial of {version_of(canary.candidate)}{of} is held at "
        f"{canary.weight_bp / 100:g}%: {hold.reason}"
        if hold.needs != "ok"
        else f"the trial of {version_of(canary.candidate)}{of}: {hold.reason}",
        to_do="it goes on when that is over; abort it if users should not have it meanwhile"
        if hold.needs != "ok"
        else "",
        data={
            "canary_id": canary.canary_id,
            "brief": hold.reason if hold.brief is None else hold.brief,
            "metric": hold.metric,
        },
    )
    conditions.write(session, found, now=now)
    # A hold is no transition: with a new generation or an audit row, every tick would make an
    # operator's If-Match stale.
    row.reason = hold.reason
    if hold.stops_clock:
        _stop_clock(row, now)
    else:
        _start_clock(row, now)


def _move(
    session: Session, row: CanaryRow, move: Move, *, now: float, actor: str, ban: bool = True
) -> None:
    before = canaries.to_canary(row)
    conditions.clear(session, "canary", before.model)
    ended: tuple[Phase, ...] = ("promoted", "rolled_back", "inconclusive")
    row.state = move.to
    row.step = move.step if move.to not in ended else row.step
    row.reason = move.reason
    row.paused = False
    row.generation = before.generation + 1
    row.step_started_at = now
    row.ended_at = now if move.to in ended else None
    canaries.add_evidence(row, clock={})
    if move.to in ended:
        _raise_anchor(session, before, promoted=move.to == "promoted", now=now)
    if move.to == "promoted":
        _promote(session, row, now=now, actor=actor, reason=move.reason)
    else:
        kept: AdapterState = move.candidate_state
        versions.set_state(session, row.candidate, kept, move.reason)
        if ban and move.bans and move.to == "rolled_back" and actor == audit.CONTROL:
            # A verdict on these files. An operator's abort is none: they may be tried again.
            bans.ban(session, row.candidate, now=now, actor=actor, reason=move.reason)
    if move.to in ended:
        versions.drop_alias(
            session, model=row.model, alias="canary", now=now, actor=actor, reason=move.reason
        )
        count(session, "canary", move.to)
        if move.candidate_state == "rejected":
            count(session, "adapter", "rejected")
    _changed(session, row, before, now=now, actor=actor, reason=move.reason)


def _raise_anchor(session: Session, canary: Canary, *, promoted: bool, now: float) -> None:
    """Let a version that is proven better than the anchor be the anchor, unless an operator moved
    it meanwhile."""
    anchor = proof_rule.anchor_after(canary, promoted=promoted)
    if versions.aliases_of(session, canary.model).get("anchor", BASE) != canary.anchor:
        return
    if anchor != canary.anchor:
        versions.move_alias(
            session,
            model=canary.model,
            alias="anchor",
            to=anchor,
            now=now,
            actor=audit.CONTROL,
            reason=f"proven better than {canary.anchor} by the groups of {canary.candidate}",
        )


def _promote(session: Session, row: CanaryRow, *, now: float, actor: str, reason: str) -> None:
    leaving = versions.champion(session, row.model)
    versions.set_state(session, leaving, "retired", f"{row.candidate} took its place")
    versions.set_state(session, row.candidate, "champion", reason)
    for alias, to in (("champion", row.candidate), ("previous", leaving)):
        versions.move_alias(
            session, model=row.model, alias=alias, to=to, now=now, actor=actor, reason=reason
        )


def _changed(
    session: Session, row: CanaryRow, before: Canary, *, now: float, actor: str, reason: str
) -> Canary:
    session.flush()
    routing_writer.write(session, row.model, now=now)
    after = canaries.to_canary(row)
    _audit(session, before, after, now=now, actor=actor, reason=reason)
    return after


def _audit(
    session: Session, before: Canary | None, after: Canary, *, now: float, actor: str, reason: str
) -> None:
    action: str = "paused" if after.paused else after.phase
    if before is not None and before.paused and before.phase == after.phase:
        action = "resumed"
    if before is not None and before.taken_out is None and after.taken_out is not None:
        action = "taken_out"
    if before is not None and before.waived_step != after.waived_step:
        action = "step_skipped"
    audit.record(
        session,
        now=now,
        actor=actor,
        action=f"canary.{action}",
        subject=after.canary_id,
        before={} if before is None else _summary(before),
        after=_summary(after),
        reason=reason,
    )


def _summary(canary: Canary) -> dict[str, Any]:
    return {
        "canary_id": canary.canary_id,
        "phase": canary.phase,
        "step": canary.step,
        "weight_bp": canary.weight_bp,
        "paused": canary.paused,
    }


def _stop_clock(row: CanaryRow, now: float) -> None:
    if canaries.to_canary(row).stopped_at is None:
        clock = {**canaries.entry(row, "clock"), "stopped_at": now}
        canaries.add_evidence(row, clock=clock)


def _start_clock(row: CanaryRow, now: float) -> None:
    canary = canaries.to_canary(row)
    if canary.stopped_at is not None:
        stopped_s = canary.stopped_s + max(0.0, now - canary.stopped_at)
        clock = {"stopped_s": stopped_s, "stopped_at": None}
        canaries.add_evidence(row, clock=clock)

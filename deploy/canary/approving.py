"""Put the operator's approval service between a decision and what it does. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from deploy.canary.facts import Facts
from deploy.evidence.approval import Approval, Stage, described, verdict
from deploy.records import AdapterState, Canary
from deploy.registry.canary_rule import Decision, Hold, Move
from sidecar.settings import Approval as ApprovalSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A decision after the service was heard."""

    decision: Decision
    facts: Facts = field(default_factory=dict)
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
    found = verdict(known, stage, holds_s=settings.every_s, max_wait_s=settings.max_wait_s, now=now)
    waits = Hold(reason=described(known, stage), stops_clock=True)
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
        reason = f"no approval of the {stage} in {settings.max_wait_s:g} s: {waits.reason}"
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

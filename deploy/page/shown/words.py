"""The first screen in words: what serves, what the candidate has, and what it waits for. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from deploy.admin.models import AuditOut, CanaryOut, StatusOut
from deploy.page.shown.times import clock
from deploy.records import LOADS, comes_next, nobody_has, version_of
from sidecar.plurals import counted
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings

STANDS = re.compile(r"step [0-9]+ stands\b")
"""How the reason of a ramp begins that something holds (`deploy.registry.canary_rule`)."""
APPROVAL = "waits for the approval service"
_SAYS_WHAT_IT_WAITS_FOR = re.compile(
    rf"step [0-9]+ (stands|waits)\b|the evidence waits|{APPROVAL}|"
    r"(the one step|all [0-9]+ steps) passed; waits|try [0-9]+ of"
)
"""How a canary's reason begins that says what the ramp waits for; others say how it got there."""


def short(adapter: object) -> str:
    """`v12` of `<model>--v12-<digest>`; "the base model"; another name as it is."""
    name = str(adapter)
    return "the base model" if name == BASE else version_of(name)


def percent(basis_points: float) -> str:
    return f"{basis_points / 100:g}%"


def share(part: float) -> str:
    """A share of 0..1; never 100.0% when something is missing."""
    return f"{min(part, 0.999):.1%}" if part < 1.0 else "100%"


def serves_since(champion: str, newest: Iterable[AuditOut]) -> float | None:
    """Return when the champion became champion; None when that is longer ago than the audit rows
    at hand. newest: the newest first."""
    for row in newest:
        if row.action == "alias.champion":
            return row.at if row.after.get("adapter") == champion else None
    return None


def champion_of(status: StatusOut) -> tuple[str, bool]:
    """Return whom the routing table names as champion, and whether no vLLM has loaded it."""
    champion = status.champion if status.routing is None else status.routing.champion
    replicas = status.engine.replicas.values()
    return champion, nobody_has(champion, (None if one.away else one.loaded for one in replicas))


def headline(
    status: StatusOut, since: float | None, waits: str, now: float, next_step_at: float | None
) -> str:
    """Say in one sentence what users get. waits: what the canary waits for; empty: the clock."""
    champion, missing = champion_of(status)
    from_when = "" if since is None else f" since {clock(since, now)} UTC"
    first = f"{_upper(short(champion))} serves{from_when}"
    if missing:
        first = f"No vLLM has {short(champion)}, the champion: the base model answers in its place"
    canary = status.canary
    waiting = status.queued
    after = "" if waiting is None else f" {_upper(short(waiting.candidate))} waits in the queue."
    if canary is None:
        return f"{first}. No candidate is being tried.{after}"
    return f"{first}; {_candidate(canary, waits, now, next_step_at)}.{after}"


def _candidate(canary: CanaryOut, waits: str, now: float, next_step_at: float | None) -> str:
    name = short(canary.candidate)
    if canary.paused:
        return f"{name} is paused at {percent(canary.weight_bp)}"
    if canary.state == "loading":
        since = clock(canary.step_started_at, now)
        doing = f"{name} is being loaded into vLLM since {since} UTC"
        return f"{doing}, {waits}" if waits else doing
    if canary.state == "gating":
        doing = f"{name} is at the gate and gets no users yet"
        return f"{doing}, {waits}" if waits else doing
    parts = [f"{name} gets {percent(canary.weight_bp)}"]
    if next_step_at is not None and next_step_at > now:
        what = comes_next(canary.state, canary.step, canary.steps)
        parts.append(f"{what} {clock(next_step_at, now)} UTC at the earliest")
    if waits:
        parts.append(waits)
    return ", ".join(parts)


def waits_for(canary: CanaryOut, evidence: Mapping[str, Any], rules: CanarySettings) -> str:
    """Say what a canary waits for, but the clock: its own reason, as short as a headline has to be,
    or what its step has not seen yet. Empty: nothing that is known."""
    reason = canary.reason or ""
    if canary.state == "loading":
        return "" if reason in ("", LOADS) else _first_part(reason)
    if canary.state == "gating":
        if not reason.startswith(("gate", APPROVAL, "try ")):
            return ""  # how it came to the gate
        told = _first_part(reason.removeprefix("gate: "))
        return f"the {told}" if told.startswith("gate ") else told
    if canary.state == "ramping" and _SAYS_WHAT_IT_WAITS_FOR.match(reason):
        return _first_part(reason.replace(" passed; waits", " passed, waits", 1))
    left = _step_lacks(canary, evidence, rules)
    return f"waits for {left}" if left else ""


def _first_part(reason: str) -> str:
    return reason.partition("; ")[0]


def _step_lacks(canary: CanaryOut, evidence: Mapping[str, Any], rules: CanarySettings) -> str:
    """Say how many replies, and sessions where the settings ask for them, the step still needs."""
    if canary.state != "ramping" or canary.step_waived:
        return ""
    step = evidence.get(f"step_{canary.step + 1}")
    step = step if isinstance(step, dict) else {}
    arm = step.get("candidate")
    replies = arm.get("replies") if isinstance(arm, dict) else None
    found = []
    sessions = getattr(rules, "step_min_sessions", None)
    if isinstance(sessions, int):
        seen = step.get("sessions")
        left = sessions - (seen if isinstance(seen, int) else 0)
        found += [counted(left, "session")] if left > 0 else []
    left = rules.step_min_exchanges - (replies if isinstance(replies, int) else 0)
    found += [counted(left, "reply", "replies")] if left > 0 else []
    return " and ".join(found)


def _upper(text: str) -> str:
    """`The base model`, but `v12` stays."""
    return text[:1].upper() + text[1:] if text.startswith("the ") else text

"""Choose the adapter of the next canary, queue the others, and tell how long a decision takes.

While no canary runs, the queued one begins, else the newest registered adapter; older ones are
retired. While one runs, a registered adapter joins the queue as an operator's version does
(`deploy.registry.canaries`): the newest wins. A registered adapter with a rolled-back ancestor gets
no canary: it was trained on top of what was taken away from users. An operator may have any version
tried (again) that is not banned, and that descends from none that is: one that ended inconclusive,
was aborted, superseded or replaced. What joined the queue is looked at again when it begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.records import AdapterState, AdapterVersion, Canary
from deploy.registry import audit, bans, canaries, canaries as waiting, transitions, versions
from deploy.registry.canary_rule import MANY_GROUPS, SLOWEST, Move
from deploy.registry.proof_rule import is_proven
from ingest.store.exchanges import first_since
from sidecar.lines import Line
from sidecar.records import BASE
from sidecar.routing.table import BUCKETS
from sidecar.settings import Canary as CanarySettings
from sidecar.store.database import Database, count
from sidecar.store.models import AuditRow, CanaryRow, ExchangeRow
from sidecar.store.tables import of_line


def begin_next(
    session: Session, model: str, *, steps: tuple[int, ...], now: float
) -> Canary | None:
    """Return the active canary, or begin that of the queued version or the newest registered one.

    Works in the caller's write transaction. What is registered while a canary runs joins the queue.
    Returns: None when no adapter waits.
    """
    active = canaries.active(session, model)
    if active is not None:
        newest = _newest_waiting(session, model, now)
        if newest is not None:
            waiting.join(
                session,
                model=model,
                candidate=newest.name,
                steps=steps,
                runs=active.candidate,
                now=now,
                actor=audit.CONTROL,
                reason="a registered adapter waits",
            )
        return active
    newest = _newest_waiting(session, model, now)
    queued = canaries.queued_row(session, model)
    if queued is not None and newest is None:
        begun = _begin_queued(session, model, queued, steps=steps, now=now)
        if begun is not None:
            return begun
    elif queued is not None and newest is not None:
        left = f"superseded by {newest.name}"
        waiting.withdraw(session, queued, reason=left, now=now, actor=audit.CONTROL)
    if newest is None:
        return None
    return transitions.begin(
        session, model=model, candidate=newest.name, steps=steps, now=now, actor=audit.CONTROL
    )


def start(
    session: Session,
    model: str,
    reference: str,
    *,
    steps: tuple[int, ...],
    now: float,
    actor: str,
    reason: str,
) -> Canary:
    """Begin a canary of a version by hand, or queue it while another runs, in the caller's write
    transaction.

    reference: as `versions.resolve`. Asked again while that canary runs or waits, it is returned.
    Raises: UnknownAdapterError; TransitionError when the version may not be tried.
    """
    name = versions.resolve(session, model, reference)
    active = canaries.active(session, model)
    if active is not None and active.candidate == name:
        return active
    if name == BASE:
        raise TransitionError("the base model is no version that a canary could try")
    if (why := _refused(session, model, name)) is not None:
        raise TransitionError(why)
    queued = canaries.queued_row(session, model)
    if active is None:
        mine = queued if queued is not None and queued.candidate == name else None
        return transitions.begin(
            session,
            model=model,
            candidate=name,
            steps=steps,
            now=now,
            actor=actor,
            reason=reason,
            row=mine,
        )
    for older in versions.versions(session, model, state="registered"):
        if older.name not in (name, queued.candidate if queued is not None else ""):
            _retire(session, older, f"superseded by {name}", now)
    return waiting.join(
        session,
        model=model,
        candidate=name,
        steps=steps,
        runs=active.candidate,
        now=now,
        actor=actor,
        reason=reason,
    )


def has_waiting(session: Session, model: str) -> bool:
    """Return True when `begin_next` would begin or queue a canary, or retire an adapter."""
    queued = canaries.queued(session, model)
    if queued is not None and canaries.active(session, model) is None:
        return True
    known = queued.candidate if queued is not None else ""
    return versions.any_in(session, model, "registered", but=known)


def _newest_waiting(session: Session, model: str, now: float) -> AdapterVersion | None:
    """Return the newest registered adapter that is not in the queue; retire the others."""
    queued = canaries.queued(session, model)
    newest: AdapterVersion | None = None
    for version in versions.versions(session, model, state="registered"):
        if queued is not None and version.name == queued.candidate:
            continue
        fallen = _rolled_back_ancestor(session, model, version)
        if fallen is not None:
            _retire(session, version, f"descends from {fallen}, which was rolled back", now)
        elif newest is not None:
            _retire(session, version, f"superseded by {newest.name}", now)
        else:
            newest = version
    return newest


def _begin_queued(
    session: Session, model: str, row: CanaryRow, *, steps: tuple[int, ...], now: float
) -> Canary | None:
    """Begin a queued canary, or take it out of the queue when its version may no longer be tried.

    An operator's version may descend from one that was rolled back, as one that is begun at once.
    """
    why = _refused(session, model, row.candidate)
    if why is None and canaries.entry(row, "queued").get("by") == audit.CONTROL:
        fallen = _rolled_back_ancestor(session, model, versions.find(session, row.candidate))
        why = f"descends from {fallen}, which was rolled back" if fallen is not None else None
    if why is not None:
        waiting.withdraw(session, row, reason=why, now=now, actor=audit.CONTROL)
        return None
    return transitions.begin(
        session,
        model=model,
        candidate=row.candidate,
        steps=steps,
        now=now,
        actor=audit.CONTROL,
        reason="it was queued, and the canary before it has ended",
        row=row,
    )


def _refused(session: Session, model: str, name: str) -> str | None:
    """Return why a version may not be tried, or None. Raises: UnknownAdapterError."""
    if name == versions.champion(session, model):
        return f"{name} is champion: it answers every session already"
    version = versions.find(session, name)
    if (why := bans.reason_of(session, model, version.digest)) is not None:
        return why
    if (why := versions.reason_removed(session, name)) is not None:
        return why
    parents = [one.name for one in _doubtful(session, model, name)[1:]]
    if (banned := bans.banned_ancestor(session, parents)) is not None:
        return f"{name} descends from {banned}, which is banned"
    if version.forgotten_at is not None:
        return f"{name} learned from content that was forgotten since"
    return None


def _rolled_back_ancestor(session: Session, model: str, version: AdapterVersion) -> str | None:
    chain = _doubtful(session, model, version.name)
    return next((one.name for one in chain if one.state == "rolled_back"), None)


def _doubtful(session: Session, model: str, name: str) -> list[AdapterVersion]:
    """List a version and its ancestors down to the champion, which is left out.

    All users have the champion, so what it descends from speaks against none of its descendants.
    """
    champion = versions.champion(session, model)
    chain = versions.ancestors(session, name)
    return list(takewhile(lambda one: one.name != champion, chain))


def _retire(session: Session, version: AdapterVersion, reason: str, now: float) -> None:
    versions.set_state(session, version.name, "retired", reason)
    audit.record(
        session,
        now=now,
        actor=audit.CONTROL,
        action="adapter.retired",
        subject=version.name,
        before={"state": version.state},
        after={"state": "retired"},
        reason=reason,
    )


# How long a decision about a candidate takes at a site's traffic, and how far the champion is from
# the best so far, in words.

EXAMINED = 20_000
"""Newest exchanges of which the sessions are counted: some tenths of a second."""
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
LOOKED_AT = 20
"""Newest canaries among which one compared the champion with the anchor."""


def sessions_a_day(session: Session, line: Line, now: float) -> float:
    """Return the sessions (assignment keys) a day of a line, of the last week, or since the first
    exchange where that is less; of a day at least. now: Unix seconds.

    Where a week has more than `EXAMINED` exchanges, those of the newest ones are scaled by the
    week's number: by the hours that they cover, an evening would stand for the day.
    """
    row = ExchangeRow
    first, end = first_since(session, now - WEEK_S)
    oldest = session.scalar(
        select(row.stored_at).where(row.seq == select(func.min(row.seq)).scalar_subquery())
    )
    if oldest is None or first == end:
        return 0.0
    covered_s = min(max(now - oldest, DAY_S), WEEK_S)
    begin = max(first, end - EXAMINED)
    own = select(func.count(row.session_key.distinct())).where(
        row.seq >= begin,
        row.public_model == line.model,
        of_line(row.project, line),
        row.origin == "user",
    )
    number = session.scalar(own) or 0
    return number * (end - first) / (end - begin) * DAY_S / covered_s


def steps_days(
    steps: tuple[int, ...], rules: CanarySettings, a_day: float, *, seen: int = 0
) -> list[float]:
    """Return the days that each step takes for its sessions, at so many sessions a day. Pure.

    steps: basis points. seen: sessions that the first of them has seen.
    """
    wanted = [max(0, rules.step_min_sessions - seen), *[rules.step_min_sessions] * len(steps)]
    return [
        lacking * BUCKETS / (one * a_day) if a_day > 0 else float("inf")
        for lacking, one in zip(wanted, steps, strict=False)
    ]


def pace(canary: Canary, evidence: Mapping[str, Any], rules: CanarySettings, a_day: float) -> str:
    """Say how long a canary takes yet. Pure. evidence: as its row has it; a_day: sessions."""
    if not canary.readable:
        return ""
    if a_day <= 0.0:
        return "No end can be told: there was no session in the last week."
    ramping = canary.phase == "ramping"
    steps = canary.steps[canary.step :] if ramping else canary.steps
    seen = _number(evidence, f"step_{canary.step + 1}", "sessions") if ramping else 0
    days = steps_days(steps, rules, a_day, seen=seen)
    traffic = f"at today's traffic ({a_day:.{int(a_day < 1.0)}f} sessions a day)"
    longest = SLOWEST * rules.step_max_s / DAY_S
    if max(days, default=0.0) > longest:
        return (
            f"No step can end {traffic}: one wants {rules.step_min_sessions} sessions, and ends "
            f"after {longest:g} days; lower canary.step_min_sessions."
        )
    ramp = sum(days)
    told = f"{_days(ramp)} {traffic} for its steps"
    groups = MANY_GROUPS - _number(evidence, "quality", "groups")
    if groups > 0 and not is_proven(canary.proven, rules):
        # A session gives a group when the candidate does not answer it.
        brings = min(24.0 * rules.groups_per_hour, a_day * (1.0 - steps[0] / BUCKETS))
        if brings > 0.0:
            whole = _days(max(ramp, groups / brings))
            told += f", {whole} in all for an equal candidate: it needs about {groups} more"
            told += f" judged groups, and new sessions bring {brings:.0f} a day"
    return f"{told[0].upper()}{told[1:]}."


def best_so_far(
    session: Session, model: str, champion: str, anchor: str, *, asked: bool = True
) -> str:
    """Say how far the champion is from the anchor, which is the best that was proven so far.

    asked: False where no canary asks the anchor.
    """
    if not asked or champion == anchor == BASE:
        return ""
    if champion == anchor:
        return f"The champion {champion} is the best so far (the anchor)."
    newest = (
        select(CanaryRow)
        .where(CanaryRow.model == model)
        .order_by(CanaryRow.created_at.desc())
        .limit(LOOKED_AT)
    )
    for row in session.scalars(newest):
        arm = "candidate" if (row.candidate, row.state) == (champion, "promoted") else "champion"
        if canaries.to_canary(row).anchor != anchor or getattr(row, arm) != champion:
            continue
        told = canaries.entry(row, "quality").get("to_anchor")
        found = told.get(arm) if isinstance(told, dict) else None
        if isinstance(found, list) and len(found) == 2 and found != [-1.0, 1.0]:
            return (
                f"The best so far is {anchor} (the anchor); the champion's difference to it is "
                f"{found[0]:+.3f} to {found[1]:+.3f}, by the groups of canary {row.canary_id}."
            )
    return f"The best so far is {anchor} (the anchor); the champion was not compared with it yet."


def _days(days: float) -> str:
    return "less than a day" if days < 1.0 else f"about {days:.0f} day{'s' if days >= 1.5 else ''}"


def _number(evidence: Mapping[str, Any], entry: str, name: str) -> int:
    found = evidence.get(entry)
    number = found.get(name) if isinstance(found, dict) else None
    return number if isinstance(number, int) else 0


# Record in the store that an adapter's files differ from the registered ones.

log = structlog.get_logger()

ACTION = "adapter.altered"
RESTORED = "adapter.sound"


def record_altered(database: Database, name: str, *, replica: str, reason: str, now: float) -> None:
    """Write the audit row and the count, and end the adapter's canary. Raises: StoreError.

    One row for each alteration: a control that is started again and finds the same one adds none,
    nor does another replica, which reads the same folder.
    """
    log.error("adapter_altered", adapter=name, replica=replica, reason=reason)
    with database.write() as session:
        told = _newest(session, name)
        version = versions.find(session, name)
        if told is None or (told.action, told.reason) != (ACTION, reason):
            count(session, "adapter", "altered")
            audit.record(
                session,
                now=now,
                actor=audit.CONTROL,
                action=ACTION,
                subject=name,
                before={"digest": version.digest},
                after={"loaded": False, "replica": replica},
                reason=reason,
            )
        canary = canaries.active(session, version.model)
        if canary is None or canary.candidate != name:
            return
        state: AdapterState = "rolled_back" if canary.phase == "ramping" else "rejected"
        move = Move(to="rolled_back", candidate_state=state, reason=f"altered: {reason}")
        transitions.apply(session, canary, move, evidence={}, now=now, ban=False)


def record_restored(database: Database, name: str, *, replica: str, now: float) -> None:
    """Write that the registered files are back, if the audit says last that they were altered.

    Raises: StoreError.
    """
    with database.read() as session:
        told = _newest(session, name)
    if told is None or told.action != ACTION:
        return
    with database.write() as session:
        audit.record(
            session,
            now=now,
            actor=audit.CONTROL,
            action=RESTORED,
            subject=name,
            before={"loaded": False, "replica": replica},
            after={"loaded": True, "replica": replica},
            reason="its files are the registered ones again",
        )


def _newest(session: Session, name: str) -> AuditRow | None:
    """Return what was last told of the adapter's files."""
    of_files = AuditRow.action.in_((ACTION, RESTORED))
    return session.scalar(
        select(AuditRow)
        .where(AuditRow.subject == name, of_files)
        .order_by(AuditRow.seq.desc())
        .limit(1)
    )

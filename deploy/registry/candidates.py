"""Choose the adapter of the next canary, and queue what comes while one runs.

While no canary runs, the queued one begins, else the newest registered adapter; older ones are
retired. While one runs, a registered adapter joins the queue as an operator's version does
(`deploy.registry.waiting`): the newest wins. A registered adapter with a rolled-back ancestor gets
no canary: it was trained on top of what was taken away from users. An operator may have any version
tried (again) that is not banned, and that descends from none that is: one that ended inconclusive,
was aborted, superseded or replaced. What joined the queue is looked at again when it begins.
"""

from __future__ import annotations

from itertools import takewhile

from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.records import AdapterVersion, Canary
from deploy.registry import audit, canaries, transitions, versions, waiting
from deploy.registry.history import bans
from sidecar.records import BASE
from sidecar.store.models import CanaryRow


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

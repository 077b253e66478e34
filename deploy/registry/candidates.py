"""Choose the adapter of the next canary: the newest registered one; older ones are retired.

A registered adapter with a rolled-back ancestor gets no canary: it was trained on top of what was
taken away from users. An operator may have any version tried (again) that is not banned, and that
descends from none that is: one that ended inconclusive, was aborted, superseded or replaced.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.records import AdapterVersion, Canary
from deploy.registry import audit, canaries, transitions, versions
from deploy.registry.history import bans
from sidecar.records import BASE


def begin_next(
    session: Session, model: str, *, steps: tuple[int, ...], now: float
) -> Canary | None:
    """Return the active canary, or begin one for the newest registered adapter.

    Works in the caller's write transaction. Returns: None when no adapter waits.
    """
    active = canaries.active(session, model)
    if active is not None:
        return active
    waiting = versions.versions(session, model, state="registered")
    tried: AdapterVersion | None = None
    for version in waiting:
        fallen = _rolled_back_ancestor(session, version)
        if fallen is not None:
            _retire(session, version, f"descends from {fallen}, which was rolled back", now)
        elif tried is not None:
            _retire(session, version, f"superseded by {tried.name}", now)
        else:
            tried = version
    if tried is None:
        return None
    return transitions.begin(
        session, model=model, candidate=tried.name, steps=steps, now=now, actor=audit.CONTROL
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
    """Begin a canary of a version by hand, in the caller's write transaction.

    reference: as `versions.resolve`. Asked again while that canary runs, it is returned.
    Raises: UnknownAdapterError; TransitionError when the version may not be tried, or another
        canary runs.
    """
    name = versions.resolve(session, model, reference)
    active = canaries.active(session, model)
    if active is not None:
        if active.candidate == name:
            return active
        raise TransitionError(
            f"the canary of {active.candidate} runs: one at a time; wait for it or abort it"
        )
    if name == BASE:
        raise TransitionError("the base model is no version that a canary could try")
    if name == versions.champion(session, model):
        raise TransitionError(f"{name} is champion: it answers every session already")
    version = versions.find(session, name)
    bans.refuse(session, model, version.digest)
    parents = [one.name for one in versions.ancestors(session, name)[1:]]
    if (banned := bans.banned_ancestor(session, parents)) is not None:
        raise TransitionError(f"{name} descends from {banned}, which is banned")
    if version.forgotten_at is not None:
        raise TransitionError(f"{name} learned from content that was forgotten since")
    return transitions.begin(
        session, model=model, candidate=name, steps=steps, now=now, actor=actor, reason=reason
    )


def has_waiting(session: Session, model: str) -> bool:
    """Return True when `begin_next` would begin a canary or retire an adapter."""
    if canaries.active(session, model) is not None:
        return False
    return versions.any_in(session, model, "registered")


def _rolled_back_ancestor(session: Session, version: AdapterVersion) -> str | None:
    chain = versions.ancestors(session, version.name)
    return next((one.name for one in chain if one.state == "rolled_back"), None)


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

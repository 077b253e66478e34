"""Choose the adapter of the next canary: the newest registered one; older ones are retired.

A registered adapter with a rolled-back ancestor gets no canary: it was trained on top of what was
taken away from users.
"""

from __future__ import annotations

from sqlalchemy.orm import Session

from deploy.records import AdapterVersion, Canary
from deploy.registry import audit, canaries, transitions, versions


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

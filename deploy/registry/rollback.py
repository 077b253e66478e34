"""Roll back to an earlier champion in one call and one transaction.

A rollback needs only the store: no vLLM, no judge, no control process. It ends the active canary,
moves the aliases and rewrites the routing table; proxies follow at their next poll. The adapter
that was champion is marked `rolled_back`, its files are banned
(`deploy.registry.bans`), and no descendant of it gets a canary. A candidate that users had
met (`ramping`) is banned with it. One that was still loading or at the gate is not, because nothing
was decided about it: its canary ends as by an abort. The learner is paused until an operator
resumes it: what it learned last was taken from the users, and somebody should look why. A rollback
to a descendant of the champion undoes an earlier one: the champion is retired, and neither marked
nor banned, because the target has learned from it.
Its next run starts from the new champion. A rollback that names a banned version lifts its ban.

An anchor that is taken away goes back to the one before it, or to the new champion when that was
rolled back too.

`previous` after a rollback is the new champion itself. So a second call, or an operator's retry
after a lost reply, finds nothing more to undo: rolling back twice is rolling back once. To go
further back, name the version, or "base". The next promotion sets `previous` anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.records import AdapterState
from deploy.registry import (
    aliases,
    audit,
    bans,
    canaries,
    flags,
    routing_writer,
    transitions,
    versions,
)
from sidecar.records import BASE
from sidecar.store.database import Database, count

NEWEST = 3
"""Former champions that a refusal names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackResult:
    """Outcome of a rollback."""

    before: str
    """Champion before, or "base"."""
    after: str
    ended_canary: str | None
    """Id of the canary that the rollback ended, if any."""
    changed: bool
    """False when the target was champion already: nothing was written."""
    learner_paused: bool
    """The learner is paused now, by this rollback or before it."""
    generation: int
    """Generation of the routing table that this rollback leaves; proxies must reach it."""
    banned: tuple[str, ...] = ()
    """Versions whose files this rollback banned."""


def rollback(
    database: Database,
    model: str,
    *,
    to: str = "previous",
    reason: str,
    actor: str,
    now: float,
    pause_learner: bool = True,
    ban: bool = True,
) -> RollbackResult:
    """Make `to` the champion and end any canary. Idempotent.

    to: "previous", "base", a version or a full name. A version must have been champion before.
    pause_learner: when the rollback changes anything.
    ban: False when what it takes away is not known to be bad; else the old champion is banned, and
        a candidate that users had met.
    Raises: UnknownAdapterError; TransitionError when the version never passed a canary, or its
        folder was removed.
    """
    return database.repeat(
        lambda session: roll_back_in(
            session,
            model,
            to=to,
            reason=reason,
            actor=actor,
            now=now,
            pause_learner=pause_learner,
            ban=ban,
        )
    )


def roll_back_in(
    session: Session,
    model: str,
    *,
    to: str,
    reason: str,
    actor: str,
    now: float,
    pause_learner: bool = True,
    ban: bool = True,
) -> RollbackResult:
    """Do as `rollback`, in the caller's write transaction."""
    before = versions.champion(session, model)
    target = versions.resolve(session, model, to)
    if not versions.has_been_champion(session, target):
        raise TransitionError(
            f"{target} has never been champion; roll back to previous, base"
            + "".join(f", {one}" for one in versions.former_champions(session, model, NEWEST))
        )
    if target != before:
        versions.refuse_removed(session, target)
    undoes = versions.descends_from(session, model, target, before)
    ended, met = _end_canary(session, model, reason=reason, actor=actor, now=now)
    left: AdapterState = "retired" if undoes else "rolled_back"
    moved = _move_aliases(
        session, model, before, target, left=left, reason=reason, actor=actor, now=now
    )
    table = routing_writer.write(session, model, now=now)
    changed = moved or ended is not None
    banned: tuple[str, ...] = ()
    if changed:
        lost = [*([before] if moved and not undoes else []), *met] if ban else []
        banned = tuple(
            name for name in lost if bans.ban(session, name, now=now, actor=actor, reason=reason)
        )
        bans.lift(session, target, now=now, actor=actor, reason=reason)
        if pause_learner:
            flags.set_paused(
                session, model, True, now=now, actor=actor, reason=f"rollback: {reason}"
            )
        by = "automatic" if actor == audit.CONTROL else "operator"
        count(session, "canary", f"{by}_rollback")
        audit.record(
            session,
            now=now,
            actor=actor,
            action="rollback",
            subject=model,
            before={"champion": before, "canary": ended},
            after={
                "champion": target,
                "canary": None,
                "generation": table.generation,
                "banned": ", ".join(banned) or None,
            },
            reason=reason,
        )
    return RollbackResult(
        before=before,
        after=target,
        ended_canary=ended,
        changed=changed,
        learner_paused=flags.read(session, model).paused,
        generation=table.generation,
        banned=banned,
    )


def _end_canary(
    session: Session, model: str, *, reason: str, actor: str, now: float
) -> tuple[str | None, list[str]]:
    """Return the id of the canary that was active, and its candidate if it had users."""
    row = canaries.active_row(session, model)
    if row is None:
        return None, []
    met = [row.candidate] if row.state == "ramping" else []
    transitions.abort(session, row, reason=f"rollback: {reason}", now=now, actor=actor)
    return row.canary_id, met


def _move_aliases(
    session: Session,
    model: str,
    before: str,
    target: str,
    *,
    left: AdapterState,
    reason: str,
    actor: str,
    now: float,
) -> bool:
    if before == target:
        return False
    versions.set_state(session, before, left, reason)
    versions.set_state(session, target, "champion", f"rollback: {reason}")
    moves = {"champion": target, "previous": target}
    if left == "rolled_back" and versions.aliases_of(session, model).get("anchor") == before:
        # What users lost holds up no candidate: the anchor goes where it was before.
        was = aliases.last_before(session, model, "anchor", before) or BASE
        fallen = was != BASE and versions.find(session, was).state == "rolled_back"
        moves["anchor"] = target if fallen else was
    for alias, to in moves.items():
        versions.move_alias(
            session, model=model, alias=alias, to=to, now=now, actor=actor, reason=reason
        )
    return True

"""Scored groups in the store, for the learner: claim, load, settle, suspect.

Functions work in the caller's transaction. A claimed group carries the run's id, so no group is
used by two runs; the groups of a dead run are given back (`give_back`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TypeVarTuple

import structlog
from sqlalchemy import Select, func, select, update
from sqlalchemy.orm import Session

from ingest.grouping.selection import Rules
from ingest.records import UNREADABLE, ScoredGroup
from ingest.store.exchanges import stored_tokens
from ingest.store.groups import CLAIMED, SCORED, load_scored_group
from ingest.tasks.keys import PREFIX
from ingest.tasks.material import TaskGroup, TooLongError, load_task_group
from learner.errors import DeviceError, FaultyGroupsError, IncompleteAdapterError, RunStoppedError
from learner.records import CheckedAnswers, Fault, Parent
from learner.runs.selection import IN_TASK_GROUP, runs_between
from sidecar.lines import Line
from sidecar.store.database import DAMAGE, count
from sidecar.store.models import AdapterRow, ExchangeRow, GroupRow, RunRow, TaskGroupRow
from sidecar.store.tables import of_line

log = structlog.get_logger()

Chosen = TypeVarTuple("Chosen")
TRAINED = "trained"
DROPPED = "dropped"
STAGE = "learn"
"""The learner's stage in the durable counters."""
FREE_TOKENS, MASKED_TOKENS = "free_tokens", "masked_tokens"
NOT_GROUPS = ("parent_altered", FREE_TOKENS, MASKED_TOKENS)
"""Reasons of that stage that count runs or tokens, not groups; those of `answer_masked_...` count
answers."""
MOST_TOKENS = 1_000_000
MOST_PACKS = 16
"""The answers of a group together may have MOST_TOKENS tokens, or MOST_PACKS times
`learner.pack_tokens`. A larger group is not read: its arrays would fill the memory before they
could be checked."""
LOOKED_AT = 4096
"""Waiting groups that are looked at to decide whether a run starts."""
DETAIL_LENGTH = 500
"""Longest detail of a reason, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Scored groups that no run has claimed, the newest first."""

    fresh: tuple[str, ...]
    """Group ids that a run may learn from."""
    stale: Mapping[str, str]
    """group id -> stale | unknown_adapter"""
    failures: Mapping[str, int]
    """Fresh group id -> number of failed runs that it is suspected of; without zeros."""


def waiting_groups(session: Session, *, line: Line, parent: str, max_age: int) -> Waiting:
    """Split the scored groups of a line into those that a run from `parent` may use and stale ones.

    max_age: largest number of training runs between a group's adapter and `parent`.
    """
    parents = _parents(session, line.name)
    statement = select(GroupRow.group_id, GroupRow.adapter, GroupRow.learn_attempts)
    answers = session.execute(_scored(statement, line)).all()
    task = TaskGroupRow
    tasks = session.execute(
        _scored_tasks(select(task.group_id, task.adapter, task.learn_attempts), line)
    ).all()
    # In turn, the newest of each first: a run takes a part, and neither may keep the other out.
    rows = [one for pair in zip_longest(tasks, answers) for one in pair if one is not None]
    ages = {adapter: runs_between(parents, parent, adapter) for _, adapter, _ in rows}
    fresh: list[str] = []
    stale: dict[str, str] = {}
    failures: dict[str, int] = {}
    for group_id, adapter, failed in rows:
        age = ages[adapter]
        if age is None:
            stale[group_id] = "unknown_adapter"
        elif age > max_age:
            stale[group_id] = "stale"
        else:
            fresh.append(group_id)
            failures |= {group_id: failed} if failed else {}
    return Waiting(fresh=tuple(fresh), stale=stale, failures=failures)


def count_fresh(session: Session, *, line: Line, parent: str, max_age: int) -> int:
    """Count the groups that a run from `parent` would find, of the line's newest `LOOKED_AT` ones.

    It is asked every few seconds, and any number of groups may wait while the learner is paused.
    Older groups than those do not start a run: the adapters that serve now make new ones.
    """
    parents = _parents(session, line.name)
    newest = session.scalars(_scored(select(GroupRow.adapter), line).limit(LOOKED_AT))
    tasks = session.scalars(_scored_tasks(select(TaskGroupRow.adapter), line).limit(LOOKED_AT))
    waiting = Counter(newest) + Counter(tasks)
    ages = {adapter: runs_between(parents, parent, adapter) for adapter in waiting}
    return sum(
        groups
        for adapter, groups in waiting.items()
        if (age := ages[adapter]) is not None and age <= max_age
    )


def _scored(statement: Select[*Chosen], line: Line) -> Select[*Chosen]:
    statement = statement.where(GroupRow.status == SCORED).order_by(GroupRow.seq.desc())
    if line.project is None and not line.others:
        return statement
    # A group of before, or of a best-of-N request, has no project: its exchange has.
    of_exchange = ExchangeRow.exchange_id == GroupRow.exchange_id
    project = func.coalesce(GroupRow.project, ExchangeRow.project)
    return statement.outerjoin(ExchangeRow, of_exchange).where(of_line(project, line))


def _scored_tasks(statement: Select[*Chosen], line: Line) -> Select[*Chosen]:
    of_project = of_line(TaskGroupRow.project, line)
    statement = statement.where(TaskGroupRow.status == SCORED, of_project)
    return statement.order_by(TaskGroupRow.seq.desc())


def _table(group_id: str) -> type[GroupRow] | type[TaskGroupRow]:
    return TaskGroupRow if group_id.startswith(PREFIX) else GroupRow


def claim(session: Session, run_id: str, group_ids: Iterable[str]) -> list[str]:
    """Move groups from `scored` to `claimed`, for this run. Returns: those that were scored."""
    return [
        group_id
        for group_id in group_ids
        if _move(session, [group_id], SCORED, status=CLAIMED, run_id=run_id)
    ]


def load(
    session: Session, group_ids: Iterable[str], *, pack_tokens: int
) -> tuple[list[ScoredGroup], dict[str, Fault]]:
    """Load groups with their scores.

    pack_tokens: a group with a longer prompt is not read at all. An answer whose row is damaged
        costs itself where two others can be read (logged).
    Returns: the usable groups; and group id -> fault for the others.
    """
    groups: list[ScoredGroup] = []
    broken: dict[str, Fault] = {}
    for group_id in group_ids:
        prompt, answers = stored_tokens(session, group_id)
        if prompt > pack_tokens or answers > max(MOST_TOKENS, MOST_PACKS * pack_tokens):
            text = f"its prompt has {prompt} tokens and its answers {answers}"
            broken[group_id] = Fault("too_long", text)
            continue
        try:
            scored = load_scored_group(session, group_id, on_damage=partial(_log_damage, group_id))
        except DAMAGE as error:
            broken[group_id] = Fault("unreadable", f"{type(error).__name__}: {error}")
            continue
        if scored is None:
            broken[group_id] = Fault("no_scores", "scores are missing")
        else:
            groups.append(scored)
    return groups, broken


def load_tasks(
    session: Session,
    run_id: str | None,
    group_ids: Iterable[str],
    rules: Rules,
    known: Mapping[str, Mapping[str, Sequence[str]]],
) -> tuple[list[TaskGroup], dict[str, Fault]]:
    """As `load`, of sessions. known: as for `learner.runs.material.load_groups`."""
    groups: list[TaskGroup] = []
    broken: dict[str, Fault] = {}
    for group_id in group_ids:
        try:
            found = load_task_group(
                session,
                group_id,
                rules,
                run_id=run_id,
                most_tokens=MOST_PACKS * MOST_TOKENS,
                known=known.get(group_id),
            )
        except TooLongError as error:
            broken[group_id] = Fault("too_long", str(error))
        except DAMAGE as error:
            broken[group_id] = Fault("unreadable", f"{type(error).__name__}: {error}")
        else:
            if found is None:
                broken[group_id] = Fault("no_scores", "rewards are missing")
            else:
                groups.append(found)
    return groups, broken


def _log_damage(group_id: str, place: int, why: str) -> None:
    log.warning("answer_left_out", group_id=group_id, index=place, reason=UNREADABLE, text=why)


def samplers(session: Session, model: str, names: Iterable[str]) -> dict[str, Parent]:
    """Return the registered adapters with these names, by name."""
    rows = session.scalars(
        select(AdapterRow).where(AdapterRow.model == model, AdapterRow.name.in_(set(names)))
    )
    return {row.name: as_parent(row) for row in rows}


def as_parent(row: AdapterRow) -> Parent:
    """Convert a registered version to a `Parent`, which the trainer can load."""
    return Parent(name=row.name, version=row.version, digest=row.digest, path=Path(row.path))


def mark_trained(session: Session, group_ids: Iterable[str]) -> None:
    """Move groups from `claimed` to `trained`, and count them. What an earlier run said is gone."""
    moved = _move(session, group_ids, CLAIMED, status=TRAINED, detail=None)
    count(session, STAGE, TRAINED, moved)


def drop_answers_of(session: Session, run_id: str, tasks: Iterable[TaskGroup]) -> None:
    """Drop the groups that wait with other answers to the steps of trained sessions: each step is
    learned from once."""
    steps = [name for task in tasks for one in task.sessions for name in one.steps]
    waiting = session.scalars(
        select(GroupRow.group_id).where(GroupRow.exchange_id.in_(steps), GroupRow.status == SCORED)
    ).all()
    drop(session, run_id, dict.fromkeys(waiting, IN_TASK_GROUP), before=SCORED)


def drop(
    session: Session,
    run_id: str,
    reasons: Mapping[str, str],
    *,
    before: str,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Move groups to `dropped` with their reasons, and count them by reason.

    reasons: group id -> reason. before: the present status of the groups. texts: group id ->
        details of the reason, if any.
    """
    moved: Counter[str] = Counter()
    for group_id, reason in reasons.items():
        text = (texts or {}).get(group_id)
        detail = text[:DETAIL_LENGTH] if text is not None else None
        values = {"status": DROPPED, "run_id": run_id, "reason": reason, "detail": detail}
        moved[reason] += _move(session, [group_id], before, **values)
    for reason, groups in moved.items():
        count(session, STAGE, reason, groups)


def give_back(session: Session, run_id: str, group_ids: Iterable[str] | None = None) -> int:
    """Move groups of a run that were not trained on from `claimed` back to `scored`.

    group_ids: None: all of the run's claimed groups. Returns: the number of groups.
    """
    held = [group_id for group_id, _ in _claimed(session, run_id)]
    returned = held if group_ids is None else set(held) & set(group_ids)
    return _move(session, returned, CLAIMED, status=SCORED, run_id=None)


def count_answers(
    session: Session,
    groups: Iterable[ScoredGroup],
    masked: Mapping[str, int],
    checked: Mapping[str, CheckedAnswers],
) -> dict[str, int]:
    """Count the answers that a run left out, and the tokens of answers that a mask restricted.

    masked: reason -> answers, of selection. checked: group id -> what the check decided.
    Returns: `FREE_TOKENS`, which were trained on, and `MASKED_TOKENS` beside them, which the mask
        had touched; nothing where no group of the run was restricted.
    """
    answers = Counter(masked)
    for one in checked.values():
        answers.update(one.left_out.values())
    tokens: Counter[str] = Counter()
    for scored in groups:
        found = checked.get(scored.group.group_id)
        if found is not None and scored.group.masked_by is not None:
            tokens[FREE_TOKENS] += found.tokens
            tokens[MASKED_TOKENS] += sum(found.masked_tokens.values())
    for why, number in answers.items():
        count(session, STAGE, f"answer_masked_{why}", number)
    for what, number in tokens.items():
        count(session, STAGE, what, number)
    return dict(tokens)


def _parents(session: Session, model: str) -> dict[str, str]:
    versions = select(AdapterRow.name, AdapterRow.parent).where(AdapterRow.model == model)
    return {row.name: row.parent for row in session.execute(versions)}


def _move(session: Session, group_ids: Iterable[str], before: str, **values: str | None) -> int:
    moved = 0
    for group_id in group_ids:
        row = _table(group_id)
        statement = (
            update(row)
            .where(row.group_id == group_id, row.status == before)
            .values(**values)
            .returning(row.seq)
        )
        moved += len(session.scalars(statement).all())
    return moved


# Decide which groups a failed run counts against, and drop groups that failed too often.

FAILED_RUNS = "failed_runs"
ATTEMPTS = 2
"""Failures after which a group that was blamed alone is dropped."""
ATTEMPTS_TOGETHER = 10
"""Failures after which a group that was blamed with others is dropped. Halving 64 suspects down to
one takes seven runs."""
ENVIRONMENT = (OSError, MemoryError, DeviceError, IncompleteAdapterError, RunStoppedError)
"""Errors that no group causes, unless they name some; StoreError and ParentError are among them."""


def blame_for_error(session: Session, run_id: str, error: BaseException) -> Mapping[str, Fault]:
    """Return the groups of a run that may have caused its error, with their faults."""
    if isinstance(error, FaultyGroupsError) and error.faults:
        return error.faults
    if isinstance(error, ENVIRONMENT) or not isinstance(error, Exception):
        return {}
    return _suspects(session, run_id, f"{type(error).__name__}: {error}")


def blame_for_death(session: Session, run_id: str, reason: str) -> Mapping[str, Fault]:
    """Return the groups of a run that may have caused its sudden end, with their faults."""
    run = session.get(RunRow, run_id)
    place = run.place if run is not None else None
    if place is None:  # not said
        return _suspects(session, run_id, reason)
    if not place:  # the run was loading, stepping or saving
        return {}
    return {place: Fault(FAILED_RUNS, f"the run was computing it when {reason}")}


def blame(session: Session, run_id: str, culprits: Mapping[str, Fault], *, times: int = 1) -> None:
    """Count a failure against claimed groups; drop those that failed too often.

    culprits: group id -> fault. times: how often it failed, where it is a single group.
    """
    counted = times if len(culprits) == 1 else 1
    most = ATTEMPTS if len(culprits) == 1 else ATTEMPTS_TOGETHER
    for group_id, fault in culprits.items():
        text, row = fault.text[:DETAIL_LENGTH], _table(group_id)
        attempts = session.scalar(
            update(row)
            .where(row.group_id == group_id, row.run_id == run_id)
            .where(row.status == CLAIMED)
            .values(learn_attempts=row.learn_attempts + counted, detail=text)
            .returning(row.learn_attempts)
        )
        if attempts is not None and attempts >= most:
            reasons, texts = {group_id: fault.reason}, {group_id: text}
            drop(session, run_id, reasons, before=CLAIMED, texts=texts)


def _claimed(session: Session, run_id: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for row in (GroupRow, TaskGroupRow):
        columns = select(row.group_id, row.learn_attempts)
        rows = session.execute(columns.where(row.run_id == run_id, row.status == CLAIMED))
        found += [(group_id, attempts) for group_id, attempts in rows]
    return found


def _suspects(session: Session, run_id: str, text: str) -> dict[str, Fault]:
    claimed = _claimed(session, run_id)
    before = any(attempts for _, attempts in claimed)
    return {
        group_id: Fault(FAILED_RUNS, text)
        for group_id, attempts in claimed
        if attempts or not before
    }


# Choose the groups of the next run when some are suspected of failed runs. Pure.

SUSPECTS_KEPT = 4
"""Most suspects that may wait, as a multiple of `most`; older ones are given up."""

TRIED_AGAIN = ("out_of_memory",)
"""Faults of a group that may be transient: it is given back, and its attempts are counted."""


def choose(
    fresh: Sequence[str], failures: Mapping[str, int], *, least: int, most: int, after_failure: bool
) -> tuple[list[str], list[str]]:
    """Choose the groups of a run.

    fresh: group ids, the newest first. failures: group id -> failed runs it is suspected of.
    least: least number of waiting groups for a run. most: most groups of a run.
    Returns: groups to take, those without failures first; and suspects to give up.
    """
    clean = [group_id for group_id in fresh if not failures.get(group_id)]
    suspects = [group_id for group_id in fresh if failures.get(group_id)]
    kept, given_up = suspects[: SUSPECTS_KEPT * most], suspects[SUSPECTS_KEPT * most :]
    if len(fresh) < least:
        return [], given_up
    if not kept or (after_failure and 2 * len(clean) >= least):
        return clean[:most], given_up
    fewest = min(failures[group_id] for group_id in kept)
    pool = [group_id for group_id in kept if failures[group_id] == fewest]
    tried = pool[: min((len(pool) + 1) // 2, most)]
    return clean[: most - len(tried)] + tried, given_up

"""The groups that wait to be scored again, in the store. Blocking: the worker calls it in a thread.

A row waits with `window_number` null. A group that will not be scored again, for whatever reason,
has its row deleted and is counted; its scores are not touched.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import msgspec
import structlog
from sqlalchemy import Select, delete, func, select, update
from sqlalchemy.orm import Session

from ingest.grouping.features import share_of
from ingest.judge_watch import read_judge_state
from ingest.noise.estimate import (
    Estimate,
    Figure,
    Passes,
    Twice,
    changes_within,
    decode_passes,
    drifts,
    encode_passes,
    estimate,
    usable,
)
from ingest.records import Group
from ingest.ruler.calls import save_judge_calls
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import JudgeCall, Judgement
from ingest.store.groups import SAMPLED, load_group
from sidecar.settings import Judge
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database, count, get_flag, insert_into, set_flag
from sidecar.store.models import GroupRow, JudgeNoiseRow, RescoringRow

# Choose groups to be scored again, at the moment when they are scored.

STAGE = "rescoring"
"""Counter rows: (stage, outcome) -> groups."""
MOST_WAITING = 1_000
"""Groups that may wait to be scored again; while so many do, no other is chosen."""


def is_chosen(group_id: str, share: float) -> bool:
    """Return True for a group that is to be scored again, decided by a hash of its id.

    share: of all groups, 0..1. A higher share only adds groups.
    """
    return share_of(f"rescoring\x00{group_id}") < share


class Choosing:
    """Notes a share of the groups that get scores."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings

    def note(
        self, session: Session, group_id: str, judgement: Judgement, rubric_hash: str, now: float
    ) -> None:
        """Choose the group or not, in the transaction that stores its scores."""
        judges = {call.judge_model for call in judgement.calls}
        if not is_chosen(group_id, self._settings.rescore_share) or len(judges) != 1:
            return
        if count_waiting(session) >= MOST_WAITING:
            count(session, STAGE, "backlog_full")
            return
        added = session.scalar(
            insert_into(session, RescoringRow)
            .values(
                group_id=group_id,
                chosen_at=now,
                due_at=now + self._settings.rescore_after_s,
                attempts=0,
                judge_model=judges.pop(),
                rubric_hash=rubric_hash,
                passes=len(judgement.passes),
                first=encode_passes(judgement.passes),
            )
            .on_conflict_do_nothing()
            .returning(RescoringRow.group_id)
        )
        if added is not None:
            count(session, STAGE, "chosen")


def count_waiting(session: Session) -> int:
    """Count the groups that wait to be scored again, up to `MOST_WAITING`."""
    waiting = select(RescoringRow.group_id).where(RescoringRow.window_number.is_(None))
    some = waiting.limit(MOST_WAITING).subquery()
    return session.scalar(select(func.count()).select_from(some)) or 0


# The noise of the judge that scores now, for status, doctor and metrics: a row of `flag`.

FLAG = "judge_noise"

log = structlog.get_logger()


class NoiseState(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the judge's noise. Figures are None before two groups were scored twice."""

    at: float
    """Unix seconds."""
    judge_model: str
    rubric_hash: str
    passes: int
    project: str = ""
    """Project whose rubric it is; empty: `judge.rubric`."""
    groups: int = 0
    """Groups that the figures come from: those of one window."""
    whole: bool = False
    """The window has all its groups."""
    sd: float | None = None
    sd_low: float | None = None
    sd_high: float | None = None
    slope: float | None = None
    slope_low: float | None = None
    slope_high: float | None = None
    flips: float | None = None
    drift: str = ""
    """What changed, as of the newest whole window; empty: nothing did."""
    drift_at: float | None = None
    """When the newest whole window showed it."""


def read_noise_state(session: Session) -> NoiseState | None:
    """Return what score last wrote; None when it wrote nothing, or the row is damaged."""
    found = get_flag(session, FLAG)
    try:
        return None if not found else msgspec.json.decode(found, type=NoiseState)
    except msgspec.MsgspecError:
        log.warning("judge_noise_state_unreadable")
        return None


def write_noise_state(session: Session, state: NoiseState) -> None:
    set_flag(session, FLAG, msgspec.json.encode(state).decode(), now=state.at)


# The judge's noise in the store, by series and window.

WINDOW = 50
"""Groups of a window: a thousand scored groups at 5%."""
LISTED = 40
"""Windows that are shown."""
FIGURES = ("sd", "slope", "first_minus_last", "shift", "flips")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    rubric_hash: str
    judge_model: str
    passes: int


def window_for(session: Session, series: Series) -> int:
    """Return the number of the window that the series' next group belongs to."""
    newest = session.execute(
        select(JudgeNoiseRow.window_number, JudgeNoiseRow.whole)
        .where(*_of(JudgeNoiseRow, series))
        .order_by(JudgeNoiseRow.window_number.desc())
        .limit(1)
    ).first()
    if newest is None:
        return 0
    return newest[0] + 1 if newest[1] else newest[0]


def refresh(session: Session, series: Series, window: int, *, now: float) -> JudgeNoiseRow | None:
    """Estimate a window anew from its groups, in the caller's write transaction.

    Returns: its row; None when too few groups can be read.
    """
    groups = _groups_of(session, series, window)
    found = estimate(groups)
    if found is None:
        return None
    whole = len(groups) >= WINDOW
    changed: tuple[str, ...] = ()
    reference = False
    if whole:
        with_all = _row(
            session,
            series,
            JudgeNoiseRow.reference.is_(True),
            JudgeNoiseRow.window_number < window,
        )
        if with_all is None:
            half = len(groups) // 2
            changed = changes_within(found, estimate(groups[:half]), estimate(groups[half:]))
            reference = not changed
        else:
            before = _row(session, series, JudgeNoiseRow.window_number == window - 1)
            changed = drifts(
                found,
                before=to_estimate(before),
                reference=None if with_all is before else to_estimate(with_all),
            )
    values = {
        **_columns(found),
        "at": now,
        "whole": whole,
        "reference": reference,
        "drift": "; ".join(changed) or None,
    }
    key = {**asdict(series), "window_number": window}
    session.execute(
        insert_into(session, JudgeNoiseRow)
        .values(**key, **values)
        .on_conflict_do_update(index_elements=list(key), set_=values)
    )
    return _row(session, series, JudgeNoiseRow.window_number == window)


def current(session: Session, series: Series, *, now: float) -> NoiseState:
    """Sum up what is known of a series."""
    rows = newest_of_series(session, series)
    whole = next((row for row in rows if row.whole), None)
    row = whole or (rows[0] if rows else None)
    if row is None:
        return NoiseState(at=now, **asdict(series))
    drift = whole.drift if whole is not None and not whole.reference else None
    return NoiseState(
        at=now,
        **asdict(series),
        groups=row.groups,
        whole=row.whole,
        sd=row.sd,
        sd_low=row.sd_low,
        sd_high=row.sd_high,
        slope=row.slope,
        slope_low=row.slope_low,
        slope_high=row.slope_high,
        flips=row.flips,
        drift=drift or "",
        drift_at=row.at if drift else None,
    )


def newest_windows(session: Session, rubric_hash: str, judge_model: str) -> list[JudgeNoiseRow]:
    """Read the newest windows of a judge with a rubric, whatever the passes; newest first."""
    return list(
        session.scalars(
            select(JudgeNoiseRow)
            .where(
                JudgeNoiseRow.rubric_hash == rubric_hash, JudgeNoiseRow.judge_model == judge_model
            )
            .order_by(JudgeNoiseRow.at.desc())
            .limit(LISTED)
        )
    )


def newest_of_series(session: Session, series: Series) -> list[JudgeNoiseRow]:
    """Read the newest windows of one series, newest first."""
    return list(
        session.scalars(
            select(JudgeNoiseRow)
            .where(*_of(JudgeNoiseRow, series))
            .order_by(JudgeNoiseRow.window_number.desc())
            .limit(LISTED)
        )
    )


def accept(session: Session, series: Series) -> JudgeNoiseRow | None:
    """Make the newest whole window of a series the one that its later windows are compared with.

    Returns: that window; None when there is none.
    """
    row = next((row for row in newest_of_series(session, series) if row.whole), None)
    if row is None:
        return None
    row.reference = True
    session.flush()
    return row


def to_estimate(row: JudgeNoiseRow | None) -> Estimate | None:
    if row is None:
        return None
    figures = {
        name: Figure(
            value=getattr(row, name),
            error=getattr(row, f"{name}_error"),
            low=getattr(row, f"{name}_low"),
            high=getattr(row, f"{name}_high"),
        )
        for name in FIGURES
    }
    return Estimate(groups=row.groups, answers=row.answers, pass_sd=row.pass_sd, **figures)


def _groups_of(session: Session, series: Series, window: int) -> list[Twice]:
    """Read a window's groups in the order in which they were scored again."""
    rows = session.execute(
        select(
            RescoringRow.at, RescoringRow.group_id, RescoringRow.first, RescoringRow.again
        ).where(*_of(RescoringRow, series), RescoringRow.window_number == window)
    ).all()
    groups = []
    for _, group_id, first, again in sorted(rows, key=lambda row: (row[0] or 0.0, row[1])):
        try:
            one = Twice(first=decode_passes(first), again=decode_passes(again))
        except (ValueError, TypeError) as error:
            log.warning("rescoring_unreadable", group_id=group_id, error=str(error))
            continue
        if usable(one):
            groups.append(one)
    return groups


def _row(session: Session, series: Series, *where: Any) -> JudgeNoiseRow | None:
    return session.scalar(
        select(JudgeNoiseRow)
        .where(*_of(JudgeNoiseRow, series), *where)
        .order_by(JudgeNoiseRow.window_number.desc())
        .limit(1)
        .execution_options(populate_existing=True)
    )


def _of(table: type[JudgeNoiseRow] | type[RescoringRow], series: Series) -> tuple[Any, ...]:
    return (
        table.rubric_hash == series.rubric_hash,
        table.judge_model == series.judge_model,
        table.passes == series.passes,
    )


def _columns(found: Estimate) -> dict[str, float | int]:
    columns: dict[str, float | int] = {
        "groups": found.groups,
        "answers": found.answers,
        "pass_sd": found.pass_sd,
    }
    for name in FIGURES:
        figure: Figure = getattr(found, name)
        columns[name] = figure.value
        columns |= {f"{name}_{part}": getattr(figure, part) for part in ("error", "low", "high")}
    return columns


# The series of the judge that the settings name: one for each rubric.


def series_of(judge: Judge, project: str = "") -> Series:
    """Return the series of the scores of a project; of `judge.rubric` without one."""
    return Series(
        rubric_hash=hash_of(judge.of(project)), judge_model=judge.model, passes=judge.passes
    )


def each_series(judge: Judge, *, model: str = "") -> Mapping[Series, str]:
    """Return every series with the project that it is of: "" for `judge.rubric`, which is first.

    model: the judge's name, where it is not that of the settings. Two projects with the same
    rubric share a series; it is under the first.
    """
    found: dict[Series, str] = {}
    for project in chain([""], judge.projects):
        series = replace(series_of(judge, project), judge_model=model or judge.model)
        found.setdefault(series, project)
    return found


def known_noise(session: Session, series: Mapping[Series, str], *, now: float) -> NoiseState:
    """Sum up what is known of the judge.

    series: as `each_series` returns them.
    Returns: the state of the first series that drifts; else of the first that is measured; else of
    the first.
    """
    states = [
        msgspec.structs.replace(current(session, one, now=now), project=project)
        for one, project in series.items()
    ]
    drifting = (state for state in states if state.drift)
    measured = (state for state in states if state.sd is not None)
    return next(chain(drifting, measured, states))


ATTEMPTS = 10
"""Claims of one group. With an hour between two of them it outlasts an outage of a night."""
AGAIN_S = 3_600.0
LATE_S = 7 * 86_400.0
"""A group that could not be asked about for so long, since fresh ones always came first, is left:
what is compared should not be weeks apart."""
GONE, OTHER_JUDGE, OTHER_ANSWERS = "group_gone", "other_judge", "other_answers"
UNREADABLE, TOO_LATE, INTERRUPTED = "unreadable", "too_late", "judge_interrupted"
SCORED = "scored"
MOST_LEFT = 50
"""Groups that one claim may pass over."""
_DAMAGE = (ValueError, TypeError, LookupError, zlib.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A group that is to be scored again now."""

    group: Group
    first: Passes
    series: Series


class Queue:
    """The groups of one judge that wait, and what is made of their second scores."""

    def __init__(
        self,
        database: Database,
        series: Mapping[Series, str],
        *,
        after_s: float,
        lease_s: float,
    ) -> None:
        """series: of the judge that scores now, as `each_series` returns them.
        after_s: `judge.rescore_after_s`. lease_s: how long a claimed group is this worker's."""
        self._database = database
        self._series = series
        self._after_s = after_s
        self._lease_s = lease_s

    def begin(self, now: float) -> None:
        """Write what is known of these series, as the state of the judge's noise."""
        with self._database.write() as session:
            write_noise_state(session, known_noise(session, self._series, now=now))

    def claim(self, now: float) -> Claim | None:
        """Claim the group that waits longest, when the judge works and no fresh group waits.

        Returns: None when there is none. Groups that are left for good are passed over.
        """
        for _ in range(MOST_LEFT):
            with self._database.read() as session:
                if not _has_time(session, now) or session.scalar(_due(now)) is None:
                    return None
            with self._database.write(alone=False) as session:
                row = session.scalar(_due(now).with_for_update(skip_locked=True))
                if row is None:
                    return None
                row.due_at = now + self._lease_s
                row.attempts += 1
                group_id, stored, held = row.group_id, row.first, _series_of(row)
                why = self._why_left(session, row, now)
                session.flush()
                if why is not None:
                    _leave(session, group_id, why)
                    continue
            claim = self._load(group_id, stored, held)
            if claim is not None:
                return claim
        return None

    def _load(self, group_id: str, stored: object, series: Series) -> Claim | None:
        try:
            with self._database.read() as session:
                group = load_group(session, group_id)
            if group is not None:
                return Claim(group=group, first=decode_passes(stored), series=series)
            why = GONE
        except _DAMAGE as error:
            log.warning("rescoring_unreadable", group_id=group_id, error=str(error))
            why = UNREADABLE
        with self._database.write(alone=False) as session:
            _leave(session, group_id, why)
        return None

    def _why_left(self, session: Session, row: RescoringRow, now: float) -> str | None:
        if _series_of(row) not in self._series:
            return OTHER_JUDGE
        if session.scalar(select(GroupRow.seq).where(GroupRow.group_id == row.group_id)) is None:
            return GONE
        if row.attempts > ATTEMPTS:
            return INTERRUPTED
        return TOO_LATE if now > row.chosen_at + self._after_s + LATE_S else None

    def give_back(
        self, claim: Claim, calls: Sequence[JudgeCall], why: str, *, final: bool, now: float
    ) -> None:
        """Keep the calls that gave no second scores, and put the group back for an hour.

        final: the judge will never score it; it is left for this reason.
        """
        group_id = claim.group.group_id
        with self._database.write() as session:
            self._save_calls(session, claim, calls, now=now)
            tried = session.scalar(
                select(RescoringRow.attempts).where(RescoringRow.group_id == group_id)
            )
            if tried is None:
                return
            if final or tried >= ATTEMPTS:
                _leave(session, group_id, why)
                return
            session.execute(
                update(RescoringRow)
                .where(RescoringRow.group_id == group_id, RescoringRow.window_number.is_(None))
                .values(due_at=now + AGAIN_S)
                .execution_options(synchronize_session=False)
            )

    def put_back(self, claim: Claim, *, now: float) -> None:
        """Undo a claim: the process stops."""
        with self._database.write(alone=False) as session:
            session.execute(
                update(RescoringRow)
                .where(
                    RescoringRow.group_id == claim.group.group_id,
                    RescoringRow.window_number.is_(None),
                )
                .values(due_at=now, attempts=RescoringRow.attempts - 1)
                .execution_options(synchronize_session=False)
            )

    def record(
        self, claim: Claim, judgement: Judgement, calls: Sequence[JudgeCall], *, now: float
    ) -> tuple[NoiseState, bool]:
        """Store second scores, and estimate their window anew.

        Returns: what is known of the judge now, and whether this says for the first time that it
        has changed.
        """
        group_id = claim.group.group_id
        both = Twice(first=claim.first, again=judgement.passes)
        with self._database.write() as session:  # alone: it gives the group its place in a window
            self._save_calls(session, claim, calls, now=now)
            known = read_noise_state(session)
            models = {call.judge_model for call in judgement.calls}
            if not usable(both):
                _leave(session, group_id, OTHER_ANSWERS)
            elif models != {claim.series.judge_model}:
                _leave(session, group_id, OTHER_JUDGE)
            else:
                window = window_for(session, claim.series)
                stored = session.scalars(
                    update(RescoringRow)
                    .where(RescoringRow.group_id == group_id, RescoringRow.window_number.is_(None))
                    .values(again=encode_passes(both.again), at=now, window_number=window)
                    .returning(RescoringRow.group_id)
                    .execution_options(synchronize_session=False)
                ).all()
                if stored:
                    count(session, STAGE, SCORED)
                    refresh(session, claim.series, window, now=now)
            state = known_noise(session, self._series, now=now)
            write_noise_state(session, state)
        news = bool(state.drift) and (
            known is None
            or (known.rubric_hash, known.drift_at) != (state.rubric_hash, state.drift_at)
        )
        return state, news

    def _save_calls(
        self, session: Session, claim: Claim, calls: Sequence[JudgeCall], *, now: float
    ) -> None:
        group_id = claim.group.group_id
        known = select(GroupRow.seq).where(GroupRow.group_id == group_id)
        if session.scalar(known) is not None:
            save_judge_calls(
                session,
                group_id,
                calls,
                rubric_hash=claim.series.rubric_hash,
                now=now,
                again=True,
            )
        else:  # deleted meanwhile: what was said of it is not kept
            for call in calls:
                count(session, "judge_calls", "good" if call.ok else "bad")
        count(session, STAGE, "calls", len(calls))


def _series_of(row: RescoringRow) -> Series:
    return Series(rubric_hash=row.rubric_hash, judge_model=row.judge_model, passes=row.passes)


def _has_time(session: Session, now: float) -> bool:
    judge = read_judge_state(session)
    if judge is None or judge.state != "works":
        return False
    fresh = select(GroupRow.seq).where(GroupRow.status == SAMPLED, GroupRow.lease_until <= now)
    return session.scalar(fresh.limit(1)) is None


def _due(now: float) -> Select[RescoringRow]:
    """Select the row that waits longest."""
    return (
        select(RescoringRow)
        .where(RescoringRow.window_number.is_(None), RescoringRow.due_at <= now)
        .order_by(RescoringRow.due_at)
        .limit(1)
    )


def _leave(session: Session, group_id: str, why: str) -> None:
    session.execute(
        delete(RescoringRow)
        .where(RescoringRow.group_id == group_id, RescoringRow.window_number.is_(None))
        .execution_options(synchronize_session=False)
    )
    count(session, STAGE, why)

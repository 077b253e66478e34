"""The judge's noise in the store, by series and window.

A series has one rubric, judge model and number of passes: with another of these the noise is
another, so a change of them begins a new series and is no drift. Its groups fill windows of
`WINDOW` groups, in the order in which they were scored again. A window is estimated anew with each
group that comes, from its own rows alone, and never again once it is whole. Then it is compared
with the one before and with the reference. The first whole window whose two halves agree is the
reference; until there is one, a window is compared with nothing but itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.noise.drift import changes_within, drifts
from ingest.noise.estimate import Estimate, Twice, estimate, usable
from ingest.noise.figures import Figure
from ingest.noise.passes import decode_passes
from ingest.noise.state import NoiseState
from sidecar.store.database import insert_into
from sidecar.store.models import JudgeNoiseRow, RescoringRow

WINDOW = 50
"""Groups of a window: a thousand scored groups at 5%."""
LISTED = 40
"""Windows that are shown."""
FIGURES = ("sd", "slope", "first_minus_last", "shift", "flips")

log = structlog.get_logger()


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

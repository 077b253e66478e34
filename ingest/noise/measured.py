"""The judge's noise in a score of so many passes, for the learner.

Noise is read where it was measured: from groups that the same judge scored twice with the same
rubric and number of passes. Where none was measured with that number, another one's gives an upper
bound, so that groups of pure noise do not pass the learner's gate:

- one pass: `pass_sd` is measured with any number of passes.
- an even number, measured with more: `sd * sqrt(measured / passes)`. Passes come in pairs, an order
  and its reverse, and the pairs of a group are drawn independently; then it is exact. What the
  passes of one scoring share makes the true noise smaller. At most `pass_sd`.
- an even number, measured with fewer: `sd`, since a mean over more pairs is no noisier. It is not
  divided by the root of their number: what the passes of one scoring share does not average out.
- otherwise `pass_sd`: the mean of several passes is no noisier than each. It is not divided by a
  root either, since an order and its reverse need not be independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.noise.windows import Series, newest_of_series
from sidecar.store.models import JudgeNoiseRow

LEAST_GROUPS = 20
"""Groups from which on a window that is not whole counts, when there is no whole one: with groups
of 8 its standard deviation is then known to about 10%."""

JudgedBy = tuple[str, str, int]
"""(judge model, rubric hash, passes) of scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNoise:
    """The noise of one judge with one rubric and number of passes. Score units."""

    judge_model: str
    rubric_hash: str
    passes: int
    """Passes of the scores that `sd` is of."""
    measured_passes: int
    """Passes with which it was measured; with others `sd` is an upper bound (`scaled_sd`)."""
    window: int
    groups: int
    at: float
    """When the newest of these groups was scored again, in Unix seconds."""
    sd: float
    """Standard deviation of a score that is the mean over `passes`."""
    pass_sd: float
    """Standard deviation of the score of a single pass."""


def measured_noise(
    session: Session, scored: Iterable[JudgedBy]
) -> Mapping[JudgedBy, MeasuredNoise]:
    """Return the noise of the scores of each of these judges that was measured.

    That is of the newest whole window, or without one of the first once it has `LEAST_GROUPS`; of
    the series with the same passes, or without one of the series that was measured last.
    """
    found = {}
    for judge_model, rubric_hash, passes in sorted(set(scored)):
        rows = _measured_rows(session, judge_model, rubric_hash)
        row = rows.get(passes) or max(rows.values(), key=lambda one: one.at, default=None)
        if row is not None:
            found[judge_model, rubric_hash, passes] = MeasuredNoise(
                judge_model=judge_model,
                rubric_hash=rubric_hash,
                passes=passes,
                measured_passes=row.passes,
                window=row.window_number,
                groups=row.groups,
                at=row.at,
                sd=scaled_sd(row.sd, row.pass_sd, measured=row.passes, passes=passes),
                pass_sd=row.pass_sd,
            )
    return found


def scaled_sd(sd: float, pass_sd: float, *, measured: int, passes: int) -> float:
    """Return the noise of a score over `passes`, or an upper bound of it. Pure.

    sd: of a score over `measured` passes. pass_sd: of a single pass. See the module's text.
    """
    if passes == measured:
        return sd
    if passes == 1 or passes % 2 or measured % 2:
        return pass_sd
    return min(pass_sd, sd * math.sqrt(max(1.0, measured / passes)))


def _measured_rows(
    session: Session, judge_model: str, rubric_hash: str
) -> dict[int, JudgeNoiseRow]:
    """Return the window that tells of each number of passes that was measured."""
    numbers = session.scalars(
        select(JudgeNoiseRow.passes)
        .where(JudgeNoiseRow.rubric_hash == rubric_hash, JudgeNoiseRow.judge_model == judge_model)
        .distinct()
    ).all()
    found = {}
    for passes in numbers:
        series = Series(rubric_hash=rubric_hash, judge_model=judge_model, passes=passes)
        rows = newest_of_series(session, series)
        fit = [row for row in rows if row.groups >= LEAST_GROUPS and _is_sound(row)]
        newest = next((row for row in fit if row.whole), fit[0] if fit else None)
        if newest is not None:
            found[passes] = newest
    return found


def _is_sound(row: JudgeNoiseRow) -> bool:
    """Return False for a damaged row, which must not keep any group from being learned from."""
    return all(isinstance(one, float) and 0 <= one <= 1 for one in (row.sd, row.pass_sd))

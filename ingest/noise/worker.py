"""Scores chosen groups a second time, one at a time, while the judge has nothing else to do.

Fresh groups come first, and nothing is asked while the judge is away. A second scoring changes no
score: a failure costs a measurement alone, so it is not blamed on anybody and stops nothing.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.noise.windows import (
    Claim,
    Queue,
    Series,
    accept,
    count_waiting,
    each_series,
    known_noise,
    newest_of_series,
    newest_windows,
    series_of,
    write_noise_state,
)
from ingest.privacy.texts import JudgeView
from ingest.ruler.group import GroupOutcome, Scored, SetAside, Unanswered, judge_group
from ingest.ruler.judge import Judge
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import ATTEMPTS, SEED_BITS, JudgeCall
from ingest.ruler.waiting import Waiting
from ingest.store.listing import patiently
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database
from sidecar.store.models import JudgeNoiseRow

POLL_S = 5.0
LEASE_SLACK_S = 60.0
LONGEST_KEPT_S = 60.0
"""Longest time that second scores are kept for a store that refuses them."""
DEFECT = "judge_defect"

log = structlog.get_logger()


class RescoringWorker:
    """Scores groups again until stopped. Several may run, in one process or in many."""

    def __init__(
        self,
        database: Database,
        judge: Judge,
        settings: JudgeSettings,
        *,
        clock: Callable[[], float] = time.time,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
        view: JudgeView | None = None,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """draw_seed: called for each group: the order is drawn anew, independently of the first.
        view: as for `score_answers`. announce: tells the operator's terminal."""
        self._judge = judge
        self._settings = settings
        self._clock = clock
        self._draw_seed = draw_seed
        self._view = view
        self._announce = announce
        self._waiting = Waiting()
        self._series = each_series(settings, model=judge.model)
        self._queue = Queue(
            database,
            self._series,
            after_s=settings.rescore_after_s,
            lease_s=settings.passes * ATTEMPTS * settings.timeout_s + LEASE_SLACK_S,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Score groups again, one at a time, until `stop` is set."""
        stopping = asyncio.create_task(stop.wait())
        begun = False
        try:
            while not stop.is_set():
                scored = False
                try:
                    if not begun:
                        await asyncio.to_thread(self.begin)
                        begun = True
                    scored = await self.step(stopping)
                except StoreError as error:
                    log.warning("rescoring_waits_for_store", error=str(error))
                if not scored:
                    await asyncio.wait({stopping}, timeout=POLL_S)
        finally:
            stopping.cancel()

    def begin(self) -> None:
        """Write what is known of this judge: the one before may have been another. Blocks.

        Raises: StoreError.
        """
        self._queue.begin(self._clock())

    async def step(self, stopping: asyncio.Task[bool] | None = None) -> bool:
        """Score the group again that waits longest, if one does and the judge has time.

        stopping: ends the question to the judge; the group is put back.
        Returns: True when another may follow at once. Raises: StoreError.
        """
        if self._clock() < self._waiting.retry_at:
            return False
        claim = await asyncio.to_thread(self._queue.claim, self._clock())
        if claim is None:
            return False
        calls: list[JudgeCall] = []
        asking = asyncio.create_task(self._ask(claim, calls))
        await asyncio.wait(
            {asking, *((stopping,) if stopping is not None else ())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.to_thread(self._queue.put_back, claim, now=self._clock())
            return False
        await self._keep(claim, asking.result(), calls)
        return isinstance(asking.result(), Scored)

    async def _ask(self, claim: Claim, calls: list[JudgeCall]) -> GroupOutcome:
        try:
            return await judge_group(
                claim.group,
                self._judge,
                # By the rubric of the first scores, also where the project has another by now.
                self._settings.of(self._series[claim.series]),
                seed=self._draw_seed(),
                on_call=calls.append,
                view=self._view,
            )
        except Exception as error:
            log.exception("rescoring_failed", group_id=claim.group.group_id)
            return SetAside(reason=DEFECT, detail=type(error).__name__, asked=False)

    async def _keep(self, claim: Claim, outcome: GroupOutcome, calls: list[JudgeCall]) -> None:
        """Store what the judge said. Raises: StoreError when the store does not take it."""
        now = self._clock()
        if isinstance(outcome, Scored):
            self._waiting = self._waiting.answered()
            state, news = await patiently(
                lambda: self._queue.record(claim, outcome.judgement, calls, now=now),
                on_failure=_not_stored,
                longest_s=LONGEST_KEPT_S,
            )
            if news:
                log.error(
                    "judge_drift",
                    model=state.judge_model,
                    rubric_hash=state.rubric_hash,
                    project=state.project,
                    what=state.drift,
                )
                of = f" --project {state.project}" if state.project else ""
                self._announce(
                    f"judge {state.judge_model} is not as it was: {state.drift}; "
                    f"see `sidecar judge noise{of}`"
                )
            return
        if isinstance(outcome, Unanswered):
            self._waiting = self._waiting.failed(now, retry_after_s=outcome.retry_after_s)
        log.info("group_not_scored_again", group_id=claim.group.group_id, reason=outcome.reason)
        await patiently(
            lambda: self._queue.give_back(
                claim, calls, outcome.reason, final=isinstance(outcome, SetAside), now=now
            ),
            on_failure=_not_stored,
            longest_s=LONGEST_KEPT_S,
        )


def _not_stored(error: StoreError, _: float) -> None:
    log.warning("rescoring_not_stored", error=str(error))


# What is known of the noise of the judge that the settings name, for the operator.


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNoise:
    rubric_hash: str
    waiting: int
    """Groups that wait to be scored again."""
    windows: list[JudgeNoiseRow]
    """The newest first."""


def read_noise(database: Database, judge: JudgeSettings, project: str = "") -> KnownNoise:
    """Read the newest windows of this judge with the rubric of a project.

    project: empty: `judge.rubric`. Raises: StoreError.
    """
    hashed = hash_of(judge.of(project))
    with database.read() as session:
        return KnownNoise(
            rubric_hash=hashed,
            waiting=count_waiting(session),
            windows=newest_windows(session, hashed, judge.model),
        )


def accept_now(
    database: Database, judge: JudgeSettings, *, now: float, project: str = ""
) -> int | None:
    """Compare later windows with the newest whole one of `judge.passes`, and end its alarm.

    project: as for `read_noise`.
    Returns: the number of that window; None when there is none. Raises: StoreError.
    """
    series = series_of(judge, project)
    with database.write() as session:
        row = accept(session, series)
        if row is None:
            return None
        write_noise_state(session, known_noise(session, each_series(judge), now=now))
        return row.window_number


# Draw a judge's noise and position bias by window.


def draw(rows: Sequence[JudgeNoiseRow], path: Path, *, min_spread: float) -> None:
    """Write a PNG with an axis of the noise and one of the position slope.

    rows: the oldest first. min_spread: `learner.min_spread`, drawn beside the noise.
    Raises: ImportError without matplotlib, which the product does not need; OSError.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend is chosen

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    noise, slope = figure.subplots(2, 1, sharex=True)
    places = list(range(len(rows)))
    sds, slopes = [row.sd for row in rows], [row.slope for row in rows]
    for axis, values, lows, highs, color in (
        (noise, sds, [row.sd_low for row in rows], [row.sd_high for row in rows], "#1f6f8b"),
        (
            slope,
            slopes,
            [row.slope_low for row in rows],
            [row.slope_high for row in rows],
            "#c8553d",
        ),
    ):
        below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
        above = [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
        axis.errorbar(places, values, yerr=[below, above], fmt="o-", capsize=3, color=color)
        for place, row in zip(places, rows, strict=True):
            if row.drift:
                axis.axvline(place, color="#b00020", linestyle=":", linewidth=1)
    noise.axhline(min_spread, color="#555", linestyle="--", linewidth=1)
    noise.set_ylim(bottom=0)
    noise.set_title("noise of a score (dashed: learner.min_spread; dotted: drift)", fontsize=9)
    slope.axhline(0, color="#555", linewidth=1)
    slope.set_title("score of the last position above the first", fontsize=9)
    slope.set_xticks(
        places, [f"{row.window_number}{'' if row.whole else '+'}" for row in rows], fontsize=8
    )
    slope.set_xlabel("window of groups that were scored twice (+: not whole)")
    figure.savefig(path)


# The windows of a judge's noise as a text table. Pure.

HEAD = ("window", "until (UTC)", "passes", "groups", "noise sd", "of a pass", "position slope",
        "first - last", "shift", "flips", "drift")  # fmt: skip


def table_lines(rows: Sequence[JudgeNoiseRow]) -> list[str]:
    """Return the table's lines, one window a line, in the order of `rows`."""
    cells = [HEAD, *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def as_dict(row: JudgeNoiseRow) -> dict[str, object]:
    """Return a window by the names of its columns."""
    return {column.key: getattr(row, column.key) for column in JudgeNoiseRow.__table__.columns}


def _cells(row: JudgeNoiseRow) -> tuple[str, ...]:
    marks = ("" if row.whole else "+") + ("*" if row.reference else "")
    return (
        f"{row.window_number}{marks}",
        f"{datetime.fromtimestamp(row.at, UTC):%Y-%m-%d %H:%M}",
        str(row.passes),
        str(row.groups),
        f"{row.sd:.3f} [{row.sd_low:.3f}, {row.sd_high:.3f}]",
        f"{row.pass_sd:.3f}",
        f"{row.slope:+.3f} [{row.slope_low:+.3f}, {row.slope_high:+.3f}]",
        f"{row.first_minus_last:+.3f} "
        f"[{row.first_minus_last_low:+.3f}, {row.first_minus_last_high:+.3f}]",
        f"{row.shift:+.3f} [{row.shift_low:+.3f}, {row.shift_high:+.3f}]",
        f"{row.flips:.0%} [{max(0.0, row.flips_low):.0%}, {row.flips_high:.0%}]",
        row.drift or "",
    )


# The judge's noise in a score of so many passes, for the learner.

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

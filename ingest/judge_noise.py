"""A judge's noise, position bias and drift, from the two passes over each scored group.

The passes over a group show the same answers in other orders. What is left of their scores without
the mean of each answer, the mean of each pass and a straight line over the positions is noise. Its
sums are added up by judge, rubric and day, in the transaction that stores the group's scores.

Once a day the judge scores ten of the shipped calibration groups, in the same orders as before. A
provider may have put another model behind the name when their scores differ from those of the first
check by more than noise. Nothing is learned from them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from operator import mul
from statistics import fmean, stdev
from typing import TypeVar

import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.calibration.figures import KnownGroup
from ingest.calibration.running import read_groups
from ingest.calibration.shipped import PATH
from ingest.errors import JudgeRefusalError, JudgeReplyError, JudgeUnavailableError
from ingest.judge_watch import read_judge_state
from ingest.privacy.texts import JudgeView, NotRedactedError
from ingest.records import ShownPass
from ingest.ruler.calls import save_judge_calls
from ingest.ruler.judge import Judge
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import JudgeCall, Judgement, measure_disagreement, score_answers
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database, get_flag, insert_into, set_flag
from sidecar.store.models import JudgeNoiseDayRow

DAY_S = 86_400.0
log = structlog.get_logger()
Known = TypeVar("Known")

# Sums over groups, and the figures that they give. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over groups that were scored in two or more passes; scores are 0..1."""

    groups: int = 0
    freedom: int = 0
    """Degrees of freedom: (passes - 1) * (distinct answers - 1)."""
    squares: float = 0.0
    """Of the scores without the means of their answer and of their pass."""
    by_position: float = 0.0
    """Products of these with the positions, 0 (first) to 1 (last), without their means likewise."""
    of_position: float = 0.0
    """Squares of those positions."""
    flips: float = 0.0
    """Shares of the pairs of answers that two passes put in opposite order."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    @property
    def slope(self) -> float:
        """What the last position gets above the first."""
        return self.by_position / self.of_position if self.of_position > 0 else 0.0

    @property
    def pass_variance(self) -> float:
        """Variance of the noise of one pass; the slope costs one degree of freedom."""
        left = self.squares - self.slope * self.by_position
        return max(0.0, left) / max(1, self.freedom - 1)

    def sd(self, passes: int) -> float:
        """Return the standard deviation of the noise of a score that is the mean over `passes`.

        Every second pass is in reverse order, so only an odd number of passes has position bias.
        """
        biased = (
            self.slope**2 * self.of_position / (2 * max(1, self.freedom)) if passes % 2 else 0.0
        )
        return math.sqrt(self.pass_variance / passes + biased / passes**2)


def sums_of(passes: Sequence[ShownPass]) -> Sums | None:
    """Return the sums of one group; None with fewer than two passes or distinct answers."""
    size = len(passes[0].scores) if passes else 0
    disagreement = measure_disagreement([one.scores for one in passes], range(size))
    if disagreement is None or size < 2:
        return None
    places = [[one.order.index(answer) / (size - 1) for answer in range(size)] for one in passes]
    x, y = _without_means(places), _without_means([one.scores for one in passes])
    return Sums(
        groups=1,
        freedom=(len(passes) - 1) * (size - 1),
        squares=sum(map(mul, y, y)),
        by_position=sum(map(mul, x, y)),
        of_position=sum(map(mul, x, x)),
        flips=disagreement.flipped,
    )


def _without_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Subtract from each value the means of its row and its column, and add the mean of all."""
    by_row = [fmean(row) for row in rows]
    by_column = [fmean(column) for column in zip(*rows, strict=True)]
    whole = fmean(by_row)
    return [
        value - mean - by_column[place] + whole
        for row, mean in zip(rows, by_row, strict=True)
        for place, value in enumerate(row)
    ]


# The sums in the store, by day.

WINDOW = 50
"""Groups that a figure needs at most: those of the newest days that have as many."""
LEAST_GROUPS = 20
"""Groups that the learner needs at least: with groups of 8 the noise is then known to about 10%."""
LISTED = 40
"""Newest days with scored groups that are read."""


def add_judgement(session: Session, judgement: Judgement, rubric_hash: str, now: float) -> None:
    """Add a group to the sums of its day, in the transaction that stores its scores."""
    sums = sums_of(judgement.passes)
    if sums is None or judgement.judge_model is None:
        return
    key = {
        "rubric_hash": rubric_hash,
        "judge_model": judgement.judge_model,
        "day": int(now // DAY_S),
    }
    row = JudgeNoiseDayRow
    session.execute(
        insert_into(session, row)
        .values(**key, **asdict(sums))
        .on_conflict_do_update(
            index_elements=list(key),
            set_={name: getattr(row, name) + value for name, value in asdict(sums).items()},
        )
    )


def noise_by_day(session: Session, judge_model: str, rubric_hash: str) -> list[tuple[int, Sums]]:
    """Return the newest days (since 1970, UTC) with scored groups, the newest first."""
    rows = session.scalars(
        select(JudgeNoiseDayRow)
        .where(
            JudgeNoiseDayRow.rubric_hash == rubric_hash, JudgeNoiseDayRow.judge_model == judge_model
        )
        .order_by(JudgeNoiseDayRow.day.desc())
        .limit(LISTED)
    )
    return [(row.day, Sums(**{f.name: getattr(row, f.name) for f in fields(Sums)})) for row in rows]


def newest(days: Iterable[tuple[int, Sums]]) -> Sums:
    """Add up the newest days until they have `WINDOW` groups."""
    found = Sums()
    for _, sums in days:
        if found.groups >= WINDOW:
            break
        found += sums
    return found


JudgedBy = tuple[str, str, int]
"""(judge model, rubric hash, passes) of scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNoise:
    """The noise of the scores of one judge with one rubric and number of passes. Score units."""

    judge_model: str
    rubric_hash: str
    passes: int
    groups: int
    """Groups that it was measured on."""
    sd: float
    """Standard deviation of a score that is the mean over `passes`."""
    pass_sd: float
    """Standard deviation of the score of a single pass, without position bias."""


def measured_noise(
    session: Session, scored: Iterable[JudgedBy]
) -> Mapping[JudgedBy, MeasuredNoise]:
    """Return the noise of the scores of each of these judges that has `LEAST_GROUPS` groups."""
    found = {}
    for judge_model, rubric_hash, passes in sorted(set(scored)):
        sums = newest(noise_by_day(session, judge_model, rubric_hash))
        if sums.groups >= LEAST_GROUPS:
            found[judge_model, rubric_hash, passes] = MeasuredNoise(
                judge_model=judge_model,
                rubric_hash=rubric_hash,
                passes=passes,
                groups=sums.groups,
                sd=sums.sd(passes),
                pass_sd=math.sqrt(sums.pass_variance),
            )
    return found


# The daily check. Pure.

CHECKED_EVERY = 7
"""Every seventh of the 70 shipped groups: ten, of most kinds of task."""
FLOOR = 0.01
"""Score units, added in squares to the noise: a difference below it is far under any spread that
teaches something."""
LIMIT = 3.0
"""Largest ratio of the variance of the change to the one that noise explains, and of two noises. By
the F distribution with the 45 degrees of freedom of ten groups, one check in 4,000 of the same
judge is over it; 3 in 1,000 where its noise differs from group to group."""
LEAST_SHIFT, SHIFT_ERRORS = 0.02, 4.3
"""A shift of all scores is told from this size on, in score units, and from so many standard errors
on: Student's t with 9 degrees of freedom, exceeded by one check in 500 of the same judge."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of the calibration groups at one time."""

    at: float
    """Unix seconds."""
    scores: list[list[float]]
    """[10][G] means over the passes."""
    variance: float
    """Of the noise of these means."""


def difference(first: Check, now: Check) -> str:
    """Return how the judge of `now` differs from that of `first`, in words; empty: by noise."""
    apart = [
        [b - a for a, b in zip(before, after, strict=True)]
        for before, after in zip(first.scores, now.scores, strict=True)
    ]
    shifts = [fmean(group) for group in apart]
    freedom = sum(len(group) - 1 for group in apart)
    squares = sum((one - m) ** 2 for group, m in zip(apart, shifts, strict=True) for one in group)
    noise = 2 * (first.variance + FLOOR**2)
    told = []
    if 2 * (now.variance + FLOOR**2) > LIMIT * noise:
        told.append(
            f"noise sd {math.sqrt(now.variance):.3f}, in the first check "
            f"{math.sqrt(first.variance):.3f}"
        )
    if squares / freedom > LIMIT * noise:
        told.append(
            f"the scores of the calibration groups changed by {math.sqrt(squares / freedom):.3f}, "
            f"where noise explains {math.sqrt(noise):.3f}"
        )
    shift, error = fmean(shifts), stdev(shifts) / math.sqrt(len(shifts))
    if abs(shift) >= LEAST_SHIFT and abs(shift) > SHIFT_ERRORS * error:
        told.append(f"it gives the calibration groups {shift:+.3f} more on average")
    return "; ".join(told)


# What is known of the judge that scores now: rows of `flag`.

FLAG, CHECKS = "judge_noise", "judge_checks"
SUBJECT = "calibration"
"""Subject of the calls of a check in the store, in place of a group's id."""


class NoiseState(msgspec.Struct, frozen=True, kw_only=True):
    """What status, doctor and metrics show. Figures are None before a group was scored."""

    at: float
    """Unix seconds."""
    judge_model: str
    rubric_hash: str
    passes: int
    project: str = ""
    """Project whose rubric it is; empty: `judge.rubric`."""
    groups: int = 0
    """Groups that the figures come from."""
    sd: float | None = None
    slope: float | None = None
    flips: float | None = None
    drift: str = ""
    """What the newest daily check found, with `judge.rubric`; empty: nothing."""
    drift_at: float | None = None
    """When a check found it first."""


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """The daily checks of one judge with one rubric."""

    judge_model: str
    rubric_hash: str
    due_at: float
    """When the next one is due."""
    first: Check | None = None
    """The one that later ones are compared with."""
    last: Check | None = None
    drift: str = ""
    drift_at: float | None = None


def read_noise_state(session: Session) -> NoiseState | None:
    """Return what score last wrote; None when it wrote nothing, or the row is damaged."""
    return _read(session, FLAG, NoiseState)


def write_noise_state(session: Session, state: NoiseState) -> None:
    set_flag(session, FLAG, msgspec.json.encode(state).decode(), now=state.at)


def _read(session: Session, name: str, kind: type[Known]) -> Known | None:
    try:
        return msgspec.json.decode(get_flag(session, name) or "null", type=kind | None)
    except msgspec.MsgspecError:
        log.warning("judge_noise_unreadable", flag=name)
        return None


def _checks(session: Session, judge: JudgeSettings, now: float) -> Checks:
    """Return the checks of this judge; the first one is due a day after it was seen first."""
    known, hashed = _read(session, CHECKS, Checks), hash_of(judge)
    if known is not None and (known.judge_model, known.rubric_hash) == (judge.model, hashed):
        return known
    return Checks(judge_model=judge.model, rubric_hash=hashed, due_at=now + DAY_S)


def _write_checks(session: Session, checks: Checks, now: float) -> None:
    set_flag(session, CHECKS, msgspec.json.encode(checks).decode(), now=now)


def _known_noise(session: Session, judge: JudgeSettings, now: float) -> NoiseState:
    """Return the noise with `judge.rubric`; of a project's rubric, where only that is known."""
    checks = _checks(session, judge, now)
    states = []
    for project in ("", *judge.projects):
        hashed = hash_of(judge.of(project))
        sums = newest(noise_by_day(session, judge.model, hashed))
        known = sums.groups > 0
        states.append(
            NoiseState(
                at=now,
                judge_model=judge.model,
                rubric_hash=hashed,
                passes=judge.passes,
                project=project,
                groups=sums.groups,
                sd=sums.sd(judge.passes) if known else None,
                slope=sums.slope if known else None,
                flips=sums.flips / sums.groups if known else None,
                drift=checks.drift,
                drift_at=checks.drift_at,
            )
        )
    return next((state for state in states if state.groups), states[0])


def accept_now(database: Database, judge: JudgeSettings, *, now: float) -> float | None:
    """Compare later checks with the newest one, and end its alarm.

    Returns: when that was, in Unix seconds; None when there was none. Raises: StoreError.
    """
    with database.write() as session:
        checks = _checks(session, judge, now)
        if checks.last is None:
            return None
        kept = msgspec.structs.replace(checks, first=checks.last, drift="", drift_at=None)
        _write_checks(session, kept, now)
        write_noise_state(session, _known_noise(session, judge, now))
        return checks.last.at


POLL_S = 60.0
AGAIN_S = 3_600.0
"""After this a check is tried again that the judge did not answer."""


class NoiseWatch:
    """Keeps the state of the judge's noise, and checks the judge once a day, until stopped."""

    def __init__(
        self,
        database: Database,
        judge: Judge,
        settings: JudgeSettings,
        *,
        clock: Callable[[], float] = time.time,
        view: JudgeView | None = None,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        """view: as for `score_answers`. announce: tells the operator's terminal."""
        self._database = database
        self._judge = judge
        self._settings = settings
        self._clock = clock
        self._view = view
        self._announce = announce

    async def run(self, stop: asyncio.Event) -> None:
        """Take a step each minute; a check that runs when `stop` is set is given up."""
        stopping, steps = asyncio.create_task(stop.wait()), asyncio.create_task(self._steps())
        try:
            await asyncio.wait({stopping, steps}, return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                steps.result()
        finally:
            for task in (stopping, steps):
                task.cancel()
            await asyncio.gather(stopping, steps, return_exceptions=True)

    async def _steps(self) -> None:
        while True:
            try:
                await self.step()
            except StoreError as error:
                log.warning("judge_noise_waits_for_store", error=str(error))
            await asyncio.sleep(POLL_S)

    async def step(self) -> None:
        """Write what is known, and check the judge when that is due. Raises: StoreError."""
        if not await asyncio.to_thread(self._write):
            return
        calls: list[JudgeCall] = []
        check = None
        try:
            check = await self._check(calls)
        except (JudgeUnavailableError, JudgeRefusalError, JudgeReplyError, NotRedactedError) as why:
            log.info("judge_not_checked", reason=str(why))
        except Exception:  # a defect costs a measurement alone
            log.exception("judge_check_failed")
        drift = await asyncio.to_thread(self._keep, calls, check)
        if drift:
            model = self._settings.model
            log.error("judge_drift", model=model, what=drift)
            self._announce(f"judge {model} is not as it was: {drift}; see `sidecar judge noise`")

    def _write(self) -> bool:
        """Write the state where it changed. Returns: True when a check is due; it is claimed."""
        now = self._clock()
        with self._database.write(alone=False) as session:
            state = _known_noise(session, self._settings, now)
            known = read_noise_state(session)
            if known is None or msgspec.structs.replace(known, at=now) != state:
                write_noise_state(session, state)
            checks, stored = _checks(session, self._settings, now), _read(session, CHECKS, Checks)
            judge = read_judge_state(session)
            due = checks.due_at <= now and judge is not None and judge.state == "works"
            if due:
                checks = msgspec.structs.replace(checks, due_at=now + DAY_S)
            if checks != stored:
                _write_checks(session, checks, now)
            return due

    async def _check(self, calls: list[JudgeCall]) -> Check | None:
        """Score the calibration groups. Returns: None when a fallback scored one of them."""
        groups: list[KnownGroup] = await asyncio.to_thread(_calibration_groups)
        passes = max(2, self._settings.passes)
        scores, sums = [], Sums()
        for number, group in enumerate(groups):
            judgement = await score_answers(
                self._judge,
                context=group.context,
                tools=group.tools,
                answers=[one.message for one in group.candidates],
                rubric=self._settings.rubric,
                passes=passes,
                seed=number,  # the same orders each time: position bias is no change
                on_call=calls.append,
                subject=SUBJECT,
                view=self._view,
            )
            if judgement.judge_model != self._settings.model:
                return None
            scores.append(list(judgement.scores))
            sums += sums_of(judgement.passes) or Sums()
        return Check(at=self._clock(), scores=scores, variance=sums.pass_variance / passes)

    def _keep(self, calls: Sequence[JudgeCall], check: Check | None) -> str:
        """Store the calls and the check. Returns: what changed, when this is news."""
        now, hashed = self._clock(), hash_of(self._settings)
        with self._database.write() as session:
            save_judge_calls(session, SUBJECT, calls, rubric_hash=hashed, now=now)
            known = _checks(session, self._settings, now)
            if check is None:
                checks = msgspec.structs.replace(known, due_at=now + AGAIN_S)
            else:
                drift = difference(known.first, check) if known.first is not None else ""
                checks = msgspec.structs.replace(
                    known,
                    first=known.first or check,
                    last=check,
                    drift=drift,
                    drift_at=(known.drift_at or now) if drift else None,
                )
            _write_checks(session, checks, now)
            write_noise_state(session, _known_noise(session, self._settings, now))
        return checks.drift if checks.drift and not known.drift else ""


def _calibration_groups() -> list[KnownGroup]:
    return read_groups(PATH.read_text("utf-8"), PATH.name)[::CHECKED_EVERY]


def figures_of(day: int, sums: Sums, passes: int) -> dict[str, object]:
    """Return what `sidecar judge noise` prints of a day. passes: of the scores that `sd` is of."""
    return {
        "day": f"{datetime.fromtimestamp(day * DAY_S, UTC):%Y-%m-%d}",
        "groups": sums.groups,
        "sd": round(sums.sd(passes), 4),
        "pass_sd": round(math.sqrt(sums.pass_variance), 4),
        "slope": round(sums.slope, 4),
        "flips": round(sums.flips / sums.groups, 4),
    }

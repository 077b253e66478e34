"""Groups are scored again when they should be, once, and everything is counted; on both stores."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from sqlalchemy import delete, select

from ingest.errors import JudgeBusyError, JudgeUnavailableError
from ingest.judge_watch import JudgeState, write_judge_state
from ingest.noise import windows
from ingest.noise.windows import (
    AGAIN_S,
    ATTEMPTS,
    LATE_S,
    MOST_WAITING,
    Choosing,
    NoiseState,
    read_noise_state,
)
from ingest.noise.worker import (
    LEAST_GROUPS,
    RescoringWorker,
    accept_now,
    measured_noise,
    read_noise,
)
from ingest.retention.deletion import delete_exchanges
from ingest.ruler.judge import Judge
from ingest.ruler.judging import JudgingWorker
from ingest.ruler.prompt import rubric_hash
from sidecar.settings import Judge as JudgeSettings
from sidecar.settings import ProjectRubric
from sidecar.store.database import Database
from sidecar.store.models import GroupRow, JudgeCallRow, JudgeNoiseRow, RescoringRow
from support.clock import Clock
from support.fake_judge import FakeJudge, Shown, scores_reply
from support.stores import NewStore
from tests.ingest.conftest import calls, counts, put_group

pytestmark = pytest.mark.both_stores

SETTINGS = JudgeSettings(model="scripted", rubric="Be good.", passes=2, rescore_share=1.0)
HASH = rubric_hash("Be good.")


class Scoring:
    """A store, the two workers of score, and a judge that a test may exchange."""

    def __init__(self, database: Database, clock: Clock, judge: Judge, **changes: Any) -> None:
        self.database, self.clock = database, clock
        self.settings = SETTINGS.model_copy(update=changes)
        self.said: list[str] = []
        self.take(judge)

    def take(self, judge: Judge, **changes: Any) -> None:
        """The processes start anew, with this judge."""
        self.settings = self.settings.model_copy(update=changes)
        self.judging = JudgingWorker(
            self.database, judge, self.settings, clock=self.clock,
            on_scored=Choosing(self.settings).note,
        )  # fmt: skip
        self.worker = RescoringWorker(
            self.database, judge, self.settings, clock=self.clock, announce=self.said.append
        )
        with self.database.write() as session:
            write_judge_state(session, JudgeState(state="works", since=1.0), now=1.0)

    def put(self, *names: str, answers: int = 4) -> None:
        for name in names:
            put_group(self.database, name, *(f"{name} {k}" for k in range(answers)))

    async def score(self, *names: str, answers: int = 4) -> None:
        self.put(*names, answers=answers)
        while await self.judging.step():
            continue

    async def again(self, after_s: float | None = None) -> int:
        """Score again all that is due then. Returns: how many."""
        self.clock.now += self.settings.rescore_after_s if after_s is None else after_s
        number = 0
        while await self.worker.step():
            number += 1
        return number

    def rows(self) -> dict[str, RescoringRow]:
        with self.database.read() as session:
            return {row.group_id: row for row in session.scalars(select(RescoringRow))}

    def windows(self) -> list[JudgeNoiseRow]:
        with self.database.read() as session:
            order = (JudgeNoiseRow.at, JudgeNoiseRow.window_number)
            return list(session.scalars(select(JudgeNoiseRow).order_by(*order)))

    @property
    def state(self) -> NoiseState | None:
        with self.database.read() as session:
            return read_noise_state(session)

    @property
    def counted(self) -> dict[str, int]:
        return counts(self.database, "rescoring")


def noisy(seed: int = 0, *, sd: float = 0.05, slope: float = 0.0, taste: int = 0) -> FakeJudge:
    """A judge with a taste of its own for each answer, and normal noise."""
    rng = random.Random(seed)

    def liked(answer: dict[str, Any]) -> float:
        return random.Random(f"{taste}{answer['content']}").uniform(0.3, 0.7)

    def reply(shown: Shown) -> str:
        last = len(shown) - 1
        return scores_reply(
            {
                name: min(
                    1.0, max(0.0, liked(answer) + slope * (k / last - 0.5) + rng.gauss(0, sd))
                )
                for k, (name, answer) in enumerate(shown.items())
            }
        )

    return FakeJudge(reply, model="scripted")


@pytest.fixture
def scoring(new_store: NewStore, clock: Clock) -> Scoring:
    return Scoring(new_store(), clock, noisy())


async def test_a_scored_group_is_scored_again_after_the_delay_and_once(scoring: Scoring) -> None:
    await scoring.score("a", "b")
    first = calls(scoring.database)

    assert await scoring.again(scoring.settings.rescore_after_s - 1) == 0
    assert await scoring.again(1.0) == 2
    assert await scoring.again(1e6) == 0

    kept = calls(scoring.database)
    assert [call.again for call in kept] == [False] * 4 + [True] * 4
    seeds = {call.order_seed for call in kept}
    assert len(seeds) == 8  # new orders
    assert {call.order_seed for call in first} < seeds
    assert counts(scoring.database, "judge_calls") == {"good": 8}
    assert scoring.counted == {"chosen": 2, "scored": 2, "calls": 4}
    rows = scoring.rows()
    assert {row.window_number for row in rows.values()} == {0}
    assert all(len(row.first) == len(row.again or ()) == 2 for row in rows.values())


async def test_a_judge_that_sees_reasoning_is_measured_too(
    new_store: NewStore, clock: Clock
) -> None:
    scoring = Scoring(new_store(), clock, noisy(), show_reasoning=True)
    await scoring.score("a", "b")

    assert await scoring.again() == 2

    found = read_noise(scoring.database, scoring.settings)
    assert [row.groups for row in found.windows] == [2]
    assert found.rubric_hash != HASH


async def test_the_scores_that_are_learned_from_do_not_change(scoring: Scoring) -> None:
    await scoring.score("a")
    with scoring.database.read() as session:
        before = session.scalars(select(GroupRow)).one()

    await scoring.again()

    with scoring.database.read() as session:
        after = session.scalars(select(GroupRow)).one()
    for name in ("status", "scored_at", "disagreement", "lease_until", "attempts"):
        assert getattr(after, name) == getattr(before, name)


async def test_a_group_of_any_later_status_is_scored_again(scoring: Scoring) -> None:
    await scoring.score("a", "b")
    with scoring.database.write() as session:
        for row, status in zip(
            session.scalars(select(GroupRow)), ("trained", "dropped"), strict=True
        ):
            row.status = status

    assert await scoring.again() == 2


async def test_fresh_groups_come_first_and_a_judge_that_is_away_is_left_alone(
    scoring: Scoring,
) -> None:
    await scoring.score("a")
    scoring.put("fresh")
    assert await scoring.again() == 0

    await scoring.judging.step()
    for state in ("away", "rejected", "unknown"):
        with scoring.database.write() as session:
            write_judge_state(session, JudgeState(state=state, since=1.0), now=1.0)
        assert await scoring.again(0.0) == 0
    scoring.take(noisy())
    assert await scoring.again(0.0) == 1  # the fresh one is not due yet


async def test_no_group_is_chosen_while_too_many_wait(scoring: Scoring) -> None:
    waiting = {"due_at": 1e12, "chosen_at": 1.0, "attempts": 0, "judge_model": "scripted",
               "rubric_hash": HASH, "passes": 2, "first": []}  # fmt: skip
    with scoring.database.write() as session:
        for number in range(MOST_WAITING):
            session.add(RescoringRow(group_id=f"w{number}", **waiting))

    await scoring.score("a")

    assert "a" not in scoring.rows()
    assert scoring.counted == {"backlog_full": 1}


async def test_a_share_of_zero_chooses_none(new_store: NewStore, clock: Clock) -> None:
    scoring = Scoring(new_store(), clock, noisy(), rescore_share=0.0)

    await scoring.score("a", "b")

    assert scoring.rows() == {}


async def test_a_group_that_is_deleted_meanwhile_goes_with_its_row(scoring: Scoring) -> None:
    await scoring.score("a", "b", "c")
    delete_exchanges(scoring.database, ["x-a"], why="forgotten", now=2.0)
    assert set(scoring.rows()) == {"b", "c"}

    assert await scoring.again() == 2
    delete_exchanges(scoring.database, ["x-b"], why="expired", now=3.0)

    assert set(scoring.rows()) == {"c"}
    assert {call.group_id for call in calls(scoring.database)} == {"c"}


async def test_what_is_said_of_a_group_that_is_deleted_while_the_judge_is_asked_is_not_kept(
    scoring: Scoring,
) -> None:
    await scoring.score("a")
    plain = noisy()

    class Deletes(FakeJudge):
        async def complete(self, *args: Any) -> Any:
            delete_exchanges(scoring.database, ["x-a"], why="forgotten", now=2.0)
            return await plain.complete(*args)

    scoring.take(Deletes(model="scripted"))
    await scoring.again()

    assert calls(scoring.database) == []
    assert scoring.rows() == {}
    assert scoring.counted["calls"] == 2
    assert counts(scoring.database, "judge_calls") == {"good": 4}


@pytest.mark.parametrize("changes", [{"rubric": "Be bad."}, {"passes": 1}])
async def test_another_judge_is_no_measure_of_the_first(
    scoring: Scoring, changes: dict[str, Any]
) -> None:
    await scoring.score("a")

    scoring.take(noisy(), **changes)

    assert await scoring.again() == 0
    assert scoring.rows() == {}
    assert scoring.counted == {"chosen": 1, "other_judge": 1}


async def test_a_question_that_fails_waits_an_hour_and_ends_after_ten(scoring: Scoring) -> None:
    await scoring.score("a")
    scoring.take(FakeJudge(JudgeUnavailableError("away"), model="scripted"))
    scoring.clock.now += scoring.settings.rescore_after_s

    for _ in range(ATTEMPTS):
        assert scoring.rows()["a"].due_at <= scoring.clock.now
        await scoring.worker.step()
        scoring.clock.now += AGAIN_S

    assert scoring.rows() == {}
    assert scoring.counted == {"chosen": 1, "judge_unavailable": 1}


async def test_the_pause_of_a_provider_is_kept(scoring: Scoring) -> None:
    await scoring.score("a", "b")
    judge = FakeJudge(JudgeBusyError("slow down", retry_after_s=120.0), model="scripted")
    scoring.take(judge)

    await scoring.again()
    for _ in range(5):
        await scoring.again(20.0)

    assert len(judge.conversations) == 1  # `b` is due, and not asked about in the pause
    await scoring.again(21.0)
    assert len(judge.conversations) == 2


async def test_a_reply_that_cannot_be_used_ends_it(scoring: Scoring) -> None:
    await scoring.score("a")
    scoring.take(FakeJudge("rubbish", model="scripted"))

    await scoring.again()

    assert scoring.rows() == {}
    assert scoring.counted == {"chosen": 1, "calls": 2, "judge_rubbish": 1}
    assert [call.ok for call in calls(scoring.database) if call.again] == [False, False]


async def test_a_group_that_waited_for_weeks_is_left(scoring: Scoring) -> None:
    await scoring.score("a")

    assert await scoring.again(scoring.settings.rescore_after_s + LATE_S + 1) == 0

    assert scoring.counted == {"chosen": 1, "too_late": 1}


async def test_a_damaged_row_or_group_costs_only_itself(scoring: Scoring) -> None:
    await scoring.score("a", "b", "c")
    with scoring.database.write() as session:
        session.get_one(RescoringRow, "a").first = [["?"]]
        session.execute(delete(JudgeCallRow).where(JudgeCallRow.group_id == "b"))

    assert await scoring.again() == 2

    assert set(scoring.rows()) == {"b", "c"}
    assert scoring.counted["unreadable"] == 1


async def test_a_stop_while_the_judge_is_asked_puts_the_group_back(scoring: Scoring) -> None:
    await scoring.score("a")
    asked, stop = asyncio.Event(), asyncio.Event()

    class Hangs(FakeJudge):
        async def complete(self, *_: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    scoring.take(Hangs(model="scripted"))
    scoring.clock.now += scoring.settings.rescore_after_s
    running = asyncio.create_task(scoring.worker.run(stop))
    await asyncio.wait_for(asked.wait(), 60)
    stop.set()
    await asyncio.wait_for(running, 60)

    row = scoring.rows()["a"]
    assert (row.due_at, row.attempts) == (scoring.clock.now, 0)


async def test_the_noise_is_known_from_twenty_groups_on(scoring: Scoring) -> None:
    names = [f"g{number}" for number in range(LEAST_GROUPS)]
    await scoring.score(*names[:-1], answers=8)
    await scoring.again()
    key = ("scripted", HASH, 2)
    with scoring.database.read() as session:
        assert measured_noise(session, [key]) == {}

    await scoring.score(names[-1], answers=8)
    await scoring.again()

    with scoring.database.read() as session:
        noise = measured_noise(session, [key, ("other", HASH, 2)])
    assert set(noise) == {key}
    assert noise[key].sd == pytest.approx(0.05 / 2**0.5, rel=0.35)
    assert noise[key].pass_sd == pytest.approx(0.05, rel=0.35)
    state = scoring.state
    assert state is not None
    assert (state.groups, state.whole, state.sd) == (20, False, noise[key].sd)


SMALL_WINDOW = 12


QUIET = noisy(sd=0.002)
"""Its windows raise no alarm by chance, which those of so few groups would now and then."""


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 50 groups takes long to fill on two stores."""
    monkeypatch.setattr(windows, "WINDOW", SMALL_WINDOW)


async def fill(scoring: Scoring, name: str, groups: int = SMALL_WINDOW) -> None:
    await scoring.score(*(f"{name}{number}" for number in range(groups)), answers=6)
    await scoring.again()


@pytest.mark.usefixtures("small_windows")
async def test_a_model_that_is_exchanged_behind_one_name_raises_an_alarm(scoring: Scoring) -> None:
    """As good as the one before, as noisy, without a bias: only another taste."""
    scoring.take(QUIET)
    await fill(scoring, "a")
    assert [(row.window_number, row.whole, row.reference) for row in scoring.windows()] == [
        (0, True, True)
    ]
    assert not scoring.said
    await scoring.score(*(f"b{number}" for number in range(SMALL_WINDOW)), answers=6)

    scoring.take(noisy(1, sd=0.002, taste=1))
    await scoring.again()

    (said,) = scoring.said
    assert said.startswith("judge scripted is not as it was: noise sd 0.")
    state = scoring.state
    assert state is not None
    assert "the window before" in state.drift
    await fill(scoring, "c")  # the new model agrees with itself: as the reference did
    state = scoring.state
    assert state is not None
    assert len(scoring.said) == 2  # it is unlike the window before


@pytest.mark.usefixtures("small_windows")
async def test_an_accepted_judge_raises_no_alarm_and_a_restart_does_not_forget_one(
    scoring: Scoring,
) -> None:
    scoring.take(QUIET)
    await fill(scoring, "a")
    scoring.take(noisy(1, sd=0.002, slope=0.3))
    await fill(scoring, "b")
    assert scoring.state is not None
    assert scoring.state.drift
    scoring.take(noisy(2, sd=0.002, slope=0.3))
    scoring.worker.begin()
    assert scoring.state.drift

    window = accept_now(scoring.database, scoring.settings, now=scoring.clock.now)

    assert window == 1
    assert scoring.state.drift == ""
    await fill(scoring, "c")
    assert scoring.state.drift == ""
    found = read_noise(scoring.database, scoring.settings)
    assert [(row.window_number, row.reference) for row in found.windows] == [
        (2, False),
        (1, True),
        (0, True),
    ]
    assert found.waiting == 0


@pytest.mark.usefixtures("small_windows")
async def test_a_change_within_the_first_window_raises_an_alarm_and_makes_no_reference(
    scoring: Scoring,
) -> None:
    await fill(scoring, "a", groups=SMALL_WINDOW // 2)
    scoring.take(noisy(1, sd=0.002, slope=0.5))
    await fill(scoring, "b", groups=SMALL_WINDOW // 2)

    assert scoring.state is not None
    assert "in the second half of the window position slope" in scoring.state.drift
    (said,) = scoring.said
    assert "is not as it was" in said
    assert [(row.window_number, row.whole, row.reference) for row in scoring.windows()] == [
        (0, True, False)
    ]

    await fill(scoring, "c")  # the new judge agrees with itself

    assert scoring.state.drift == ""
    assert [row.reference for row in scoring.windows()] == [False, True]


@pytest.mark.usefixtures("small_windows")
async def test_a_judge_that_changed_within_the_first_window_can_be_accepted(
    scoring: Scoring,
) -> None:
    scoring.take(QUIET)
    await fill(scoring, "a", groups=SMALL_WINDOW // 2)
    scoring.take(noisy(1, sd=0.002, slope=0.5))
    await fill(scoring, "b", groups=SMALL_WINDOW // 2)

    assert accept_now(scoring.database, scoring.settings, now=scoring.clock.now) == 0

    assert scoring.state is not None
    assert scoring.state.drift == ""


@pytest.mark.usefixtures("small_windows")
async def test_what_is_accepted_is_the_judge_with_the_passes_of_the_settings(
    scoring: Scoring,
) -> None:
    scoring.take(QUIET)
    await fill(scoring, "a")
    scoring.take(noisy(1, sd=0.002, slope=0.5))
    await fill(scoring, "b")
    scoring.take(QUIET, passes=1)
    await fill(scoring, "c")
    scoring.take(QUIET, passes=2)

    assert accept_now(scoring.database, scoring.settings, now=scoring.clock.now) == 1

    marks = {(row.passes, row.window_number): row.reference for row in scoring.windows()}
    assert marks == {(2, 0): True, (2, 1): True, (1, 0): True}
    other = scoring.settings.model_copy(update={"passes": 4})
    assert accept_now(scoring.database, other, now=scoring.clock.now) is None


async def test_another_rubric_begins_a_series_of_its_own(scoring: Scoring) -> None:
    await fill(scoring, "a", groups=3)
    scoring.take(noisy(1, sd=0.2), rubric="Be brief.")
    scoring.worker.begin()
    assert scoring.state is not None
    assert (scoring.state.groups, scoring.state.sd) == (0, None)

    await fill(scoring, "b", groups=3)

    assert [(row.rubric_hash, row.window_number, row.groups) for row in scoring.windows()] == [
        (HASH, 0, 3),
        (rubric_hash("Be brief."), 0, 3),
    ]


async def test_a_damaged_estimate_is_not_used(scoring: Scoring) -> None:
    await fill(scoring, "a", groups=LEAST_GROUPS)
    with scoring.database.write() as session:
        session.scalars(select(JudgeNoiseRow)).one().sd = float("inf")

    with scoring.database.read() as session:
        assert measured_noise(session, [("scripted", HASH, 2)]) == {}


async def test_each_projects_groups_are_scored_again_by_their_rubric_and_make_a_series(
    new_store: NewStore, clock: Clock
) -> None:
    judge = noisy()
    projects = {"shop": ProjectRubric(rubric="Sell politely.")}
    scoring = Scoring(new_store(), clock, judge, projects=projects)
    for number in range(3):
        put_group(scoring.database, f"s{number}", "a", "b", "c", project="shop")
        put_group(scoring.database, f"d{number}", "a", "b", "c")
    while await scoring.judging.step():
        continue
    first = len(judge.conversations)

    assert await scoring.again() == 6

    shop = rubric_hash("Sell politely.")
    again = [row for row in calls(scoring.database) if row.again]
    assert {(row.group_id[0], row.rubric_hash) for row in again} == {("s", shop), ("d", HASH)}
    texts = ["".join(one["content"] for one in talk) for talk in judge.conversations[first:]]
    assert sum("Sell politely." in text for text in texts) == 6  # 3 groups, 2 passes
    assert sum("Be good." in text for text in texts) == 6
    assert {row.rubric_hash: row.groups for row in scoring.windows()} == {shop: 3, HASH: 3}
    assert scoring.counted == {"chosen": 6, "scored": 6, "calls": 12}
    assert scoring.state is not None
    assert (scoring.state.rubric_hash, scoring.state.project) == (HASH, "")
    for project, expected in (("", HASH), ("shop", shop)):
        found = read_noise(scoring.database, scoring.settings, project)
        assert (found.rubric_hash, [row.groups for row in found.windows]) == (expected, [3])


async def test_groups_of_a_rubric_that_no_project_has_any_more_are_left(
    new_store: NewStore, clock: Clock
) -> None:
    projects = {"shop": ProjectRubric(rubric="Sell politely.")}
    scoring = Scoring(new_store(), clock, noisy(), projects=projects)
    put_group(scoring.database, "s1", "a", "b", project="shop")
    await scoring.judging.step()

    scoring.take(noisy(), projects={"shop": ProjectRubric(rubric="Sell quickly.")})

    assert await scoring.again() == 0
    assert scoring.counted == {"chosen": 1, "other_judge": 1}


async def test_a_drift_of_one_projects_scores_is_told_with_its_project(
    new_store: NewStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW", SMALL_WINDOW)
    projects = {"shop": ProjectRubric(rubric="Sell politely.")}
    scoring = Scoring(new_store(), clock, noisy(1, sd=0.002), projects=projects)

    async def fill(prefix: str, project: str) -> None:
        for number in range(SMALL_WINDOW):
            name = f"{prefix}{number}"
            put_group(scoring.database, name, *(f"{name} {k}" for k in range(4)), project=project)
        while await scoring.judging.step():
            continue
        assert await scoring.again() == SMALL_WINDOW

    await fill("d", "default")
    await fill("s", "shop")
    assert scoring.said == []
    scoring.take(noisy(2, sd=0.2))
    await fill("t", "shop")

    assert scoring.state is not None
    assert scoring.state.drift
    assert (scoring.state.project, len(scoring.said)) == ("shop", 1)
    assert scoring.said[0].endswith("see `sidecar judge noise --project shop`")
    now = scoring.clock.now
    assert accept_now(scoring.database, scoring.settings, now=now, project="shop") == 1
    assert scoring.state is not None
    assert (scoring.state.drift, scoring.state.project) == ("", "")

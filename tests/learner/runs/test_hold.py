"""The reward watch before a run: what it does to rows and groups, and a hack from end to end."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select, update
from structlog.testing import capture_logs

from ingest.reward_watch.store import Override, look_at_answers, write_override
from ingest.reward_watch.traits import Profile, RateOf, write_body
from learner.errors import HeldError
from learner.once import run_once
from learner.records import Candidate
from learner.runs.runs import open_run
from learner.runs.train import Run
from learner.schedule.loop import REQUESTED_FLAG, Schedule
from learner.schedule.rule import HELD_S
from sidecar.settings import Settings, Watch
from sidecar.store.codec import pack_ids
from sidecar.store.database import Database, compress, set_flag
from sidecar.store.models import (
    AdapterProfileRow,
    AliasRow,
    ChoiceRow,
    CounterRow,
    ExchangeRow,
    GroupRow,
    RunRow,
)
from support.clock import Clock

if TYPE_CHECKING:
    from tests.learner.conftest import (
        FakeTrainer,
        MakeAnswer,
        MakeScoredGroup,
        PutGroup,
        PutVersion,
    )

pytestmark = pytest.mark.both_stores

Start = Callable[..., Candidate]


@pytest.fixture
def start(settings: Settings, database: Database, clock: Clock, fake_trainer: FakeTrainer) -> Start:
    """start(run_id): a run now. Raises what the run raises."""

    def begin(run_id: str) -> Candidate:
        run = Run(
            settings,
            database,
            lambda: fake_trainer,
            run_id=run_id,
            clock=clock,
            heartbeat_s=0.01,
        )
        return run.start()

    return begin


def put_profile(database: Database, adapter: str, share: float) -> None:
    rates = {"refusal": RateOf(n=1_000, hits=round(1_000 * share), weight=1_000.0, sessions=1_000)}
    body = write_body(Profile(answers=1_000, sessions=1_000, newest=9, rates=rates))  # type: ignore[arg-type]
    with database.write() as session:
        session.merge(AdapterProfileRow(model="m", adapter=adapter, at=1.0, body=body))


@pytest.fixture
def refusing(
    database: Database,
    put_version: PutVersion,
    put_group: PutGroup,
    scored_group: MakeScoredGroup,
) -> str:
    """A champion that refuses ten times as often as the base, and groups to learn from."""
    champion = put_version(1, champion=True)
    put_profile(database, "base", 0.02)
    put_profile(database, champion, 0.2)
    for name in ("a", "b"):
        put_group(scored_group([0.0, 1.0], group_id=name, adapter=champion))
    return champion


def rows(database: Database) -> list[RunRow]:
    with database.read() as session:
        return list(session.scalars(select(RunRow).order_by(RunRow.started_at)))


def group_states(database: Database) -> set[tuple[str, str | None]]:
    with database.read() as session:
        return {(row.status, row.run_id) for row in session.scalars(select(GroupRow))}


def counts(database: Database) -> dict[str, int]:
    with database.read() as session:
        found = session.scalars(select(CounterRow).where(CounterRow.stage == "watch"))
        return {row.reason: row.count for row in found if row.count}


def test_a_held_run_is_a_row_with_its_figures_and_takes_nothing(
    refusing: str, database: Database, start: Start, fake_trainer: FakeTrainer
) -> None:
    with capture_logs() as logs, pytest.raises(HeldError, match=r"20\.0%"):
        start("r1")

    (row,) = rows(database)
    assert (row.status, row.parent, row.adapter) == ("held", refusing, None)
    assert "20.0% of the champion's answers are refusals" in str(row.reason)
    assert row.held is not None
    assert row.held["findings"][0]["check"] == "refusal"
    assert row.held["findings"][0]["figures"]["before"] == 0.02
    assert row.ended_at is not None
    assert fake_trainer.jobs == []
    assert group_states(database) == {("scored", None)}
    assert counts(database) == {"held_refusal": 1}
    assert [one["log_level"] for one in logs if one["event"] == "run_held"] == ["error"]


def test_asked_again_it_keeps_one_row_and_one_alarm(
    refusing: str, database: Database, start: Start, clock: Clock
) -> None:
    levels = []
    for name in ("r1", "r2", "r3"):
        with capture_logs() as logs, pytest.raises(HeldError):
            start(name)
        levels += [one["log_level"] for one in logs if one["event"] == "run_held"]
        clock.now += 600.0

    (row,) = rows(database)
    assert row.run_id == "r1"
    assert row.held is not None
    assert row.held["checks"] == 3
    assert row.ended_at == row.started_at + 1_200.0
    assert levels == ["error", "info", "info"]
    assert counts(database) == {"held_refusal": 1}


def test_it_goes_on_when_the_figures_are_good_again(
    refusing: str, database: Database, start: Start, clock: Clock
) -> None:
    with pytest.raises(HeldError):
        start("r1")
    clock.now += 600.0
    put_profile(database, refusing, 0.02)

    start("r2")

    assert [row.status for row in rows(database)] == ["held", "finished"]
    assert group_states(database) == {("trained", "r2")}


def test_a_rollback_of_the_champion_ends_the_hold(
    refusing: str, database: Database, start: Start
) -> None:
    with pytest.raises(HeldError):
        start("r1")
    with database.write() as session:
        session.execute(update(AliasRow).values(adapter="base"))

    start("r2")

    assert {row.status for row in rows(database)} == {"held", "finished"}


def test_an_override_lets_runs_go_on_and_is_said(
    refusing: str, database: Database, start: Start
) -> None:
    with database.write() as session:
        write_override(session, "m", Override(champion=refusing, checks=("refusal",), at=1.0))

    with capture_logs() as logs:
        start("r1")

    assert [row.status for row in rows(database)] == ["finished"]
    assert "reward_watch_waived" in {one["event"] for one in logs}


def test_a_hold_takes_no_lease_and_ends_no_other_run(
    refusing: str, database: Database, start: Start, clock: Clock
) -> None:
    with database.write() as session:
        open_run(session, run_id="alive", model="m", parent="base", settings={}, now=clock.now)

    with pytest.raises(HeldError):
        start("r1")

    assert {row.run_id: row.status for row in rows(database)} == {"alive": "running", "r1": "held"}


def test_a_run_by_hand_that_is_held_ends_with_4_and_says_what_to_do(
    refusing: str,
    database: Database,
    settings: Settings,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)

    code = run_once(settings, database, run_id="r1", clock=clock, stopping=threading.Event())

    assert code == 4
    out = capsys.readouterr().out
    assert "held by the reward watch, nothing was trained: 20.0%" in out
    assert "sidecar learner override" in out


class _HeldChild:
    def exit_code(self) -> int:
        return 4

    def stop(self) -> None:
        """It has ended."""


def test_the_schedule_asks_again_after_a_while_and_at_once_when_told_to(
    refusing: str, database: Database, settings: Settings, clock: Clock
) -> None:
    launched: list[str] = []

    def launch(run_id: str) -> _HeldChild:
        launched.append(run_id)
        return _HeldChild()

    schedule = Schedule(settings, database, launch, clock=clock)
    schedule.poll()
    for _ in range(3):
        decision = schedule.poll()
        assert decision is not None
        assert decision.kind == "held"
        clock.now += 10.0
    assert len(launched) == 1

    clock.now += HELD_S
    schedule.poll()
    assert len(launched) == 2

    with database.write() as session:
        set_flag(session, REQUESTED_FLAG, "1", now=clock.now)
    schedule.poll()
    schedule.poll()
    assert len(launched) == 3


# --- from end to end: a judge that likes length, and one that does not

ANSWERS = 300
"""Answers that each version serves before its successor is trained."""
GROUPS = 30


class _World:
    """Versions that answer ever longer, as far as the judge rewards it, and users who do not care.

    Each run moves the mean of log(1 + tokens) by 0.25 times the correlation of the judge's scores
    with length, which is the direction in which a policy gradient would move it.
    """

    def __init__(
        self,
        database: Database,
        put_group: PutGroup,
        scored_group: MakeScoredGroup,
        answer: MakeAnswer,
        *,
        taste: float,
    ) -> None:
        self.database, self.taste = database, taste
        self._put_group, self._scored_group, self._answer = put_group, scored_group, answer
        self._rng = Random(5)
        self.log_tokens = 3.5
        self.version = 0
        self.champion = "base"

    def serve(self) -> None:
        """Users get answers of this version, and the judge scores groups of it."""
        with self.database.write() as session:
            for number in range(ANSWERS):
                name = f"e-{self.version}-{number}"
                self._add_exchange(session, name, self._rng.gauss(self.log_tokens, 0.6))
        while look_at_answers(self.database, window=2_000, now=10_000_000.0)[0]:
            continue
        for number in range(GROUPS):
            logs = [self._rng.gauss(self.log_tokens, 0.5) for _ in range(6)]
            mean = sum(logs) / 6
            scores = [min(1.0, max(0.0, 0.5 + 0.15 * self._score(one - mean))) for one in logs]
            lengths = [max(1, round(math.expm1(one))) for one in logs]
            given = [
                self._answer(
                    at,
                    token_ids=tuple(range(length)),
                    logprobs=(-1.0,) * length,
                )
                for at, length in enumerate(lengths)
            ]
            self._put_group(
                self._scored_group(
                    scores,
                    answers=given,
                    group_id=f"g-{self.version}-{number}",
                    adapter=self.champion,
                )
            )

    def promote(self, candidate: Candidate) -> None:
        """The run's candidate is promoted, and answers longer if that paid."""
        self.version += 1
        self.champion = candidate.adapter
        with self.database.write() as session:
            session.merge(
                AliasRow(model="m", alias="champion", adapter=self.champion, generation=1)
            )
        self.log_tokens += 0.25 * self.taste

    def _score(self, above: float) -> float:
        noise = self._rng.gauss(0.0, 1.0)
        return self.taste * above / 0.5 + math.sqrt(1 - self.taste**2) * noise

    def _add_exchange(self, session: Any, name: str, log_tokens: float) -> None:
        message = json.dumps({"role": "assistant", "content": "It is so."}).encode()
        session.add(
            ExchangeRow(
                exchange_id=name,
                stored_at=1.0,
                started_at=1.0,
                surface="chat",
                public_model="m",
                adapter=self.champion,
                arm="champion",
                propensity=1.0,
                replica="",
                session_key=f"h:{name}",
                session_id=f"h:{name}",
                held_out=False,
                request_body=compress(b"{}"),
                prompt_token_ids=pack_ids((1,)),
                sampling={},
                timings={},
                stream=False,
                status=200,
                outcome="ok",
                completion_tokens=max(1, round(math.expm1(log_tokens))),
                trace_id="",
                project="default",
                user="",
            )
        )
        session.flush()
        session.add(
            ChoiceRow(
                exchange_id=name,
                index=0,
                message_body=compress(message),
                finish_reason="stop",
                token_ids=b"",
                logprobs=b"",
            )
        )


def runs_until_held(world: _World, start: Start, trainer: FakeTrainer, *, most: int) -> int | None:
    """Serve, train and promote. Returns: the number of runs that trained before one was held."""
    for number in range(most):
        world.serve()
        trainer.weights = b"weights %d" % number
        try:
            candidate = start(f"run-{number}")
        except HeldError:
            return number
        world.promote(candidate)
    return None


@pytest.mark.parametrize(("taste", "held_after"), [(0.8, 2), (0.0, None)])
def test_a_judge_that_rewards_length_is_held_and_an_honest_one_is_not(
    database: Database,
    put_group: PutGroup,
    scored_group: MakeScoredGroup,
    answer: MakeAnswer,
    start: Start,
    fake_trainer: FakeTrainer,
    settings: Settings,
    taste: float,
    held_after: int | None,
) -> None:
    """A judge whose scores follow length by 0.8: each version answers 1.22 times as long as the one
    before. Two runs train; the third is held, at 1.54 times the length. A judge without the taste
    is not held in 6 runs."""
    assert settings.watch == Watch()
    world = _World(database, put_group, scored_group, answer, taste=taste)

    trained = runs_until_held(world, start, fake_trainer, most=6)

    assert trained == held_after
    with database.read() as session:
        held = session.scalars(select(RunRow).where(RunRow.status == "held")).all()
    if held_after is None:
        assert held == []
        return
    (row,) = held
    assert row.held is not None
    (finding,) = row.held["findings"]
    assert finding["check"] == "length"
    assert finding["figures"]["growth_low"] > 1.25
    assert finding["figures"]["correlation_low"] > 0.3
    assert len(fake_trainer.jobs) == held_after

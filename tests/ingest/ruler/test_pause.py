"""A judge's `Retry-After` holds for whoever wants to ask it."""

from __future__ import annotations

import pytest

from ingest.errors import JudgeBusyError
from ingest.ruler.outage import LONGEST_RETRY_AFTER_S, Pause, PausingJudge
from support.clock import Clock
from support.fake_judge import FakeJudge

MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "?"}]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that passes in pauses."""
    made = Clock()

    async def sleep(seconds: float) -> None:
        made.now += seconds

    monkeypatch.setattr("ingest.ruler.outage.monotonic", made)
    monkeypatch.setattr("asyncio.sleep", sleep)
    return made


async def ask(judge: PausingJudge) -> None:
    await judge.complete(MESSAGES, {})


async def test_no_call_before_the_twenty_seconds_that_the_judge_asked_for(clock: Clock) -> None:
    scripted = FakeJudge(JudgeBusyError("429", retry_after_s=20.0), "{}")
    judge = PausingJudge(scripted, Pause(), longest_stay_s=0.0)
    with pytest.raises(JudgeBusyError):
        await ask(judge)

    for moment in (1_000.0, 1_010.0, 1_019.9):
        clock.now = moment
        with pytest.raises(JudgeBusyError, match="asked for a pause") as raised:
            await ask(judge)
        assert raised.value.retry_after_s == pytest.approx(1_020.0 - moment)
    assert len(scripted.conversations) == 1
    clock.now = 1_020.0
    await ask(judge)
    assert len(scripted.conversations) == 2


async def test_the_second_pass_of_a_group_waits_for_the_end_of_the_pause(clock: Clock) -> None:
    pause = Pause()
    pause.asked_for(20.0)
    scripted = FakeJudge("{}")

    await ask(PausingJudge(scripted, pause, longest_stay_s=30.0))

    assert clock.now == 1_020.0
    assert len(scripted.conversations) == 1


async def test_it_does_not_wait_longer_than_the_groups_lease_has_to_spare(clock: Clock) -> None:
    pause = Pause()
    pause.asked_for(31.0)
    scripted = FakeJudge("{}")

    with pytest.raises(JudgeBusyError):
        await ask(PausingJudge(scripted, pause, longest_stay_s=30.0))

    assert (clock.now, scripted.conversations) == (1_000.0, [])


async def test_scoring_and_best_of_n_share_the_pause(clock: Clock) -> None:
    pause = Pause()
    limited = FakeJudge(JudgeBusyError("429", retry_after_s=20.0))
    asked = FakeJudge("{}")
    with pytest.raises(JudgeBusyError):
        await ask(PausingJudge(limited, pause, longest_stay_s=30.0))

    with pytest.raises(JudgeBusyError):
        await ask(PausingJudge(asked, pause, longest_stay_s=0.0))

    assert asked.conversations == []


async def test_a_pause_of_years_is_bounded_and_a_limit_without_one_is_none(clock: Clock) -> None:
    pause = Pause()
    pause.asked_for(0.0)
    assert pause.left_s <= 0.0
    pause.asked_for(1e9)
    assert pause.left_s == LONGEST_RETRY_AFTER_S == 300.0
    pause.asked_for(5.0)
    assert pause.left_s == 300.0, "a shorter one does not end it"

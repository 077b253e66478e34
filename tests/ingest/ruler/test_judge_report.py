"""What the operator and sampling are told of a judge that is down or set wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from ingest import judge_watch
from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.judge_watch import JudgeState, why_sampling_holds
from ingest.judges.provider import Panel, Patience, Provider
from ingest.judges.spending import Ledger, Meter
from ingest.ruler.judging import JudgingWorker
from sidecar.conditions import read_all
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from support.fake_judge import FakeJudge, score_by_content
from tests.ingest.conftest import Bench

PRICE = {"input": 1.0, "output": 1.0}
SCORES = score_by_content({}, otherwise=0.5)


class Started:
    """A worker as a scoring process starts it, and what it says on the operator's terminal."""

    def __init__(self, bench: Bench, judge: FakeJudge | Panel) -> None:
        self.bench = bench
        self.said: list[str] = []
        self.worker = JudgingWorker(
            bench.database,
            judge,
            JudgeSettings(model="scripted"),
            clock=bench.clock,
            announce=self.said.append,
        )

    @property
    def state(self) -> JudgeState:
        return self.bench.state

    async def play(self, steps: int) -> None:
        """A step each second."""
        for _ in range(steps):
            self.bench.clock.now += 1.0
            await self.worker.step()


async def start(bench: Bench, judge: FakeJudge | Panel, *, steps: int = 1) -> Started:
    started = Started(bench, judge)
    await started.worker.begin()
    for _ in range(steps):
        await started.worker.step()
    return started


@pytest.mark.parametrize(
    "error",
    [
        JudgeRejectedError("401: the key is wrong"),
        JudgeGarbledError("<html>: the URL is a web page's"),
    ],
)
async def test_a_wrong_key_or_url_is_found_at_the_start(bench: Bench, error: Exception) -> None:
    for number in range(8):
        bench.put(f"g{number}", "good", "bad")
    judge = FakeJudge(error)
    started = await start(bench, judge)

    assert ["2 + 3" in prompt for prompt in judge.prompts] == [True]
    assert (started.state.state, started.state.error_at) == ("rejected", 1_000.0)
    assert started.state.good_at is None
    assert str(error) in started.state.error
    assert len(started.said) == 1
    assert str(error) in started.said[0]
    assert "correct judge." in started.said[0]


async def test_a_judge_that_is_down_at_the_start_is_away_and_not_rejected(bench: Bench) -> None:
    started = await start(bench, FakeJudge(JudgeUnavailableError("connection refused")))

    assert (started.state.state, started.state.until) == ("away", 1_001.0)
    assert started.said == [
        "judge gives no scores: judge_unavailable: connection refused; start the judge, correct "
        "judge.api_base, or raise judge.timeout_s where it is slow; it is asked again and again"
    ]


async def test_an_outage_of_a_judge_that_worked_is_told_once_it_has_lasted(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = FakeJudge(SCORES, JudgeUnavailableError("connection refused"))
    started = await start(bench, judge)
    with structlog.testing.capture_logs() as logs:
        await started.play(25)
    short = list(started.said)
    await started.play(60)
    long = list(started.said)
    judge.script = [SCORES]
    await started.play(70)

    assert short == []
    assert [line.partition(":")[0] for line in long] == ["judge gives no scores"]
    assert started.said[1:] == ["judge gives scores again"]
    (down,) = [one for one in logs if one["event"] == "judge_down"]
    assert down["log_level"] == "warning"
    assert down["to_do"] == long[0].partition("; ")[2].removesuffix("; it is asked again and again")


async def test_an_account_without_credit_has_a_state_of_its_own(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    judge = FakeJudge(SCORES, JudgeNoCreditError("429: insufficient_quota"))
    started = await start(bench, judge, steps=0)
    await started.play(4)

    assert started.state.state == "no_credit"
    with bench.database.read() as session:
        assert (why_sampling_holds(session) or ("",))[0] == "judge_no_credit"
    assert len(started.said) == 1
    assert "pay or raise the limit of the provider's account" in started.said[0]
    assert bench.status("g1") == ("sampled", None)


async def test_a_judge_that_garbles_the_last_groups_is_found(bench: Bench) -> None:
    for number in range(3):
        bench.put(f"g{number}", "good", "bad")
    judge = FakeJudge(SCORES, "I like them all")
    started = await start(bench, judge, steps=0)
    await started.play(4)

    assert started.state.state == "rejected"
    assert started.state.error.startswith("judge_rubbish")
    assert "name a stronger judge.model" in started.said[0]


async def test_a_judge_that_wrote_rubbish_at_the_start_sets_no_group_aside(bench: Bench) -> None:
    for number in range(4):
        bench.put(f"g{number}", "good", "bad")
    started = await start(bench, FakeJudge("I like them all"), steps=0)

    for _ in range(20):
        await started.worker.step()
        bench.clock.now += 5.0

    assert started.state.state == "rejected"
    assert bench.counts("judging") == {}


async def test_a_repaired_judge_is_found_though_no_group_waits(bench: Bench) -> None:
    """Sampling holds, so no group comes that could show it."""
    judge = FakeJudge(JudgeRejectedError("401"))
    started = await start(bench, judge)
    judge.script = [SCORES]

    await started.play(30)

    assert started.state.state == "works"
    assert started.state.error == "judge_rejected: 401", "it was the last"
    assert started.said[1:] == ["judge gives scores again"]
    assert len(judge.prompts) == 2


async def test_a_judge_that_fails_on_every_group_is_away(bench: Bench) -> None:
    def sums_only(shown: Any) -> str:
        if not any("2 + 3" in answer["content"] for answer in shown.values()):
            raise JudgeRejectedError("400: max_tokens")
        return SCORES(shown)

    for number in range(30):
        bench.put(f"g{number}", "good", "bad")
    started = await start(bench, FakeJudge(sums_only), steps=0)

    await started.play(10)

    assert started.state.state == "away"
    assert started.state.error.endswith("fails on every group: judge_rejected")


async def test_a_rate_limit_is_away_until_the_pause_ends(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    busy = JudgeBusyError("429", retry_after_s=20.0)
    started = await start(bench, FakeJudge(SCORES, busy))

    await started.worker.step()

    assert (started.state.state, started.state.until) == ("away", 1_020.0)
    assert (started.state.good_at, started.state.error) == (
        1_000.0,
        "judge_busy: a rate limit of the provider, met by group g1; it asked to wait 20 s",
    )


async def test_an_error_over_a_group_is_the_last_of_a_working_judge(bench: Bench) -> None:
    bench.put("g1", "good", "bad")
    started = await start(bench, FakeJudge(SCORES, JudgeUnavailableError("503"), SCORES))
    bench.clock.now += 7.0

    await started.worker.step()

    assert (started.state.state, started.state.since) == ("works", 1_000.0)
    assert (started.state.error_at, started.state.error) == (1_007.0, "judge_unavailable: group g1")


async def test_the_flag_keeps_no_words_that_may_quote_a_prompt(bench: Bench) -> None:
    """`sidecar forget` deletes groups and their calls, and does not reach the flag."""

    def quoting(shown: Any) -> str:
        said = " ".join(answer["content"] for answer in shown.values())
        if "2 + 3" in said:
            return SCORES(shown)
        raise JudgeRejectedError(f"400: invalid prompt: {said}")

    for number in range(30):
        bench.put(f"g{number}", "Jane Doe lives here", "Jane Doe")
    judge, settings = FakeJudge(quoting), JudgeSettings(model="scripted", price=PRICE)
    meter = Meter(settings, Ledger(bench.database, settings, clock=bench.clock))
    panel = Panel(
        [Provider(judge, settings, meter, clock=bench.clock) for _ in range(2)],
        Patience(first_s=0.0, begun_s=0.0),
    )
    started = await start(bench, panel, steps=0)

    kept = []
    for _ in range(10):
        await started.play(1)
        with bench.database.read() as session:
            kept.append(str(read_all(session)))

    assert any("Jane Doe" in prompt for prompt in judge.prompts)
    assert any("judge_rejected" in text for text in kept)
    assert not any("Jane" in text for text in kept)


async def test_what_is_known_of_the_judge_is_written_once_a_locked_store_is_free(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the store would say `unknown` for ever, and sampling would wait for ever."""
    started = await start(bench, FakeJudge(SCORES), steps=0)

    def locked(*_: object, **__: object) -> None:
        raise StoreError("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(judge_watch, "write_judge_state", locked)
        await started.worker.step()
    before = started.state

    await started.worker.step()

    assert (before.state, started.state.state) == ("unknown", "works")
    assert (started.state.good_at, started.said) == (1_000.0, [])


async def test_a_restart_keeps_when_the_judge_was_good(bench: Bench) -> None:
    judge = FakeJudge(SCORES, JudgeRejectedError("401"))
    started = await start(bench, judge)
    bench.clock.now += 60.0

    await start(bench, judge, steps=0)

    assert (started.state.state, started.state.since) == ("unknown", 1_060.0)
    assert started.state.good_at == 1_000.0

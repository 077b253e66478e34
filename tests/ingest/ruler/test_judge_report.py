"""What the operator and sampling are told of a judge that is down or set wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from ingest.judge_watch import JudgeState, read_judge_state, why_sampling_holds
from ingest.judges.provider import Panel, Patience, Provider
from ingest.judges.spending import Ledger, Meter
from ingest.ruler.judging import JudgingWorker
from sidecar.conditions import read_all
from sidecar.errors import StoreError
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database
from support.clock import Clock
from support.fake_judge import FakeJudge, score_by_content

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit

PRICE = {"input": 1.0, "output": 1.0}
SCORES = score_by_content({}, otherwise=0.5)


class Started:
    """A worker as a scoring process starts it, and what it says on the operator's terminal."""

    def __init__(self, database: Database, judge: FakeJudge | Panel, clock: Clock) -> None:
        self.database = database
        self.said: list[str] = []
        self.worker = JudgingWorker(
            database,
            judge,
            JudgeSettings(model="scripted"),
            clock=clock,
            announce=self.said.append,
        )

    @property
    def state(self) -> JudgeState:
        with self.database.read() as session:
            found = read_judge_state(session)
        assert found is not None
        return found


@pytest.mark.parametrize(
    "error",
    [
        JudgeRejectedError("401: the key is wrong"),
        JudgeRejectedError("404: no such model"),
        JudgeGarbledError("<html>: the URL is a web page's"),
    ],
)
async def test_a_wrong_key_model_or_url_is_found_at_the_start_before_any_group(
    database: Database, clock: Clock, error: Exception
) -> None:
    judge = FakeJudge(error)
    started = Started(database, judge, clock)
    await started.worker.begin()

    await started.worker.step()

    assert ["2 + 3" in prompt for prompt in judge.prompts] == [True]
    assert (started.state.state, started.state.error_at) == ("rejected", 1_000.0)
    assert started.state.good_at is None
    assert str(error) in started.state.error
    assert len(started.said) == 1
    assert str(error) in started.said[0]
    assert "correct judge." in started.said[0]


async def test_a_judge_that_is_down_at_the_start_is_away_and_not_rejected(
    database: Database, clock: Clock
) -> None:
    started = Started(database, FakeJudge(JudgeUnavailableError("connection refused")), clock)
    await started.worker.begin()

    await started.worker.step()

    assert (started.state.state, started.state.until) == ("away", 1_001.0)
    assert started.said == [
        "judge gives no scores: judge_unavailable: connection refused; start the judge, correct "
        "judge.api_base, or raise judge.timeout_s where it is slow; it is asked again and again"
    ]


async def test_an_outage_of_a_judge_that_worked_is_told_once_it_has_lasted(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    judge = FakeJudge(SCORES, JudgeUnavailableError("connection refused"))
    started = Started(database, judge, clock)
    await started.worker.begin()
    await started.worker.step()
    with structlog.testing.capture_logs() as logs:
        for _ in range(25):
            clock.now += 1.0
            await started.worker.step()
    short = list(started.said)
    for _ in range(60):
        clock.now += 1.0
        await started.worker.step()
    long = list(started.said)
    judge.script = [SCORES]
    for _ in range(70):
        clock.now += 1.0
        await started.worker.step()

    assert short == []
    assert [line.partition(":")[0] for line in long] == ["judge gives no scores"]
    assert "; start the judge, correct judge.api_base" in long[0]
    assert started.said[1:] == ["judge gives scores again"]
    (down,) = [one for one in logs if one["event"] == "judge_down"]
    assert (down["log_level"], down["to_do"]) == (
        "warning",
        "start the judge, correct judge.api_base, or raise judge.timeout_s where it is slow",
    )


async def test_an_account_without_credit_has_a_state_of_its_own(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    judge = FakeJudge(SCORES, JudgeNoCreditError("429: insufficient_quota"))
    started = Started(database, judge, clock)
    await started.worker.begin()
    for _ in range(4):
        await started.worker.step()
        clock.now += 1.0

    assert started.state.state == "no_credit"
    with database.read() as session:
        assert (why_sampling_holds(session) or ("",))[0] == "judge_no_credit"
    assert len(started.said) == 1
    assert "pay or raise the limit of the provider's account" in started.said[0]
    assert judge_kit.status(database, "g1") == ("sampled", None)


async def test_a_judge_that_garbles_the_last_groups_is_found_though_no_other_group_comes(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    for number in range(3):
        judge_kit.put_group(database, f"g{number}", "good", "bad")
    judge = FakeJudge(SCORES, "I like them all")
    started = Started(database, judge, clock)
    await started.worker.begin()
    for _ in range(4):
        await started.worker.step()
        clock.now += 1.0

    assert started.state.state == "rejected"
    assert started.state.error.startswith("judge_rubbish")
    assert "name a stronger judge.model" in started.said[0]


async def test_a_judge_that_works_at_the_start_is_no_news(database: Database, clock: Clock) -> None:
    started = Started(database, FakeJudge(SCORES), clock)
    await started.worker.begin()

    await started.worker.step()

    assert (started.state.state, started.state.good_at) == ("works", 1_000.0)
    assert started.said == []


async def test_groups_wait_for_the_first_question_to_the_judge(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    for number in range(8):
        judge_kit.put_group(database, f"g{number}", "good", "bad")
    judge = FakeJudge(JudgeRejectedError("401"))
    started = Started(database, judge, clock)
    await started.worker.begin()

    await started.worker.step()

    assert len(judge.prompts) == 1, "and not one call for each group"


async def test_a_judge_that_wrote_rubbish_at_the_start_sets_no_group_aside(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    for number in range(4):
        judge_kit.put_group(database, f"g{number}", "good", "bad")
    started = Started(database, FakeJudge("I like them all"), clock)
    await started.worker.begin()

    for _ in range(20):
        await started.worker.step()
        clock.now += 5.0

    assert started.state.state == "rejected"
    assert judge_kit.counts(database, "judging") == {}


async def test_a_judge_that_was_repaired_is_found_again_though_no_group_waits_for_it(
    database: Database, clock: Clock
) -> None:
    """Sampling holds, so no group comes that could show it."""
    judge = FakeJudge(JudgeRejectedError("401"))
    started = Started(database, judge, clock)
    await started.worker.begin()
    await started.worker.step()
    judge.script = [SCORES]

    for _ in range(30):
        clock.now += 1.0
        await started.worker.step()

    assert started.state.state == "works"
    assert started.state.error == "judge_rejected: 401", "it was the last"
    assert started.said[1:] == ["judge gives scores again"]
    assert len(judge.prompts) == 2


async def test_a_judge_that_fails_on_every_group_is_not_rejected_so_that_new_groups_may_prove_it(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    def sums_only(shown: Any) -> str:
        if not any("2 + 3" in answer["content"] for answer in shown.values()):
            raise JudgeRejectedError("400: max_tokens")
        return SCORES(shown)

    for number in range(30):
        judge_kit.put_group(database, f"g{number}", "good", "bad")
    started = Started(database, FakeJudge(sums_only), clock)
    await started.worker.begin()

    for _ in range(10):
        clock.now += 1.0
        await started.worker.step()

    assert started.state.state == "away"
    assert started.state.error.endswith("fails on every group: judge_rejected")


async def test_a_rate_limit_is_away_until_the_pause_ends(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    busy = JudgeBusyError("429", retry_after_s=20.0)
    started = Started(database, FakeJudge(SCORES, busy), clock)
    await started.worker.begin()
    await started.worker.step()

    await started.worker.step()

    assert (started.state.state, started.state.until) == ("away", 1_020.0)
    assert (started.state.good_at, started.state.error) == (
        1_000.0,
        "judge_busy: a rate limit of the provider, met by group g1; it asked to wait 20 s",
    )


async def test_an_error_over_one_group_is_the_last_error_of_a_judge_that_works(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    judge_kit.put_group(database, "g1", "good", "bad")
    started = Started(database, FakeJudge(SCORES, JudgeUnavailableError("503"), SCORES), clock)
    await started.worker.begin()
    await started.worker.step()
    clock.now += 7.0

    await started.worker.step()

    assert (started.state.state, started.state.since) == ("works", 1_000.0)
    assert (started.state.error_at, started.state.error) == (1_007.0, "judge_unavailable: group g1")


async def test_the_flag_keeps_no_words_of_a_provider_that_may_quote_a_users_prompt(
    database: Database, clock: Clock, judge_kit: JudgeKit
) -> None:
    """`sidecar forget` deletes groups and their calls, and does not reach the flag."""

    def quoting(shown: Any) -> str:
        said = " ".join(answer["content"] for answer in shown.values())
        if "2 + 3" in said:
            return SCORES(shown)
        raise JudgeRejectedError(f"400: invalid prompt: {said}")

    for number in range(30):
        judge_kit.put_group(database, f"g{number}", "Jane Doe lives here", "Jane Doe")
    judge, settings = FakeJudge(quoting), JudgeSettings(model="scripted", price=PRICE)
    meter = Meter(settings, Ledger(database, settings, clock=clock))
    panel = Panel(
        [Provider(judge, settings, meter, clock=clock) for _ in range(2)],
        Patience(first_s=0.0, begun_s=0.0),
    )
    started = Started(database, panel, clock)
    await started.worker.begin()

    kept = []
    for _ in range(10):
        clock.now += 1.0
        await started.worker.step()
        with database.read() as session:
            kept.append(str(read_all(session)))

    assert any("Jane Doe" in prompt for prompt in judge.prompts)
    assert any("judge_rejected" in text for text in kept)
    assert not any("Jane" in text for text in kept)


async def test_what_is_known_of_the_judge_is_written_once_a_locked_store_is_free(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the store would say `unknown` for ever, and sampling would wait for ever."""
    started = Started(database, FakeJudge(SCORES), clock)
    await started.worker.begin()

    def locked(*_: object, **__: object) -> None:
        raise StoreError("database is locked")

    with monkeypatch.context() as patched:
        patched.setattr(judge_watch, "write_judge_state", locked)
        await started.worker.step()
    before = started.state

    await started.worker.step()

    assert (before.state, started.state.state) == ("unknown", "works")


async def test_a_restart_keeps_when_the_judge_was_good_and_forgets_that_it_was_wrong(
    database: Database, clock: Clock
) -> None:
    judge = FakeJudge(SCORES, JudgeRejectedError("401"))
    started = Started(database, judge, clock)
    await started.worker.begin()
    await started.worker.step()
    clock.now += 60.0

    await Started(database, judge, clock).worker.begin()

    assert (started.state.state, started.state.since) == ("unknown", 1_060.0)
    assert started.state.good_at == 1_000.0

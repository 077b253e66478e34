"""One condition, six renderings: status as JSON and text, page, doctor, `/readyz` and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from deploy.admin.text import reply_lines
from deploy.conditions import read_conditions
from deploy.doctor.collect import Facts, StoreFacts
from deploy.doctor.rules import OF_CONDITIONS, diagnose
from deploy.funnel import read_funnel
from deploy.registry import canaries, flags, transitions
from ingest.judge_watch import JudgeState, write_judge_state
from ingest.verifiers.state import VerifierSeen, write_verifiers
from learner.progress.watch import Missing, write_missing
from sidecar.conditions import Condition, clear, read, write
from sidecar.lines import Line
from sidecar.settings import Settings
from sidecar.store.database import count
from support.finished_run import finished_run
from tests.deploy.page.test_pages import words_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser

NOON = 1_767_268_800.0
LINE = Line(name="m")


def judge(session: Session) -> None:
    state = JudgeState(since=NOON - 60.0)
    state = state.fails(NOON, "judge_rejected: 401", until=NOON + 9.0, state="rejected")
    write_judge_state(session, state, now=NOON)


def sampling(session: Session) -> None:
    one = Condition(
        kind="sampling", state="look", code="budget_spent", message="no candidates are sampled: 15",
        to_do="wait", until=NOON + 3_600.0,
    )  # fmt: skip
    write(session, one, now=NOON)


def verifier(session: Session) -> None:
    dead = VerifierSeen(name="policy", kind="http", fails=True, error_at=NOON, error="unreachable")
    write_verifiers(session, [dead], now=NOON)


def bus(session: Session) -> None:
    one = Condition(kind="bus", state="act", code="bus_away", message="ingest cannot read the bus")
    write(session, one, now=NOON)


def pause(session: Session) -> None:
    flags.set_paused(session, "m", True, now=NOON, actor="token:86f65e28", reason="a sale begins")


def failed(session: Session) -> None:
    session.add(finished_run("r1", status="failed", reason="no base weights", started_at=NOON))


def held(session: Session) -> None:
    session.add(finished_run("r1", status="held", reason="refusals", started_at=NOON))


def lack(session: Session) -> None:
    write_missing(session, [Missing("learner.device", "it cannot be used")], now=NOON)


def late(session: Session) -> None:
    one = Condition(kind="schedule", line="m", code="waits", message="not due")
    write(session, one, now=NOON - 600.0)


def died(session: Session) -> None:
    """In a run, which has no end."""
    late(session)
    gone = {"started_at": NOON - 900.0, "heartbeat_at": NOON - 600.0}
    session.add(finished_run("r1", status="running", **gone))


def scoreless(session: Session) -> None:
    write_judge_state(session, JudgeState(since=1.0).works(NOON - 600.0), now=NOON - 600.0)
    count(session, "selection", "chosen")  # a group that waits for answers


def lost(session: Session) -> None:
    count(session, "consume", "poison", 2)


def silent(session: Session) -> None:
    count(session, "capture", "kept", 3)


@pytest.mark.parametrize(
    ("plant", "state", "code", "says"),
    [
        (judge, "act", "judge_rejects", "the judge rejects every question: judge_rejected: 401"),
        (sampling, "look", "budget_spent", "no candidates are sampled: 15"),
        (verifier, "act", "verifier_fails", "the verifier policy fails: unreachable"),
        (bus, "act", "bus_away", "ingest cannot read the bus"),
        (pause, "look", "paused", "so no run starts, by token:86f65e28: a sale begins"),
        (failed, "act", "run_failed", "the newest training run failed: no base weights"),
        (held, "act", "held", "the reward watch holds the learner: refusals"),
        (lack, "act", "learner_cannot_run", "learner.device: it cannot be used"),
        (late, "act", "learner_away", "the learner has not been heard of"),
        (died, "act", "learner_away", "the learner has not been heard of"),
        (scoreless, "act", "score_down", "score has not been heard of"),
        (lost, "look", "dead_letters", "2 records could not be stored"),
        (silent, "act", "ingest_down", "ingest has not been heard of yet"),
    ],
)
async def test_a_condition_is_the_same_in_every_rendering(
    world: World,
    browser: Browser,
    plant: Callable[[Session], None],
    state: str,
    code: str,
    says: str,
) -> None:
    world.clock.now = NOON
    await browser.reconciler.reconcile()
    with world.database.write() as session:
        plant(session)

    status = (await browser.get("/admin/v1/status")).json()
    page = words_of((await browser.get("/")).text)
    ready = (await browser.get("/readyz")).json()
    metrics = (await browser.get("/metrics")).text
    with world.database.read() as session:
        funnel = read_funnel(session, "m")
        found = read_conditions(
            session, [LINE], funnel, watch=browser.context.watch, most_pending=256, now=NOON
        )
    store = StoreFacts(funnel=funnel, conditions=tuple(found))
    settings = Settings.model_validate({"judge": {"model": "j"}, "learner": {"schedule": "groups"}})
    told = [one.text for one in diagnose(Facts(now=NOON, settings=settings, store=store))]

    (one,) = [one for one in status["conditions"] if one["code"] == code]
    assert (one["state"], says in one["message"]) == (state, True)
    sentence = one["message"][0].upper() + one["message"][1:]
    assert any(sentence in line for line in reply_lines("/status", status, NOON))
    assert sentence in page
    assert (code in ready["conditions"]) is (state == "act")
    label = f'code="{code}",kind="{one["kind"]}",project="",state="{state}"'
    assert f"sidecar_condition{{{label}}} 1.0" in metrics
    stops = one["kind"].partition(" ")[0] in OF_CONDITIONS
    assert any(one["message"] in text for text in told) is stops


async def test_a_reason_that_is_the_judges_is_one_card(world: World, browser: Browser) -> None:
    world.clock.now = NOON
    waits = Condition(kind="sampling", state="look", code="judge_rejected", message="no candidates")
    with world.database.write() as session:
        judge(session)
        write(session, waits, now=NOON)

    found = (await browser.get("/admin/v1/status")).json()["conditions"]

    assert [one["code"] for one in found if one["state"] != "ok"].count("judge_rejects") == 1
    assert "judge_rejected" not in [one["code"] for one in found]


async def test_a_paused_trial_is_told_of(world: World, browser: Browser) -> None:
    name = world.register(1)
    with world.database.write() as session:
        begun = transitions.begin(
            session, model="m", candidate=name, steps=(5_000,), now=NOON, actor="control"
        )

    async def codes() -> list[str]:
        found = (await browser.get("/admin/v1/status")).json()["conditions"]
        return [one["code"] for one in found if one["kind"] == "canary"]

    assert await codes() == []
    with world.database.write() as session:
        row = canaries.find_row(session, begun.canary_id)
        transitions.pause(session, row, reason="x", now=NOON, actor="t")
    assert await codes() == ["canary_paused"]


def test_since_is_kept_while_the_code_stays(world: World) -> None:
    def put(code: str, now: float) -> float:
        with world.database.write() as session:
            write(session, Condition(kind="bus", code=code), now=now)
        with world.database.read() as session:
            found = read(session, "bus")
        assert found is not None
        return found.since

    assert [put("a", 1.0), put("a", 2.0), put("b", 3.0)] == [1.0, 1.0, 3.0]
    with world.database.write() as session:
        clear(session, "bus")
        assert read(session, "bus") is None

"""`sidecar status`: sentences for people, made from what the admin API says."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from deploy.admin.models import EngineOut, LearnerOut, ReplicaOut, RunOut, ScheduleOut
from deploy.admin.out import BudgetOut, ConditionOut, GateJudgeOut, RoutingOut
from deploy.admin.text import reply_lines
from deploy.examiner import examiner_of
from deploy.text import shown_time
from learner.schedule.rule import shown_cron
from sidecar.conditions import Condition
from sidecar.settings import Learner, Settings
from support.admin_replies import CANDIDATE, CHAMPION, canary_out, status_out

NOW = 1_772_357_400.0  # 2026-03-01T09:30:00Z
URL = "http://127.0.0.1:8000"
canary = partial(canary_out, NOW)


def status(**changes: Any) -> Any:
    """`GET /admin/v1/status` as JSON: a champion serves, and nothing else goes on."""
    replicas = {URL: ReplicaOut(away=None, loaded=[CHAMPION], refused={})}
    fields: dict[str, Any] = {
        "engine": EngineOut(away=None, loaded=[CHAMPION], refused={}, replicas=replicas),
        "routing": RoutingOut(champion=CHAMPION, canary=None, canary_weight_bp=0, generation=7),
        "adapters": {"champion": 1, "retired": 2},
        "groups": {"scored": 12},
        "exchanges": 1_240,
    }
    return status_out(**{**fields, **changes}).model_dump(mode="json")


def status_lines(found: Any) -> list[str]:
    return list(reply_lines("/status", found, NOW))


def test_the_budgets_have_a_line() -> None:
    budgets = [
        BudgetOut(
            setting="groups.tokens_per_day",
            what="candidate tokens",
            used=716_800.0,
            limit=5_000_000.0,
            period="day",
        ),
        BudgetOut(
            setting="judge.budget",
            what="US dollars",
            used=0.004,
            limit=0.5,
            period="day",
        ),
    ]

    lines = status_lines(status(budgets=budgets))
    quiet = status_lines(status())

    assert [one for one in lines if one not in quiet] == [
        "Budgets (UTC): 716,800 of 5,000,000 candidate tokens today (groups.tokens_per_day); under "
        "$0.01 of $0.50 for judges today (judge.budget).",
    ]


def test_a_gate_that_is_marked_by_the_rewards_judge_is_said() -> None:
    settings = Settings.model_validate({"judge": {"model": "openai/a"}})
    apart = Settings.model_validate(
        {
            "judge": {"model": "openai/a"},
            "gate_judge": {"model": "openai/b", "rubric": "is it right?"},
        }
    )

    def said(one: Settings) -> list[str]:
        found = status_lines(status(gate_judge=GateJudgeOut.model_validate(examiner_of(one))))
        return [line for line in found if line not in status_lines(status())]

    assert said(settings) == [
        "Gate: judged by openai/a, 2 passes, by judge.rubric.",
    ]
    assert said(apart) == ["Gate: judged by openai/b, 2 passes, by a rubric of its own."]


def run(**changes: Any) -> RunOut:
    fields: dict[str, Any] = {
        "run_id": "r-1",
        "status": "finished",
        "reason": None,
        "started_at": NOW - 600,
        "heartbeat_at": NOW - 240,
        "ended_at": NOW - 240,
        "parent": CHAMPION,
        "adapter": CANDIDATE,
        "settings": {},
        "counts": {},
        "metrics": [],
        "held": None,
        "deaths": None,
        "progress": None,
    }
    return RunOut(**{**fields, **changes})


def test_a_champion_that_no_vllm_has_is_said() -> None:
    bare = ReplicaOut(away=None, loaded=[], refused={CHAMPION: "corrupt"})
    engine = EngineOut(away=None, loaded=[], refused={CHAMPION: "corrupt"}, replicas={URL: bare})

    lines = status_lines(status(engine=engine))
    assert lines[0] == (
        f"No vLLM has loaded the champion {CHAMPION}: the base model answers in its place."
    )
    assert "the base model answers every session" in lines[1]


def test_conditions_are_said_with_since_until_and_what_to_do() -> None:
    works = Condition(kind="judge", code="judge_works", message="the judge gives scores")
    away = Condition(
        kind="vllm u", state="act", code="vllm_away", message="vLLM at u does not answer: refused",
        to_do="start it again", since=NOW - 60, until=NOW + 3_600,
    )  # fmt: skip
    found = [ConditionOut.of(one) for one in (away, works)]

    lines = status_lines(status(conditions=found))

    assert lines[-4:] == [
        "The judge gives scores.",
        "Needs you:",
        f"  vLLM at u does not answer: refused, since {shown_time(NOW - 60, NOW)}; again "
        f"{shown_time(NOW + 3_600, NOW)}.",
        "    Start it again.",
    ]


def test_a_quiet_sidecar() -> None:
    assert status_lines(status()) == [
        f"Model m: {CHAMPION} answers every session.",
        "A rollback goes to the base model.",
        "Canary: none.",
        "Learner: follows its schedule.",
        "  It has not run yet.",
        f"vLLM at {URL}: answers; it has loaded {CHAMPION}.",
        "Adapters: 1 champion, 2 retired.",
        "Recorded: 1,240 exchanges. Groups: 12 scored.",
    ]


def learner_of(last: RunOut) -> LearnerOut:
    return LearnerOut(paused=False, run_requested=False, last_run=last, allowed_actions=[])


def test_a_run_that_was_killed_and_resumed() -> None:
    death = {"at": NOW - 100, "checkpoint": 3, "step": 2, "steps": 4, "place": "g"}
    going = run(status="running", ended_at=None, adapter=None, heartbeat_at=NOW - 2, deaths=[death])

    lines = status_lines(status(learner=learner_of(going)))

    assert "  It was killed, and resumed from step 2 of 4." in lines
    assert not any("KILLED" in line for line in lines)


def test_a_run_that_stands_still_was_killed() -> None:
    still = run(status="running", ended_at=None, adapter=None, heartbeat_at=NOW - 180)

    lines = status_lines(status(learner=learner_of(still)))

    assert "  It was KILLED: no sign of it for 3 min; the next start goes on with it." in lines


def test_a_run_that_was_stopped_waits_for_the_next_start() -> None:
    stop = {"at": NOW - 100, "checkpoint": 3, "step": 2, "steps": 4, "place": "", "stopped": True}
    left = "asked to stop; the next start goes on with it"
    waits = run(status="running", ended_at=None, adapter=None, heartbeat_at=NOW - 900, reason=left)
    again = run(
        status="running", ended_at=None, adapter=None, heartbeat_at=NOW, deaths=[{"at": 1}, stop]
    )

    waiting, going = (status_lines(status(learner=learner_of(one))) for one in (waits, again))

    said = next(line for line in waiting if "Last run" in line)
    assert "is interrupted, began" in said
    assert said.endswith(f": {left}.")
    assert not any("KILLED" in line for line in waiting)
    assert "  It was stopped, and resumed from step 2 of 4, after 1 kill and 1 stop." in going


@pytest.mark.parametrize(("project", "of_line"), [(None, ""), ("shop", " --project shop")])
def test_a_learner_that_runs_by_hand_follows_no_schedule(project: str | None, of_line: str) -> None:
    told = ScheduleOut(kind="not_due", why="the schedule has not come round", at=NOW)
    learner = learner_of(run()).model_copy(update={"schedule": told})

    lines = status_lines(status(learner=learner, project=project, by_hand=True))

    asks = f"`sidecar learner run{of_line}` asks"
    assert f"Learner: runs when it is asked to (learner.schedule); {asks}." in lines
    assert not any("the schedule has not come round" in line for line in lines)


def test_a_ramp_says_who_answers_how_much_and_when_it_goes_on() -> None:
    routing = RoutingOut(champion=CHAMPION, canary=CANDIDATE, canary_weight_bp=2_000, generation=8)

    lines = status_lines(status(canary=canary(), routing=routing))

    assert lines[0] == (
        f"Model m: {CHAMPION} answers 80% of the sessions, the canary {CANDIDATE} 20%."
    )
    assert lines[2:4] == [
        f"Canary c-1: {CANDIDATE} has 20% of the sessions (step 1 of 2) since "
        f"2026-03-01T09:28:00Z (2 min ago), against {CHAMPION}.",
        "  Next step: in 1 min at the earliest.",
    ]


def test_behind_the_last_step_comes_the_promotion_and_the_next_one_waits() -> None:
    queued = canary(state="queued", canary_id="c-2")

    lines = status_lines(status(canary=canary(step=1, weight_bp=5_000), queued=queued))

    assert "  Promotion: in 1 min at the earliest." in lines
    since = "2026-03-01T09:28:00Z (2 min ago)"
    assert f"Queue: {CANDIDATE} waits since {since} (canary c-2)." in lines


def test_a_paused_canary_says_why_and_how_to_continue_it() -> None:
    held = canary(state="gating", paused=True, reason="by hand", next_step_earliest_at=None)

    lines = status_lines(status(canary=held))

    assert lines[2:4] == [
        f"Canary c-1: {CANDIDATE} is gating since 2026-03-01T09:28:00Z (2 min ago), against "
        f"{CHAMPION}.",
        "  Reason: by hand",
    ]


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (run(), f"finished 2026-03-01T09:26:00Z (4 min ago) and made {CANDIDATE}."),
        (
            run(status="running", ended_at=None, adapter=None),
            "runs since 2026-03-01T09:20:00Z (10 min ago).",
        ),
        (
            run(status="failed", adapter=None, reason="no base weights"),
            "failed 2026-03-01T09:26:00Z (4 min ago): no base weights.",
        ),
    ],
)
def test_the_last_run_says_how_it_ended(last: RunOut, sentence: str) -> None:
    learner = LearnerOut(paused=True, run_requested=False, last_run=last, allowed_actions=[])

    lines = status_lines(status(learner=learner))

    assert lines[3] == "Learner: paused."
    assert lines[4] == f"  Last run r-1: {sentence}"


@pytest.mark.parametrize(
    ("kind", "why", "told_at", "expected"),
    [
        ("not_due", "the schedule has not come round", NOW - 30, ["  No run now: {why}."]),
        ("users_busy", "users make 9.0 requests a minute", NOW, ["  No run now: {why}."]),
        ("start", "16 groups wait", NOW - 30, []),
        ("running", "a run is in progress", NOW - 30, []),
    ],
)
def test_a_schedule_says_when_it_is_due_and_why_no_run_starts(
    kind: str, why: str, told_at: float, expected: list[str]
) -> None:
    learner = LearnerOut(
        paused=False,
        run_requested=False,
        last_run=None,
        allowed_actions=[],
        next_run_at=NOW + 7200,
        schedule=ScheduleOut(kind=kind, why=why, at=told_at),
    )

    lines = status_lines(status(learner=learner))

    assert lines[3:-3] == [
        "Learner: follows its schedule.",
        "  Next scheduled time: 2026-03-01T11:30:00Z (in 2 h).",
        *(line.format(why=why) for line in expected),
        "  It has not run yet.",
    ]


def test_a_hold_says_until_when() -> None:
    why = "a run needs about 16.4 GB on cuda:0, and 3.0 of 80.0 GB are free"
    told = ScheduleOut(kind="no_room", why=why, at=NOW, again_at=NOW + 480)
    learner = learner_of(run()).model_copy(update={"schedule": told})

    lines = status_lines(status(learner=learner))

    at = lines.index(f"  No run now: {why}.")
    assert lines[at + 1] == "  It is tried again 2026-03-01T09:38:00Z (in 8 min)."


def test_a_run_that_goes_on_says_where_it_is_and_how_long_it_takes() -> None:
    progress = {
        "phase": "training",
        "answers_done": 12,
        "answers": 64,
        "step": 2,
        "steps": 3,
        "tokens_done": 4_100,
        "tokens_left": 17_900,
        "left_s": 130.0,
        "at": NOW - 4.0,
    }
    last = run(
        status="running", ended_at=None, adapter=None, heartbeat_at=NOW - 2, progress=progress
    )
    learner = LearnerOut(paused=False, run_requested=False, last_run=last, allowed_actions=[])

    lines = status_lines(status(learner=learner))

    assert lines[5] == (
        "  It is training: step 2 of 3, 12 of 64 answers, about 2 min left (4 s ago)."
    )


def test_feedback_and_signals_are_counted() -> None:
    feedback = {"joined": 2, "stored_feedback": 3, "stored_outcome": 1}

    lines = status_lines(status(feedback=feedback, signals={"retry": 4}))

    told = "Feedback: 3 scores and 1 outcome; 2 of them are joined to exchanges."
    assert lines[-2:] == [told, "Signals: 4 retry."]


def test_before_any_adapter_the_base_model_answers() -> None:
    lines = status_lines(status(champion="base", routing=None, adapters={}, groups={}, exchanges=1))

    assert lines[0] == "Model m: the base model answers every session."
    assert lines[1] == "Canary: none."
    assert lines[-2:] == ["Adapters: none.", "Recorded: 1 exchange. Groups: none."]


def test_the_next_times_of_a_cron_line_are_told_below_the_learner() -> None:
    rules = Learner(schedule="cron", cron="30 3 * * mon-fri", timezone="America/New_York")
    friday = datetime(2027, 1, 8, 8, 30, 1, tzinfo=UTC).timestamp()  # 03:30:01 in New York

    lines = status_lines(status(cron_times=shown_cron(rules, friday)))

    assert shown_cron(Learner(), friday) == ""
    at = lines.index("Learner: follows its schedule.")
    assert (
        "  learner.cron runs next Mon 2027-01-11 03:30, Tue 2027-01-12 03:30, "
        "Wed 2027-01-13 03:30 (America/New_York)."
    ) in lines[at:]

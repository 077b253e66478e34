"""`sidecar status`: sentences for people, made from what the admin API says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from deploy.admin.models import (
    CanaryOut,
    EngineOut,
    LearnerOut,
    ReplicaOut,
    RunOut,
    ScheduleOut,
    StatusOut,
)
from deploy.admin.out import (
    BudgetOut,
    BusOut,
    GateJudgeOut,
    JudgeNoiseOut,
    JudgeOut,
    LoopOut,
    OneJudgeOut,
    PileUpOut,
    RoutingOut,
    TroubleOut,
    VerifierOut,
)
from deploy.cli.output import shown_cron
from deploy.cli.status import status_lines
from deploy.examiner import examiner_of
from deploy.funnel import PileUp
from deploy.text import shown_time
from sidecar.settings import Learner, Settings

NOW = 1_772_357_400.0  # 2026-03-01T09:30:00Z
CHAMPION, CANDIDATE = "m--v3-0a0b0c0d0e0f", "m--v4-1a1b1c1d1e1f"
URL = "http://127.0.0.1:8000"


def status(**changes: Any) -> Any:
    """`GET /admin/v1/status` as JSON: a champion serves, and nothing else goes on."""
    engine = EngineOut(
        away=None,
        loaded=[CHAMPION],
        refused={},
        replicas={URL: ReplicaOut(away=None, loaded=[CHAMPION], refused={})},
    )
    fields: dict[str, Any] = {
        "model": "m",
        "champion": CHAMPION,
        "previous": "base",
        "routing": RoutingOut(champion=CHAMPION, canary=None, canary_weight_bp=0, generation=7),
        "canary": None,
        "learner": LearnerOut(
            paused=False, run_requested=False, last_run=None, allowed_actions=["pause", "run"]
        ),
        "engine": engine,
        "control": {"tick": LoopOut(failures=0, error=None)},
        "adapters": {"champion": 1, "retired": 2},
        "groups": {"scored": 12},
        "exchanges": 1_240,
        "feedback": {},
        "signals": {},
        "bus": BusOut(lag=3, error="", at=NOW - 4.0),
        "retention": None,
        "token_check": "on",
    }
    return StatusOut(**{**fields, **changes}).model_dump(mode="json")


NO_JUDGE = "Judge: no score process with a judge has run (judge.model)."


def judge(state: str, **changes: Any) -> JudgeOut:
    fields: dict[str, Any] = {
        "state": state,
        "since": NOW - 300,
        "good_at": None,
        "error_at": None,
        "error": "",
        "until": None,
        "waiting": 0,
    }
    return JudgeOut(**{**fields, **changes})


def test_a_vllm_that_refuses_our_fields_has_a_line() -> None:
    lines = status_lines(status(fields_refused={URL: 1}), NOW)

    assert lines is not None
    assert (
        f"vLLM at {URL}: fails when it is asked for token ids and log-probabilities, so users are "
        "served without; 1 of the newest 200 exchanges has none and cannot be learned from."
    ) in lines


def test_what_keeps_sampling_from_its_work_has_a_line() -> None:
    sampling = TroubleOut(since=NOW - 60, why="spent: 15 tokens", until=NOW + 3_600)

    lines = status_lines(status(sampling=sampling, dead_letters=2), NOW)
    quiet = status_lines(status(), NOW)

    assert lines is not None
    assert quiet is not None
    assert [one for one in lines if one not in quiet] == [
        "Dead letters: 2 records could not be stored; see the runbook.",
        f"Sampling: waits since {shown_time(NOW - 60, NOW)}, until "
        f"{shown_time(NOW + 3_600, NOW)}: spent: 15 tokens",
    ]
    assert NO_JUDGE in quiet


def test_a_pile_up_and_the_budgets_have_lines() -> None:
    pile = PileUp(most=256, sampling=0, judging=6, learning=250, exchanges=1_234)
    budgets = [
        BudgetOut(
            setting="groups.tokens_per_day",
            what="candidate tokens",
            used=716_800.0,
            limit=5_000_000.0,
            period="day",
        ),
        BudgetOut(
            setting="judge.budget_per_hour",
            what="US dollars",
            used=0.004,
            limit=0.5,
            period="hour",
        ),
    ]

    lines = status_lines(status(pile_up=PileUpOut.of(pile), budgets=budgets), NOW)
    quiet = status_lines(status(), NOW)

    assert lines is not None
    assert quiet is not None
    assert [one for one in lines if one not in quiet] == [
        "Selection: no new group begins, because 256 wait (6 for the judge, 250 for the learner), "
        "as many as may (groups.max_pending_groups); 1,234 suitable exchanges are not chosen for "
        "it yet.",
        "  What to do: nothing, if this many groups a run are enough: the next run makes room. A "
        "larger learner.max_groups makes runs and this limit larger; a smaller groups.rate spreads "
        "the groups over the time between two runs.",
        "Budgets (UTC): 716,800 of 5,000,000 candidate tokens today (groups.tokens_per_day); under "
        "$0.01 of $0.50 for judges this hour (judge.budget_per_hour).",
    ]


def verifier(name: str, **changes: Any) -> VerifierOut:
    fields: dict[str, Any] = {
        "name": name,
        "kind": "http",
        "fails": False,
        "good_at": NOW - 12,
        "error_at": None,
        "error": "",
        "waiting": 0,
    }
    return VerifierOut(**{**fields, **changes})


def test_each_verifier_has_a_line() -> None:
    verifiers = [
        verifier("calls", kind="tool_calls"),
        verifier("once", error_at=NOW - 60, error="timeout: no whole reply in 2 s"),
        verifier(
            "policy",
            fails=True,
            good_at=None,
            error_at=NOW - 9,
            error="unreachable: ConnectError",
            waiting=3,
        ),
        verifier("new", good_at=None),
    ]

    lines = status_lines(status(verifiers=verifiers), NOW)
    quiet = status_lines(status(), NOW)

    assert lines is not None
    assert quiet is not None
    good = shown_time(NOW - 12, NOW)
    assert [one for one in lines if one not in quiet] == [
        f"Verifier calls (tool_calls): works. Last good: {good}.",
        f"Verifier once (http): works. Last good: {good}.",
        f"  Last error {shown_time(NOW - 60, NOW)}: timeout: no whole reply in 2 s",
        "Verifier policy (http): FAILS: unreachable: ConnectError. Last good: never. 3 groups wait "
        "for it.",
        "Verifier new (http): has not been tried yet. Last good: never.",
    ]


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        (
            judge("works", good_at=NOW - 12, waiting=1),
            [
                f"Judge: gives scores. Last good answer: {shown_time(NOW - 12, NOW)}. 1 group "
                "waits for it."
            ],
        ),
        (
            judge(
                "rejected",
                error_at=NOW - 9,
                error="judge_rejected: 401",
                until=NOW + 291,
                waiting=12,
            ),
            [
                f"Judge: REJECTS every question since {shown_time(NOW - 300, NOW)}; "
                "correct judge.model, judge.api_base, judge.api_key or judge.params, and restart "
                "score and control, for score reads the settings at its start; meanwhile it is "
                "asked again, in case its server is mended, next in 4 min. Last good answer: "
                "never. 12 groups wait for it.",
                f"  Last error {shown_time(NOW - 9, NOW)}: judge_rejected: 401",
            ],
        ),
        (
            judge(
                "away",
                good_at=NOW - 400,
                error_at=NOW - 9,
                error="judge_unavailable: x",
                until=NOW - 1,
            ),
            [
                f"Judge: gives no scores since {shown_time(NOW - 300, NOW)}; start the judge, "
                "correct judge.api_base, or raise judge.timeout_s where it is slow; it is asked "
                "again by itself. "
                f"Last good answer: {shown_time(NOW - 400, NOW)}. 0 groups wait for it.",
                f"  Last error {shown_time(NOW - 9, NOW)}: judge_unavailable: x",
            ],
        ),
        (
            judge(
                "spent",
                error_at=NOW - 9,
                error="judge.budget is spent: $5.02 of $5.00 today, until 2026-11-24 00:00 UTC",
                until=NOW + 3_600,
                waiting=2,
                spent_usd_today=5.02,
                tokens_today=31_000,
            ),
            [
                "Judge: is not asked: judge.budget is spent: $5.02 of $5.00 today, until "
                "2026-11-24 00:00 UTC. Last good answer: never. 2 groups wait for it.",
                "  Today (UTC): $5.02, 31,000 tokens.",
            ],
        ),
        (
            judge(
                "works",
                good_at=NOW - 12,
                judges=[
                    OneJudgeOut(
                        model="openai/a",
                        breaker="open",
                        since=NOW - 60,
                        until=NOW + 120,
                        error="401",
                    ),
                    OneJudgeOut(model="b", breaker="closed", since=None, until=None, error=""),
                ],
            ),
            [
                f"Judge: gives scores. Last good answer: {shown_time(NOW - 12, NOW)}. 0 groups "
                "wait for it.",
                f"  openai/a (first judge): fails since {shown_time(NOW - 60, NOW)}; it is tried "
                "again in 2 min. Its error: 401",
                "  b (fallback 1): gives the scores",
            ],
        ),
        (
            judge(
                "no_credit",
                error_at=NOW - 9,
                error="judge_no_credit: 429",
                until=NOW + 120,
                tokens_today=31_000,
                judges=[
                    OneJudgeOut(
                        model="openai/a", breaker="closed", since=NOW - 60, until=None, error="x"
                    ),
                    OneJudgeOut(
                        model="b", breaker="open", since=NOW - 60, until=NOW - 1, error="y"
                    ),
                ],
            ),
            [
                f"Judge: its account has NO CREDIT since {shown_time(NOW - 300, NOW)}; pay or "
                "raise the limit of the provider's account, or name another judge.model or "
                "judge.api_key and restart, since no waiting helps; it is asked again, next in "
                "2 min. Last good answer: never. 0 groups wait for it.",
                "  Today (UTC): no dollars are counted, since no price is known (judge.price), "
                "31,000 tokens.",
                f"  openai/a (first judge): fails since {shown_time(NOW - 60, NOW)}; it is asked "
                "on until it fails three times in a row. Its error: x",
                f"  b (fallback 1): fails since {shown_time(NOW - 60, NOW)}; the next group tries "
                "it. Its error: y",
                f"  Last error {shown_time(NOW - 9, NOW)}: judge_no_credit: 429",
            ],
        ),
        (
            judge("unknown"),
            [
                "Judge: is being asked whether it works, since "
                f"{shown_time(NOW - 300, NOW)}. Last good answer: never. 0 groups wait for it."
            ],
        ),
    ],
)
def test_the_judge_has_a_line_whatever_its_state(judged: JudgeOut, expected: list[str]) -> None:
    lines = status_lines(status(judge=judged), NOW)
    quiet = status_lines(status(), NOW)

    assert lines is not None
    assert quiet is not None
    assert [one for one in lines if one not in quiet] == expected
    assert NO_JUDGE not in lines


def test_a_gate_that_is_marked_by_the_rewards_judge_is_said() -> None:
    settings = Settings.model_validate({"judge": {"model": "openai/a"}})
    apart = Settings.model_validate(
        {
            "judge": {"model": "openai/a"},
            "gate_judge": {"model": "openai/b", "rubric": "is it right?"},
        }
    )

    def said(one: Settings) -> list[str]:
        found = status_lines(status(gate_judge=GateJudgeOut.model_validate(examiner_of(one))), NOW)
        assert found is not None
        return [line for line in found if line not in (status_lines(status(), NOW) or ())]

    assert said(settings) == [
        "Gate: judged by openai/a, 2 passes, by judge.rubric.",
        "  WARNING: openai/a gives the reward and decides the gate, by one rubric: an adapter that "
        "learned to please this judge passes for better; name another model in gate_judge.model.",
    ]
    assert said(apart) == ["Gate: judged by openai/b, 2 passes, by a rubric of its own."]


def noise(**changes: Any) -> JudgeNoiseOut:
    fields: dict[str, Any] = {
        "at": NOW, "judge_model": "j", "rubric_hash": "r", "passes": 2, "groups": 50,
        "sd": 0.0414, "slope": 0.0, "flips": 0.1, "drift": "", "drift_at": None, "project": "",
    }  # fmt: skip
    return JudgeNoiseOut(**{**fields, **changes})


def test_the_noise_of_the_judge_has_a_line_and_its_drift_one_more() -> None:
    known = status_lines(status(judge_noise=noise()), NOW)
    drifted = noise(drift="changed by 0.107", drift_at=NOW - 60)
    changed = status_lines(status(judge_noise=drifted), NOW)
    nothing = status_lines(status(judge_noise=noise(sd=None, groups=0)), NOW)

    assert known is not None
    assert changed is not None
    quiet = status_lines(status(), NOW)
    assert quiet is not None
    assert nothing == quiet
    line = "  Noise of a score: sd 0.041, from the 2 passes over 50 groups."
    assert [one for one in known if one not in quiet] == [line]
    assert [one for one in changed if one not in quiet] == [
        line,
        f"  The judge is NOT AS IT WAS since {shown_time(NOW - 60, NOW)}: changed by "
        "0.107; see `sidecar judge noise`",
    ]


def canary(**changes: Any) -> CanaryOut:
    fields: dict[str, Any] = {
        "canary_id": "c-1",
        "candidate": CANDIDATE,
        "champion": CHAMPION,
        "state": "ramping",
        "paused": False,
        "reason": None,
        "step": 0,
        "steps": [2_000, 5_000],
        "weight_bp": 2_000,
        "created_at": NOW - 300,
        "step_started_at": NOW - 120,
        "next_step_earliest_at": NOW + 60,
        "ended_at": None,
        "generation": 3,
        "allowed_actions": ["abort"],
    }
    return CanaryOut(**{**fields, **changes})


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

    lines = status_lines(status(engine=engine), NOW)
    assert lines is not None
    assert lines[0] == (
        f"No vLLM has loaded the champion {CHAMPION}: the base model answers in its place."
    )
    assert "the base model answers every session" in lines[1]


def test_a_quiet_sidecar() -> None:
    assert status_lines(status(), NOW) == [
        f"Model m: {CHAMPION} answers every session.",
        "A rollback goes to the base model.",
        "Canary: none.",
        "Learner: follows its schedule.",
        "  It has not run yet.",
        f"vLLM at {URL}: answers; it has loaded {CHAMPION}.",
        "Control: every loop works.",
        "Adapters: 1 champion, 2 retired.",
        "Recorded: 1,240 exchanges. Groups: 12 scored.",
        "Bus: 3 records waiting to be stored, 4 s ago.",
        NO_JUDGE,
    ]


def learner_of(last: RunOut) -> LearnerOut:
    return LearnerOut(paused=False, run_requested=False, last_run=last, allowed_actions=[])


def test_a_run_that_was_killed_and_resumed() -> None:
    death = {"at": NOW - 100, "checkpoint": 3, "step": 2, "steps": 4, "place": "g"}
    going = run(status="running", ended_at=None, adapter=None, heartbeat_at=NOW - 2, deaths=[death])

    lines = status_lines(status(learner=learner_of(going)), NOW)

    assert lines is not None
    assert "  It was killed, and resumed from step 2 of 4." in lines
    assert not any("KILLED" in line for line in lines)


def test_a_run_that_stands_still_was_killed() -> None:
    still = run(status="running", ended_at=None, adapter=None, heartbeat_at=NOW - 180)

    lines = status_lines(status(learner=learner_of(still)), NOW)

    assert lines is not None
    assert "  It was KILLED: no sign of it for 3 min; the next start goes on with it." in lines


def test_a_run_that_was_stopped_waits_for_the_next_start() -> None:
    stop = {"at": NOW - 100, "checkpoint": 3, "step": 2, "steps": 4, "place": "", "stopped": True}
    left = "asked to stop; the next start goes on with it"
    waits = run(status="running", ended_at=None, adapter=None, heartbeat_at=NOW - 900, reason=left)
    again = run(
        status="running", ended_at=None, adapter=None, heartbeat_at=NOW, deaths=[{"at": 1}, stop]
    )

    waiting, going = (
        status_lines(status(learner=learner_of(one)), NOW) or [] for one in (waits, again)
    )

    said = next(line for line in waiting if "Last run" in line)
    assert "is interrupted, began" in said
    assert said.endswith(f": {left}.")
    assert not any("KILLED" in line for line in waiting)
    assert "  It was stopped, and resumed from step 2 of 4, after 1 kill and 1 stop." in going


@pytest.mark.parametrize(("project", "of_line"), [(None, ""), ("shop", " --project shop")])
def test_a_learner_that_runs_by_hand_follows_no_schedule(project: str | None, of_line: str) -> None:
    told = ScheduleOut(kind="not_due", why="the schedule has not come round", at=NOW)
    learner = learner_of(run()).model_copy(update={"schedule": told})

    lines = status_lines(status(learner=learner, project=project), NOW, schedule="manual")

    assert lines is not None
    asks = f"`sidecar learner run{of_line}` asks"
    assert f"Learner: runs when it is asked to (learner.schedule); {asks}." in lines
    assert not any("the schedule has not come round" in line for line in lines)


def test_a_ramp_says_who_answers_how_much_and_when_it_goes_on() -> None:
    routing = RoutingOut(champion=CHAMPION, canary=CANDIDATE, canary_weight_bp=2_000, generation=8)

    lines = status_lines(status(canary=canary(), routing=routing), NOW)

    assert lines is not None
    assert lines[0] == (
        f"Model m: {CHAMPION} answers 80% of the sessions, the canary {CANDIDATE} 20%."
    )
    assert lines[2:4] == [
        f"Canary c-1: {CANDIDATE} has 20% of the sessions (step 1 of 2) since "
        f"2026-03-01T09:28:00Z (2 min ago), against {CHAMPION}.",
        "  Next step: in 1 min at the earliest.",
    ]


def test_behind_the_last_step_comes_the_promotion() -> None:
    lines = status_lines(status(canary=canary(step=1, weight_bp=5_000)), NOW)

    assert lines is not None
    assert "  Promotion: in 1 min at the earliest." in lines


def test_a_paused_canary_says_why_and_how_to_continue_it() -> None:
    held = canary(state="gating", paused=True, reason="by hand", next_step_earliest_at=None)

    lines = status_lines(status(canary=held), NOW)

    assert lines is not None
    assert lines[2:5] == [
        f"Canary c-1: {CANDIDATE} is gating since 2026-03-01T09:28:00Z (2 min ago), against "
        f"{CHAMPION}.",
        "  It is paused: `sidecar canary resume` continues it.",
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

    lines = status_lines(status(learner=learner), NOW)

    assert lines is not None
    assert lines[3].startswith("Learner: paused;")
    assert lines[4] == f"  Last run r-1: {sentence}"


@pytest.mark.parametrize(
    ("kind", "why", "told_at", "expected"),
    [
        ("not_due", "the schedule has not come round", NOW - 30, ["  No run now: {why}."]),
        ("users_busy", "users make 9.0 requests a minute", NOW, ["  No run now: {why}."]),
        ("start", "16 groups wait", NOW - 30, []),
        ("running", "a run is in progress", NOW - 30, []),
        (
            "canary",
            "a canary is not decided",
            NOW - 600,
            [
                "  It said nothing since 2026-03-01T09:20:00Z (10 min ago); is `sidecar learn` up?",
            ],
        ),
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

    lines = status_lines(status(learner=learner), NOW)

    assert lines is not None
    assert lines[3:-6] == [
        "Learner: follows its schedule.",
        "  Next scheduled time: 2026-03-01T11:30:00Z (in 2 h).",
        *(line.format(why=why) for line in expected),
        "  It has not run yet.",
    ]


def test_a_hold_says_until_when() -> None:
    why = "a run needs about 16.4 GB on cuda:0, and 3.0 of 80.0 GB are free"
    told = ScheduleOut(kind="no_room", why=why, at=NOW, again_at=NOW + 480)
    learner = learner_of(run()).model_copy(update={"schedule": told})

    lines = status_lines(status(learner=learner), NOW)

    assert lines is not None
    at = lines.index(f"  No run now: {why}.")
    assert lines[at + 1] == "  It is tried again 2026-03-01T09:38:00Z (in 8 min)."


def test_what_runs_lack_is_said_though_no_run_was_due_yet() -> None:
    lack = "learner.device: learner.device = 'cuda:1' cannot be used: ...; set it to cpu"
    told = ScheduleOut(kind="not_due", why="the schedule has not come round", at=NOW)
    learner = learner_of(run()).model_copy(update={"schedule": told, "lacks": [lack]})

    lines = status_lines(status(learner=learner), NOW)

    assert lines is not None
    assert f"  It found at its start: {lack}." in lines


def test_a_pause_is_said_once() -> None:
    learner = LearnerOut(
        paused=True,
        run_requested=False,
        last_run=None,
        allowed_actions=[],
        schedule=ScheduleOut(kind="paused", why="paused by the operator", at=NOW),
    )

    lines = status_lines(status(learner=learner), NOW)

    assert lines is not None
    assert lines[4] == "  It has not run yet."


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

    lines = status_lines(status(learner=learner), NOW)

    assert lines is not None
    assert lines[5] == (
        "  It is training: step 2 of 3, 12 of 64 answers, about 2 min left (4 s ago)."
    )


def test_a_held_learner_says_so_and_what_to_do() -> None:
    last = run(status="held", adapter=None, reason="20.0% of the answers are refusals")
    learner = LearnerOut(paused=False, run_requested=False, last_run=last, allowed_actions=[])

    lines = status_lines(status(learner=learner, watch_holds="20.0% are refusals"), NOW)
    after = status_lines(status(learner=learner), NOW)

    assert after is not None
    assert after[4].startswith("  The reward watch held the last run and holds it no more")
    assert lines is not None
    assert lines[4].startswith("  The reward watch HOLDS it")
    assert lines[5].endswith(
        "held 2026-03-01T09:26:00Z (4 min ago): 20.0% of the answers are refusals."
    )


def test_a_hold_is_said_before_a_run_is_tried() -> None:
    lines = status_lines(status(watch_holds="20.0% of the answers are refusals"), NOW)

    assert lines is not None
    assert lines[4] == (
        "  The reward watch WOULD HOLD a run now: 20.0% of the answers are refusals; `sidecar "
        "learner watch` has the figures, `sidecar learner override` lets it go on."
    )


def test_a_judge_whose_newest_answer_was_no_score_is_not_said_to_give_scores() -> None:
    error = "judge_rubbish: group g-1"
    fails = judge("works", good_at=NOW - 60, error_at=NOW - 9, error=error)
    works = judge("works", good_at=NOW - 5, error_at=NOW - 9, error=error)

    said = [
        next(line for line in status_lines(status(judge=one), NOW) or () if line[:6] == "Judge:")
        for one in (fails, works)
    ]

    assert said[0].startswith("Judge: answers, but gave the newest group no scores; name a strong")
    assert said[1].startswith("Judge: gives scores.")


def test_what_needs_attention_is_said_with_its_reason() -> None:
    other = "http://127.0.0.1:8001"
    engine = EngineOut(
        away=None,
        loaded=[],
        refused={CHAMPION: "rank 64"},
        replicas={
            URL: ReplicaOut(away=None, loaded=[], refused={CHAMPION: "rank 64"}),
            other: ReplicaOut(away="connection refused", loaded=[], refused={}),
        },
    )

    lines = status_lines(
        status(
            engine=engine,
            control={"tick": LoopOut(failures=2, error="KeyError: 'x'")},
            token_check="off: no tokenizer",
        ),
        NOW,
    )

    assert lines is not None
    assert lines[6:] == [
        f"vLLM at {URL}: answers; it has loaded no adapter.",
        f"  It does not serve {CHAMPION}: rank 64",
        f"vLLM at {other}: away: connection refused",
        "Control: the loop `tick` failed 2 times in a row: KeyError: 'x'",
        "Adapters: 1 champion, 2 retired.",
        "Recorded: 1,240 exchanges. Groups: 12 scored.",
        "Bus: 3 records waiting to be stored, 4 s ago.",
        NO_JUDGE,
        "Token check: off: no tokenizer",
    ]


def test_feedback_and_signals_are_counted() -> None:
    feedback = {"joined": 2, "stored_feedback": 3, "stored_outcome": 1}

    lines = status_lines(status(feedback=feedback, signals={"retry": 4}), NOW)

    assert lines is not None
    told = "Feedback: 3 scores and 1 outcome; 2 of them are joined to exchanges."
    assert lines[-4:-2] == [told, "Signals: 4 retry."]


def test_before_any_adapter_the_base_model_answers() -> None:
    lines = status_lines(
        status(champion="base", routing=None, adapters={}, groups={}, exchanges=1), NOW
    )

    assert lines is not None
    assert lines[0] == "Model m: the base model answers every session."
    assert lines[1] == "Canary: none."
    assert lines[-4:-2] == ["Adapters: none.", "Recorded: 1 exchange. Groups: none."]


@pytest.mark.parametrize("found", [{}, [], {"model": 1}, {**status(), "engine": None}])
def test_a_status_of_another_version_is_left_to_the_caller(found: Any) -> None:
    assert status_lines(found, NOW) is None


def test_a_bus_that_is_away_or_not_known_is_said() -> None:
    away = BusOut(lag=None, error="Kafka at h:9092, topic t: no answer", at=NOW - 4.0)

    for bus, line in (
        (away, "Bus: could not be reached 4 s ago: Kafka at h:9092, topic t: no answer"),
        (None, "Bus: not known, because ingest has not looked at it yet."),
    ):
        lines = status_lines(status(bus=bus), NOW)

        assert lines is not None
        assert lines[-2] == line


def test_the_next_times_of_a_cron_line_are_told_below_the_learner() -> None:
    rules = Learner(schedule="cron", cron="30 3 * * mon-fri", timezone="America/New_York")
    friday = datetime(2027, 1, 8, 8, 30, 1, tzinfo=UTC).timestamp()  # 03:30:01 in New York

    lines = status_lines(status(), NOW, times=shown_cron(rules, friday)) or []

    assert shown_cron(Learner(), friday) == ""
    at = lines.index("Learner: follows its schedule.")
    assert (
        "  learner.cron runs next Mon 2027-01-11 03:30, Tue 2027-01-12 03:30, "
        "Wed 2027-01-13 03:30 (America/New_York)."
    ) in lines[at:]

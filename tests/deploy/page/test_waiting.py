"""What a canary waits for, as the first screen says it of the reasons that the rule gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deploy.admin.out import ConditionOut
from deploy.admin.text import reply_lines
from deploy.canary.controller import with_approval
from deploy.evidence.live import Approval, Check, MetricState, add_check
from deploy.evidence.quality import Group, Quality, add_group
from deploy.page.text import headline, waits_for
from deploy.records import Canary
from deploy.registry import transitions
from deploy.registry.canary_rule import ArmCounts, Hold, Move, RampEvidence, decide
from deploy.registry.proof_rule import limits_of
from sidecar.conditions import Condition
from sidecar.settings import Approval as ApprovalSettings, Canary as CanarySettings
from support.admin_replies import status_out
from support.made_canary import made_canary
from tests.deploy.page.test_pages import words_of
from tests.deploy.page.test_shown import NOON, canary

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser

RULES = CanarySettings()
RAMPING = replace(made_canary(), step_started_at=NOON - 3_600.0, ramp_began_at=NOON - 3_600.0)
SEEN = ArmCounts(replies=60, errors=0, short=0)


def held(quality: Quality, metrics: Mapping[str, MetricState] | None = None) -> Hold:
    """What the rule decides of a ramp whose only step has lasted and seen enough."""
    evidence = RampEvidence(
        candidate=SEEN, champion=SEEN, sessions=60, quality=quality, metrics=metrics or {}
    )
    found = decide(RAMPING, evidence, RULES, NOON)
    assert isinstance(found, Hold)
    return found


def judged(*differences: float) -> Quality:
    quality = Quality()
    for one in differences:
        quality = add_group(quality, Group(champion=one, anchor=one), limits_of(RULES))
    return quality


def checked(mode: str, *values: float | None) -> MetricState:
    state = MetricState(mode=mode, max=0.1, fails_at=1, errs_at=1)  # type: ignore[arg-type]
    for value in values:
        outcome = "error" if value is None else "failing"
        check = Check(at=NOON, outcome=outcome, value=value, why="503" if value is None else "")  # type: ignore[arg-type]
        state = add_check(state, check)
    return state


def said(hold: Hold) -> str:
    """The headline of a canary that control holds so."""
    one = canary(reason=hold.reason, step=1, weight_bp=5_000, next_step_earliest_at=NOON - 1.0)
    brief = hold.reason if hold.brief is None else hold.brief
    data = {"canary_id": "c1", "brief": brief, "metric": hold.metric}
    known = Condition(kind="canary", line="m", code="canary_waits", data=data)
    found = status_out(canary=one, conditions=[ConditionOut.of(known)])
    return headline(found, None, waits_for(found), NOON, None)


def test_the_headline_says_which_proof_the_ramp_waits_for() -> None:
    hold = held(judged(*[0.1] * 8))

    assert "passed; waits for proof" in hold.reason
    assert said(hold).startswith(
        "v2 serves; v3 gets 50%, the one step passed, waits for proof that it is no worse than "
        "the champion: evidence "
    )
    assert hold.needs == "ok", "more groups settle it, and nobody has to do anything"


def test_a_ramp_that_stands_is_in_the_headline_and_needs_somebody() -> None:
    hold = held(judged(), {"errors": checked("signal", 0.5)})

    assert hold.needs == "act"
    assert "v3 gets 50%, step 1 stands until it recovers: signal errors: " in said(hold)


def test_a_metric_without_an_answer_is_named_by_the_ramp_that_stands_for_it() -> None:
    hold = held(judged(), {"errors": checked("signal", None)})

    assert hold.reason.startswith("step 1 stands: metric errors gave no answer")
    assert (hold.needs, hold.metric) == ("act", "errors")


@pytest.mark.parametrize(
    ("answer", "needs", "says"),
    [
        ("asked", "look", "it is being asked"),
        ("wait", "act", "it says wait (the owner sleeps)"),
        ("error", "act", "it gave no answer (the owner sleeps)"),
    ],
)
@pytest.mark.parametrize(("stage", "state"), [("ramp", "gating"), ("promotion", "ramping")])
def test_a_move_that_waits_for_its_approval_is_in_the_headline_and_needs_somebody(
    answer: str, needs: str, says: str, stage: str, state: str
) -> None:
    known = Approval(
        before=stage,  # type: ignore[arg-type]
        since=NOON - 9.0,
        answer=answer,  # type: ignore[arg-type]
        reason="the owner sleeps",
        at=NOON,
    )

    hold = held_back(replace(RAMPING, phase=state, approval=known))  # type: ignore[arg-type]

    assert hold.needs == needs
    assert f"waits for the approval service before the {stage}: {says}." in said(hold)


def held_back(one: Canary) -> Hold:
    """The hold of a canary whose next move waits for the approval service."""
    move = Move(to="ramping", candidate_state="ramping", reason="gate: no harm shown")
    if one.phase == "ramping":
        move = Move(to="promoted", candidate_state="champion", reason="passed the one step")
    asks = ApprovalSettings(url="http://127.0.0.1:1/", before=("ramp", "promotion"))
    found = with_approval(one, move, asks, NOON).decision
    assert isinstance(found, Hold)
    return found


def test_a_step_waits_for_the_replies_and_sessions_that_it_lacks() -> None:
    few = ArmCounts(replies=13, errors=0, short=0)
    evidence = RampEvidence(candidate=few, champion=few, sessions=500)
    rules = RULES.model_copy(update={"step_min_exchanges": 20})

    replies = decide(RAMPING, evidence, rules, NOON)
    both = decide(RAMPING, replace(evidence, sessions=RULES.step_min_sessions - 1), rules, NOON)

    assert (replies.brief, both.brief) == (  # type: ignore[union-attr]
        "waits for 7 replies",
        "waits for 1 session and 7 replies",
    )


async def test_while_vllm_loads_a_candidate_its_canary_says_so_and_since_when(
    world: World, browser: Browser
) -> None:
    world.clock.now = NOON
    name = world.register(1)
    with world.database.write() as session:
        transitions.begin(
            session, model="m", candidate=name, steps=(5_000,), now=NOON, actor="control"
        )
    world.clock.now += 60.0

    canary_id = world.canary(name).canary_id
    page = words_of((await browser.get(f"/canaries/{canary_id}")).text)
    first = words_of((await browser.get("/")).text)
    listed = words_of((await browser.get("/canaries")).text)

    assert "vLLM loads it since 12:00 UTC" in page
    assert "v1 is being loaded into vLLM since 12:00 UTC." in first
    assert "vLLM loads it" in listed
    status = (await browser.get("/admin/v1/status")).json()
    told = list(reply_lines("/status", status, world.clock.now))
    place = next(i for i, line in enumerate(told) if f"{name} is loading since" in line)
    assert told[place + 1] == "  Reason: vLLM loads it"

"""What a canary waits for, as the first screen says it of the reasons that the rule gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deploy.canary.controller import with_approval
from deploy.cli.status import status_lines
from deploy.evidence.live import Approval, Check, MetricState, add_check
from deploy.evidence.quality import Group, Quality, add_group
from deploy.page.attention import Need, needs
from deploy.page.text import headline, waits_for
from deploy.records import LOADS, Canary
from deploy.registry import transitions
from deploy.registry.canary_rule import ArmCounts, Decision, Move, RampEvidence, decide
from deploy.registry.proof_rule import limits_of
from sidecar.settings import Approval as ApprovalSettings
from sidecar.settings import Canary as CanarySettings
from support.made_canary import made_canary
from tests.deploy.page.test_pages import words_of
from tests.deploy.page.test_shown import NOON, V3, canary, status

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser

RULES = CanarySettings()
RAMPING = replace(made_canary(), step_started_at=NOON - 3_600.0, ramp_began_at=NOON - 3_600.0)
SEEN = ArmCounts(replies=60, errors=0, short=0)


def held(quality: Quality, metrics: Mapping[str, MetricState] | None = None) -> Decision:
    """What the rule decides of a ramp whose only step has lasted and seen enough."""
    evidence = RampEvidence(
        candidate=SEEN, champion=SEEN, sessions=60, quality=quality, metrics=metrics or {}
    )
    return decide(RAMPING, evidence, RULES, NOON)


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


def said(reason: str, **changed: object) -> str:
    one = canary(
        reason=reason, step=1, weight_bp=5_000, next_step_earliest_at=NOON - 1.0, **changed
    )
    seen = {"step_2": {"candidate": {"replies": 60}, "sessions": 60}}
    return headline(status(canary=one), None, waits_for(one, seen, RULES), NOON, None)


def cards(reason: str, **changed: object) -> list[Need]:
    one = canary(reason=reason, step=1, weight_bp=5_000, **changed)
    return needs(status(canary=one), None, lost=0, now=NOON)


def test_the_headline_says_which_proof_the_ramp_waits_for() -> None:
    reason = held(judged(*[0.1] * 8)).reason

    assert "passed; waits for proof" in reason
    assert said(reason) == (
        "v2 serves; v3 gets 50%, the one step passed, waits for proof that it is no worse than "
        f"the champion: evidence {evidence_in(reason)} of 20."
    )
    assert cards(reason) == [], "more groups settle it, and nobody has to do anything"


def evidence_in(reason: str) -> str:
    return reason.partition("evidence ")[2].partition(" of 20")[0]


def test_a_ramp_that_stands_is_in_the_headline_and_needs_somebody() -> None:
    reason = held(judged(), {"errors": checked("signal", 0.5)}).reason

    (card,) = cards(reason)

    assert said(reason).endswith(
        "v3 gets 50%, step 1 stands until it recovers: signal errors: "
        + reason.partition("signal errors: ")[2]
        + "."
    )
    assert (card.level, card.link) == ("act", "/canaries/c1")
    assert card.what == "The ramp of v3 stands at 50%"
    assert card.why == reason


def test_what_stands_comes_before_what_the_step_has_not_seen() -> None:
    one = canary(reason="step 1 stands: sessions are not split by the weight; look for a proxy")

    assert waits_for(one, {}, RULES) == "step 1 stands: sessions are not split by the weight"


def test_a_metric_without_an_answer_has_one_card() -> None:
    state = checked("signal", None)
    reason = held(judged(), {"errors": state}).reason
    metric = {
        "name": "errors", "mode": "signal", "outcome": "error", "value": None, "min": None,
        "max": 0.1, "at": NOON, "why": "503", "failures": 0, "fails_at": 1, "errors": 1,
        "errs_at": 1,
    }  # fmt: skip

    found = cards(reason, metrics=[metric])

    assert reason.startswith("step 1 stands: metric errors gave no answer")
    assert [one.what for one in found] == ["The metric errors gives no answer"]
    assert "stands: metric errors gave no answer" in said(reason, metrics=[metric])
    split = "step 1 stands: sessions are not split by the weight; look for a proxy"
    both = {one.what for one in cards(split, metrics=[metric])}
    assert both == {"The metric errors gives no answer", "The ramp of v3 stands at 50%"}


@pytest.mark.parametrize(
    ("answer", "level", "says"),
    [
        ("asked", "look", "it is being asked"),
        ("wait", "act", "it says wait (the owner sleeps)"),
        ("error", "act", "it gave no answer (the owner sleeps)"),
    ],
)
@pytest.mark.parametrize(("stage", "state"), [("ramp", "gating"), ("promotion", "ramping")])
def test_a_move_that_waits_for_its_approval_is_in_the_headline_and_among_the_needs(
    answer: str, level: str, says: str, stage: str, state: str
) -> None:
    known = Approval(
        before=stage,  # type: ignore[arg-type]
        since=NOON - 9.0,
        answer=answer,  # type: ignore[arg-type]
        reason="the owner sleeps",
        at=NOON,
    )
    reason = held_back(replace(RAMPING, phase=state, approval=known))  # type: ignore[arg-type]
    told = {"before": stage, "since": NOON, "answer": answer, "reason": "x", "at": NOON, "asked": 1}

    (card,) = cards(reason, state=state, approval=told)

    assert f"waits for the approval service before the {stage}: {says}." in said(
        reason, state=state, approval=told
    )
    assert (card.what, card.level) == (f"The {stage} of v3 waits for the approval service", level)
    assert card.why == reason


def held_back(one: Canary) -> str:
    """The reason of a canary whose next move waits for the approval service."""
    move = Move(to="ramping", candidate_state="ramping", reason="gate: no harm shown")
    if one.phase == "ramping":
        move = Move(to="promoted", candidate_state="champion", reason="passed the one step")
    asks = ApprovalSettings(url="http://127.0.0.1:1/", before=("ramp", "promotion"))
    return with_approval(one, move, asks, NOON).decision.reason


@pytest.mark.parametrize(
    ("state", "reason", "waits"),
    [
        ("gating", "gate: 3 of 40 prompts judged", "3 of 40 prompts judged"),
        ("gating", "gate waits: the judge is away", "the gate waits: the judge is away"),
        ("gating", "loaded and live", ""),
        ("ramping", "gate: no harm shown on 12 prompts; approved: it waits for nobody", ""),
        ("ramping", "step 1 of 2 passed with 20 exchanges", ""),
        ("ramping", "the evidence waits: it is away", "the evidence waits: it is away"),
        ("ramping", "try 2 of 8: ValueError: x", "try 2 of 8: ValueError: x"),
        ("loading", LOADS, ""),
        ("loading", "waiting for vLLM: no route", "waiting for vLLM: no route"),
        ("queued", "x", ""),
    ],
)  # fmt: skip
def test_a_reason_that_says_how_it_got_there_is_none_to_wait_for(
    state: str, reason: str, waits: str
) -> None:
    seen = {"step_1": {"candidate": {"replies": 60}, "sessions": 60}}

    assert waits_for(canary(state=state, reason=reason), seen, RULES) == waits


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
    told = status_lines((await browser.get("/admin/v1/status")).json(), world.clock.now)
    assert told is not None
    place = next(i for i, line in enumerate(told) if f"{name} is loading since" in line)
    assert told[place + 1] == "  Reason: vLLM loads it"


def test_a_card_is_the_same_one_when_only_its_numbers_change() -> None:
    def key(what: str) -> str:
        return Need(level="act", what=what, why="", to_do="").key

    assert key("Ingest has not been heard of for 59 seconds") == key(
        "Ingest has not been heard of for 1 minute"
    )
    assert key("1,412 records could not be stored") == key("1 record could not be stored")
    assert key("vLLM at http://a:8000 does not answer") != key(
        "vLLM at http://a:8001 does not answer"
    )
    assert key(f"vLLM at http://a refuses {V3}") != key("vLLM at http://a refuses v2")

"""What the page says, word by word: times, sentences, visits, shares, charts."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest

from deploy.admin.models import AuditOut, EngineOut, ReplicaOut
from deploy.admin.out import ConditionOut, FunnelOut, StageOut
from deploy.page.text import (
    AWAY_S,
    MOST_POINTS,
    MOST_ROWS,
    Visits,
    changes,
    clock,
    differences,
    evidence_rows,
    headline,
    iso,
    length,
    lost_captures,
    names_in,
    proof_chart,
    read_looked,
    run_charts,
    serving,
    share,
    short_length,
)
from deploy.records import short
from sidecar.conditions import Condition
from support.admin_replies import CANDIDATE as V3, CHAMPION as V2, canary_out, status_out

NOON = 1_767_268_800.0
"""2026-01-01 12:00 UTC."""
canary = partial(
    canary_out, NOON, canary_id="c1", step_started_at=NOON, next_step_earliest_at=NOON + 3_600.0
)


def audit(action: str, at: float = NOON, **changed: Any) -> AuditOut:
    fields: dict[str, Any] = {
        "seq": 1,
        "at": at,
        "actor": "control",
        "source": "",
        "request_id": "",
        "action": action,
        "subject": "c1",
        "before": {},
        "after": {},
        "reason": "because",
    }
    return AuditOut.model_validate({**fields, **changed})


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (NOON - 60.0, "11:59"),
        (NOON + 86_400.0, "2 Jan 12:00"),
        (NOON - 86_400.0, "31 Dec 2025 12:00"),
        (math.inf, "an unreadable time"),
        (math.nan, "an unreadable time"),
        (None, "an unreadable time"),
        ("<b>", "an unreadable time"),
    ],
)
def test_a_time_is_as_short_as_it_is_clear(at: object, said: str) -> None:
    assert clock(at, NOON) == said
    assert (iso(at) == "") is (said == "an unreadable time")


def test_lengths_have_whole_units_and_measurements_their_own() -> None:
    assert [length(s) for s in (0.4, 1, 59.9, 60, 7_200, 100_000, 200_000)] == [
        "less than a second", "1 second", "59 seconds", "1 minute", "2 hours", "27 hours", "2 days",
    ]  # fmt: skip
    assert [short_length(s) for s in (0.0412, 0.9994, 0.9996, 1.25, 59.94, 59.96, -1.0)] == [
        "41 ms", "999 ms", "1.0 s", "1.2 s", "59.9 s", "1 minute", "0 ms",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "waits", "said"),
    [
        (None, "", "v2 serves since 11:00 UTC. No candidate is being tried."),
        (
            {},
            "waits for 7 sessions",
            "v3 gets 20%, next step 13:00 UTC at the earliest, waits for 7 sessions.",
        ),
        ({"step": 1, "weight_bp": 5_000}, "", "v3 gets 50%, promotion 13:00 UTC at the earliest."),
        ({"next_step_earliest_at": NOON}, "", "v3 gets 20%."),
        ({"paused": True}, "waits for 7 sessions", "v3 is paused at 20%."),
        ({"state": "loading"}, "", "v3 is being loaded into vLLM since 12:00 UTC."),
        ({"state": "gating"}, "", "v3 is at the gate and gets no users yet."),
    ],
)
def test_the_headline_says_what_users_get(
    changed: dict[str, Any] | None, waits: str, said: str
) -> None:
    one = None if changed is None else canary(**changed)
    found = headline(
        status_out(canary=one),
        NOON - 3_600.0,
        waits,
        NOON,
        None if one is None else one.next_step_earliest_at,
    )

    assert found.endswith(said)
    assert found.startswith("v2 serves since 11:00 UTC")


def test_the_headline_says_when_no_vllm_has_the_champion() -> None:
    def replica(*loaded: str, away: str | None = None) -> ReplicaOut:
        return ReplicaOut(away=away, loaded=list(loaded), refused={})

    def said(**replicas: ReplicaOut) -> str:
        engine = EngineOut(away=None, loaded=[], refused={}, replicas=replicas)
        return headline(status_out(engine=engine), None, "", NOON, None)

    assert said(a=replica(V3), b=replica(away="gone")).startswith(
        "No vLLM has v2, the champion: the base model answers in its place."
    )
    assert said(a=replica(V3), b=replica(V2)).startswith("v2 serves")
    assert said(a=replica(away="gone")).startswith("v2 serves")


def test_the_headline_says_when_nobody_answers_or_is_heard_of() -> None:
    away = EngineOut(away="refused", loaded=[], refused={}, replicas={})
    late = Condition(kind="bus", state="act", code="ingest_down", message="ingest is not heard of")

    found = headline(
        status_out(engine=away, conditions=[ConditionOut.of(late)]), None, "", NOON, None
    )

    assert found.startswith("No vLLM can be reached, so users may get no answer. v2 serves again")
    assert found.endswith("Ingest is not heard of.")


def test_names_are_short_where_they_are_of_our_form() -> None:
    names = (V2, "base", "m--v2-0123456789AB", "", 7)

    assert [short(one) for one in names] == ["v2", "the base model", *map(str, names[2:])]


def test_a_visit_ends_when_its_visitor_was_away() -> None:
    first = Visits().again(100.0, lost=5)
    reloaded = first.again(100.0 + AWAY_S, lost=7)
    back = reloaded.again(100.0 + 2 * AWAY_S + 1.0, lost=9)

    assert first == Visits(before=0.0, last=100.0, lost_before=5, lost_last=5)
    assert reloaded == Visits(before=0.0, last=1_000.0, lost_before=5, lost_last=7)
    assert back == Visits(before=1_000.0, last=1_901.0, lost_before=7, lost_last=9)
    assert read_looked(back.cookie(), 2_000.0) == back


@pytest.mark.parametrize("at", [1_000_000.0, 1_000_000.2, 1_000_000.7, NOON + 0.999_999_9])
def test_what_was_seen_stays_seen_at_any_part_of_a_second(at: float) -> None:
    seen = Visits().seen(at, lost=3)

    for now in (at, at + 0.05):
        assert read_looked(seen.cookie(), now) == seen
    assert seen.before == seen.last == at


@pytest.mark.parametrize(
    "cookie",
    [
        None,
        "",
        "1.0_2.0_3",
        "1.0_2.0_3_x",
        "1.0_9999.0_0_0",
        "9999.0_1.0_0_0",
        "-1.0_2.0_3_4",
        "nan_1.0_1_1",
        "٣.0_1.0_1_1",
        "1" * 99 + ".0_1.0_1_1",
        "1.0_1.0_1_" + "1" * 99,
        "1.2.3.4",
    ],
)
def test_a_cookie_that_somebody_made_up_is_a_first_visit(cookie: str | None) -> None:
    assert read_looked(cookie, 100.0) == Visits()


def test_changes_name_the_candidate_and_tell_a_rejection_from_a_rollback() -> None:
    rows = [
        audit("rollback", before={"champion": V3}, after={"champion": V2}),
        audit("canary.rolled_back", before={"phase": "ramping", "weight_bp": 2_000}),
        audit("canary.rolled_back", before={"phase": "gating", "weight_bp": 0}),
        audit("canary.promoted"),
        audit("canary.ramping"),
        audit("canary.promoted", at=NOON - 10.0),
    ]

    found = changes(rows, {"c1": V3}, NOON - 10.0)

    assert [(one.kind, one.text) for one in found] == [
        ("bad", "rollback from v3 to v2"),
        ("bad", "v3 was rolled back at 20%"),
        ("bad", "v3 was rejected"),
        ("good", "v3 was promoted"),
    ]


def test_a_trial_that_a_person_ended_is_no_verdict_on_the_candidate() -> None:
    gate, ramp = {"phase": "gating", "weight_bp": 0}, {"phase": "ramping", "weight_bp": 2_000}
    rows = [
        audit("rollback", before={"champion": V2, "canary": "c1"}, after={"champion": "base"}),
        audit("canary.rolled_back", before=gate, reason="rollback: replies got worse"),
        audit("canary.rolled_back", subject="c2", actor="token:0badcafe", before=ramp),
        audit("canary.rolled_back", subject="c3", actor="ann", before=gate, reason="rollback: no"),
    ]

    found = changes(rows, {"c1": V3, "c2": V2, "c3": V3}, 0.0)

    assert [(one.kind, one.text) for one in found[1:]] == [
        ("plain", "the trial of v3 was ended by the rollback"),
        ("plain", "the trial of v2 at 20% was ended by token:0badcafe"),
        ("plain", "the trial of v3 was ended by ann"),
    ]


def test_an_audit_row_says_what_it_changed() -> None:
    row = audit(
        "x",
        before={"weight_bp": 0, "phase": "gating", "same": 1},
        after={"weight_bp": 2_000, "phase": "ramping", "same": 1, "paused": True, "canary_id": "c"},
    )

    assert differences(row) == "weight: 0% → 20%; phase: gating → ramping; paused: yes"


def test_an_audit_row_names_several_versions_each_in_short() -> None:
    joined = audit("rollback", before={"banned": None}, after={"banned": f"{V2}, {V3}"})
    listed = audit("rollback", after={"banned": [V2, V3]})

    assert differences(joined) == differences(listed) == "banned: v2, v3"
    assert names_in(f"{V2}, {V3}") == names_in([V2, V3]) == [V2, V3]
    assert names_in(None) == []


def test_a_share_is_whole_only_when_nothing_is_missing() -> None:
    assert [share(one) for one in (1.0, 0.99999, 0.5, 0.0)] == ["100%", "99.9%", "50.0%", "0.0%"]


def test_what_is_lost_is_told_apart_from_what_is_left_out() -> None:
    ended = {"lost_queue_full": 3, "lost_disk_full": 1, "skipped_header": 6}
    stage = StageOut(
        name="requests",
        unit="requests",
        passed_as="captured",
        entered=100,
        passed=90,
        ended=ended,
        waiting={},
        unreported=0,
    )
    funnel = FunnelOut(
        stages=[stage],
        exchanges={},
        groups={},
        groups_by_reason={},
        runs={},
        canaries={},
        counters={},
        token_check="on",
    )

    captured = serving(funnel, status_out(), NOON, lost=1)[0]
    seen_before = serving(funnel, status_out(), NOON, lost=0)[0]

    assert lost_captures(funnel) == 4
    assert (captured.figure, captured.good) == ("90.0% of 100 requests", False)
    assert seen_before.good, "older losses are no news"
    assert captured.note == "4 lost, 6 left out on purpose, since the store was made"


def test_e_values_stand_on_a_log_axis_with_their_thresholds() -> None:
    found = proof_chart(
        {
            "quality": {"no_worse": {"nats": math.log(8.0), "threshold": 20.0}, "groups": 12},
            "guards": {"failed": {"nats": 0.0, "threshold": 100.0}, "cut": {"nats": "?"}},
            "steps": [2_000],
        }
    )

    assert found is not None
    assert found.names == (
        "no worse than the champion",
        "guard: more failed replies than the champion",
    )
    assert json.loads(found.data)["names"] == ["1", "2"], "long names would cover each other"
    assert found.rows()[0] == ("1: no worse than the champion", "8", "20")
    assert found.series["e-value"] == pytest.approx((8.0, 1.0))
    assert [line.y for line in found.lines] == [20.0, 100.0]
    assert found.log
    assert proof_chart({"gate": {"scored": 3}}) is None


def test_evidence_of_any_shape_becomes_rows_and_not_too_many() -> None:
    deep: dict[str, Any] = {"end": 1}
    for _ in range(50):
        deep = {"x": deep}
    wide = {f"k{number}": number for number in range(2 * MOST_ROWS)}

    gate = {"passed": True, "low": 0.123456, "none": None}
    rows = evidence_rows({"gate": gate, "deep": deep}, NOON)

    assert rows[:2] == [("gate / passed", "yes"), ("gate / low", "0.1235")]
    assert len(rows[2][1]) <= 500
    assert len(evidence_rows(wide, NOON)) == MOST_ROWS


def test_curves_leave_out_what_no_step_has_and_thin_out_what_is_long() -> None:
    steps = [{"step": n, "reward_mean": n / 10, "loss": math.nan} for n in range(1, 5)]

    charts = run_charts(steps)
    long = run_charts([{"step": n, "loss": 1.0} for n in range(3 * MOST_POINTS)])

    assert [one.title for one in charts] == ["Reward of each step's groups, sampled before the run"]
    assert charts[0].series == {"mean reward": (0.1, 0.2, 0.3, 0.4)}
    assert charts[0].rows()[0] == ("1", "0.1")
    assert len(long[0].x) == MOST_POINTS

"""The figure as the store, the API, its text and the metrics have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from deploy.admin.metrics import StoreCollector
from deploy.admin.progress import ProgressReader, compared_words
from deploy.engine.reconcile import EngineView
from deploy.registry import canaries
from ingest.judge_watch import NANO
from sidecar.store.database import count
from sidecar.store.models import CanaryRow, ExchangeRow, GateComparisonRow
from support.finished_run import finished_run

if TYPE_CHECKING:
    from tests.deploy.conftest import MakeApi, World

pytestmark = pytest.mark.both_stores


def judged(
    world: World,
    name: str,
    differences: list[float | None],
    anchors: list[float] | None = None,
    *,
    rubric: str | None = "rubric",
) -> None:
    """Store comparisons of the newest canary of an adapter; None: the candidate's answer failed."""
    with world.database.write() as session:
        canary_id = world.canary_row(session, name).canary_id
        for place, difference in enumerate(differences, start=1):
            session.add(
                GateComparisonRow(
                    comparison_id=f"{canary_id}-{place}",
                    canary_id=canary_id,
                    exchange_id=f"x-{place}",
                    status="set_aside" if difference is None else "scored",
                    difference=difference,
                    anchor_difference=None if anchors is None else anchors[place - 1],
                    answers=[],
                    rubric_hash=rubric,
                    place=place,
                    fault="candidate" if difference is None else None,
                )
            )


async def test_the_figure_follows_promotions_and_says_what_it_cost(
    world: World, make_api: MakeApi
) -> None:
    world.rules = world.rules.model_copy(update={"promote_on": "no_worse"})
    api = make_api()
    assert (await api.get("/progress")).json()["sentence"].startswith("not known yet")
    first = world.register(1)
    world.promote(first)
    judged(world, first, [0.3, 0.1] * 30)
    second = world.register(2, parent=first, values=(0.5, -0.2))
    world.clock.now += 1.0
    world.promote(second)
    judged(world, second, [0.2, 0.0, 0.1] * 20)
    third = world.register(3, parent=second, values=(0.5, -0.3))
    world.ramp(third)
    judged(world, third, [0.1, None])
    with world.database.write() as session:
        count(session, "judge_paid", "judge", 6 * NANO)
        count(session, "judge_prompt_tokens", "judge", 900)
        count(session, "sampling_tokens", "2026-01-01", 250)
        count(session, "served_tokens", "2026-01-01", 1_000)
        run = finished_run("run-1", started_at=0.0, ended_at=1_800.0)
        run.model = world.line.name
        session.add(run)

    found = (await api.get("/progress")).json()
    text = (
        await api.client.get("/admin/v1/progress", headers={"accept": "text/plain"})
    ).text.splitlines()

    assert found["origin"] == "base"
    assert [round(one["gain"]["mean"], 3) for one in found["points"]] == [0.2, 0.3]
    gain = found["gain"]
    assert 0.0 < gain["low"] < 0.3 < gain["high"]
    assert gain["groups"] == 120
    assert found["running"]["difference"]["mean"] == pytest.approx(-0.45)  # (0.1 - 1) / 2
    assert found["running"]["wanted"] == 20.0
    assert found["cost"] == {
        "judge_tokens": 900,
        "judge_usd": 6.0,
        "candidate_tokens": 250,
        "user_tokens": 1_000,
        "candidate_share": 0.25,
        "judge_usd_today": 0.0,
        "candidate_tokens_today": 0,
        "run_minutes": 30.0,
    }
    assert found["cost_of_a_point"].startswith("$0.200 of judging, 1.0 minutes of training, 8 cand")
    assert text[0].startswith("Better? Yes: v2 scored 0.300 higher than the base (95% interval +")
    assert text[1] == "Gain of the score (0..1) over the base model:"
    assert [line.split()[0] for line in text[3:5]] == ["v1", "v2"]
    assert "proven 1.0 of 20" in text[5]
    assert (await api.get("/status")).json()["better"] == found["sentence"]

    collector = StoreCollector(world.database, world.line.name, lambda: EngineView())
    metrics = {one.name: one.samples for one in collector.collect()}
    assert [one.labels for one in metrics["sidecar_gain"]] == [{"version": "v1"}, {"version": "v2"}]
    assert metrics["sidecar_gain_low"][1].value == pytest.approx(gain["low"])


async def test_gains_by_whole_tasks_are_not_added_to_gains_of_a_judges_score(
    world: World, make_api: MakeApi
) -> None:
    first = world.register(1)
    world.promote(first)
    judged(world, first, [0.4] * 60)
    second = world.register(2, parent=first, values=(0.5, -0.3))
    world.clock.now += 1.0
    world.promote(second)
    judged(world, second, [0.2] * 60, rubric=None)

    found = (await make_api().get("/progress")).json()

    assert found["origin"] == first
    assert [round(one["gain"]["mean"], 3) for one in found["points"]] == [0.2]


async def test_the_champions_promotion_by_kind_of_request(world: World, make_api: MakeApi) -> None:
    first = world.register(1)
    world.promote(first)
    judged(world, first, [0.4, 0.2, 0.6, -0.2])
    for place in range(1, 5):
        asked = world.serve(f"s{place}", project="shop" if place == 1 else "default")
        group, row = GateComparisonRow, ExchangeRow
        with world.database.write() as session:
            at = group.place == place
            session.execute(update(group).where(at).values(exchange_id=asked))
            turn = place // 4
            session.execute(update(row).where(row.exchange_id == asked).values(turn=turn))

    api = make_api()
    found = (await api.get("/progress")).json()
    text = (await api.client.get("/admin/v1/progress", headers={"accept": "text/plain"})).text

    means = {one["name"]: one["difference"]["mean"] for one in found["kinds"]}
    assert means == pytest.approx(
        {"openings": 0.4, "later turns": -0.2, "project shop": 0.4, "project default": 0.2}
    )
    assert "v1 on openings: +0.400 (" in text


def test_where_no_comparison_is_stored_any_more_the_evidence_of_the_canary_tells(
    world: World,
) -> None:
    first, second = world.register(1), world.register(2, values=(0.5, -0.2))
    world.promote(first)
    with world.database.write() as session:
        row = world.canary_row(session, first)
        canaries.add_evidence(row, quality={"low": 0.1, "high": 0.3, "groups": 40})
    world.clock.now += 1.0
    world.promote(second)
    with world.database.write() as session:
        row = world.canary_row(session, second)
        canaries.add_evidence(row, quality={"low": "?", "high": 7}, gate={"low": -9.0, "high": 9.0})

    with world.database.read() as session:
        points = ProgressReader().points(session, world.line.name)
        sentence = ProgressReader().sentence(session, world.line.name)

    assert points[0].gain is not None
    assert points[0].gain.mean == pytest.approx(0.2)
    assert points[0].gain.groups == 40
    assert points[1].gain is None
    assert sentence.startswith("not known: v2 was not compared")


def test_a_version_is_said_to_be_compared_once_its_canary_has_ended(world: World) -> None:
    first, second = world.register(1), world.register(2, values=(0.5, -0.2))

    def said(name: str) -> str:
        with world.database.read() as session:
            return compared_words(session, name)

    none = said(first)
    world.promote(first)
    unjudged = said(first)
    judged(world, first, [-0.3, -0.1] * 30)
    world.ramp(second)
    judged(world, second, [0.2] * 30)

    assert none == unjudged == said(second)
    assert none == "It was not compared with the version that it should replace."
    assert said(first).startswith("In its canary it scored 0.200 lower than the base (95% inter")
    assert said(first).endswith(", 60 comparisons).")


def test_what_an_ended_canary_said_is_read_once(world: World) -> None:
    first = world.register(1)
    world.promote(first)
    judged(world, first, [0.2] * 10)
    reader = ProgressReader()
    with world.database.read() as session:
        before = reader.points(session, world.line.name)
    with world.database.write() as session:
        session.query(GateComparisonRow).delete()
        assert session.query(CanaryRow).count() == 1
    with world.database.read() as session:
        assert reader.points(session, world.line.name) == before

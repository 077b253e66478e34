"""Lineage: from a version to the base, with everything it learned from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from sqlalchemy import update

from deploy.errors import UnknownAdapterError
from deploy.evidence.live import GUARDS
from deploy.registry.lineage import SHOWN_PROMPTS, Lineage, render_lineage, trace_lineage
from sidecar.store.database import compress
from sidecar.store.models import AdapterRow, AnswerRow, GroupRow
from support.finished_run import finished_run
from tests.deploy.conftest import World


def add_run(world: World, name: str, run_id: str, scores: tuple[float, ...]) -> str:
    """A run that made `name` from one group. Returns: the exchange's id."""
    exchange_id = world.serve(f"s-{run_id}")
    with world.database.write() as session:
        session.add(
            finished_run(
                run_id,
                ended_at=3.0,
                settings={"learning_rate": 2e-4, "steps": 3},
                counts={"used": 1, "no_spread": 2},
                metrics=[{"loss": 0.1}, {"loss": 0.05}],
                adapter=name,
            )
        )
        session.add(
            GroupRow(
                group_id=f"g-{run_id}",
                exchange_id=exchange_id,
                session_key=f"s-{run_id}",
                adapter="base",
                status="trained",
                created_at=1.0,
                judge_model="openai/judge",
                rubric_hash="abcdef0123456789",
                run_id=run_id,
            )
        )
        session.flush()
        for index, score in enumerate(scores):
            session.add(
                AnswerRow(
                    group_id=f"g-{run_id}",
                    index=index,
                    origin="sampled",
                    message_body=compress(b"{}"),
                    token_ids=b"",
                    logprobs=b"",
                    temperature=1.0,
                    score=score,
                )
            )
        session.get_one(AdapterRow, name).run_id = run_id
    return exchange_id


async def traced(world: World) -> tuple[str, str, Lineage]:
    first = world.register(1)
    add_run(world, first, "r1", (0.25, 0.75))
    world.promote(first)
    second = world.register(2, parent=first)
    add_run(world, second, "r2", (0.5, 1.0))
    world.hold_out(2)
    for _ in range(2):
        await world.controller().tick()
    with world.database.read() as session:
        return first, second, trace_lineage(session, "m", "v2")


async def test_the_chain_ends_at_the_base_and_names_what_each_step_rests_on(world: World) -> None:
    first, second, lineage = await traced(world)

    assert [step.adapter.name for step in lineage.steps] == [second, first]
    assert lineage.steps[-1].adapter.parent == "base"
    run, canary = lineage.steps[1].run, lineage.steps[0].canary
    assert run is not None
    assert run.settings == {"learning_rate": 2e-4, "steps": 3}
    (group,) = run.groups
    assert (group.group_id, group.exchange_id) == ("g-r1", "x1")
    assert group.scores == (0.25, 0.75)
    assert (group.judge_model, group.rubric_hash) == ("openai/judge", "abcdef0123456789")
    assert canary is not None
    assert canary.state == "ramping"
    assert canary.evidence["probe"]["live"] is True
    assert canary.evidence["gate"]["scored"] == 2
    assert set(canary.gate_exchange_ids) == {"x3", "x4"}
    assert canary.gate_differences == (0.0, 0.0)
    assert len(canary.gate_judges) == 1
    assert canary.gate_judges[0].startswith("fake-judge rubric ")
    body = json.loads(json.dumps(asdict(lineage)))
    assert body["steps"][0]["run"]["groups"][0]["scores"] == [0.5, 1.0]


async def test_rewards_of_verifiers_are_told_beside_the_scores(world: World) -> None:
    _, second, _ = await traced(world)
    with world.database.write() as session:
        session.execute(
            update(GroupRow).where(GroupRow.group_id == "g-r2").values(reward_rule="{}")
        )
        session.execute(update(AnswerRow).where(AnswerRow.group_id == "g-r2").values(reward=0.25))
    with world.database.read() as session:
        lineage = trace_lineage(session, "m", second)

    runs = [step.run for step in lineage.steps]
    assert [run.groups[0].rewards for run in runs if run is not None] == [(0.25, 0.25), ()]
    text = render_lineage(lineage)
    assert "rubric abcdef012345, rewards 0.25 0.25 with verifiers" in text
    assert text.count("with verifiers") == 1


async def test_it_reads_as_text(world: World) -> None:
    first, second, lineage = await traced(world)

    lines = render_lineage(lineage).splitlines()

    assert lines[0] == f"{second} of m"
    assert lines[2] == f"v2 {second} [ramping]"
    assert (
        "    group g-r2 [trained] exchange x2, answers of base, scores 0.50 1.00 by openai/judge "
        "rubric abcdef012345" in lines
    )
    assert "    probe live: differs from the base by 0.25 nats a token" in lines
    assert f"v1 {first} [champion]" in lines
    assert lines[-1] == "base: m"


async def test_of_one_thing_the_text_speaks_in_the_singular(world: World) -> None:
    _, _, lineage = await traced(world)
    step = lineage.steps[0]
    assert step.run is not None
    assert step.canary is not None
    quality = {"groups": 1, "proven": ["better"], "low": 0.1, "high": 0.5, "lost": 0, "unknown": 0}
    arm = {"replies": 1, "errors": 0, "short": 0}
    met = {"canary": 1, "champion": 4}
    evidence: dict[str, Any] = {
        "quality": quality,
        # Of an older release, which had one guard less.
        "guards": {"sessions": met, **{kind: {"canary": 0, "champion": 0} for kind in GUARDS[1:]}},
        "step_1": {"weight_bp": 2_000, "candidate": arm, "champion": arm},
    }
    judged = tuple(map(str, range(SHOWN_PROMPTS + 1)))
    one = replace(
        step,
        run=replace(step.run, metrics=step.run.metrics[:1]),
        canary=replace(
            step.canary,
            evidence=evidence,
            gate_exchange_ids=judged,
            gate_differences=(0.0,) * len(judged),
        ),
    )

    text = render_lineage(replace(lineage, steps=(one,)))

    assert ": 1 optimiser step; groups: " in text
    assert "    and 1 more held-out prompt\n" in text
    assert "    1 judged group proves: better than the champion; difference to " in text
    assert "    1 session of the canary, 4 of the champion; " in text
    assert "canary 1 reply, 0 failed, 0 cut short or empty; champion 1 reply, 0 failed" in text


def test_the_base_has_no_steps(world: World) -> None:
    with world.database.read() as session:
        lineage = trace_lineage(session, "m", "champion")

    assert (lineage.name, lineage.steps) == ("base", ())
    assert render_lineage(lineage) == "base of m\n\nbase: m"


def test_an_unknown_version_has_none(world: World) -> None:
    with world.database.read() as session, pytest.raises(UnknownAdapterError):
        trace_lineage(session, "m", "9")

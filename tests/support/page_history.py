"""What a few days leave in a store, for the status page: versions, canaries, groups, runs, faults.

Every text of it can be given a mark, so that a test sees whether it is shown as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from deploy.registry import canaries, transitions
from deploy.registry.canary_rule import Move
from deploy.registry.rollback import rollback
from ingest.judge_watch import JudgeState, write_judge_state
from sidecar.conditions import Condition, write
from sidecar.store.codec import pack_ids
from sidecar.store.database import compress, count
from sidecar.store.models import AnswerRow, CanaryRow, GroupRow, RunStepRow
from support.finished_run import finished_run

if TYPE_CHECKING:
    from tests.deploy.conftest import World

BEGIN = 1_790_000_000.0
HOUR = 3_600.0
GATE = {
    "passed": True,
    "scored": 12,
    "set_aside": 1,
    "mean_difference": 0.084,
    "low": 0.021,
    "high": 0.147,
    "candidate_short_share": 0.02,
    "champion_short_share": 0.03,
}
STEP = {
    "weight_bp": 2_000,
    "sessions": 13,
    "candidate": {"replies": 13, "errors": 0, "cuts": 1, "short": 0},
    "champion": {"replies": 61, "errors": 1, "cuts": 2, "short": 3},
    "missing_in_a_row": 0,
}
PROOF = {
    "quality": {
        "no_worse": {"nats": 2.1, "threshold": 20.0},
        "anchored": {"nats": 3.4, "threshold": 20.0},
        "harm": {"nats": -1.2, "threshold": 20.0},
    },
    "guards": {
        "failed": {"nats": -0.4, "threshold": 100.0},
        "cut": {"nats": 0.3, "threshold": 100.0},
    },
}


def tell(world: World, mark: Callable[[str], str] = lambda text: text) -> None:
    """Write the history. mark: changes every text that a person or a model wrote."""
    clock = world.clock
    clock.now = BEGIN
    first = world.register(1, values=(0.5, -0.1))
    _promote(world, first)
    clock.now += 5 * HOUR
    bad = world.register(2, parent=first, values=(0.5, -0.2))
    _canary(world, bad, _reject(mark("worse than the champion on 12 prompts: -0.081")))
    clock.now += 20 * HOUR
    second = world.register(3, parent=first, values=(0.5, -0.3))
    _promote(world, second)
    clock.now += 8 * HOUR
    broken = world.register(4, parent=second, values=(0.5, -0.4))
    _canary(world, broken, *_roll_back(mark("9% of the canary's 210 replies failed, 1% before")))
    clock.now += 3 * HOUR
    with world.database.write() as session:
        count(session, "capture", "kept", 96_120)
        count(session, "capture", "lost_queue_full", 14)
        count(session, "requests", "ok", 96_134)
        count(session, "consume", "stored", 96_000)
        count(session, "selection", "chosen", 12_000)
        count(session, "selection", "rate", 80_000)
        count(session, "sampling", "sampled", 11_800)
        count(session, "judging", "scored", 11_500)
        count(session, "learn", "trained", 9_000)
        count(session, "learn", "no_spread", 1_400)
    _groups(world, mark)
    _runs(world, second, mark)
    third = world.register(5, parent=second, values=(0.5, -0.5))
    clock.now += HOUR
    _canary(world, third, *_ramp(mark("no harm shown on 12 prompts")))
    clock.now += 4.0
    with world.database.write() as session:
        row = canaries.canary_of(session, third)
        assert row is not None
        canaries.add_evidence(row, gate={**GATE, "reason": mark("better")}, step_1=STEP, **PROOF)
        row.reason = mark("step 1 of 2 at 20%: 13 of 20 exchanges")
        judge = JudgeState(since=clock.now - 900.0).works(clock.now - 900.0)
        judge = judge.fails(
            clock.now - 300.0, mark("503 from the judge"), until=clock.now + 5.0, state="away"
        )
        write_judge_state(session, judge, now=clock.now)
        bus = Condition(
            kind="bus", code="bus_read", message="3 records wait on the bus", data={"lag": 3}
        )
        write(session, bus, now=clock.now - 2.0)
        data = {"canary_id": row.canary_id, "brief": "waits for 7 replies", "metric": ""}
        hold = Condition(
            kind="canary", line="m", code="canary_waits", message=row.reason, data=data
        )
        write(session, hold, now=clock.now)


def roll_back(world: World, reason: str) -> None:
    rollback(world.database, "m", reason=reason, actor="token:0badcafe", now=world.clock.now)


def _reject(reason: str) -> Move:
    return Move(to="rolled_back", candidate_state="rejected", reason=reason)


def _ramp(reason: str) -> tuple[Move, ...]:
    return (
        Move(to="gating", candidate_state="gating", reason="loaded and live"),
        Move(to="ramping", candidate_state="ramping", reason=reason),
    )


def _roll_back(reason: str) -> tuple[Move, ...]:
    return (
        *_ramp("no harm shown on 12 prompts"),
        Move(to="rolled_back", candidate_state="rolled_back", reason=reason),
    )


def _promote(world: World, name: str) -> None:
    """With a figure, so that the first page has its curve."""
    world.promote(name)
    with world.database.write() as session:
        canaries.add_evidence(world.canary_row(session, name), gate=GATE)


def _canary(world: World, name: str, *moves: Move) -> None:
    with world.database.write() as session:
        begun = transitions.begin(
            session,
            model="m",
            candidate=name,
            steps=(2_000, 5_000),
            now=world.clock.now,
            actor="control",
        )
        for move in moves:
            row = session.get(CanaryRow, begun.canary_id)
            assert row is not None
            world.clock.now += 60.0
            transitions.apply(
                session, canaries.to_canary(row), move, evidence={}, now=world.clock.now
            )


def _groups(world: World, mark: Callable[[str], str]) -> None:
    texts = (
        "Your parcel comes tomorrow before noon.",
        "I do not know.",
        "It is on its way: tomorrow by noon, and you get a message when it is near.",
        "Please ask the post office about your parcel, since I cannot look it up for you.",
    )
    for number in range(3):
        exchange_id = world.serve(f"shop-{number}", content=mark(texts[0]), adapter="base")
        with world.database.write() as session:
            session.add(
                GroupRow(
                    group_id=f"group-{number}",
                    exchange_id=exchange_id,
                    session_key=f"shop-{number}",
                    session_id=f"shop-{number}",
                    adapter="base",
                    status=("trained", "scored", "set_aside")[number],
                    reason="judge_rubbish" if number == 2 else None,
                    detail=mark("the judge answered with prose") if number == 2 else None,
                    created_at=world.clock.now,
                    scored_at=None if number == 2 else world.clock.now + 30.0,
                    judge_model=mark("openai/gpt-4.1-mini"),
                    rubric_hash="r",
                    disagreement=0.042,
                    run_id="run-2" if number == 0 else None,
                )
            )
            session.flush()
            for index, text in enumerate(texts):
                message = json.dumps({"role": "assistant", "content": mark(text)}).encode()
                session.add(
                    AnswerRow(
                        group_id=f"group-{number}",
                        index=index,
                        origin="served" if index == 0 else "sampled",
                        message_body=compress(message),
                        finish_reason="stop",
                        token_ids=pack_ids((1,) * (8 + index)),
                        logprobs=b"",
                        temperature=1.0,
                        score=(0.85, 0.05, 0.95, 0.2)[index],
                        explanation=mark(
                            ("Short and polite.", "No help.", "Complete.", "Sends away.")[index]
                        ),
                    )
                )


def _runs(world: World, parent: str, mark: Callable[[str], str]) -> None:
    now = world.clock.now
    with world.database.write() as session:
        session.add(
            finished_run(
                "run-1",
                started_at=now - 9 * HOUR,
                ended_at=now - 8.9 * HOUR,
                status="failed",
                reason=mark("DriftError: recorded and recomputed log-probabilities differ"),
                parent="base",
                counts={"used": 0, "dropped": 40},
            )
        )
        session.add(
            finished_run(
                "run-2",
                started_at=now - HOUR,
                ended_at=now - 0.5 * HOUR,
                parent=parent,
                adapter=parent,
                counts={"used": 96, "dropped": 4},
            )
        )
        for step in range(1, 25):
            session.add(
                RunStepRow(
                    run_id="run-2", step=step, at=now - HOUR + 60 * step, body=_figures(step)
                )
            )


def _figures(step: int) -> dict[str, float]:
    return {
        "reward_mean": 0.55 + 0.25 * (1 - math.exp(-step / 8)) + 0.02 * math.sin(step),
        "reward_spread": 0.2 + 0.02 * math.cos(step),
        "loss": 0.01 * math.sin(step / 3),
        "approx_kl": 0.001 * step,
        "kl_base": 0.004 * step,
        "entropy": 1.2 - 0.01 * step,
        "clip_share": 0.01 + 0.001 * step,
        "answer_tokens": 40 - 0.5 * step,
    }

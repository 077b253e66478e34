"""SIGKILL of ingest, at the two worst moments and at random ones: nothing lost, nothing twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from sidecar.capture.outbox import Outbox
from sidecar.feedback import Feedback
from sidecar.records import Exchange
from sidecar.store.models import ChoiceRow, ExchangeRow, FeedbackRow, GroupRow
from support.ingest_kit import Kit, make_feedback, packed

CHILD = Path(__file__).with_name("consuming_child.py")
RECORDS = 300
KILLS = 3
TOLD = 20
"""Feedback is about the exchanges from this one on; every second comes before its exchange."""


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    """Makes an ingest for each line; says its pid, its steps, and how it ended."""
    paths = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, str(CHILD)],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def start(nursery: subprocess.Popen[str], folder: Path, moment: str = "") -> int:
    assert nursery.stdin is not None
    nursery.stdin.write(f"{folder}\t{moment}\n")
    nursery.stdin.flush()
    return int(said(nursery))


def said(nursery: subprocess.Popen[str]) -> str:
    assert nursery.stdout is not None
    return nursery.stdout.readline().strip()


def ended(nursery: subprocess.Popen[str]) -> str:
    while (line := said(nursery)) == "step":
        pass
    return line


def with_feedback(kit: Kit, names: list[str]) -> list[Exchange | Feedback]:
    records: list[Exchange | Feedback] = []
    for number, name in enumerate(names):
        pair = (kit.exchange(name), make_feedback(f"fb_{name}", name))
        records += pair[:1] if number < TOLD else pair if number % 2 else pair[::-1]
    return records


def test_kills_lose_and_double_none(
    nursery: subprocess.Popen[str], kit: Kit, tmp_path: Path
) -> None:
    names = [f"e{number}" for number in range(RECORDS)]
    outbox = Outbox(tmp_path / "outbox.db", max_rows=2 * RECORDS)
    outbox.append(packed(with_feedback(kit, names)))
    outbox.close()
    rng = random.Random(5)

    for moment in ("in_transaction", "before_bus_commit"):
        start(nursery, tmp_path, moment)
        assert ended(nursery) == "ended -9"
    for _ in range(KILLS):
        pid = start(nursery, tmp_path)
        for _ in range(rng.randint(1, 6)):
            assert said(nursery) == "step"
        time.sleep(rng.uniform(0.0, 0.01))
        os.kill(pid, signal.SIGKILL)
        assert ended(nursery) == "ended -9"
    start(nursery, tmp_path)
    assert ended(nursery) == "ended 0"

    with kit.database.read() as session:
        stored = list(session.scalars(select(ExchangeRow.exchange_id).order_by(ExchangeRow.seq)))
        choices = list(session.scalars(select(ChoiceRow.exchange_id)))
        states = set(session.scalars(select(ExchangeRow.selection)))
        feedback = list(session.scalars(select(FeedbackRow.exchange_id)))
        grouped = list(session.scalars(select(GroupRow.exchange_id)))
    assert stored == names
    assert sorted(choices) == sorted(names)
    assert "new" not in states
    assert sorted(str(one) for one in feedback) == sorted(names[TOLD:])
    assert kit.counts("feedback")["joined"] == len(feedback)
    assert len(grouped) == len(set(grouped)) == kit.counts("selection")["chosen"]
    # The batch that the store had and the bus did not came again. Every other one came once.
    consumed = kit.counts("consume")
    assert consumed["stored"] == sum(kit.counts("selection").values()) == RECORDS
    assert consumed["repeated"] >= 5

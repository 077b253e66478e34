"""What is deleted of a session ends its group, or names the adapters that learned from it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from deploy.forgetting import Target, mark_digests
from ingest.intake.choose import choose_backlog
from ingest.retention.deletion import Deleted, delete_exchanges
from sidecar.store.models import ExchangeRow, GroupDigestRow, JudgeCallRow, RunRow, TaskGroupRow
from support.ingest_kit import Kit
from support.task_kit import TaskKit

pytestmark = pytest.mark.both_stores


class Drawn(TaskKit):
    """One group of two sessions."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit.database, size=2)
        self.good = self.session("good", success=True)
        self.bad = self.session("bad", success=False)
        assert self.follow() == 1
        self.group_id = self.groups()[0].group_id

    def give(self, status: str, adapter: str | None) -> None:
        """Give the group to a run."""
        with self.database.write() as session:
            session.add(
                RunRow(
                    run_id="run",
                    model="m",
                    status="running",
                    started_at=1.0,
                    heartbeat_at=1.0,
                    parent="base",
                    settings={},
                    counts={},
                    metrics=[],
                    adapter=adapter,
                )
            )
            session.execute(update(TaskGroupRow).values(status=status, run_id="run"))

    def delete(self, names: Sequence[str], why: str, **more: object) -> Deleted:
        return delete_exchanges(self.database, names, why=why, now=9.0, **more)  # type: ignore[arg-type]


@pytest.fixture
def drawn(kit: Kit) -> Drawn:
    return Drawn(kit)


@pytest.mark.parametrize("why", ["forgotten", "expired"])
def test_an_untrained_group_ends_with_its_first_loss(drawn: Drawn, kit: Kit, why: str) -> None:
    with kit.database.write() as session:
        session.add(
            JudgeCallRow(
                group_id=drawn.group_id,
                at=1.0,
                judge_model="j",
                rubric_hash="r",
                order_seed=1,
                ok=True,
                reply="it quotes",
                seconds=1.0,
            )
        )

    drawn.delete(drawn.good[1:], why)

    (group,) = drawn.groups()
    assert (group.status, group.reason) == ("dropped", why)
    assert list(drawn.members()) == ["bad"]
    with kit.database.read() as session:
        assert session.scalars(select(JudgeCallRow.reply)).all() == []
        assert session.scalars(select(GroupDigestRow.group_id)).all() == []

    drawn.delete([*drawn.good[:1], *drawn.bad], why)

    assert drawn.groups() == []
    assert drawn.members() == {}


@pytest.mark.parametrize(
    ("kind", "name"), [("session", "good"), ("user", "good"), ("exchange", "second turn")]
)
def test_what_learned_from_it_is_found(drawn: Drawn, kit: Kit, kind: str, name: str) -> None:
    drawn.give("trained", adapter="v1")
    named = drawn.good[1] if kind == "exchange" else name

    done = drawn.delete([named] if kind == "exchange" else drawn.good, "forgotten")

    assert done.runs == {"run"}
    assert drawn.groups()[0].status == "trained"
    assert list(drawn.members()) == ["bad"]
    with kit.database.write() as session:
        assert mark_digests(session, Target(kind, named)) == ["run"]  # type: ignore[arg-type]


def test_of_an_expired_trained_session_the_digest_stays(drawn: Drawn, kit: Kit) -> None:
    drawn.give("trained", adapter="v1")

    drawn.delete(drawn.good[:1], "expired")
    assert drawn.members()["good"].exchange_ids == drawn.good[1:]
    drawn.delete(drawn.good[1:], "expired")

    assert list(drawn.members()) == ["bad"]
    with kit.database.write() as session:
        assert mark_digests(session, Target("session", "good")) == ["run"]


def test_what_a_run_has_now_stays_unless_it_is_forgotten_which_ends_the_run(drawn: Drawn) -> None:
    drawn.give("claimed", adapter=None)

    assert drawn.delete(drawn.good, "expired").held == set(drawn.good)
    assert drawn.groups()[0].status == "claimed"

    ended: list[str] = []

    def release(session: Session, run_ids: Sequence[str]) -> None:
        ended.extend(run_ids)
        session.execute(update(TaskGroupRow).values(status="scored", run_id=None))

    drawn.delete(drawn.good, "forgotten", release=release)

    assert ended == ["run"]
    assert drawn.groups()[0].status == "dropped"


def test_no_step_is_chosen_that_is_learned_from_with_its_session(drawn: Drawn, kit: Kit) -> None:
    with kit.database.write() as session:
        session.execute(update(ExchangeRow).values(selection="backlog", key_id="k"))
        in_group = ExchangeRow.exchange_id.in_(drawn.good)
        session.execute(update(ExchangeRow).where(~in_group).values(task_group_id=None))
    drawn.give("trained", adapter="v1")
    kit.route(champion="base")

    choose_backlog(kit.database, kit.rules(), model="smollm", now=drawn.now)

    with kit.database.read() as session:
        found = dict(session.execute(select(ExchangeRow.exchange_id, ExchangeRow.selection)).all())
    assert {found[name] for name in drawn.good} == {"in_task_group"}
    assert {found[name] for name in drawn.bad} == {"chosen"}

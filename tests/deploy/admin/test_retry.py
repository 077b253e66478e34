"""`POST /groups/retry`: groups that judging gave up are judged again, once and on the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import update

from deploy.admin import actions
from deploy.admin.actions import why_refused
from deploy.funnel import groups_by_status, read_funnel
from ingest.store.groups import set_aside
from sidecar.store.models import AdapterRow, AuditRow, CounterRow, GroupRow
from support import page_history

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World

pytestmark = pytest.mark.both_stores


@pytest.fixture
def history(world: World) -> World:
    """Three groups; the judge gave up one of them, after failed attempts that count."""
    page_history.tell(world)
    with world.database.write() as session:
        group = update(GroupRow).where(GroupRow.group_id == "group-2")
        session.execute(group.values(status="sampled", judge_attempts=5, attempts=10))
        session.execute(group.values(judge_failures='{"judge_rubbish": 5}'))
        set_aside(session, "group-2", "judge_rubbish", detail="prose")
    return world


def group(world: World, group_id: str = "group-2") -> Any:
    return next(one for one in world.rows(GroupRow) if one.group_id == group_id)


def counts(world: World) -> dict[str, int]:
    return {
        f"{one.stage} {one.reason}": one.count
        for one in world.rows(CounterRow)
        if one.stage.startswith("judging") and one.reason == "judge_rubbish"
    }


@pytest.mark.parametrize("asked", [{"groups": ["group-2"]}, {"of_reason": "judge_rubbish"}])
async def test_a_group_goes_back_once_is_counted_and_audited(
    history: World, api: Api, asked: dict[str, Any]
) -> None:
    known = len(history.rows(AuditRow))

    first = await api.post("/groups/retry", {**asked, "reason": "a stronger judge"})
    again = await api.post("/groups/retry", {**asked, "reason": "a stronger judge"})

    assert first.json() == {"retried": ["group-2"], "unchanged": [], "refused": {}}
    unchanged = ["group-2"] if "groups" in asked else []
    assert again.json() == {"retried": [], "unchanged": unchanged, "refused": {}}
    row = group(history)
    assert (row.status, row.reason, row.detail) == ("sampled", None, None)
    assert (row.judge_attempts, row.judge_failures, row.attempts) == (0, None, 10)
    assert counts(history) == {"judging judge_rubbish": 0, "judging_retried judge_rubbish": 1}
    (row,) = history.rows(AuditRow)[known:]
    assert (row.action, row.reason) == ("groups.retried", "a stronger judge")
    assert row.subject == asked.get("of_reason", "group-2")
    assert row.after == {"number": 1, "groups": ["group-2"]}
    with history.database.read() as session:
        assert "set_aside" not in groups_by_status(read_funnel(session, "m").stages)


async def test_one_call_gives_back_the_newest_and_the_next_call_the_others(
    history: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "MOST_GROUPS", 1)
    older = min(history.rows(GroupRow), key=lambda one: one.seq).group_id
    with history.database.write() as session:
        session.execute(
            update(GroupRow)
            .where(GroupRow.group_id == older)
            .values(status="set_aside", reason="judge_rubbish")
        )

    calls = [await api.post("/groups/retry", {"of_reason": "judge_rubbish"}) for _ in range(3)]

    assert [one.json()["retried"] for one in calls] == [["group-2"], [older], []]


async def test_a_group_without_its_adapter_is_refused_with_the_reason(
    history: World, api: Api
) -> None:
    name = history.rows(AdapterRow)[0].name
    with history.database.write() as session:
        session.execute(update(GroupRow).values(adapter=name))
        session.execute(update(AdapterRow).values(removed_at=1.0))

    alone = await api.post("/groups/retry", {"of_reason": "judge_rubbish"})
    beside = await api.post("/groups/retry", {"groups": ["group-1", "group-2", "none"]})

    why = f"its adapter {name} does not exist any more"
    assert alone.status_code == 409
    assert alone.json()["detail"] == f"no group can be judged again: group-2: {why}"
    assert beside.json() == {
        "retried": [],
        "unchanged": ["group-1"],
        "refused": {"none": "there is none", "group-2": why},
    }
    assert group(history).status == "set_aside"


@pytest.mark.parametrize(
    ("status", "reason", "why"),
    [
        ("set_aside", "judge_rubbish", "its prompt is not stored any more"),
        ("set_aside", "adapter_gone", "it is set_aside: adapter_gone"),
        ("dropped", "stale", "it is dropped: stale"),
        ("sampling", None, "it is sampling"),
        ("claimed", None, ""),
    ],
)
def test_what_cannot_be_judged_again_says_why(status: str, reason: str | None, why: str) -> None:
    row = GroupRow(adapter="base", status=status, reason=reason)

    assert why_refused(row, has_prompt=False, has_adapter=True) == why


@pytest.mark.parametrize("body", [{}, {"groups": ["a"], "of_reason": "judge_busy"}])
async def test_it_names_groups_or_a_reason(api: Api, body: dict[str, Any]) -> None:
    assert (await api.post("/groups/retry", body)).status_code == 400

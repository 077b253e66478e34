"""`GET /task-groups`: groups of whole sessions, with their rewards and without what was said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.admin.text import reply_lines
from sidecar.store.database import count
from support.task_kit import TaskKit

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World


async def test_groups_are_listed_newest_first_and_shown_with_their_sessions(
    world: World, api: Api
) -> None:
    tasks = TaskKit(world.database, size=2)
    for task in ("first", "second"):
        tasks.session(f"{task}-good", success=True, task=task)
        tasks.session(f"{task}-bad", success=task == "second", task=task)
        assert tasks.follow() == 1
    set_aside, scored = tasks.groups()[::-1]

    listed = (await api.get("/task-groups")).json()["items"]
    waiting = (await api.get("/task-groups", status="waiting")).json()["items"]
    unknown = await api.get("/task-groups", status="sampling")
    shown = (await api.get(f"/task-groups/{scored.group_id}")).json()
    missing = await api.get("/task-groups/tg_none")

    assert [one["group_id"] for one in listed] == [set_aside.group_id, scored.group_id]
    assert waiting == []
    assert (unknown.status_code, missing.status_code) == (400, 404)
    assert [(one["session_id"], one["reward"]) for one in shown["members"]] == [
        ("first-bad", 0.0),
        ("first-good", 1.0),
    ]
    now = tasks.now
    (line,) = [*reply_lines("/task-groups", {"items": listed[:1]}, now)][1:]
    assert {set_aside.group_id, "set_aside", "header", "base", "no_spread"} <= {*line.split()}
    text = [*reply_lines("/task-groups/{task_group_id}", shown, now)]
    assert text[0] == f"Task group {scored.group_id}: scored"
    assert text[2].endswith("by outcomes alone")
    assert text[4:] == [
        "  [0] first-bad: reward 0.000, 2 turns",
        "  [1] first-good: reward 1.000, 2 turns",
    ]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, []),
        ({"seen": 99}, []),
        ({"seen": 100}, ["no session has a task name"]),
        ({"seen": 100, "enrolled_header": 1}, []),
        (
            {"seen": 100, "enrolled_header": 25, "over": 3, "without_outcome": 22},
            ["12% of finished sessions have an outcome"],
        ),
        (
            {"seen": 500, "enrolled_header": 100, "over": 100},
            ["of 100 finished sessions none makes a group"],
        ),
        ({"seen": 500, "enrolled_header": 100, "over": 100, "drawn": 1}, []),
    ],
)
async def test_the_status_says_what_whole_tasks_lack(
    world: World, api: Api, counts: dict[str, int], said: list[str]
) -> None:
    with world.database.write() as session:
        for reason, number in counts.items():
            count(session, "tasks", reason, number)

    conditions = (await api.get("/status")).json()["conditions"]

    assert [one["message"] for one in conditions if one["kind"] == "tasks"] == said

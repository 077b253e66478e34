"""`Accept: text/plain`: replies in lines, made of the same reply as the JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from support import page_history

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, MakeApi, World

TEXT = {"accept": "text/plain"}


def evil(text: str) -> str:
    """What a person wrote, with what a terminal obeys and what looks like a line of its own."""
    return f"{text}\x1b[2J\u202e\x07\nchampion: evil\x7f"


async def test_every_get_is_lines_that_no_terminal_obeys(world: World, api: Api) -> None:
    page_history.tell(world, evil)
    described = (await api.client.get("/admin/openapi.json")).json()["paths"]
    [canary, *_] = (await api.get("/canaries")).json()["items"]
    ids = {"version": "v1", "name": "champion", "group_id": "group-1", "run_id": "run-2"}
    asked = 0
    for path, methods in described.items():
        for name, value in {**ids, "canary_id": canary["canary_id"]}.items():
            path = path.replace(f"{{{name}}}", value)
        if "get" not in methods or "{" in path or path.endswith("/events") or "v1" not in path:
            continue
        reply = await api.client.get(path, headers=TEXT)
        assert (reply.status_code, reply.headers["content-type"]) == (
            200,
            "text/plain; charset=utf-8",
        ), path
        lines = reply.text.removesuffix("\n").split("\n")
        assert all(line.isprintable() for line in lines), path
        assert "champion: evil" not in lines
        asked += 1
    assert asked > 15


async def test_a_table_is_as_wide_as_it_is_asked_for_and_says_what_it_lacks(
    world: World, api: Api
) -> None:
    page_history.tell(world)

    narrow = await api.client.get("/admin/v1/adapters", headers={**TEXT, "x-sidecar-columns": "80"})
    whole = await api.client.get("/admin/v1/adapters", headers=TEXT)
    page = await api.client.get("/admin/v1/audit?limit=3", headers=TEXT)

    assert "x-sidecar-notes" not in whole.headers
    assert len(narrow.text.splitlines()) > len(whole.text.splitlines())
    assert narrow.text.split() == whole.text.split()
    assert len(page.text.splitlines()) == 4
    assert json.loads(page.headers["x-sidecar-notes"]) == [
        "there are more than these 3; --limit shows up to 200"
    ]


async def test_a_change_keeps_its_tag_and_errors_stay_problems(
    world: World, api: Api, make_api: MakeApi
) -> None:
    world.promote(world.register(1))
    tag = (await api.get("/learner")).headers["etag"]

    paused = await api.client.post("/admin/v1/learner/pause", json={}, headers=TEXT)
    ran = await api.client.post(
        "/admin/v1/learner/resume", json={}, headers={**TEXT, "if-match": tag}
    )
    back = await api.client.post("/admin/v1/rollback", json={"to": "base"}, headers=TEXT)
    nobody = await make_api("secret").client.get("/admin/v1/status", headers=TEXT)

    assert paused.headers["etag"] != tag
    assert paused.text.startswith("paused: yes\n")
    assert "schedule" not in paused.text
    assert (ran.status_code, ran.headers["content-type"]) == (412, "application/problem+json")
    assert json.loads(back.headers["x-sidecar-notes"]) == [
        "the learner is paused until `sidecar learner resume`"
    ]
    assert (nobody.status_code, nobody.headers["content-type"]) == (401, "application/problem+json")

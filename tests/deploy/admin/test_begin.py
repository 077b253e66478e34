"""Canaries that are begun by hand, and bans that are lifted, over the API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from deploy.registry import transitions
from deploy.registry.canary_rule import Move

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World


def end(world: World, name: str, move: Move) -> None:
    with world.database.write() as session:
        transitions.apply(session, world.canary(name), move, evidence={}, now=world.clock())


async def test_a_version_is_tried_and_tried_again_after_no_verdict(world: World, api: Api) -> None:
    name = world.register(1)
    first = await api.post("/canaries", {"version": 1, "reason": "a first try"})
    same = await api.post("/canaries", {"version": "v1"})
    end(world, name, Move(to="inconclusive", candidate_state="retired", reason="no traffic"))

    second = await api.post("/canaries", {"version": name})

    assert [one.status_code for one in (first, same, second)] == [201, 201, 201]
    assert first.json()["canary_id"] == same.json()["canary_id"] != second.json()["canary_id"]
    made = second.json()
    assert (made["candidate"], made["state"], made["steps"]) == (name, "loading", [2_000, 5_000])
    assert second.headers["location"] == f"/admin/v1/canaries/{made['canary_id']}"
    assert second.headers["etag"] == '"g1"'
    audit = (await api.get("/audit")).json()["items"]
    assert [one["reason"] for one in audit if one["action"] == "canary.loading"] == [
        "no reason given",
        "a first try",
    ]


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        ({"version": "v9"}, 404, "unknown-adapter"),
        ({"version": "base"}, 409, "not-allowed-now"),
        ({"version": "champion"}, 409, "not-allowed-now"),
        ({"version": 2}, 409, "not-allowed-now"),
        ({"version": True}, 422, "bad-request"),
        ({"version": 1, "reason": " "}, 400, "blank-reason"),
        ({}, 422, "bad-request"),
        ({"version": "x" * 300}, 422, "bad-request"),
    ],
)
async def test_what_cannot_be_tried_is_a_problem(
    world: World, api: Api, body: dict[str, Any], status: int, slug: str
) -> None:
    world.promote(world.register(2, values=(0.1, 0.2)))
    world.register(1)

    reply = await api.post("/canaries", body)

    assert (reply.status_code, reply.json()["type"].rsplit(":", 1)[1]) == (status, slug)


async def test_the_champion_is_refused_without_what_another_canary_allows(
    world: World, api: Api
) -> None:
    world.promote(world.register(2, values=(0.1, 0.2)))
    world.ramp(world.register(1))

    reply = await api.post("/canaries", {"version": 2})

    assert (reply.status_code, reply.json()["allowed_actions"]) == (409, [])
    assert "is champion" in reply.json()["detail"]


async def test_a_ban_is_shown_and_lifted(world: World, api: Api) -> None:
    name = world.register(1)
    await api.post("/canaries", {"version": 1})
    end(world, name, Move(to="rolled_back", candidate_state="rejected", reason="it is rude"))
    shown = (await api.get("/adapters/1")).json()

    refused = await api.post("/canaries", {"version": 1})
    allowed = await api.post("/adapters/1/allow", {"reason": "the judge was wrong"})

    assert shown["banned"] == "it is rude"
    assert refused.status_code == 409
    assert (allowed.status_code, allowed.json()["banned"]) == (200, None)
    assert (await api.post("/canaries", {"version": 1})).status_code == 201
    assert (await api.post("/adapters/base/allow")).status_code == 404


async def test_a_second_start_is_queued_shown_and_taken_out_again(world: World, api: Api) -> None:
    world.register(1)
    world.register(2)
    first = (await api.post("/canaries", {"version": 1})).json()

    second = await api.post("/canaries", {"version": 2, "reason": "next"})

    queued = second.json()
    assert (second.status_code, queued["state"], queued["weight_bp"]) == (201, "queued", 0)
    assert queued["allowed_actions"] == ["abort"]
    status = (await api.get("/status")).json()
    assert status["canary"]["canary_id"] == first["canary_id"]
    assert status["queued"]["canary_id"] == queued["canary_id"]
    paused = await api.post(f"/canaries/{queued['canary_id']}/pause")
    assert (paused.status_code, paused.json()["allowed_actions"]) == (409, ["abort"])
    ended = await api.post(f"/canaries/{queued['canary_id']}/abort", {"reason": "not now"})
    assert (ended.status_code, ended.json()["state"]) == (200, "withdrawn")
    assert (await api.get("/status")).json()["queued"] is None


async def test_a_step_is_skipped_once_by_who_saw_the_present_state(world: World, api: Api) -> None:
    name = world.register(1)
    made = (await api.post("/canaries", {"version": 1})).json()
    path = f"/canaries/{made['canary_id']}/skip-step"
    early = await api.post(path, if_match="*")
    end(world, name, Move(to="gating", candidate_state="gating", reason="loaded"))
    end(world, name, Move(to="ramping", candidate_state="ramping", reason="gate passed"))
    etag = (await api.get(f"/canaries/{made['canary_id']}")).headers["etag"]

    bare = await api.post(path)
    stale = await api.post(path, if_match='"g1"')
    done = await api.post(path, {"reason": "a quiet night"}, if_match=etag)
    twice = await api.post(path, if_match=done.headers["etag"])

    codes = [one.status_code for one in (early, bare, stale, done, twice)]
    assert codes == [409, 428, 412, 200, 409]
    assert done.json()["step_waived"] is True
    assert "skip-step" not in done.json()["allowed_actions"]
    newest = (await api.get("/audit")).json()["items"][0]
    assert (newest["action"], newest["reason"]) == ("canary.step_skipped", "a quiet night")

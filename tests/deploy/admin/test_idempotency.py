"""A change that is asked again with its key: made once, answered twice."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from deploy.admin import idempotency
from deploy.admin.idempotency import KEPT_S, REPLAYED, TAKEN_S
from sidecar.store.models import AuditRow, IdempotentReplyRow

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, MakeApi, World

PAUSE = "/learner/pause"


def changes(world: World) -> int:
    return len([row for row in world.rows(AuditRow) if row.action.startswith("learner.")])


async def test_the_same_key_and_body_get_the_first_reply_again(world: World, api: Api) -> None:
    body = {"reason": "x"}
    first = await api.post(PAUSE, body, idempotency_key="k")
    etag = (await api.get("/learner")).headers["etag"]
    await api.post("/learner/resume", if_match=etag)

    again = await api.post(PAUSE, body, idempotency_key="k")

    assert (again.status_code, again.json()) == (200, first.json())
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers[REPLAYED] == "true"
    assert REPLAYED not in first.headers
    assert changes(world) == 2  # it is not paused again
    assert (await api.get("/learner")).json()["paused"] is False


@pytest.mark.parametrize(
    ("path", "body"), [(PAUSE, {"reason": "y"}), ("/rollback", {"reason": "x"}), (PAUSE, None)]
)
async def test_the_same_key_with_another_request_is_422(api: Api, path: str, body: Any) -> None:
    await api.post(PAUSE, {"reason": "x"}, idempotency_key="k")

    reply = await api.post(path, body, idempotency_key="k")

    assert reply.status_code == 422
    assert reply.json()["type"].endswith(":key-reused")


@pytest.mark.parametrize(("path", "status"), [("/status", 405), ("/nowhere", 404)])
async def test_a_key_changes_no_refusal_of_a_path_or_method(
    api: Api, path: str, status: int
) -> None:
    await api.post(PAUSE, {"reason": "x"}, idempotency_key="k")

    assert (await api.post(path, {}, idempotency_key="k")).status_code == status


async def test_an_error_is_not_kept_so_the_request_may_be_made_again(
    world: World, api: Api
) -> None:
    refused = await api.post("/learner/run", idempotency_key="k")
    etag = (await api.get("/learner")).headers["etag"]

    done = await api.post("/learner/run", idempotency_key="k", if_match=etag)

    assert (refused.status_code, done.status_code) == (428, 200)
    assert done.json()["run_requested"] is True


async def test_while_the_first_is_answered_the_second_is_409(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    whole = idempotency.Idempotency._answer

    async def slow(self: Any, *rest: Any) -> None:
        started.set()
        await go_on.wait()
        await whole(self, *rest)

    monkeypatch.setattr(idempotency.Idempotency, "_answer", slow)
    first = asyncio.create_task(api.post(PAUSE, idempotency_key="k"))
    await started.wait()

    second = await api.post(PAUSE, idempotency_key="k")
    go_on.set()

    assert second.status_code == 409
    assert second.json()["type"].endswith(":key-in-use")
    assert (await first).status_code == 200
    assert changes(world) == 1


async def test_a_key_that_a_killed_process_left_is_free_after_a_minute(
    world: World, api: Api
) -> None:
    await api.post(PAUSE, idempotency_key="k")
    with world.database.write() as session:
        session.query(IdempotentReplyRow).update({"status": None, "at": world.clock()})

    taken = await api.post(PAUSE, idempotency_key="k")
    world.clock.now += TAKEN_S
    free = await api.post(PAUSE, idempotency_key="k")

    assert (taken.status_code, free.status_code) == (409, 200)


async def test_a_key_is_kept_a_day_and_the_oldest_go_beyond_the_limit(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_ROWS", 3)
    for number in range(5):
        world.clock.now += 1.0
        await api.post(PAUSE, idempotency_key=f"k{number}")

    assert [row.key for row in world.rows(IdempotentReplyRow)] == ["k2", "k3", "k4"]
    world.clock.now += KEPT_S
    await api.post(PAUSE, idempotency_key="later")
    assert [row.key for row in world.rows(IdempotentReplyRow)] == ["k4", "later"]


async def test_keys_belong_to_their_caller(world: World, make_api: MakeApi) -> None:
    api = make_api("a", "b")

    for token in ("a", "b"):
        reply = await api.post(PAUSE, idempotency_key="k", authorization=f"Bearer {token}")
        assert REPLAYED not in reply.headers

    assert len(world.rows(IdempotentReplyRow)) == 2


@pytest.mark.parametrize("key", ["", " ", "k" * 256, "\xe4"])
async def test_a_key_that_is_none_is_a_400(api: Api, key: str) -> None:
    reply = await api.client.post(
        f"/admin/v1{PAUSE}", headers=[(b"idempotency-key", key.encode("latin-1"))]
    )

    assert reply.status_code == 400


async def test_a_read_with_a_key_is_a_read(world: World, api: Api) -> None:
    reply = await api.client.get("/admin/v1/status", headers={"idempotency-key": "k"})

    assert reply.status_code == 200
    assert world.rows(IdempotentReplyRow) == []

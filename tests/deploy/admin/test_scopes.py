"""What a token may do, how a caller learns it, and what a change leaves behind of its request."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from deploy.admin import reception
from deploy.admin.auth import grant_of
from deploy.admin.client import is_of_a_line
from deploy.admin.wire import MOST, NEEDED, PREFIX, scopes_of
from sidecar.lines import lines_of
from sidecar.settings.kinds import AdminScope
from sidecar.settings.sections import Admin
from sidecar.store.models import AuditRow, GroupRow
from support.finished_run import finished_run

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, MakeApi, World

DIGEST = hashlib.sha256(b"t").hexdigest()
AS_T = {"authorization": "Bearer t"}


def routes_of(routes: Any) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in route.methods or ())
        elif isinstance(inner := getattr(route, "original_router", None), APIRouter):
            yield from routes_of(inner.routes)


def test_every_route_has_a_scope_and_every_scope_a_route(api: Api) -> None:
    found = set(routes_of(api.app.routes)) | {("GET", "/admin/openapi.json")}

    assert found == set(NEEDED)
    assert len(found) >= 25


def test_a_digest_alone_has_every_scope_and_words_narrow_it() -> None:
    header = b"Bearer t"

    assert grant_of(header, [DIGEST]).scopes == {"read", "content", "operate", "train", "admin"}
    assert grant_of(header, [f"{DIGEST}:read"]).scopes == {"read"}
    assert grant_of(header, [f"{DIGEST}:content+train"]).scopes == {"read", "content", "train"}
    assert scopes_of(()) == set()


@pytest.mark.parametrize(
    ("scope", "method", "path", "allowed"),
    [
        ("read", "GET", "/status", True),
        ("read", "GET", "/groups/g", False),
        ("read", "GET", "/sessions/a/b", False),
        ("read", "GET", "/canaries/x/evidence", False),
        ("read", "POST", "/rollback", False),
        ("content", "GET", "/groups/g", True),
        ("content", "POST", "/rollback", False),
        ("operate", "POST", "/rollback", True),
        ("operate", "POST", "/canaries/x/pause", True),
        ("operate", "POST", "/learner/pause", False),
        ("train", "POST", "/learner/pause", True),
        ("train", "POST", "/rollback", False),
        ("admin", "POST", "/learner/pause", True),
        ("admin", "GET", "/exchanges/x", True),
    ],
)
async def test_the_server_holds_a_token_to_its_scopes(
    make_api: MakeApi, scope: AdminScope, method: str, path: str, allowed: bool
) -> None:
    api = make_api("t", scopes=scope)

    reply = await api.client.request(method, f"/admin/v1{path}", headers=AS_T)

    assert (reply.status_code != 403) is allowed, reply.text
    if not allowed:
        assert reply.json()["type"].endswith(":no-scope")
        assert f"it has {', '.join(sorted(scopes_of([scope])))}" in reply.json()["detail"]
        assert api.refusals.counts["no_scope"] == 1


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/status?project=shop", True),
        ("GET", "/status", False),
        ("GET", "/status?project=other", False),
        ("GET", "/status?project=shop&project=other", False),
        ("POST", "/rollback?project=shop", True),
        ("POST", "/rollback", False),
        ("GET", "/audit?project=shop", False),
        ("GET", "/exchanges/x?project=shop", True),
        ("GET", "/exchanges/x", False),
    ],
)
async def test_a_token_of_a_project_asks_about_that_alone(
    make_api: MakeApi, method: str, path: str, allowed: bool
) -> None:
    api = make_api("t", scopes="admin@shop+sales")

    reply = await api.client.request(method, f"/admin/v1{path}", headers=AS_T)

    assert (reply.status_code != 403) is allowed, reply.text
    if not allowed:
        assert "of a project" in reply.json()["detail"]
        of_all = path.startswith("/audit")
        hint = "not about one project alone" if of_all else "send ?project=sales or ?project=shop"
        assert hint in reply.json()["detail"]


async def test_a_token_of_a_project_cannot_tell_which_records_others_have(
    world: World, make_api: MakeApi
) -> None:
    api = make_api("t", scopes="content@shop", lines=lines_of("m", ["shop"]))
    canary = world.start(world.register(1)).canary_id
    exchange = world.serve("s")
    with world.database.write() as session:
        group = GroupRow(
            group_id="group", exchange_id=exchange, session_key="s", adapter="base",
            status="scored", created_at=1.0,
        )  # fmt: skip
        session.add_all([finished_run("run"), group])
    theirs = {"canaries": canary, "exchanges": exchange, "runs": "run", "groups": "group"}

    for kind, record in theirs.items():
        path = f"/admin/v1/{kind}/{{}}?project=shop"
        found = await api.client.get(path.format(record), headers=AS_T)
        missing = await api.client.get(path.format("nothing"), headers=AS_T)
        assert (found.status_code, missing.status_code) == (404, 404)
        assert found.json()["detail"] == missing.json()["detail"].replace("nothing", record)
    assert (await api.client.get("/admin/v1/groups/group", headers=AS_T)).status_code == 403
    for kind, record in {**theirs, "task-groups": "nothing"}.items():
        path = f"/admin/v1/{kind}/{record}?project=nobody"
        nobodys = await make_api("t").client.get(path, headers=AS_T)
        assert (nobodys.status_code, "nobody is none" in nobodys.text) == (404, True), path


@pytest.mark.parametrize(
    ("scopes", "method", "path", "allowed"),
    [
        ("read operate@shop", "GET", "/status", True),
        ("read operate@shop", "POST", "/rollback?project=shop", True),
        ("read operate@shop", "POST", "/rollback", False),
        ("read operate@shop", "POST", "/rollback?project=sales", False),
        ("read operate@shop", "POST", "/canaries/x/pause", False),
        ("operate@shop read", "POST", "/rollback", False),
        ("operate@shop read@sales", "POST", "/rollback?project=shop", True),
        ("operate@shop read@sales", "POST", "/rollback?project=sales", False),
        ("operate@shop read@sales", "GET", "/status?project=sales", True),
        ("operate@shop read@sales", "GET", "/status?project=shop&project=sales", False),
        ("read operate", "POST", "/rollback", True),
    ],
)
async def test_of_a_digest_that_is_listed_twice_one_entry_must_allow_the_request(
    make_api: MakeApi, scopes: str, method: str, path: str, allowed: bool
) -> None:
    api = make_api("t", scopes=scopes)

    reply = await api.client.request(method, f"/admin/v1{path}", headers=AS_T)

    assert (reply.status_code != 403) is allowed, reply.text


def test_what_two_entries_hold_for_everything_adds_up() -> None:
    several = grant_of(b"Bearer t", [f"{DIGEST}:{it}" for it in ("read@shop", "train", "operate")])

    assert several.scopes == {"read", "train", "operate"}
    assert several.projects == frozenset()
    assert [sorted(one.projects) for one in several.others] == [["shop"]]


async def test_a_guess_waits_and_a_right_token_does_not(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await real(0)

    monkeypatch.setattr(reception, "GUESS_S", 1.5)
    monkeypatch.setattr("deploy.admin.reception.asyncio.sleep", sleep)
    api = make_api("t")

    await api.client.get("/admin/v1/status", headers=AS_T)
    assert 1.5 not in waited
    await api.client.get("/admin/v1/status", headers={"authorization": "Bearer guess"})
    assert 1.5 in waited


async def test_a_flood_of_guesses_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "GUESS_S", 3_600.0)
    refusals = reception.Refusals()

    waiting = [
        asyncio.create_task(refusals.slow_down("unknown_token"))
        for _ in range(reception.GUESSES + 5)
    ]
    done, held = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for one in held:
        one.cancel()
    await asyncio.wait(held)

    assert (len(done), len(held)) == (5, reception.GUESSES)
    assert reception.GUESSES <= MOST // 10


def test_the_setting_takes_digests_with_and_without_scopes() -> None:
    words = (DIGEST, f"{DIGEST}:read+content", f"{DIGEST}:read@shop+sales")

    assert Admin(tokens=words).tokens == words
    for wrong in ("", "write", "read+", "read@", "@shop"):
        with pytest.raises(ValueError, match=r"scope|project"):
            Admin(tokens=(f"{DIGEST}:{wrong}",))
    with pytest.raises(ValueError, match="digest"):
        Admin(tokens=(f"{DIGEST[1:]}:read",))


async def test_the_command_sends_the_project_wherever_one_is_taken(make_api: MakeApi) -> None:
    api = make_api("t", scopes="read")
    document = (await api.client.get("/admin/openapi.json")).json()
    taken = {
        path.removeprefix(PREFIX)
        for path, methods in document["paths"].items()
        for one in methods.values()
        if any(it["name"] == "project" for it in one.get("parameters", ()))
    }

    assert {"/canaries/{canary_id}", "/task-groups", "/status"} <= taken
    for path in taken:
        first, *rest = path[1:].split("/")
        assert is_of_a_line((f"/{first}", *rest)), path


@pytest.mark.parametrize("method", ["DELETE", "POST"])
async def test_the_evidence_is_no_action_of_a_canary(api: Api, method: str) -> None:
    evidence = await api.client.request(method, "/admin/v1/canaries/x/evidence")
    action = await api.client.request("DELETE", "/admin/v1/canaries/x/pause")
    status = await api.post("/status")

    assert (evidence.status_code, evidence.headers["allow"]) == (405, "GET")
    assert (action.status_code, action.headers["allow"]) == (405, "POST")
    assert (status.status_code, status.headers["allow"]) == (405, "GET")


async def test_a_reply_and_the_audit_name_the_request(world: World, api: Api) -> None:
    world.promote(world.register(1))

    own = await api.post("/rollback", {"reason": "x"}, x_request_id="deploy-17.a")
    etag = (await api.get("/learner")).headers["etag"]
    strange = await api.post("/learner/resume", if_match=etag, x_request_id="no spaces\tor so")
    refused = await api.get("/nope")

    assert own.headers["x-request-id"] == "deploy-17.a"
    made = strange.headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", made)
    assert refused.headers["x-request-id"] not in ("", made)
    ids = {row.action: row.request_id for row in world.rows(AuditRow)}
    assert (ids["rollback"], ids["learner.resume"]) == ("deploy-17.a", made)
    assert ids["canary.promoted"] == ""
    assert (await api.get("/audit")).json()["items"][0]["request_id"] == made


async def test_no_etag_of_the_learner_returns(api: Api) -> None:
    tags = [(await api.get("/learner")).headers["etag"]]
    for action in ("pause", "resume", "pause", "resume", "run"):
        reply = await api.post(f"/learner/{action}", if_match=tags[-1])
        assert reply.status_code == 200, reply.text
        tags.append(reply.headers["etag"])

    assert len(set(tags)) == 6
    assert (await api.post("/learner/run", if_match=tags[0])).status_code == 412


async def test_the_description_says_scopes_and_the_form_of_errors(api: Api) -> None:
    document = (await api.client.get("/admin/openapi.json")).json()

    scheme = document["components"]["securitySchemes"]["token"]
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    back = document["paths"]["/admin/v1/rollback"]["post"]
    assert (back["security"], back["x-scope"]) == ([{"token": []}], "operate")
    assert "Needs the scope `operate`" in back["description"]
    assert set(back["responses"]) == {"200", "default"}
    assert list(back["responses"]["default"]["content"]) == ["application/problem+json"]
    assert document["paths"]["/healthz"]["get"]["security"] == []
    paths = document["paths"]
    headers = {
        (method, path): set(paths[f"/admin/v1{path}"][method]["responses"][status]["headers"])
        for method, path, status in (
            ("get", "/status", "200"),
            ("get", "/canaries/{canary_id}", "200"),
            ("post", "/canaries", "201"),
            ("put", "/aliases/{name}", "200"),
            ("post", "/rollback", "200"),
        )
    }
    always = {"x-request-id"}
    assert list(headers.values()) == [
        always,
        {*always, "etag"},
        {*always, "etag", "location"},
        {*always, "etag"},
        always,
    ]
    reason = document["components"]["schemas"]["RollbackIn"]["properties"]["reason"]
    assert reason["pattern"] == r"\S", "of a longer one the rest is left out"
    session = document["paths"]["/admin/v1/sessions/{session_id}"]["get"]
    assert session["x-scope"] == "content"
    assert "HTTPValidationError" not in document["components"]["schemas"]

"""No input makes the admin API fail: what cannot be read is a 400, and never a 500."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest

from deploy.admin.wire import read_stored
from sidecar.store.database import compress
from sidecar.store.models import ChoiceRow, ExchangeRow

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, MakeApi, World

SURROGATE = '"\\ud800"'
BEYOND_64_BITS = (str(2**63), str(-(2**63) - 1), "1" * 400, "1e999", "NaN", "-Infinity")
CURSORS = (
    *(f"[{number}]" for number in BEYOND_64_BITS),
    *(f'[{number},"x"]' for number in BEYOND_64_BITS),
    f"[1.0,{SURROGATE}]",
    '[1.0,"\\u0000"]',
    "[" * 20_000,
    "[" * 900 + "]" * 900,
    '{"a":' * 3_000,
    "none",
    '["a"]',
    "[true]",
)
DEEP = [
    opening * depth + "1" + closing * depth
    for opening, closing in (("[", "]"), ('{"to":', "}"))
    for depth in (100, 900, 990, 5_000)
]
BODIES = (
    *(f'{{"{key}":{value}}}' for key in ("to", "reason") for value in (SURROGATE, '"\\u0000"')),
    f"{{{SURROGATE}:1}}",
    *(f'{{"to":{number}}}' for number in (*BEYOND_64_BITS, "1" * 5_000)),
    *DEEP,
    *(f'{{"to":{deep}}}' for deep in DEEP),
    "{",
    "nonsense",
)
RAW_BODIES = (
    *(body.encode() for body in BODIES),
    b"\xff",
    b"\x00",
    b'{"to":"\xed\xa0\x80"}',
    b'{"reason":"\xff"}',
    b"\xef\xbb\xbf{}",
    '{"to":"base"}'.encode("utf-16"),
)
LISTINGS = ("/groups", "/audit", "/adapters", "/runs", "/canaries")
READS = (
    "/status", "/funnel", "/learner", "/aliases", *LISTINGS, "/adapters/{}", "/canaries/{}",
    "/canaries/{}/evidence", "/groups/{}", "/exchanges/{}",
)  # fmt: skip
POSTS = ("/rollback", "/canaries/x/pause", "/canaries/x/promote", "/learner/pause", "/learner/run")
UNREADABLE_PARTS = ("%ED%A0%80", "%00", "%FF", "a%C3")
HOSTS = (b"[::1", b"a]b", b"127.0.0.1:x", b"127.0.0.1:999999", b"[::1]x", b"\xff", b"a b", b"@")
ORIGINS = (b"http://[::1", b"http://[v.x]", b"\xed\xa0\x80")


async def status_of(
    api: Api,
    method: str,
    path: str,
    *,
    query: bytes = b"",
    headers: tuple[tuple[bytes, bytes], ...] = (),
    body: bytes = b"",
) -> int:
    """Ask the ASGI application as the server does: no client library mends what it is given."""
    named = dict(headers)
    standard = {b"host": b"127.0.0.1:8081", b"content-length": str(len(body)).encode()}
    if body:
        standard[b"content-type"] = b"application/json"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(f"/admin/v1{path}"),
        "raw_path": f"/admin/v1{path}".encode(),
        "query_string": query,
        "root_path": "",
        "headers": [*{**standard, **named}.items()],
        "client": ("127.0.0.1", 4711),
        "server": ("127.0.0.1", 8081),
    }
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if waiting else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await api.app(scope, receive, send)
    types = [value for name, value in sent[0]["headers"] if name == b"content-type"]
    assert types == [b"application/problem+json"]
    return int(sent[0]["status"])


def cursor(text: str) -> bytes:
    return b"cursor=" + base64.urlsafe_b64encode(text.encode())


@pytest.mark.parametrize("path", LISTINGS)
async def test_a_cursor_that_no_database_can_hold_is_a_400(api: Api, path: str) -> None:
    for text in CURSORS:
        named = text.replace("[", f'["{path[1:]}",', 1)  # one of this listing
        for one in (text, named):
            assert await status_of(api, "GET", path, query=cursor(one)) == 400, one[:40]
    for raw in (
        b"cursor=\xff",
        b"cursor=nonsense",
        b"cursor=%ED%A0%80",
        b"%ED%A0%80=1",
        b"state=%00",
    ):
        assert await status_of(api, "GET", path, query=raw) == 400, raw


@pytest.mark.parametrize("path", POSTS)
async def test_a_body_that_cannot_be_read_is_a_400(api: Api, path: str) -> None:
    for body in RAW_BODIES:
        found = await status_of(api, "POST", path, body=body, headers=((b"if-match", b"*"),))
        assert found == 400, body[:40]


@pytest.mark.parametrize("part", UNREADABLE_PARTS)
async def test_a_path_that_is_no_text_is_a_400(api: Api, part: str) -> None:
    for path in READS:
        if "{}" in path:
            assert await status_of(api, "GET", path.format(part)) == 400, path
    for path in (f"/canaries/{part}/abort", f"/canaries/x/{part}", f"/learner/{part}", f"/{part}"):
        assert await status_of(api, "POST", path) == 400, path


@pytest.mark.parametrize("path", [*READS, "/status/", "/nope"])
async def test_a_host_or_an_origin_that_is_none_is_a_400(api: Api, path: str) -> None:
    for host in HOSTS:
        assert await status_of(api, "GET", path.format("1"), headers=((b"host", host),)) == 400
    for origin in ORIGINS:
        assert await status_of(api, "GET", path.format("1"), headers=((b"origin", origin),)) == 400


async def test_a_strange_if_match_is_stale_and_no_failure(world: World, api: Api) -> None:
    for tag in (b"\xff", b"\xed\xa0\x80", b'"' * 9_000):
        found = await status_of(
            api, "POST", "/learner/run", body=b"{}", headers=((b"if-match", tag),)
        )
        assert found == 412, tag[:10]


async def test_with_tokens_a_malformed_host_is_a_400_too(make_api: MakeApi) -> None:
    api = make_api("token")

    assert await status_of(api, "GET", "/status", headers=((b"host", b"[::1"),)) == 400
    assert await status_of(api, "GET", "/nope", headers=((b"origin", b"http://[::1"),)) == 400


def stored_texts() -> Iterator[tuple[str, str]]:
    yield "a lone surrogate", '{"messages":[{"role":"user","content":"\\ud800"}]}'
    yield "NaN", '{"temperature":NaN}'
    yield "a large integer", '{"seed":' + "1" * 4_000 + "}"
    yield "deep nesting", '{"x":' + "[" * 900 + "]" * 900 + "}"


@pytest.mark.parametrize(("what", "text"), list(stored_texts()))
async def test_what_a_client_wrote_into_the_store_is_shown_whatever_it_is(
    world: World, api: Api, what: str, text: str
) -> None:
    exchange_id = world.serve("s1")
    with world.database.write() as session:
        row = session.query(ExchangeRow).filter_by(exchange_id=exchange_id).one()
        row.request_body = compress(text.encode())
        row.sampling = {"stop": ["\ud800", float("inf")]}
        choice = session.query(ChoiceRow).filter_by(exchange_id=exchange_id).one()
        choice.message_body = compress(text.encode())

    reply = await api.get(f"/exchanges/{exchange_id}")

    assert reply.status_code == 200, what
    shown = json.loads(reply.text)
    assert (shown["exchange_id"], shown["sampling"]) == (exchange_id, {"stop": ["\ud800", None]})
    assert shown["request"] != {}


def test_what_is_nested_too_deep_is_shown_as_text() -> None:
    def nested(depth: int) -> bytes:
        return b'{"x":' + b"[" * depth + b"]" * depth + b"}"

    assert read_stored(nested(199)) == json.loads(nested(199))
    for data in (nested(200), nested(100_000), b"[]", b"\xff", b"{"):
        assert read_stored(data) == {"unreadable": data.decode("utf-8", "replace")}


@pytest.mark.parametrize("body", [b'{"to":"base","to":"v1"}', b'{"x":[{"a":1,"a":1}]}'])
async def test_a_name_that_is_twice_in_an_object_is_refused(
    world: World, api: Api, body: bytes
) -> None:
    world.promote(world.register(1))

    reply = await api.client.post(
        "/admin/v1/rollback", content=body, headers={"content-type": "application/json"}
    )

    assert reply.status_code == 400
    assert "twice" in reply.json()["detail"]
    assert world.table().champion != "base"

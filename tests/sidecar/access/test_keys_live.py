"""API keys of a real store through the relay: who gets in, as whom, how much, and until when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import FreePort, Running, StartProxy, Wire
from tests.sidecar.access.conftest import KeyStore

VLLM_KEY = "vllm-own-key"
SURFACES = ["chat", "completions", "responses", "messages"]


Answer = tuple[str, dict[str, str], bytes]
"""Status line, headers and body."""


@dataclass
class Site:
    """A vLLM, proxies before it that ask for keys, and the store of the keys."""

    state_dir: Path
    vllm: FakeVllm
    wire: Wire
    start_proxy: StartProxy
    free_port: FreePort

    @cached_property
    def keys(self) -> KeyStore:
        """Makes the store."""
        return KeyStore(self.state_dir)

    async def start(self, **sections: Any) -> Running:
        return await self.start_proxy(
            access={"mode": "keys"},
            serving={"api_key": VLLM_KEY, **sections.pop("serving", {})},
            proxy={"port": self.free_port(), **sections.pop("proxy", {})},
            **sections,
        )

    async def ask(self, running: Running, headers: str = "", name: str = "chat.plain") -> Answer:
        item = self.wire.recording(name)
        sent = self.wire.post(item.request, path=item.path, headers=headers)
        return self.wire.split(await running.send(sent))

    async def ask_twice(self, running: Running, key: str, name: str = "chat.plain") -> str:
        """Returns: the tokens that the second reply says are left."""
        await self.ask(running, bearer(key), name)
        _, headers, _ = await self.ask(running, bearer(key), name)
        return headers["x-ratelimit-remaining-tokens"]


@pytest.fixture
def site(
    state_dir: Path, fake_vllm: FakeVllm, wire: Wire, start_proxy: StartProxy, free_port: FreePort
) -> Iterator[Site]:
    site = Site(state_dir, fake_vllm, wire, start_proxy, free_port)
    yield site
    site.keys.database.close()


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


WRONG = ["Authorization: Bearer sk-sidecar-0123456789ab-x\r\n", "x-api-key: vllm-own-key\r\n"]


@pytest.mark.parametrize(
    ("surface", "sent"),
    [(one, "") for one in [*SURFACES, "count_tokens", "embeddings"]]
    + list(zip(["chat", "messages"], WRONG, strict=True)),
)
async def test_without_a_good_key_nobody_gets_in_on_any_surface(
    surface: str, sent: str, site: Site
) -> None:
    site.keys.create()
    running = await site.start()

    line, headers, body = await site.ask(running, sent, f"{surface}.plain")

    assert line == "HTTP/1.1 401 Unauthorized"
    assert headers["www-authenticate"] == "Bearer"
    told = json.loads(body)
    if surface in ("messages", "count_tokens"):
        assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
        assert set(told["error"]) == {"type", "message"}
    else:
        assert told["error"]["code"] == "invalid_api_key"
        assert set(told["error"]) == {"message", "type", "param", "code"}
    assert (site.vllm.requests, running.sink.exchanges) == ([], [])
    reason = "unknown" if sent else "no_key"
    assert running.metric("sidecar_access_denied_total", reason=reason) == 1


@pytest.mark.parametrize(
    ("surface", "header"),
    [("messages", "x-api-key: {}"), *((one, "Authorization: Bearer {}") for one in SURFACES)],
)
async def test_a_good_key_gets_in_by_either_header_and_vllm_sees_only_its_own(
    surface: str, header: str, site: Site
) -> None:
    key_id, key = site.keys.create(project="shop")
    item = site.wire.recording(f"{surface}.plain")
    site.vllm.script = lambda _: [item.reply]
    running = await site.start()

    line, headers, body = await site.ask(running, header.format(key) + "\r\n", f"{surface}.plain")

    assert (line, body) == ("HTTP/1.1 200 OK", item.body)
    assert not [name for name in headers if name.startswith("x-ratelimit")]
    [seen] = site.vllm.requests
    assert seen.headers["authorization"] == f"Bearer {VLLM_KEY}"
    assert "x-api-key" not in seen.headers
    assert key not in str(seen)
    exchange = (await running.captured(1))[0]
    assert (exchange.project, exchange.key_id) == ("shop", key_id)
    assert key not in str(exchange)


async def test_the_list_of_models_is_guarded_and_health_is_not(site: Site) -> None:
    _, key = site.keys.create()
    site.vllm.models = ["smollm2-135m", "smollm2-135m--v1-0123456789ab"]
    card = {"id": "smollm2-135m", "object": "model"}
    site.vllm.script = lambda _: [site.wire.whole_reply(json.dumps({"data": [card]}).encode())]
    running = await site.start()

    async def get(path: str, headers: str = "") -> Answer:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n"
        return site.wire.split(await running.send(head.encode()))

    assert (await get("/v1/models"))[0] == "HTTP/1.1 401 Unauthorized"
    line, _, body = await get("/v1/models", bearer(key))
    assert (line, json.loads(body)["data"]) == ("HTTP/1.1 200 OK", [card])
    [seen] = site.vllm.requests
    assert seen.headers["authorization"] == f"Bearer {VLLM_KEY}"
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await get(path))[0] == "HTTP/1.1 200 OK"


async def test_the_proxys_own_thread_follows_the_store_from_before_it_is_there(site: Site) -> None:
    running = await site.start()

    async def until(status: str, key: str) -> dict[str, str]:
        async with asyncio.timeout(60):
            while (answer := await site.ask(running, bearer(key)))[0] != f"HTTP/1.1 {status}":
                await asyncio.sleep(0.02)
        return answer[1]

    headers = await until("503 Service Unavailable", "sk-sidecar-0123456789ab-x")
    assert headers["retry-after"] == "1"
    key_id, key = site.keys.create()
    await until("200 OK", key)
    site.keys.revoke(key_id)
    await until("401 Unauthorized", key)


async def test_requests_over_the_limit_are_told_when_to_come_again(site: Site) -> None:
    _, key = site.keys.create(requests_per_minute=3)
    now = 1_000_000.0
    running = await site.start(clock=lambda: now)

    answers = [await site.ask(running, bearer(key), "messages.plain") for _ in range(5)]

    assert [line.split()[1] for line, _, _ in answers] == ["200"] * 3 + ["429"] * 2
    left = [headers["x-ratelimit-remaining-requests"] for _, headers, _ in answers]
    assert left == ["2", "1", "0", "0", "0"]
    _, headers, body = answers[4]
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert (headers["retry-after"], headers["x-ratelimit-reset-requests"]) == ("20", "1m0s")
    assert json.loads(body)["error"]["type"] == "rate_limit_error"
    assert len(site.vllm.requests) == 3
    now += 20.0
    assert (await site.ask(running, bearer(key)))[0] == "HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("name", "cost", "capture"),
    [
        ("chat", 42, {}),
        ("completions", 10, {}),
        ("responses", 44, {}),
        ("messages", 44, {}),
        ("chat_usage_stream", 42, {}),
        ("completions_usage_stream", None, {}),
        ("responses_stream", 44, {}),
        ("messages_stream", 44, {}),
        ("chat", 42, {"sample_rate": 0.0}),
        ("completions_usage_stream", None, {"sample_rate": 0.0}),
    ],
)
async def test_tokens_are_metered_by_what_the_reply_says_it_used(
    name: str, cost: int | None, capture: dict[str, Any], site: Site
) -> None:
    plain = site.wire.recording(f"{name}.plain")
    asked = name.split("_")[0] in ("chat", "completions") and not capture
    item = site.wire.recording(f"{name}.asked") if asked else plain
    site.vllm.script = lambda _: [item.reply]
    _, key = site.keys.create(tokens_per_day=1000)
    running = await site.start(capture=capture)

    _, _, body = await site.ask(running, bearer(key), f"{name}.plain")
    _, headers, _ = await site.ask(running, bearer(key), f"{name}.plain")

    assert body == plain.body
    if cost is None:
        cost = json.loads(plain.body.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"][
            "total_tokens"
        ]
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - cost)


@pytest.mark.parametrize("surface", ["chat", "completions"])
@pytest.mark.parametrize("capture", [{}, {"sample_rate": 0.0}])
async def test_a_stream_that_would_not_tell_its_usage_is_asked_for_it_on_our_account(
    surface: str, capture: dict[str, Any], site: Site
) -> None:
    """What vLLM sends for that is one event more, and the client does not see it."""
    plain = site.wire.recording(f"{surface}_stream.plain")
    item = plain if capture else site.wire.recording(f"{surface}_stream.asked")
    sampled = {"chat": 6, "completions": 5}[surface]
    usage = {"prompt_tokens": 50 - sampled, "total_tokens": 50, "completion_tokens": sampled}
    first = json.loads(item.chunks[0].partition(b"\r\n")[2].removeprefix(b"data: "))
    fields = {name: first[name] for name in ("id", "object", "created", "model")}
    event = json.dumps({**fields, "choices": [], "usage": usage}, separators=(",", ":"))
    *told, done, last = item.chunks
    told.append(site.wire.chunk(b"data: " + event.encode() + b"\n\n"))
    site.vllm.script = lambda _: [item.head, *told, done, last]
    _, key = site.keys.create(tokens_per_day=1000)
    running = await site.start(capture=capture)

    _, _, body = await site.ask(running, bearer(key), f"{surface}_stream.plain")
    _, headers, _ = await site.ask(running, bearer(key), f"{surface}_stream.plain")

    assert body == plain.body
    sent = json.loads(site.vllm.requests[0].body)
    assert sent["stream_options"] == {"include_usage": True}
    assert headers["x-ratelimit-remaining-tokens"] == "950"
    if not capture:
        assert (await running.captured(2))[0].untrainable_reason is None


async def test_a_key_without_an_allowance_asks_for_no_usage(site: Site) -> None:
    _, key = site.keys.create(requests_per_minute=100)
    running = await site.start(capture={"sample_rate": 0.0})

    await site.ask(running, bearer(key), "chat_stream.plain")

    assert site.vllm.requests[0].body == site.wire.recording("chat_stream.plain").request


@pytest.mark.parametrize("capture", [{}, {"sample_rate": 0.0}])
async def test_prompt_ids_that_capture_asks_for_do_not_hide_the_usage(
    capture: dict[str, Any], site: Site
) -> None:
    """vLLM writes the ids behind the usage: 1,000 of them are more than the 8 kB that were once
    looked at."""
    reply = json.loads(site.wire.recording("chat.asked").body)
    reply["usage"] = {"prompt_tokens": 5900, "total_tokens": 6000, "completion_tokens": 100}
    reply["prompt_token_ids"] = [12345] * 5900 if not capture else None
    body = json.dumps(reply, separators=(",", ":")).encode()
    site.vllm.script = lambda _: [site.wire.whole_reply(body)]
    _, key = site.keys.create(tokens_per_day=100_000)
    running = await site.start(capture=capture)

    assert await site.ask_twice(running, key) == "94000"


async def test_a_long_user_does_not_hide_the_usage_of_responses(site: Site) -> None:
    item = site.wire.recording("responses_stream.plain")
    body = item.body.replace(b'"user":null', b'"user":"%b"' % (b"u" * 20_000))
    site.vllm.play(item.head, site.wire.chunk(body), site.wire.LAST_CHUNK)
    _, key = site.keys.create(tokens_per_day=1000)
    running = await site.start()

    assert len(body) > len(item.body) + 19_000
    assert await site.ask_twice(running, key, "responses_stream.plain") == str(1000 - 44)


@pytest.mark.parametrize("surface", [*SURFACES, "embeddings"])
async def test_a_request_that_is_cut_before_vllms_head_costs_its_prompt(
    surface: str, site: Site
) -> None:
    site.vllm.script = lambda _: [asyncio.Event()]
    item = site.wire.recording(f"{surface}.plain")
    body = item.request[:-1] + b',"x":"%b"}' % (b"x" * 60_000)
    _, key = site.keys.create(tokens_per_day=100_000)
    running = await site.start()

    for number in range(1, 6):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(site.wire.post(body, path=item.path, headers=bearer(key)))
        async with asyncio.timeout(60):
            while len(site.vllm.requests) < number:
                await asyncio.sleep(0.005)
            writer.transport.abort()
            while running.metric("sidecar_requests_total", status="499") < number:
                await asyncio.sleep(0.005)
    site.vllm.script = lambda _: [site.wire.whole_reply(b"{}")]
    _, headers, _ = await site.ask(running, bearer(key))

    assert headers["x-ratelimit-remaining-tokens"] == str(100_000 - 5 * (len(body) // 4))


async def test_a_prompt_that_vllm_never_had_costs_nothing(site: Site) -> None:
    _, key = site.keys.create(tokens_per_day=1000)
    running = await site.start()
    site.vllm.script = lambda _: [site.wire.RESET]

    line, _, _ = await site.ask(running, bearer(key))
    site.vllm.script = lambda _: [site.wire.whole_reply(b"{}", "400 Bad Request")]
    await site.ask(running, bearer(key))
    _, headers, _ = await site.ask(running, bearer(key))

    assert line == "HTTP/1.1 502 Bad Gateway"
    assert headers["x-ratelimit-remaining-tokens"] == "1000"


async def test_a_metered_reply_is_not_compressed(site: Site) -> None:
    """Nobody could read its usage."""
    _, free = site.keys.create()
    _, metered = site.keys.create(tokens_per_day=1000)
    running = await site.start(capture={"sample_rate": 0.0})

    for key in (free, metered):
        await site.ask(running, bearer(key) + "Accept-Encoding: gzip\r\n", "responses.plain")

    sent = [seen.headers.get("accept-encoding") for seen in site.vllm.requests]
    assert sent == ["gzip", None]


async def test_a_stream_that_breaks_before_it_tells_its_usage_is_estimated(site: Site) -> None:
    item = site.wire.recording("chat_stream.plain")
    site.vllm.script = lambda _: [item.head, *item.chunks[:5], site.wire.CLOSE]
    _, key = site.keys.create(tokens_per_day=1000)
    running = await site.start(capture={"sample_rate": 0.0})

    await site.ask(running, bearer(key), "chat_stream.plain")
    site.vllm.script = lambda _: [site.wire.whole_reply(b"{}")]
    _, headers, _ = await site.ask(running, bearer(key))

    # A quarter of the request's bytes, and one for each event, in however many reads they came.
    cost = len(item.request) // 4 + 5
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - cost)


async def test_in_mode_upstream_the_callers_credentials_go_on_and_vllm_judges_them(
    site: Site,
) -> None:
    refusal = b'{"error":"Unauthorized"}'
    site.vllm.script = lambda seen: [
        site.wire.whole_reply(b"{}")
        if seen.headers.get("authorization") == "Bearer good"
        else site.wire.whole_reply(refusal, "401 Unauthorized")
    ]
    running = await site.start_proxy(access={"mode": "upstream"}, serving={"api_key": VLLM_KEY})

    good, _, _ = await site.ask(running, bearer("good") + "x-api-key: also\r\n")
    bad, _, body = await site.ask(running, bearer("bad"))
    none, _, _ = await site.ask(running)

    assert [line.split()[1] for line in (good, bad, none)] == ["200", "401", "401"]
    assert body == refusal
    sent = {
        (seen.headers.get("authorization"), seen.headers.get("x-api-key"))
        for seen in site.vllm.requests
    }
    assert sent == {("Bearer good", "also"), ("Bearer bad", None), (None, None)}


async def test_a_session_of_one_project_is_never_one_of_another(site: Site) -> None:
    running = await site.start()
    for project, name in (("shop", "s"), ("other", "s"), ("default", "shop/s")):
        _, key = site.keys.create(project=project)
        running.proxy.lines.source.poll()
        await site.ask(running, bearer(key) + f"x-sidecar-session: {name}\r\n")

    exchanges = await running.captured(3)
    assert [item.session_key for item in exchanges] == ["h:shop/s", "h:other/s", "h:default/shop/s"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/version"), ("GET", "/load"), ("POST", "/tokenize"), ("POST", "/detokenize")],
)
async def test_vllms_own_paths_need_a_key_except_its_probes(
    method: str, path: str, site: Site
) -> None:
    _, key = site.keys.create()
    site.vllm.script = lambda _: [site.wire.whole_reply(b"{}")]
    running = await site.start()
    told = []
    for shown in ("", bearer("wrong"), bearer(key)):
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{shown}Content-Length: 0\r\n"
        answer = await running.send(f"{head}Connection: close\r\n\r\n".encode())
        told.append(site.wire.split(answer)[0])

    assert told == ["HTTP/1.1 401 Unauthorized"] * 2 + ["HTTP/1.1 200 OK"]
    [seen] = site.vllm.requests
    assert seen.headers["authorization"] == f"Bearer {VLLM_KEY}"

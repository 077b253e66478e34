"""API keys of a real store through the relay: who gets in, as whom, how much, and until when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import api_keys
from support.fake_vllm import FakeVllm
from support.migrated_store import open_migrated
from support.proxy_kit import FreePort, Running, StartProxy, Wire

VLLM_KEY = "vllm-own-key"
SURFACES = ["chat", "completions", "responses", "messages"]


class KeyStore:
    def __init__(self, folder: Path) -> None:
        self.database = open_migrated(folder / "store.db")

    def create(self, **changes: Any) -> tuple[str, str]:
        """Returns: the key's id and the key."""
        return api_keys.create(self.database, **changes)

    def revoke(self, key_id: str) -> None:
        api_keys.revoke(self.database, key_id)


@pytest.fixture
def keys(state_dir: Path) -> Iterator[KeyStore]:
    store = KeyStore(state_dir)
    yield store
    store.database.close()


Answer = tuple[str, dict[str, str], bytes]
"""Status line, headers and body."""


@pytest.fixture
def guarded(start_proxy: StartProxy, free_port: FreePort) -> StartProxy:
    """Start a proxy that asks for keys."""

    async def start(**sections: Any) -> Running:
        return await start_proxy(
            access={"mode": "keys"},
            serving={"api_key": VLLM_KEY, **sections.pop("serving", {})},
            proxy={"port": free_port(), **sections.pop("proxy", {})},
            **sections,
        )

    return start


def bearer(key: str) -> str:
    return f"Authorization: Bearer {key}\r\n"


async def ask(running: Running, wire: Wire, headers: str = "", name: str = "chat.plain") -> Answer:
    item = wire.recording(name)
    return wire.split(await running.send(wire.post(item.request, path=item.path, headers=headers)))


WRONG = ["Authorization: Bearer sk-sidecar-0123456789ab-x\r\n", "x-api-key: vllm-own-key\r\n"]


@pytest.mark.parametrize(
    ("surface", "sent"),
    [(one, "") for one in [*SURFACES, "count_tokens", "embeddings"]]
    + list(zip(["chat", "messages"], WRONG, strict=True)),
)
async def test_without_a_good_key_nobody_gets_in_on_any_surface(
    surface: str, sent: str, keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    keys.create()
    running = await guarded()

    line, headers, body = await ask(running, wire, sent, f"{surface}.plain")

    assert line == "HTTP/1.1 401 Unauthorized"
    assert headers["www-authenticate"] == "Bearer"
    told = json.loads(body)
    if surface in ("messages", "count_tokens"):
        assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
        assert set(told["error"]) == {"type", "message"}
    else:
        assert told["error"]["code"] == "invalid_api_key"
        assert set(told["error"]) == {"message", "type", "param", "code"}
    assert (fake_vllm.requests, running.sink.exchanges) == ([], [])
    reason = "unknown" if sent else "no_key"
    assert running.metric("sidecar_access_denied_total", reason=reason) == 1


@pytest.mark.parametrize(
    ("surface", "header"),
    [("messages", "x-api-key: {}"), *((one, "Authorization: Bearer {}") for one in SURFACES)],
)
async def test_a_good_key_gets_in_by_either_header_and_vllm_sees_only_its_own(
    surface: str, header: str, keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    key_id, key = keys.create(project="shop")
    item = wire.recording(f"{surface}.plain")
    fake_vllm.script = lambda _: [item.reply]
    running = await guarded()

    line, headers, body = await ask(running, wire, header.format(key) + "\r\n", f"{surface}.plain")

    assert (line, body) == ("HTTP/1.1 200 OK", item.body)
    assert not [name for name in headers if name.startswith("x-ratelimit")]
    [seen] = fake_vllm.requests
    assert seen.headers["authorization"] == f"Bearer {VLLM_KEY}"
    assert "x-api-key" not in seen.headers
    assert key not in str(seen)
    exchange = (await running.captured(1))[0]
    assert (exchange.project, exchange.key_id) == ("shop", key_id)
    assert key not in str(exchange)


async def test_the_list_of_models_is_guarded_and_health_is_not(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    _, key = keys.create()
    fake_vllm.models = ["smollm2-135m", "smollm2-135m--v1-0123456789ab"]
    card = {"id": "smollm2-135m", "object": "model"}
    fake_vllm.script = lambda _: [wire.whole_reply(json.dumps({"data": [card]}).encode())]
    running = await guarded()

    async def get(path: str, headers: str = "") -> Answer:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}Connection: close\r\n\r\n"
        return wire.split(await running.send(head.encode()))

    assert (await get("/v1/models"))[0] == "HTTP/1.1 401 Unauthorized"
    line, _, body = await get("/v1/models", bearer(key))
    assert (line, json.loads(body)["data"]) == ("HTTP/1.1 200 OK", [card])
    [seen] = fake_vllm.requests
    assert seen.headers["authorization"] == f"Bearer {VLLM_KEY}"
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await get(path))[0] == "HTTP/1.1 200 OK"


async def test_a_revoked_key_is_refused_though_only_the_proxys_own_thread_polls(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    running = await guarded()
    key_id, key = keys.create()
    running.proxy.lines.source.poll()
    assert (await ask(running, wire, bearer(key)))[0] == "HTTP/1.1 200 OK"

    keys.revoke(key_id)

    async with asyncio.timeout(60):
        while (await ask(running, wire, bearer(key)))[0] != "HTTP/1.1 401 Unauthorized":
            await asyncio.sleep(0.01)


async def test_a_key_made_while_the_proxy_runs_gets_in(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    running = await guarded()
    _, key = keys.create()

    async with asyncio.timeout(60):
        while (await ask(running, wire, bearer(key)))[0] != "HTTP/1.1 200 OK":
            await asyncio.sleep(0.02)


async def test_before_the_store_was_seen_the_answer_is_503_and_with_it_the_proxy_works(
    state_dir: Path, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    running = await guarded()
    line, headers, _ = await ask(running, wire, bearer("sk-sidecar-0123456789ab-x"))
    assert (line, headers["retry-after"]) == ("HTTP/1.1 503 Service Unavailable", "1")

    store = KeyStore(state_dir)
    _, key = store.create()
    async with asyncio.timeout(60):
        while (await ask(running, wire, bearer(key)))[0] != "HTTP/1.1 200 OK":
            await asyncio.sleep(0.02)
    store.database.close()


@pytest.mark.parametrize("surface", ["chat", "messages"])
async def test_requests_over_the_limit_are_told_when_to_come_again(
    surface: str, keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    _, key = keys.create(requests_per_minute=3)
    now = 1_000_000.0
    running = await guarded(clock=lambda: now)

    answers = [await ask(running, wire, bearer(key), f"{surface}.plain") for _ in range(5)]

    assert [line for line, _, _ in answers] == ["HTTP/1.1 200 OK"] * 3 + [
        "HTTP/1.1 429 Too Many Requests"
    ] * 2
    left = [headers["x-ratelimit-remaining-requests"] for _, headers, _ in answers]
    assert left == ["2", "1", "0", "0", "0"]
    _, headers, body = answers[4]
    assert headers["x-ratelimit-limit-requests"] == "3"
    assert (headers["retry-after"], headers["x-ratelimit-reset-requests"]) == ("20", "1m0s")
    error = json.loads(body)["error"]
    if surface == "messages":
        assert error["type"] == "rate_limit_error"
    else:
        assert error["code"] == "rate_limit_exceeded"
    assert len(fake_vllm.requests) == 3
    now += 20.0
    assert (await ask(running, wire, bearer(key)))[0] == "HTTP/1.1 200 OK"


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
    name: str,
    cost: int | None,
    capture: dict[str, Any],
    keys: KeyStore,
    guarded: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
) -> None:
    plain = wire.recording(f"{name}.plain")
    asked = name.split("_")[0] in ("chat", "completions") and not capture
    item = wire.recording(f"{name}.asked") if asked else plain
    fake_vllm.script = lambda _: [item.reply]
    _, key = keys.create(tokens_per_day=1000)
    running = await guarded(capture=capture)

    _, _, body = await ask(running, wire, bearer(key), f"{name}.plain")
    _, headers, _ = await ask(running, wire, bearer(key), f"{name}.plain")

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
    surface: str,
    capture: dict[str, Any],
    keys: KeyStore,
    guarded: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
) -> None:
    """What vLLM sends for that is one event more, and the client does not see it."""
    plain = wire.recording(f"{surface}_stream.plain")
    item = plain if capture else wire.recording(f"{surface}_stream.asked")
    sampled = {"chat": 6, "completions": 5}[surface]
    usage = {"prompt_tokens": 50 - sampled, "total_tokens": 50, "completion_tokens": sampled}
    first = json.loads(item.chunks[0].partition(b"\r\n")[2].removeprefix(b"data: "))
    fields = {name: first[name] for name in ("id", "object", "created", "model")}
    event = json.dumps({**fields, "choices": [], "usage": usage}, separators=(",", ":"))
    *told, done, last = item.chunks
    told.append(wire.chunk(b"data: " + event.encode() + b"\n\n"))
    fake_vllm.script = lambda _: [item.head, *told, done, last]
    _, key = keys.create(tokens_per_day=1000)
    running = await guarded(capture=capture)

    _, _, body = await ask(running, wire, bearer(key), f"{surface}_stream.plain")
    _, headers, _ = await ask(running, wire, bearer(key), f"{surface}_stream.plain")

    assert body == plain.body
    sent = json.loads(fake_vllm.requests[0].body)
    assert sent["stream_options"] == {"include_usage": True}
    assert headers["x-ratelimit-remaining-tokens"] == "950"
    if not capture:
        assert (await running.captured(2))[0].untrainable_reason is None


async def test_a_key_without_an_allowance_asks_for_no_usage(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    _, key = keys.create(requests_per_minute=100)
    running = await guarded(capture={"sample_rate": 0.0})

    await ask(running, wire, bearer(key), "chat_stream.plain")

    assert fake_vllm.requests[0].body == wire.recording("chat_stream.plain").request


@pytest.mark.parametrize("capture", [{}, {"sample_rate": 0.0}])
async def test_prompt_ids_that_capture_asks_for_do_not_hide_the_usage(
    capture: dict[str, Any], keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    """vLLM writes the ids behind the usage: 1,000 of them are more than the 8 kB that were once
    looked at."""
    reply = json.loads(wire.recording("chat.asked").body)
    reply["usage"] = {"prompt_tokens": 5900, "total_tokens": 6000, "completion_tokens": 100}
    reply["prompt_token_ids"] = [12345] * 5900 if not capture else None
    body = json.dumps(reply, separators=(",", ":")).encode()
    fake_vllm.script = lambda _: [wire.whole_reply(body)]
    _, key = keys.create(tokens_per_day=100_000)
    running = await guarded(capture=capture)

    for _ in range(2):
        _, headers, _ = await ask(running, wire, bearer(key))

    assert headers["x-ratelimit-remaining-tokens"] == "94000"


@pytest.mark.parametrize("name", ["responses.plain", "responses_stream.plain"])
async def test_a_long_user_does_not_hide_the_usage_of_responses(
    name: str, keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    item = wire.recording(name)
    body = item.body.replace(b'"user":null', b'"user":"%b"' % (b"u" * 20_000))
    assert len(body) > len(item.body) + 19_000
    fake_vllm.script = lambda _: [
        *([item.head, wire.chunk(body), wire.LAST_CHUNK] if item.chunks else ()),
        *(() if item.chunks else [wire.whole_reply(body)]),
    ]
    _, key = keys.create(tokens_per_day=1000)
    running = await guarded()

    for _ in range(2):
        _, headers, _ = await ask(running, wire, bearer(key), name)

    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 44)


@pytest.mark.parametrize("surface", [*SURFACES, "embeddings"])
async def test_a_request_that_is_cut_before_vllms_head_costs_its_prompt(
    surface: str, keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [asyncio.Event()]
    item = wire.recording(f"{surface}.plain")
    body = item.request[:-1] + b',"x":"%b"}' % (b"x" * 60_000)
    _, key = keys.create(tokens_per_day=100_000)
    running = await guarded()

    for number in range(1, 6):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(wire.post(body, path=item.path, headers=bearer(key)))
        async with asyncio.timeout(60):
            while len(fake_vllm.requests) < number:
                await asyncio.sleep(0.005)
            writer.transport.abort()
            while running.metric("sidecar_requests_total", status="499") < number:
                await asyncio.sleep(0.005)
    fake_vllm.script = lambda _: [wire.whole_reply(b"{}")]
    _, headers, _ = await ask(running, wire, bearer(key))

    assert headers["x-ratelimit-remaining-tokens"] == str(100_000 - 5 * (len(body) // 4))


async def test_a_prompt_that_vllm_never_had_costs_nothing(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    _, key = keys.create(tokens_per_day=1000)
    running = await guarded()
    fake_vllm.script = lambda _: [wire.RESET]

    line, _, _ = await ask(running, wire, bearer(key))
    fake_vllm.script = lambda _: [wire.whole_reply(b"{}", "400 Bad Request")]
    await ask(running, wire, bearer(key))
    _, headers, _ = await ask(running, wire, bearer(key))

    assert line == "HTTP/1.1 502 Bad Gateway"
    assert headers["x-ratelimit-remaining-tokens"] == "1000"


async def test_a_metered_reply_is_not_compressed(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    """Nobody could read its usage."""
    _, free = keys.create()
    _, metered = keys.create(tokens_per_day=1000)
    running = await guarded(capture={"sample_rate": 0.0})

    for key in (free, metered):
        await ask(running, wire, bearer(key) + "Accept-Encoding: gzip\r\n", "responses.plain")

    sent = [seen.headers.get("accept-encoding") for seen in fake_vllm.requests]
    assert sent == ["gzip", None]


async def test_a_stream_that_breaks_before_it_tells_its_usage_is_estimated(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    item = wire.recording("chat_stream.plain")
    fake_vllm.script = lambda _: [item.head, *item.chunks[:5], wire.CLOSE]
    _, key = keys.create(tokens_per_day=1000)
    running = await guarded(capture={"sample_rate": 0.0})

    await ask(running, wire, bearer(key), "chat_stream.plain")
    fake_vllm.script = lambda _: [wire.whole_reply(b"{}")]
    _, headers, _ = await ask(running, wire, bearer(key))

    # A quarter of the request's bytes, and one for each event, in however many reads they came.
    cost = len(item.request) // 4 + 5
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - cost)


async def test_in_mode_upstream_the_callers_credentials_go_on_and_vllm_judges_them(
    start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    refusal = b'{"error":"Unauthorized"}'
    fake_vllm.script = lambda seen: [
        wire.whole_reply(b"{}")
        if seen.headers.get("authorization") == "Bearer good"
        else wire.whole_reply(refusal, "401 Unauthorized")
    ]
    running = await start_proxy(access={"mode": "upstream"}, serving={"api_key": VLLM_KEY})

    good, _, _ = await ask(running, wire, bearer("good") + "x-api-key: also\r\n")
    bad, _, body = await ask(running, wire, bearer("bad"))
    none, _, _ = await ask(running, wire)

    assert [line.split()[1] for line in (good, bad, none)] == ["200", "401", "401"]
    assert body == refusal
    sent = {
        (seen.headers.get("authorization"), seen.headers.get("x-api-key"))
        for seen in fake_vllm.requests
    }
    assert sent == {("Bearer good", "also"), ("Bearer bad", None), (None, None)}


async def test_what_is_captured_follows_the_keys_project(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    (_, shop), (other_id, other) = keys.create(project="shop"), keys.create(project="other")
    fake_vllm.script = lambda _: [wire.recording("chat.asked").reply]
    running = await guarded(capture={"projects": {"shop": 0.0}})

    await ask(running, wire, bearer(shop))
    await ask(running, wire, bearer(other))

    [exchange] = await running.captured(1)
    assert (exchange.project, exchange.key_id) == ("other", other_id)
    assert running.metric("sidecar_captures_skipped_total", reason="project") == 1
    assert fake_vllm.requests[0].body == wire.recording("chat.plain").request


async def test_a_session_of_one_project_is_never_one_of_another(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    (_, shop), (_, other) = keys.create(project="shop"), keys.create(project="other")
    running = await guarded()

    for key in (shop, other):
        await ask(running, wire, bearer(key) + "x-sidecar-session: s\r\n")

    exchanges = await running.captured(2)
    assert [item.session_key for item in exchanges] == ["h:shop/s", "h:other/s"]


async def test_a_default_key_reaches_no_session_of_a_project_by_its_header(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    (_, acme), (_, default) = keys.create(project="acme"), keys.create(project="default")
    running = await guarded()

    await ask(running, wire, bearer(acme) + "x-sidecar-session: s1\r\n")
    await ask(running, wire, bearer(default) + "x-sidecar-session: acme/s1\r\n")

    exchanges = await running.captured(2)
    assert [item.session_key for item in exchanges] == ["h:acme/s1", "h:default/acme/s1"]


async def test_sessions_and_users_are_recorded_bounded_and_apart(
    keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    """Wherever they stand: in a header, in the body's `user`, in Anthropic's `metadata`."""
    (_, key), long = keys.create(), "n" * 20_000
    running = await guarded()
    request = json.loads(wire.recording("chat.plain").request)
    bodies = [request | {"user": long + end} for end in "ab"]
    bodies += [request | {"metadata": {"user_id": long[:5_000] + end}} for end in "cd"]
    for end in "ab":
        names = f"x-sidecar-session: {long}{end}\r\nx-sidecar-user: {long}{end}\r\n"
        await ask(running, wire, bearer(key) + names)
    for body in bodies:
        sent = wire.post(json.dumps(body).encode(), headers=bearer(key))
        assert (await running.send(sent)).startswith(b"HTTP/1.1 200")

    exchanges = await running.captured(6)

    assert len({item.session_key for item in exchanges}) == 6
    assert len({item.user for item in exchanges}) == 4  # the header's and the body's are the same
    for item in exchanges:
        assert len(item.session_key.encode()) <= 255
        assert len(item.user.encode()) <= 255


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/version"), ("GET", "/load"), ("POST", "/tokenize"), ("POST", "/detokenize")],
)
async def test_vllms_own_paths_need_a_key_except_its_probes(
    method: str, path: str, keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    _, key = keys.create()
    fake_vllm.script = lambda _: [wire.whole_reply(b"{}")]
    running = await guarded()
    told = []
    for shown in ("", bearer("wrong"), bearer(key)):
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{shown}Content-Length: 0\r\n"
        answer = await running.send(f"{head}Connection: close\r\n\r\n".encode())
        told.append(wire.split(answer)[0])

    assert told == ["HTTP/1.1 401 Unauthorized"] * 2 + ["HTTP/1.1 200 OK"]
    [seen] = fake_vllm.requests
    assert seen.headers["authorization"] == f"Bearer {VLLM_KEY}"


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/reset_prefix_cache", "/sleep", "/pause"]
)
async def test_no_scope_reaches_what_changes_vllm(
    path: str, keys: KeyStore, guarded: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    _, key = keys.create(scopes=frozenset({"infer", "operate"}))
    running = await guarded()

    line, _, _ = wire.split(await running.send(wire.post(b"{}", path=path, headers=bearer(key))))

    assert line == "HTTP/1.1 404 Not Found"
    assert fake_vllm.requests == []

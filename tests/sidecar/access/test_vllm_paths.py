"""vLLM's own paths beside the model surfaces: who answers them, and what needs a key."""

from __future__ import annotations

from itertools import product

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProxy, Wire

PROBES = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
ASKED_OF_VLLM = [
    ("GET", "/version", b""),
    ("GET", "/load", b""),
    ("POST", "/tokenize", b'{"prompt":"Hi"}'),
    ("POST", "/detokenize", b'{"tokens":[1]}'),
]
CONTROLS = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/update_weights",
    "/start_profile",
]


def request(method: str, path: str, body: bytes = b"", more: str = "") -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode() + body


@pytest.mark.parametrize(
    ("method", "path", "mode"), [(*PROBES[0], "open"), *((*one, "keys") for one in PROBES)]
)
async def test_a_probe_needs_no_key_and_follows_vllms_health(
    method: str, path: str, mode: str, start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    running = await start_proxy(access={"mode": mode})
    told = []
    for healthy in (True, False):
        fake_vllm.healthy = healthy
        line, _, body = wire.split(await running.send(request(method, path)))
        told.append((line, body))
    await fake_vllm.stop()
    line, _, body = wire.split(await running.send(request(method, path)))
    told.append((line, body))

    unavailable = ("HTTP/1.1 503 Service Unavailable", b"")
    assert told == [("HTTP/1.1 200 OK", b""), unavailable, unavailable]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/health"), ("HEAD", "/health"), ("PUT", "/ping")]
)
async def test_other_methods_of_a_probe_are_405_as_vllms(
    method: str, path: str, start_proxy: StartProxy, wire: Wire
) -> None:
    running = await start_proxy()

    line, _, _ = wire.split(await running.send(request(method, path)))

    assert line == "HTTP/1.1 405 Method Not Allowed"


@pytest.mark.parametrize(("method", "path", "body"), ASKED_OF_VLLM)
async def test_vllm_answers_what_it_is_asked(
    method: str, path: str, body: bytes, start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(b'{"said":"by vLLM"}')]
    running = await start_proxy()

    line, _, told = wire.split(await running.send(request(method, path, body)))

    assert (line, told) == ("HTTP/1.1 200 OK", b'{"said":"by vLLM"}')
    [seen] = fake_vllm.requests
    assert (seen.line, seen.body) == (f"{method} {path} HTTP/1.1", body)
    assert running.sink.exchanges == []


async def test_a_slash_at_the_end_redirects_to_the_path_without_it(
    start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    running = await start_proxy()

    for path in ("/v1/chat/completions/", "/health/", "/v1/models/", "/tokenize/"):
        line, headers, body = wire.split(await running.send(request("POST", path + "?a=b")))
        assert (line, body) == ("HTTP/1.1 307 Temporary Redirect", b"")
        assert headers["location"] == path.rstrip("/") + "?a=b"
    assert fake_vllm.requests == []


async def test_nothing_that_changes_vllm_is_passed_on(
    start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    running = await start_proxy()

    for method, slash, path in product(("GET", "POST"), ("", "/"), CONTROLS):
        line, _, _ = wire.split(await running.send(request(method, path + slash)))
        assert line == "HTTP/1.1 404 Not Found", path
    assert fake_vllm.requests == []

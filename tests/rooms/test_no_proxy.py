"""Requests to this machine never go through the environment's proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.engine.engines import vllm_client
from deploy.supervise import status_of
from ingest.errors import IngestError
from ingest.ruler.judge import LiteLlmJudge
from ingest.ruler.prompt import reply_schema
from ingest.vllm.probe import probe
from ingest.vllm.sampler import VllmSampler
from sidecar.settings import Judge, Settings, Telemetry
from sidecar.settings.kinds import ask_loopback_directly
from sidecar.tracing.telemetry import configure_tracing
from support.outside_server import OutsideServer, outside_server

Servers = tuple[OutsideServer, OutsideServer]
"""The server that is asked, and the proxy that the environment names."""


@pytest.fixture
def server_and_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    with outside_server() as server, outside_server() as proxy:
        server.status = proxy.status = 404
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "internal.example")
        yield server, proxy
        assert proxy.asked == []


async def test_our_clients_of_vllm_ask_it_directly(server_and_proxy: Servers) -> None:
    server, _ = server_and_proxy
    sampler = VllmSampler(server.url)
    async with vllm_client(Settings(), server.url) as client:
        await client.get("/from-control")
    with pytest.raises(IngestError):
        await sampler.load()
    await sampler.aclose()
    with pytest.raises(IngestError):
        probe(server.url, "m", None, budget_s=5.0)

    assert status_of(f"{server.url}/from-up") == 404
    assert {"/from-up", "/from-control"} < {one.path for one in server.asked}
    assert len(server.asked) > 3


async def test_the_judge_on_this_machine_is_asked_directly(server_and_proxy: Servers) -> None:
    server, _ = server_and_proxy
    for model in ("openai/m", "hosted_vllm/m"):
        judge = LiteLlmJudge(Judge(model=model, api_base=f"{server.url}/v1", api_key="k" * 9))
        with pytest.raises(IngestError):
            await judge.complete([{"role": "user", "content": "?"}], reply_schema(()))
        await judge.aclose()

    assert len(server.asked) == 2


def test_telemetry_to_this_machine_goes_directly(server_and_proxy: Servers) -> None:
    server, _ = server_and_proxy
    tracing = configure_tracing(Telemetry(otlp_endpoint=f"{server.url}/v1/traces"), "test")
    assert tracing.spans is not None
    tracing.spans.get_tracer("test").start_span("one").end()
    tracing.shutdown()

    assert [(one.method, one.path) for one in server.asked] == [("POST", "/v1/traces")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "localhost,127.0.0.1,::1,127.0.0.2"),
        ({"NO_PROXY": "a.b, c"}, "a.b,c,localhost,127.0.0.1,::1,127.0.0.2"),
        ({"NO_PROXY": "lost", "no_proxy": "read"}, "read,localhost,127.0.0.1,::1,127.0.0.2"),
        ({"NO_PROXY": "::1,localhost"}, "::1,localhost,127.0.0.1,127.0.0.2"),
        ({"NO_PROXY": "*", "no_proxy": "*"}, "*"),
    ],
)
def test_the_users_own_exceptions_stay(before: dict[str, str], after: str) -> None:
    environ = dict(before)

    ask_loopback_directly(environ, "http://127.0.0.2:4318/v1", "http://far.example", "")

    assert environ == {"NO_PROXY": after, "no_proxy": after}

"""Requests to this machine never go through the environment's proxy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


class Recorder(ThreadingHTTPServer):
    """Notes the first line of every request, and refuses it."""

    def __init__(self) -> None:
        lines: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def _record(self) -> None:
                lines.append(self.requestline)
                self.send_error(404)

            do_GET = do_POST = do_CONNECT = _record

            def log_message(self, *_: object) -> None:
                return None

        super().__init__(("127.0.0.1", 0), Handler)
        self.lines = lines
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def recorders() -> Iterator[tuple[Recorder, Recorder]]:
    both = (Recorder(), Recorder())
    threads = [threading.Thread(target=one.serve_forever) for one in both]
    for thread in threads:
        thread.start()
    yield both
    for one, thread in zip(both, threads, strict=True):
        one.shutdown()
        thread.join()
        one.server_close()


@pytest.fixture
def server_and_proxy(
    recorders: tuple[Recorder, Recorder], monkeypatch: pytest.MonkeyPatch
) -> tuple[Recorder, Recorder]:
    """The server that is asked, and the proxy that the environment names."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, recorders[1].url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "internal.example")
    return recorders


async def test_our_clients_of_vllm_ask_it_directly(
    server_and_proxy: tuple[Recorder, Recorder],
) -> None:
    server, proxy = server_and_proxy
    sampler = VllmSampler(server.url)
    async with vllm_client(Settings(), server.url) as client:
        await client.get("/from-control")
    try:
        await sampler.load()
    except IngestError:
        server.lines.append("refused")
    finally:
        await sampler.aclose()
    with pytest.raises(IngestError):
        probe(server.url, "m", None, budget_s=5.0)

    assert status_of(f"{server.url}/from-up") == 404
    assert "GET /from-up HTTP/1.1" in server.lines
    assert "GET /from-control HTTP/1.1" in server.lines
    assert len(server.lines) > 3
    assert proxy.lines == []


async def test_the_judge_on_this_machine_is_asked_directly(
    server_and_proxy: tuple[Recorder, Recorder],
) -> None:
    server, proxy = server_and_proxy
    for model in ("openai/m", "hosted_vllm/m"):
        judge = LiteLlmJudge(Judge(model=model, api_base=f"{server.url}/v1", api_key="k" * 9))
        with pytest.raises(IngestError):
            await judge.complete([{"role": "user", "content": "?"}], reply_schema(()))
        await judge.aclose()

    assert len(server.lines) == 2
    assert proxy.lines == []


def test_telemetry_to_this_machine_goes_directly(
    server_and_proxy: tuple[Recorder, Recorder],
) -> None:
    server, proxy = server_and_proxy
    tracing = configure_tracing(Telemetry(otlp_endpoint=f"{server.url}/v1/traces"), "test")
    assert tracing.spans is not None
    tracing.spans.get_tracer("test").start_span("one").end()
    tracing.shutdown()

    assert server.lines == ["POST /v1/traces HTTP/1.1"]
    assert proxy.lines == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "localhost,127.0.0.1,::1,127.0.0.2"),
        ({"NO_PROXY": "a.b, c"}, "a.b,c,localhost,127.0.0.1,::1,127.0.0.2"),
        ({"NO_PROXY": "lost", "no_proxy": "read"}, "read,localhost,127.0.0.1,::1,127.0.0.2"),
        ({"NO_PROXY": "::1,localhost"}, "::1,localhost,127.0.0.1,127.0.0.2"),
    ],
)
def test_the_users_own_exceptions_stay(before: dict[str, str], after: str) -> None:
    environ = dict(before)

    ask_loopback_directly(environ, "http://127.0.0.2:4318/v1", "http://far.example", "")

    assert environ == {"NO_PROXY": after, "no_proxy": after}


def test_every_host_without_a_proxy_stays_so() -> None:
    environ = {"NO_PROXY": "*"}

    ask_loopback_directly(environ, "http://127.0.0.1:1")

    assert environ == {"NO_PROXY": "*"}

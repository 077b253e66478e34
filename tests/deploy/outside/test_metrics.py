"""Metrics over HTTP against a real local server, and the contract that the fake keeps too."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import ValidationError

from deploy.outside.http import (
    MAX_REPLY_BYTES,
    Caller,
    HttpMetrics,
    MetricSource,
    Names,
    OutsideError,
    filled_query,
    filled_url,
)
from sidecar.settings import Metric
from support.fake_metrics import FakeMetrics
from support.outside_server import OutsideServer, outside_server

NAMES = Names(adapter="m--v2-0123456789ab", champion="base", canary="c1")


@pytest.fixture
def server() -> Iterator[OutsideServer]:
    with outside_server() as found:
        yield found


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    found = Caller()
    yield found
    await found.aclose()


def prometheus(server: OutsideServer, **more: Any) -> Metric:
    values = {"kind": "prometheus", "url": server.url, "query": "up", "max": 0.5, **more}
    return Metric.model_validate(values)


def document(server: OutsideServer, pointer: str = "", path: str = "/x", **more: Any) -> Metric:
    values = {"kind": "http_json", "url": server.url + path, "pointer": pointer, "max": 0.5, **more}
    return Metric.model_validate(values)


def vector(*values: str) -> bytes:
    result = [{"metric": {}, "value": [1.0, value]} for value in values]
    return json.dumps(
        {"status": "success", "data": {"resultType": "vector", "result": result}}
    ).encode()


Say = Callable[[float | None], None]
Make = Callable[[], tuple[MetricSource, Metric, Say, Callable[[], None]]]


@pytest.fixture(params=["fake", "prometheus", "http_json"])
def source(request: pytest.FixtureRequest, server: OutsideServer, caller: Caller) -> Make:
    """A source, a metric, what makes it have a value or none, and what makes it fail."""

    def make() -> tuple[MetricSource, Metric, Say, Callable[[], None]]:
        if request.param == "fake":
            fake, metric = FakeMetrics(), document(server)

            def put(value: float | None) -> None:
                fake.values[metric.url] = value

            def fail() -> None:
                fake.values[metric.url] = OutsideError("it is down; start it")

            return fake, metric, put, fail
        is_query = request.param == "prometheus"

        def say(value: float | None) -> None:
            whole = vector(*([] if value is None else [str(value)]))
            server.body = whole if is_query else json.dumps({"a": value}).encode()

        def refuse() -> None:
            server.status, server.body = 503, b"down"

        metric = prometheus(server) if is_query else document(server, "/a")
        return HttpMetrics(caller), metric, say, refuse

    return make


async def test_every_source_tells_value_no_data_and_error_apart(source: Make) -> None:
    metrics, metric, say, fail = source()

    say(0.25)
    value = await metrics.read(metric, NAMES)
    say(None)
    nothing = await metrics.read(metric, NAMES)
    fail()
    with pytest.raises(OutsideError, match=";"):
        await metrics.read(metric, NAMES)

    assert (value, nothing) == (0.25, None)


async def test_a_query_has_names_and_token_and_is_one_instant(
    server: OutsideServer, caller: Caller
) -> None:
    server.body = vector("3")
    metric = prometheus(
        server, query='errors{adapter="{adapter}", by="{champion}"}', token_env="METRICS_TOKEN"
    )

    value = await HttpMetrics(caller, {"METRICS_TOKEN": "s3cret"}).read(metric, NAMES)

    asked = server.asked[0]
    assert (value, urlsplit(asked.path).path) == (3.0, "/api/v1/query")
    assert parse_qs(urlsplit(asked.path).query) == {
        "query": ['errors{adapter="m--v2-0123456789ab", by="base"}']
    }
    assert asked.headers["authorization"] == "Bearer s3cret"


def test_a_name_leaves_neither_its_quotes_nor_its_place_in_a_path() -> None:
    names = Names(adapter='a"} or vector(0) # \\', champion="../admin?x=1#y", canary="c")

    query = filled_query('x{a="{adapter}"} {other}', names)
    url = filled_url("http://h/{champion}/v", names)

    assert query == 'x{a="a\\"} or vector(0) # \\\\"} {other}'
    assert url == "http://h/..%2Fadmin%3Fx%3D1%23y/v"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (vector("1", "2"), "2 series; aggregate"),
        (b"<html>", "no JSON"),
        (b'{"status": "success"}', "no number"),
        (vector("many"), "the sample is no number"),
        (b'{"status": "error", "error": "parse error at 3"}', "parse error at 3"),
        (b"[" * 100_000, "no JSON"),
    ],
)
async def test_what_is_no_instant_number_is_an_error_that_says_what_to_do(
    server: OutsideServer, caller: Caller, body: bytes, said: str
) -> None:
    server.body = body

    with pytest.raises(OutsideError, match=said) as raised:
        await HttpMetrics(caller).read(prometheus(server), NAMES)

    assert ";" in str(raised.value)


@pytest.mark.parametrize(
    ("body", "pointer", "value"),
    [
        (b"0.5", "", 0.5),
        (b'{"a/b": [{"~": 7}]}', "/a~1b/0/~0", 7.0),
        (b'{"a": {}}', "/a/b/c", None),
        (b"[1]", "/3", None),
        (b"[1]", "/-1", OutsideError),
        (b'{"a": "0.5"}', "/a", OutsideError),
        (b'{"a": true}', "/a", OutsideError),
        (b'{"a": 1}', "/a/b", OutsideError),
        (b"1" + b"0" * 400, "", OutsideError),
    ],
)
async def test_a_number_is_found_by_its_pointer(
    server: OutsideServer, caller: Caller, body: bytes, pointer: str, value: Any
) -> None:
    server.body = body
    metrics, metric = HttpMetrics(caller), document(server, pointer)

    if value is OutsideError:
        with pytest.raises(OutsideError):
            await metrics.read(metric, NAMES)
    else:
        assert await metrics.read(metric, NAMES) == value


async def test_a_redirect_is_not_followed_and_takes_no_token_along(
    server: OutsideServer, caller: Caller
) -> None:
    with outside_server() as other:
        server.status, server.headers = 302, {"location": other.url}
        metric = document(server, token_env="T")

        with pytest.raises(OutsideError, match="redirects"):
            await HttpMetrics(caller, {"T": "s3cret"}).read(metric, NAMES)

        assert other.asked == []


async def test_a_reply_without_end_is_cut_and_a_slow_one_is_not_waited_for(
    server: OutsideServer, caller: Caller
) -> None:
    server.body = b"1" * (MAX_REPLY_BYTES + 1)
    with pytest.raises(OutsideError, match="over"):
        await HttpMetrics(caller).read(document(server), NAMES)

    server.wait_s = 0.5
    with pytest.raises(OutsideError, match=r"no whole reply in 0\.05 s"):
        await HttpMetrics(caller).read(document(server, timeout_s=0.05), NAMES)


async def test_a_server_that_is_away_and_a_secret_that_is_not_set_are_errors(
    caller: Caller,
) -> None:
    with outside_server() as gone:
        pass
    with pytest.raises(OutsideError, match="cannot be reached"):
        await HttpMetrics(caller).read(document(gone), NAMES)
    with outside_server() as wordy:
        wordy.headers["x-much"] = "x" * 200_000
        with pytest.raises(OutsideError, match="its reply cannot be read as HTTP"):
            await HttpMetrics(caller).read(document(wordy), NAMES)
    with pytest.raises(OutsideError, match="METRICS_TOKEN is not set"):
        await HttpMetrics(caller, {}).read(document(gone, token_env="METRICS_TOKEN"), NAMES)


async def test_no_message_quotes_the_url(caller: Caller) -> None:
    metric = Metric.model_validate(
        {"kind": "http_json", "url": "http://me:s3cret@127.0.0.1:9/x?key=s3cret", "max": 1.0}
    )

    with pytest.raises(OutsideError) as raised:
        await HttpMetrics(caller).read(metric, NAMES)

    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "prometheus", "query": "up"}, "no limit"),
        ({"kind": "prometheus", "max": 1.0}, "needs a query"),
        ({"kind": "http_json", "query": "up", "max": 1.0}, "needs a query"),
        ({"kind": "prometheus", "query": "up", "pointer": "/a", "max": 1.0}, "pointer"),
        ({"kind": "http_json", "pointer": "a", "max": 1.0}, "JSON pointer"),
        ({"kind": "http_json", "min": 2.0, "max": 1.0}, "min over max"),
        ({"kind": "http_json", "max": 1.0, "token_env": "SIDECAR_X"}, "begins with SIDECAR_"),
        ({"kind": "http_json", "max": 1.0, "url": "file:///etc/passwd"}, "http"),
    ],
)
def test_a_metric_that_could_not_work_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Metric.model_validate({"url": "http://h", **values})

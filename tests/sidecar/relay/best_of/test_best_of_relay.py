"""Best of N over real sockets: client, relay, a scripted vLLM, and a picker in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sidecar.relay.best_of import read_answers, stream_reply, whole_reply
from sidecar.relay.reply_edit import Strip
from sidecar.scoring import NoPick, Pick
from support.fake_vllm import FakeVllm, Step
from support.proxy_kit import MemoryPicker, Wire

ALL = Strip(token_ids=True, logprobs=True)
REQUEST = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}]}
TWO, ONE = "two_reply_asked.json", "whole_reply_asked.json"
Recorded = Callable[[str], bytes]
StartProxy = Callable[..., Awaitable[Any]]


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> Any:
    """Best of N is on; the picker that is asked."""
    picker = wire.Picker(Pick(index=1, scores=(0.25, 0.75)))
    monkeypatch.setattr("sidecar.proxy.SocketPicker", lambda *_, **__: picker)
    return picker


@pytest.fixture
async def running(wired: MemoryPicker, start_proxy: StartProxy, fake_vllm: FakeVllm) -> Any:
    return await start_proxy(best_of={"enabled": True})


def asking(wire: Wire, *, headers: str = "", **fields: Any) -> bytes:
    data: bytes = wire.post(
        json.dumps({**REQUEST, **fields}).encode(), headers=f"x-sidecar-best-of: 2\r\n{headers}"
    )
    return data


async def test_the_client_gets_the_best_answer_and_the_record_holds_all(
    wired: MemoryPicker, running: Any, fake_vllm: FakeVllm, wire: Wire, recorded: Recorded
) -> None:
    reply = recorded(TWO)
    fake_vllm.script = lambda _: [wire.whole_reply(reply)]

    line, headers, body = wire.split(await running.send(asking(wire)))

    assert line == "HTTP/1.1 200 OK"
    assert body == whole_reply(read_answers(reply, 2), 1, ALL)
    assert headers["content-length"] == str(len(body))
    assert headers["x-sidecar-best-of"] == "2;picked=1"
    (seen,) = fake_vllm.requests
    sent = json.loads(seen.body)
    assert (sent["n"], sent["stream"], sent["logprobs"]) == (2, False, True)
    assert not [name for name in seen.headers if name.startswith("x-sidecar")]
    (exchange,) = await running.captured(1)
    assert headers["x-sidecar-exchange-id"] == exchange.exchange_id
    assert json.loads(exchange.request) == REQUEST
    assert [choice.index for choice in exchange.choices] == [0, 1]
    assert (exchange.untrainable_reason, exchange.returned_index) == (None, 1)
    (asked,) = wired.asked
    assert (asked.exchange_id, asked.keep, asked.project) == (exchange.exchange_id, True, "default")
    shown = [json.loads(answer) for answer in asked.answers]
    assert shown == [choice["message"] for choice in json.loads(reply)["choices"]]
    assert running.metric("sidecar_best_of_picked_total", answer="other") == 1
    assert running.metric("sidecar_best_of_judge_seconds_count") == 1
    assert running.metric("sidecar_best_of_unreturned_tokens_total") == 8


async def test_a_client_that_asked_for_a_stream_gets_one(
    running: Any, fake_vllm: FakeVllm, wire: Wire, recorded: Recorded
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded(TWO))]
    options = {"include_usage": True}

    sent = asking(wire, stream=True, stream_options=options)
    _, headers, body = wire.split(await running.send(sent))

    answers = read_answers(recorded(TWO), 2)
    assert body == stream_reply(answers, 1, ALL, include_usage=True, continuous_usage=False)
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in headers
    assert (await running.captured(1))[0].stream  # as it was asked for


@pytest.mark.parametrize("reason", ["timeout", "failed"])
async def test_without_a_pick_it_is_the_first_answer_and_the_reason_is_counted(
    reason: str,
    wired: MemoryPicker,
    running: Any,
    fake_vllm: FakeVllm,
    wire: Wire,
    recorded: Recorded,
) -> None:
    """failed: the picker itself breaks."""
    wired.script = [NoPick(reason=reason)] if reason == "timeout" else []
    fake_vllm.script = lambda _: [wire.whole_reply(recorded(TWO))]

    _, headers, body = wire.split(await running.send(asking(wire)))

    assert body == whole_reply(read_answers(recorded(TWO), 2), 0, ALL)
    assert headers["x-sidecar-best-of"] == f"2;picked=0;fallback={reason}"
    assert running.metric("sidecar_best_of_fallbacks_total", reason=reason) == 1
    assert running.metric("sidecar_best_of_judge_seconds_count") == 1
    assert running.metric("sidecar_best_of_unreturned_tokens_total") == 8


OF_NO_SHAPE = b'"reasoning":null', b'"tool_calls":[{}]'


@pytest.mark.parametrize(
    ("body", "status", "extra", "sampled", "reason"),
    [
        (b'{"error":{}}', "500 No", "", 1, "not_200"),
        (b"\x1f\x8b", "200 OK", "content-encoding: gzip\r\n", 1, "encoded"),
        (b'{"choices":[]}', "200 OK", "", 1, "unreadable_reply"),
        (b"not json", "200 OK", "", 1, "unreadable_reply"),
        (OF_NO_SHAPE, "200 OK", "", 2, "unreadable_reply"),
        (None, "200 OK", "", 1, "too_large"),
    ],
)
async def test_a_reply_that_is_not_n_answers_is_handed_on_as_it_is(
    body: Any,
    status: str,
    extra: str,
    sampled: int,
    reason: str,
    running: Any,
    fake_vllm: FakeVllm,
    wire: Wire,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client asks for the fields that are ours, so the request is not tried without them."""
    if not isinstance(body, bytes):
        body = recorded(TWO).replace(*(body or (b"", b"")))
    if reason == "too_large":
        monkeypatch.setattr("sidecar.relay.best_of.MAX_HELD_BYTES", 1000)
    fake_vllm.script = lambda _: [wire.whole_reply(body, status, extra)]
    sent = asking(wire, stream=True, logprobs=True, return_token_ids=True)

    line, headers, received = wire.split(await running.send(sent))

    assert (line, received) == (f"HTTP/1.1 {status}", body)
    assert headers["x-sidecar-best-of"] == f"{sampled};picked=0;fallback={reason}"
    assert running.metric("sidecar_best_of_fallbacks_total", reason=reason) == 1


async def test_while_the_judge_thinks_vllms_connection_serves_another_client(
    wired: MemoryPicker, running: Any, fake_vllm: FakeVllm, wire: Wire, recorded: Recorded
) -> None:
    wired.script = [asyncio.Event()]
    replies = iter([recorded(TWO), recorded(ONE)])
    fake_vllm.script = lambda _: [wire.whole_reply(next(replies))]
    _, first = await asyncio.open_connection("127.0.0.1", running.port)
    first.write(asking(wire))
    while not wired.asked:
        await asyncio.sleep(0.005)

    _, _, other = wire.split(await running.send(wire.post(json.dumps(REQUEST).encode())))
    first.close()
    await running.metric_reaches(1.0, "sidecar_best_of_fallbacks_total", reason="cut")
    while not wired.cancelled:
        await asyncio.sleep(0.005)

    assert other == recorded("whole_reply_plain.json")
    assert [seen.connection for seen in fake_vllm.requests] == [1, 1]
    assert not fake_vllm.client_left.is_set()


async def test_a_client_that_leaves_early_stops_vllm(
    running: Any, fake_vllm: FakeVllm, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [asyncio.Event()]
    _, client = await asyncio.open_connection("127.0.0.1", running.port)
    client.write(asking(wire))
    await fake_vllm.asked()

    client.close()

    async with asyncio.timeout(60):
        await fake_vllm.client_left.wait()


async def test_a_lost_connection_is_tried_again_and_judged_once(
    wired: MemoryPicker, running: Any, fake_vllm: FakeVllm, wire: Wire, recorded: Recorded
) -> None:
    steps: list[list[Step]] = [
        [wire.whole_reply(b"{}")],
        [wire.CLOSE],
        [wire.whole_reply(recorded(TWO))],
    ]
    fake_vllm.script = lambda _: steps.pop(0)
    await running.send(wire.post(json.dumps(REQUEST).encode()))

    _, headers, _ = wire.split(await running.send(asking(wire)))

    assert headers["x-sidecar-best-of"] == "2;picked=1"
    assert len(wired.asked) == 1
    assert running.metric("sidecar_best_of_picked_total", answer="other") == 1


@pytest.mark.parametrize("status", ["400 Bad Request", "500 No"])
async def test_when_vllm_takes_no_n_the_client_gets_a_plain_answer(
    status: str, running: Any, fake_vllm: FakeVllm, wire: Wire, recorded: Recorded
) -> None:
    refusal = wire.whole_reply(b'{"error":{"message":"n must be 1"}}', status)
    plain = wire.whole_reply(recorded(ONE))
    fake_vllm.script = lambda seen: [refusal if b'"n":' in seen.body else plain]

    line, headers, body = wire.split(await running.send(asking(wire)))

    expected = "whole_reply_plain.json" if status[0] == "4" else ONE  # asked without our fields
    assert (line, body) == ("HTTP/1.1 200 OK", recorded(expected))
    assert headers["x-sidecar-best-of"] == "1;picked=0;fallback=refused"
    url = f"http://127.0.0.1:{fake_vllm.port}"
    # It may have been `n`: nothing tells against the fields.
    assert running.metric("sidecar_own_fields_total", replica=url, event="refused") == 0


async def test_the_clients_own_mistake_is_answered_by_vllm(
    running: Any, fake_vllm: FakeVllm, wire: Wire
) -> None:
    fake_vllm.script = lambda seen: [wire.whole_reply(b'{"error":1}', "400 Bad Request")]

    line, _, body = wire.split(await running.send(asking(wire)))

    assert (line, body) == ("HTTP/1.1 400 Bad Request", b'{"error":1}')
    asked = [json.loads(seen.body) for seen in fake_vllm.requests]
    assert [one.get("n") for one in asked] == [2, None, None]
    assert [one.get("logprobs") for one in asked] == [True, True, None]


@pytest.mark.parametrize("why", ["temperature_zero", "not_ready"])
async def test_where_there_is_no_point_the_plain_request_is_sent(
    why: str, wired: MemoryPicker, running: Any, fake_vllm: FakeVllm, wire: Wire
) -> None:
    wired.ready = why != "not_ready"

    sent = asking(wire, temperature=0.0 if wired.ready else 1.0)
    _, headers, _ = wire.split(await running.send(sent))

    assert headers["x-sidecar-best-of"] == f"1;picked=0;fallback={why}"
    assert "n" not in json.loads(fake_vllm.requests[0].body)
    assert running.metric("sidecar_best_of_fallbacks_total", reason=why) == 1


async def test_with_capture_off_it_works_and_nothing_is_kept(
    wired: MemoryPicker, running: Any, fake_vllm: FakeVllm, wire: Wire, recorded: Recorded
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded(TWO))]

    sent = asking(wire, headers="x-sidecar-capture: off\r\n")
    _, headers, _ = wire.split(await running.send(sent))

    assert headers["x-sidecar-best-of"] == "2;picked=1"
    assert wired.asked[0].keep is False
    assert running.metric("sidecar_captures_skipped_total", reason="header") == 1
    assert running.sink.exchanges == []

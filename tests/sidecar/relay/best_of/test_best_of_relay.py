"""Best of N over real sockets: client, relay, a scripted vLLM, and a picker in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from sidecar.relay.best_of import read_answers, whole_reply
from sidecar.relay.reply_edit import Strip
from sidecar.scoring import Pick
from support.fake_vllm import FakeVllm, Step
from support.proxy_kit import MemoryPicker, Wire

ALL = ASKED = Strip(token_ids=True, logprobs=True)
REQUEST = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}]}
Recorded = Callable[[str], bytes]


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> Any:
    """Best of N is on; the picker that is asked."""
    picker = wire.Picker(Pick(index=1, scores=(0.25, 0.75)))
    monkeypatch.setattr("sidecar.proxy.SocketPicker", lambda *_, **__: picker)
    return picker


def asking(
    wire: Wire, *, n: int = 2, headers: str = "", close: bool = True, **fields: Any
) -> bytes:
    data: bytes = wire.post(
        json.dumps({**REQUEST, **fields}).encode(),
        headers=f"x-sidecar-best-of: {n}\r\n{headers}",
        close=close,
    )
    return data


StartProxy = Callable[..., Awaitable[Any]]


async def test_the_client_gets_the_best_answer_and_the_record_holds_all(
    wired: MemoryPicker,
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
    recorded: Recorded,
) -> None:
    reply = recorded("two_reply_asked.json")
    fake_vllm.script = lambda _: [wire.whole_reply(reply)]
    running = await start_proxy(best_of={"enabled": True})

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
    assert exchange.untrainable_reason is None
    assert wired.asked[0].exchange_id == exchange.exchange_id


async def test_while_the_judge_thinks_vllms_connection_serves_another_client(
    wired: MemoryPicker,
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
    recorded: Recorded,
) -> None:
    thinks = asyncio.Event()
    wired.script = [thinks]
    replies = iter([recorded("two_reply_asked.json"), recorded("whole_reply_asked.json")])
    fake_vllm.script = lambda _: [wire.whole_reply(next(replies))]
    running = await start_proxy(best_of={"enabled": True})
    _, first = await asyncio.open_connection("127.0.0.1", running.port)
    first.write(asking(wire))
    while not wired.asked:
        await asyncio.sleep(0.005)

    _, _, other = wire.split(await running.send(wire.post(json.dumps(REQUEST).encode())))
    first.close()
    await running.metric_reaches(1.0, "sidecar_best_of_fallbacks_total", reason="cut")
    thinks.set()

    assert other == recorded("whole_reply_plain.json")
    assert [seen.connection for seen in fake_vllm.requests] == [1, 1]
    assert not fake_vllm.client_left.is_set()


async def test_a_client_that_leaves_early_stops_vllm(
    wired: MemoryPicker, start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    fake_vllm.script = lambda _: [asyncio.Event()]
    running = await start_proxy(best_of={"enabled": True})
    _, client = await asyncio.open_connection("127.0.0.1", running.port)
    client.write(asking(wire))
    while not fake_vllm.requests:
        await asyncio.sleep(0.005)

    client.close()

    async with asyncio.timeout(60):
        await fake_vllm.client_left.wait()


async def test_a_lost_connection_is_tried_again_and_judged_once(
    wired: MemoryPicker,
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
    recorded: Recorded,
) -> None:
    reply = recorded("two_reply_asked.json")
    steps: Iterator[Sequence[Step]] = iter(
        [[wire.whole_reply(b"{}")], [wire.CLOSE], [wire.whole_reply(reply)]]
    )
    fake_vllm.script = lambda _: next(steps)
    running = await start_proxy(best_of={"enabled": True})
    await running.send(wire.post(json.dumps(REQUEST).encode()))

    _, headers, _ = wire.split(await running.send(asking(wire)))

    assert headers["x-sidecar-best-of"] == "2;picked=1"
    assert len(wired.asked) == 1
    assert running.metric("sidecar_best_of_picked_total", answer="other") == 1


async def test_when_vllm_takes_no_n_the_client_gets_a_plain_answer(
    wired: MemoryPicker,
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
    recorded: Recorded,
) -> None:
    refusal = wire.whole_reply(b'{"error":{"message":"n must be 1"}}', "400 Bad Request")
    plain = wire.whole_reply(recorded("whole_reply_asked.json"))
    fake_vllm.script = lambda seen: [refusal if b'"n":' in seen.body else plain]
    running = await start_proxy(best_of={"enabled": True})

    line, headers, body = wire.split(await running.send(asking(wire)))

    assert (line, body) == ("HTTP/1.1 200 OK", recorded("whole_reply_plain.json"))
    assert headers["x-sidecar-best-of"] == "1;picked=0;fallback=refused"
    (exchange,) = await running.captured(1)
    assert exchange.untrainable_reason is None


async def test_the_clients_own_mistake_is_answered_by_vllm(
    wired: MemoryPicker, start_proxy: StartProxy, fake_vllm: FakeVllm, wire: Wire
) -> None:
    fake_vllm.script = lambda seen: [wire.whole_reply(b'{"error":1}', "400 Bad Request")]
    running = await start_proxy(best_of={"enabled": True})

    line, _, body = wire.split(await running.send(asking(wire)))

    assert (line, body) == ("HTTP/1.1 400 Bad Request", b'{"error":1}')
    asked = [json.loads(seen.body) for seen in fake_vllm.requests]
    assert [one.get("n") for one in asked] == [2, None, None]
    assert [one.get("logprobs") for one in asked] == [True, True, None]


async def test_with_capture_off_it_works_and_nothing_is_kept(
    wired: MemoryPicker,
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    wire: Wire,
    recorded: Recorded,
) -> None:
    fake_vllm.script = lambda _: [wire.whole_reply(recorded("two_reply_asked.json"))]
    running = await start_proxy(best_of={"enabled": True})

    _, headers, _ = wire.split(
        await running.send(asking(wire, headers="x-sidecar-capture: off\r\n"))
    )

    assert headers["x-sidecar-best-of"] == "2;picked=1"
    assert wired.asked[0].keep is False
    assert running.metric("sidecar_captures_skipped_total", reason="header") == 1
    assert running.sink.exchanges == []

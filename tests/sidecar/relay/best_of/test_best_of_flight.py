"""Best of N between flight and upstream: what the flight sees of a reply, and what is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sidecar.metrics.proxy import Metrics
from sidecar.relay.best_of import (
    BestOf,
    BestOfConnection,
    BestOfPlan,
    plan_best_of,
    read_answers,
    stream_reply,
    whole_reply,
)
from sidecar.relay.heads import ReplyHeaders
from sidecar.relay.peek import peek_request
from sidecar.relay.reply_parser import ReplyHead, ReplyReader
from sidecar.relay.request_edit import PiecedBody
from sidecar.scoring import Material, NoPick, Pick, Verdict
from support.proxy_kit import MemoryPicker, Wire

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SECOND = Pick(index=1, scores=(0.25, 0.75))


def reply_headers(encoding: bytes = b"") -> ReplyHeaders:
    headers = ReplyHeaders()
    headers.lines = [b"server: uvicorn", b"Content-Type: application/json"]
    headers.content_type = b"application/json"
    headers.content_encoding = encoding
    return headers


Recorded = Callable[[str], bytes]


@dataclass
class MemoryConnection:
    """The upstream connection, in memory: it notes what it is told."""

    told: list[str] = field(default_factory=list)
    reader: ReplyReader | None = None
    sent: bytes = b""

    def send(
        self, reader: ReplyReader, head: bytes, body: bytes | PiecedBody, *, head_only: bool
    ) -> None:
        assert isinstance(body, bytes)
        self.reader = reader
        self.sent = head + body
        assert not head_only

    def abort(self) -> None:
        self.told.append("abort")

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


@dataclass
class MemoryFlight(ReplyReader):
    """What a flight sees of a reply."""

    head: ReplyHead | None = None
    body: bytes = b""
    lost: tuple[str, bool, bool] | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def reply_head(self, head: ReplyHead) -> None:
        self.head = head

    def reply_body(self, data: bytes) -> None:
        self.body += data

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        return False

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        if complete:
            self.ended.set()

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        self.lost = (why, nothing_came, reused)


@dataclass
class Rig:
    """One best-of request with everything around it in memory."""

    metrics: Metrics
    picker: MemoryPicker
    best_of: BestOf
    plan: BestOfPlan
    upstream: MemoryConnection
    flight: MemoryFlight
    connection: BestOfConnection
    chunks: list[bytes]

    @property
    def reader(self) -> ReplyReader:
        """What the upstream connection was told to give its reply to."""
        assert self.upstream.reader is not None
        return self.upstream.reader

    @property
    def head(self) -> ReplyHead:
        """The head that the flight saw."""
        assert self.flight.head is not None
        return self.flight.head

    def reply(
        self, body: bytes, *, status: int = 200, encoding: bytes = b"", size: int = 100
    ) -> None:
        """vLLM's reply comes, in pieces, and its connection goes back to the pool."""
        reader = self.reader
        reader.reply_head(ReplyHead(status, b"", reply_headers(encoding), len(body)))
        for at in range(0, len(body), size):
            reader.reply_body(body[at : at + size])
            reader.batch_end(complete=False, received_at=0.0)
        reader.batch_end(complete=True, received_at=0.0)

    async def ended(self) -> None:
        async with asyncio.timeout(60):
            await self.flight.ended.wait()

    def counted(self) -> dict[str, float]:
        """Close, and give every best-of counter that is not 0."""
        self.best_of.close()
        return {
            "/".join((sample.name.removeprefix("sidecar_best_of_"), *sample.labels.values())): (
                sample.value
            )
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name.startswith("sidecar_best_of_")
            and sample.name.endswith(("_total", "_count"))
            and sample.value
        }


MakeRig = Callable[..., Rig]


@pytest.fixture
def rig(wire: Wire) -> MakeRig:
    def make(
        *script: Verdict | asyncio.Event, keep: bool = True, timeout_s: float = 30.0, **fields: Any
    ) -> Rig:
        body = json.dumps({**REQUEST, **fields}).encode()
        metrics, picker = Metrics(), wire.Picker(*(script or (SECOND,)))
        plan = plan_best_of(peek_request(body), 2, captured=keep)
        best_of = BestOf(
            plan,
            picker,
            metrics,
            exchange_id="ex_1",
            request=body,
            keep=keep,
            project="shop",
            timeout_s=timeout_s,
        )
        assert best_of.plan is not None
        upstream, flight = MemoryConnection(), MemoryFlight()
        chunks: list[bytes] = []
        connection = BestOfConnection(upstream, best_of, best_of.plan, chunks.append)
        connection.send(flight, b"HEAD ", b"BODY", head_only=False)
        return Rig(metrics, picker, best_of, best_of.plan, upstream, flight, connection, chunks)

    return make


async def test_the_flight_sees_the_pick_as_a_plain_reply(rig: MakeRig, recorded: Recorded) -> None:
    one = rig()
    reply = recorded("two_reply_asked.json")

    one.reply(reply)
    await one.ended()

    assert one.upstream.sent == b"HEAD BODY"
    expected = whole_reply(read_answers(reply, 2), 1, one.plan.strip)
    assert one.flight.body == expected
    assert one.head.content_length == len(expected)
    assert one.best_of.own_lines == (b"x-sidecar-best-of: 2;picked=1",)
    assert one.best_of.returned_index == 1
    assert one.counted() == {
        "requests_total": 1,
        "picked_total/other": 1,
        "judge_seconds_count": 1,
        "unreturned_tokens_total": 8,
    }


async def test_a_client_that_asked_for_a_stream_gets_one(rig: MakeRig, recorded: Recorded) -> None:
    one = rig(stream=True, stream_options={"include_usage": True})
    reply = recorded("two_reply_asked.json")

    one.reply(reply)
    await one.ended()

    assert one.flight.body == stream_reply(
        read_answers(reply, 2), 1, one.plan.strip, include_usage=True, continuous_usage=False
    )
    assert one.head.content_length is None
    headers = one.head.headers
    assert headers.lines == [b"server: uvicorn", b"content-type: text/event-stream; charset=utf-8"]
    assert headers.content_type.startswith(b"text/event-stream")


async def test_the_judge_is_shown_all_answers_and_whose_they_are(
    rig: MakeRig, recorded: Recorded
) -> None:
    one = rig(keep=False)
    reply = recorded("two_reply_asked.json")

    one.reply(reply)
    await one.ended()

    choices = json.loads(reply)["choices"]
    (asked,) = one.picker.asked
    assert isinstance(asked, Material)
    assert [json.loads(answer) for answer in asked.answers] == [c["message"] for c in choices]
    assert (asked.exchange_id, asked.keep, asked.project) == ("ex_1", False, "shop")
    assert json.loads(asked.request) == REQUEST


@pytest.mark.parametrize("reason", ["away", "timeout", "garbage", "disconnect", "judge_rubbish"])
async def test_without_a_pick_it_is_the_first_answer_and_the_reason_is_counted(
    reason: str, rig: MakeRig, recorded: Recorded
) -> None:
    one = rig(NoPick(reason=reason))
    reply = recorded("two_reply_asked.json")

    one.reply(reply)
    await one.ended()

    assert one.flight.body == whole_reply(read_answers(reply, 2), 0, one.plan.strip)
    expected = f"x-sidecar-best-of: 2;picked=0;fallback={reason}".encode()
    assert one.best_of.own_lines == (expected,)
    assert one.counted() == {
        "requests_total": 1,
        f"fallbacks_total/{reason}": 1,
        "judge_seconds_count": 1,
        "unreturned_tokens_total": 8,
    }


async def test_a_picker_that_breaks_costs_the_client_nothing(
    rig: MakeRig, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rig()

    async def broken(material: Material, deadline_s: float) -> Verdict:
        raise RuntimeError("a defect")

    monkeypatch.setattr(one.picker, "pick", broken)
    one.reply(recorded("two_reply_asked.json"))
    await one.ended()

    assert one.counted()["fallbacks_total/failed"] == 1


@pytest.mark.parametrize("status", [400, 404, 500])
async def test_an_error_of_vllm_is_handed_on_as_it_is(status: int, rig: MakeRig) -> None:
    one = rig()

    one.reply(b'{"error":{}}', status=status, size=3)
    await one.ended()

    assert (one.head.status, one.flight.body) == (status, b'{"error":{}}')
    assert one.picker.asked == []
    assert one.counted() == {"requests_total": 1, "fallbacks_total/not_200": 1}


async def test_when_vllm_refuses_n_the_plain_request_is_sent_once(rig: MakeRig) -> None:
    one = rig()
    one.reply(b'{"error":{"message":"n must be 1 when using greedy sampling"}}', status=400)

    assert one.best_of.plain_instead(404) is False
    assert one.best_of.plain_instead(400) is True
    assert one.best_of.plan is None
    assert one.best_of.plain_instead(400) is False

    assert one.best_of.own_lines == (b"x-sidecar-best-of: 1;picked=0;fallback=refused",)
    assert one.counted() == {"requests_total": 1, "fallbacks_total/refused": 1}


async def test_a_compressed_reply_is_handed_on_as_it_is(rig: MakeRig) -> None:
    one = rig()

    one.reply(b"\x1f\x8b", encoding=b"gzip")
    await one.ended()

    assert one.flight.body == b"\x1f\x8b"
    assert one.counted()["fallbacks_total/encoded"] == 1


@pytest.mark.parametrize("body", [b"", b"{}", b'{"choices":[]}', b"not json"])
async def test_a_reply_that_is_not_n_answers_is_handed_on_as_it_is(
    body: bytes, rig: MakeRig
) -> None:
    one = rig(stream=True)

    one.reply(body)
    await one.ended()

    assert one.flight.body == body
    assert one.counted() == {"requests_total": 1, "fallbacks_total/unreadable_reply": 1}


async def test_a_reply_of_a_shape_that_vllm_does_not_write_is_handed_on(
    rig: MakeRig, recorded: Recorded
) -> None:
    one = rig(stream=True)
    body = recorded("two_reply_asked.json").replace(b'"reasoning":null', b'"tool_calls":[{}]')

    one.reply(body)
    await one.ended()

    assert one.flight.body == body
    assert one.best_of.returned_index == 0
    assert one.counted()["fallbacks_total/unreadable_reply"] == 1


async def test_a_reply_too_large_to_hold_goes_on_unedited(
    rig: MakeRig, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.relay.best_of.MAX_HELD_BYTES", 1000)
    one = rig()

    one.reply(recorded("two_reply_asked.json"))
    await one.ended()

    assert one.flight.body == recorded("two_reply_asked.json") == b"".join(one.chunks)
    assert one.counted()["fallbacks_total/too_large"] == 1


async def test_a_lost_upstream_is_told_to_the_flight(rig: MakeRig) -> None:
    one = rig()

    one.reader.upstream_lost("gone", nothing_came=True, reused=True)

    assert one.flight.lost == ("gone", True, True)
    one.connection.pause()
    one.connection.abort()
    assert one.upstream.told == []
    assert one.counted() == {"requests_total": 1, "fallbacks_total/upstream_lost": 1}


async def test_after_the_reply_the_clients_leaving_stops_the_waiting_and_not_the_connection(
    rig: MakeRig, recorded: Recorded
) -> None:
    defects: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: defects.append(told))
    one = rig(asyncio.Event())
    one.reply(recorded("two_reply_asked.json"))
    await asyncio.sleep(0)

    one.connection.pause()
    one.connection.abort()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert defects == []
    assert one.picker.cancelled == 1
    assert one.upstream.told == []  # by now it carries somebody else's request
    assert one.flight.head is None
    assert one.counted() == {"requests_total": 1, "fallbacks_total/cut": 1}


@pytest.mark.parametrize("why", ["temperature_zero", "not_ready"])
async def test_where_there_is_no_point_the_plain_request_is_sent(why: str, wire: Wire) -> None:
    picker, metrics = wire.Picker(SECOND), Metrics()
    picker.ready = why != "not_ready"
    temperature = 0.0 if why == "temperature_zero" else 1.0
    body = json.dumps({**REQUEST, "temperature": temperature}).encode()

    best_of = BestOf(
        plan_best_of(peek_request(body), 2, captured=True),
        picker,
        metrics,
        exchange_id="ex_1",
        request=body,
        keep=True,
        project="default",
        timeout_s=1.0,
    )

    assert best_of.plan is None
    expected = f"x-sidecar-best-of: 1;picked=0;fallback={why}".encode()
    assert best_of.own_lines == (expected,)
    best_of.close()
    value = metrics.registry.get_sample_value
    assert value("sidecar_best_of_fallbacks_total", {"reason": why}) == 1

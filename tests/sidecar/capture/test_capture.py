"""The queue between the relay and the sink: bounded, counted, never in the way."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sidecar.capture.assemble import Turns, assemble
from sidecar.capture.recorder import Capture, Limits
from sidecar.errors import OutboxError
from sidecar.metrics.proxy import Metrics
from sidecar.records import Exchange, RawCapture
from sidecar.tracing.spans import RequestSpans
from support.exchanges import make_raw_capture
from support.proxy_kit import MemorySink, Wire

REPLY = json.dumps(
    {
        "model": "m",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "message": {"role": "assistant", "content": "ok"},
                "token_ids": [7],
                "logprobs": {"content": [{"token": "ok", "logprob": -0.5}]},
            }
        ],
        "usage": {"completion_tokens": 1},
    }
).encode()


def _raw(name: str = "ex_1", reply: tuple[bytes, ...] | None = (REPLY,)) -> RawCapture:
    return make_raw_capture(name, reply, request=b'{"temperature":0.5}')


class Bench:
    """A capture whose thread runs only when the test says so."""

    def __init__(self, sink: Any, *, traced: bool = True, **limits: Any) -> None:
        self.metrics = Metrics()
        self.spans = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.sink = sink
        spans = RequestSpans(self.provider) if traced else None
        self.capture = Capture(Limits(**limits), sink, self.metrics, spans)

    def flush(self) -> None:
        self.capture.start()
        assert self.capture.stop(5.0)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"sidecar_{name}_total", labels) or 0.0


MakeBench = Callable[..., Bench]


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.provider.shutdown()


@pytest.fixture
def make_bench(benches: list[Bench], wire: Wire) -> MakeBench:
    def make(sink: Any = None, **settings: Any) -> Bench:
        benches.append(Bench(sink if sink is not None else wire.Sink(), **settings))
        return benches[-1]

    return make


def test_what_is_offered_before_the_stop_is_written(make_bench: MakeBench) -> None:
    bench = make_bench()
    for number in range(3):
        bench.capture.offer(_raw(f"ex_{number}"))

    bench.flush()

    assert [item.exchange_id for item in bench.sink.exchanges] == ["ex_0", "ex_1", "ex_2"]
    assert bench.metric("captures_kept") == 3
    assert bench.sink.closed


def test_the_newest_is_dropped_when_too_many_wait(make_bench: MakeBench) -> None:
    bench = make_bench(max_pending=2)
    for number in range(5):
        bench.capture.offer(_raw(f"ex_{number}"))

    bench.flush()

    assert [item.exchange_id for item in bench.sink.exchanges] == ["ex_0", "ex_1"]
    assert bench.metric("captures_lost", reason="queue_full") == 3


def test_a_defect_in_reading_one_capture_costs_that_one_only(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken_once(raw: RawCapture, turns: Turns | None) -> Exchange:
        if raw.exchange_id == "ex_0":
            raise ZeroDivisionError("what the user wrote")
        return assemble(raw, turns)

    monkeypatch.setattr("sidecar.capture.recorder.assemble", broken_once)
    bench = make_bench()
    for number in range(3):
        bench.capture.offer(_raw(f"ex_{number}"))

    bench.flush()

    assert [item.exchange_id for item in bench.sink.exchanges] == ["ex_1", "ex_2"]
    assert bench.metric("captures_lost", reason="unreadable") == 1
    logged = capsys.readouterr()
    assert "ZeroDivisionError" in logged.out + logged.err
    assert "what the user wrote" not in logged.out + logged.err


def test_an_exchange_that_must_not_be_learned_from_is_kept_and_counted(
    make_bench: MakeBench,
) -> None:
    bench = make_bench()
    bench.capture.offer(_raw(reply=(REPLY.replace(b"[7]", b"null"),)))

    bench.flush()

    assert bench.sink.exchanges[0].untrainable_reason == "ids_missing"
    assert bench.metric("exchanges_untrainable", reason="ids_missing") == 1


def test_spans_are_made_from_the_record_and_where_none_is_kept_too(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.capture.offer(_raw())
    bench.capture.offer(_raw(reply=None))

    bench.flush()

    spans = sorted(bench.spans.get_finished_spans(), key=lambda span: span.name)
    assert [span.name for span in spans] == ["capture", "chat m", "chat m"]
    assert len(bench.sink.exchanges) == 1
    for request in spans[1:]:
        assert (request.start_time, request.end_time) == (1_000 * 10**9, 1_002 * 10**9)
        attributes = dict(request.attributes or {})
        assert attributes["gen_ai.response.time_to_first_chunk"] == 0.5


class SlowSink:
    """A sink that is stuck in its first batch until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def write(self, exchanges: Sequence[Exchange]) -> int:
        self.entered.set()
        assert self.go_on.wait(10)
        return len(exchanges)

    def close(self) -> None: ...


def test_what_a_stop_does_not_wait_for_is_counted_once(make_bench: MakeBench) -> None:
    sink = SlowSink()
    bench = make_bench(sink, flush_interval_s=0.001)
    bench.capture.offer(_raw("ex_0"))
    bench.capture.start()
    assert sink.entered.wait(10)
    for number in range(1, 4):  # behind the batch that is stuck
        bench.capture.offer(_raw(f"ex_{number}"))
    bench.capture.offer(_raw(reply=None))  # only its span is wanted

    assert not bench.capture.stop(0.01)

    assert bench.metric("captures_lost", reason="stopped") == 4
    bench.capture.offer(_raw("ex_9"))
    assert bench.metric("captures_lost", reason="stopped") == 5
    sink.go_on.set()
    bench.capture._thread.join(10)
    assert bench.metric("captures_kept") == 0, "they are counted as lost already"
    assert bench.metric("captures_lost", reason="stopped") == 5


def test_one_exchange_that_cannot_be_written_costs_that_one_only(make_bench: MakeBench) -> None:
    class PickySink(MemorySink):
        def write(self, exchanges: Sequence[Exchange]) -> int:
            if any(item.exchange_id == "ex_1" for item in exchanges):
                raise OverflowError("no room for it in msgpack")
            return super().write(exchanges)

    bench = make_bench(PickySink())
    for number in range(3):
        bench.capture.offer(_raw(f"ex_{number}"))

    bench.flush()

    assert [item.exchange_id for item in bench.sink.exchanges] == ["ex_0", "ex_2"]
    assert bench.metric("captures_lost", reason="unwritable") == 1
    assert bench.metric("captures_kept") == 2


def test_batches_are_cut_by_their_bytes(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Counting(MemorySink):
        def write(self, exchanges: Sequence[Exchange]) -> int:
            sizes.append(len(exchanges))
            return super().write(exchanges)

    monkeypatch.setattr("sidecar.capture.recorder.BATCH_BYTES", 2 * _raw().size)
    bench = make_bench(Counting())
    for number in range(5):
        bench.capture.offer(_raw(f"ex_{number}"))

    bench.flush()

    assert sizes == [2, 2, 1]


def test_the_memory_of_what_was_written_is_free_again(make_bench: MakeBench) -> None:
    bench = make_bench(max_pending_bytes=2 * _raw().size)
    reply_buffer = bench.capture.reply_buffer()
    reply_buffer.add(REPLY)
    assert reply_buffer.size == len(REPLY)
    bench.capture.offer(_raw(reply=reply_buffer.take()))
    bench.flush()

    assert bench.capture.held.refuse(0, 2 * _raw().size) is None
    assert bench.metrics.registry.get_sample_value("sidecar_capture_pending_bytes") == 0


@pytest.mark.parametrize("seed", range(20))
def test_kept_and_lost_are_all_that_was_offered(
    make_bench: MakeBench, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults at random, in the reading and in the sink, and a queue that is too short."""
    rng = random.Random(seed)

    class Unlucky(MemorySink):
        def write(self, exchanges: Sequence[Exchange]) -> int:
            fault = rng.choice([None, None, OutboxError("locked", ""), OverflowError(), "full"])
            if isinstance(fault, Exception):
                raise fault
            self.room = len(self.exchanges) + rng.randrange(3) if fault else 1_000_000
            return super().write(exchanges)

    monkeypatch.setattr("sidecar.capture.recorder.BATCH", 4)
    bench = make_bench(Unlucky(), max_pending=20)
    bad = (REPLY[:50], b"\xff", b"[]", b"")
    offered = rng.randrange(10, 30)
    for number in range(offered):
        bench.capture.offer(_raw(f"ex_{number}", reply=(rng.choice((REPLY, *bad)),)))
        bench.capture.offer(_raw(reply=None))
    bench.flush()

    lost = sum(
        sample.value
        for family in bench.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "sidecar_captures_lost_total"
    )
    assert bench.metric("captures_kept") == len(bench.sink.exchanges)
    assert bench.metric("captures_kept") + lost == offered


def test_a_reply_of_another_model_raises_the_alarm(make_bench: MakeBench) -> None:
    bench = make_bench()
    for number in range(3):
        bench.capture.offer(_raw(f"ex_{number}", reply=(REPLY.replace(b'"m"', b'"other"'),)))

    bench.flush()

    assert bench.metric("model_mismatch") == 3
    assert bench.metric("exchanges_untrainable", reason="model_mismatch") == 3

"""The limit on the slow-down of users, kept over real sockets against a fake vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ingest.vllm.load import LoadLimits
from ingest.vllm.sampler import SampledAnswer, SampleRequest, VllmSampler
from ingest.vllm.throttle import MIN_POINTS
from ingest.vllm.watch import ReplicaSampler
from support.fake_vllm import FakeVllm, SeenRequest, Step, load_metrics, recording

ANSWER = recording("chat.asked")
ASK = SampleRequest(
    upstream_model="smollm2-135m",
    chat={"messages": [{"role": "user", "content": "hi"}]},
    temperature=1.0,
    max_tokens=4,
)


class Engine:
    """Counters of an engine whose step takes 10 ms and `request_s` for each running request."""

    def __init__(self, request_s: float) -> None:
        self.request_s = request_s
        self.steps = self.tokens = self.tokens_s = 0.0

    def page(self, running: int) -> bytes:
        """Decode 50 steps. Returns: what vLLM's metrics page says then."""
        each_s = 0.010 + self.request_s * running
        self.steps += 50
        self.tokens += 50 * running
        self.tokens_s += 50 * running * each_s
        work = (
            f'vllm:inter_token_latency_seconds_count{{engine="0"}} {self.tokens}\n'
            f'vllm:inter_token_latency_seconds_sum{{engine="0"}} {self.tokens_s}\n'
            f'vllm:iteration_tokens_total_count{{engine="0"}} {self.steps}\n'
            'vllm:request_prefill_time_seconds_count{engine="0"} 0\n'
            'vllm:request_prefill_time_seconds_sum{engine="0"} 0\n'
        )
        return load_metrics(running=running) + work.encode()


class Rig:
    """A fake vLLM that holds its answers until `go` is set."""

    def __init__(self, vllm: FakeVllm, sampler: VllmSampler, max_slowdown: float) -> None:
        self.vllm = vllm
        self.go = asyncio.Event()
        limits = LoadLimits(requests=48, kv_cache_usage=0.8, max_slowdown=max_slowdown)
        self.engine = ReplicaSampler({"http://a": sampler}, limits, interval_s=0.0)

    async def learn(self, engine: Engine) -> None:
        """Let users come and go until it is known what a request costs; four of them stay."""
        for number in range(MIN_POINTS + 2):
            self.vllm.metrics = engine.page(1 + number % 6)
            await self.engine.is_open()
        self.vllm.metrics = engine.page(4)

    async def sample(self) -> SampledAnswer:
        return await self.engine.sample(ASK)


@asynccontextmanager
async def rig(max_slowdown: float) -> AsyncIterator[Rig]:
    vllm = FakeVllm(script=lambda _: [])
    await vllm.start()
    sampler = VllmSampler(f"http://127.0.0.1:{vllm.port}", timeout_s=30.0)
    made = Rig(vllm, sampler, max_slowdown)

    def script(_: SeenRequest) -> list[Step]:
        return [made.go, ANSWER.reply]

    vllm.script = script
    try:
        yield made
    finally:
        await sampler.aclose()
        await vllm.stop()


async def test_no_more_candidates_are_in_flight_than_the_limit_allows() -> None:
    async with rig(0.2) as made, asyncio.timeout(60):
        # beside the 2 to 4 users that are not ours: 20% of (10 + 2..4) ms are 2.4 to 2.8 of 1 ms
        await made.learn(Engine(request_s=0.001))
        tasks = [asyncio.create_task(made.sample()) for _ in range(8)]
        while len(made.vllm.requests) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # time for others to break the limit in

        assert len(made.vllm.requests) == 2

        made.go.set()
        answers = await asyncio.gather(*tasks)

        assert len(answers) == len(made.vllm.requests) == 8

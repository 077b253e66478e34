"""vLLM slow, resetting, half-closing, talking rubbish, sending 10 MB in one event. A request that
vLLM alone would serve is served; any other fails as vLLM itself would fail. And every request has
its place in the accounts."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from support.fake_vllm import FakeVllm, SeenRequest, Step
from support.proxy_kit import StartProxy, Wire
from support.traffic import Faults

Recorded = Callable[[str], bytes]
BAD: dict[str, list[Step]] = {
    "resets before a byte": ["reset"],
    "resets in the head": [b"HTTP/1.1 200 OK\r\ncontent-", "reset"],
    "resets in the body": [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", "reset"],
    "closes before a byte": ["close"],
    "closes in the body": [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", "close"],
    "half-closes before a byte": ["half-close"],
    "half-closes in the body": [b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", "half-close"],
    "talks rubbish": [b"\x16\x03\x01\x00\x00 no http\r\n\r\n"],
    "talks rubbish in chunks": [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    "sends a head without end": [b"HTTP/1.1 200 OK\r\n" + b"x: 1\r\n" * 100_000],
}


@pytest.mark.parametrize("kind", BAD)
async def test_only_the_requests_that_vllm_fails_fail(
    kind: str,
    start_proxy: StartProxy,
    fake_vllm: FakeVllm,
    recorded: Recorded,
    wire: Wire,
    faults: Faults,
) -> None:
    """Every third request meets the fault, on whatever connection it goes."""
    whole = wire.whole_reply(recorded("whole_reply_asked.json"))

    def script(seen: SeenRequest) -> list[Step]:
        number = int(json.loads(seen.body)["messages"][0]["content"].split()[1])
        failed[number] = number % 3 == 0
        return BAD[kind] if failed[number] else [whole]

    failed: dict[int, bool] = {}
    fake_vllm.script = script
    running = await start_proxy()
    traffic = faults.Traffic(running.port)

    outcomes = {number: await traffic.one() for number in range(1, 31)}

    assert {n: o for n, o in outcomes.items() if n % 3 and o != "200"} == {}
    assert {o for n, o in outcomes.items() if n % 3 == 0} <= {"502", "broken"}
    accounts = await faults.accounts(running, 30)
    assert accounts.lost == {}
    assert accounts.kept == 30
    outcomes_kept = [exchange.outcome for exchange in await running.captured(30)]
    assert (outcomes_kept.count("ok"), outcomes_kept.count("upstream_error")) == (20, 10)


async def test_a_vllm_that_closes_after_each_reply_serves_all(
    start_proxy: StartProxy, fake_vllm: FakeVllm, recorded: Recorded, wire: Wire, faults: Faults
) -> None:
    """Without `Connection: close`, so that each kept connection is found dead."""
    whole = wire.whole_reply(recorded("whole_reply_asked.json"))
    fake_vllm.script = lambda _: [whole, "close"]
    running = await start_proxy()

    async with faults.traffic(running, workers=8) as traffic:
        await traffic.more(400)

    assert set(traffic.statuses) == {"200"}
    assert (await faults.accounts(running, traffic.sent)).kept == traffic.sent

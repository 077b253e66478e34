"""Sampling on vLLMs that say how busy they are, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from ingest.sampling.worker import SamplingWorker
from ingest.vllm.sampler import PRIORITY
from ingest.vllm.watch import open_replicas
from sidecar.settings import Groups
from support.fake_vllm import FakeVllm, load_metrics, recording, whole_reply
from support.ingest_kit import Kit

ANSWER = recording("chat.asked")
MODEL = "smollm2-135m"
PROMPT = tuple(json.loads(ANSWER.body)["prompt_token_ids"])
ROOM = load_metrics(running=8, kv_cache=0.5)


@pytest.fixture
async def vllms() -> AsyncIterator[list[FakeVllm]]:
    """Two vLLMs with room, each with a recorded answer."""
    fakes = [FakeVllm(script=lambda _: [ANSWER.reply], metrics=ROOM) for _ in range(2)]
    for fake in fakes:
        await fake.start()
    yield fakes
    for fake in fakes:
        await fake.stop()


async def sample_once(kit: Kit, vllms: list[FakeVllm]) -> int:
    groups = Groups(size=4)
    urls = [f"http://127.0.0.1:{fake.port}" for fake in vllms]
    engine = open_replicas(urls, None, groups, timeout_s=30.0)
    try:
        return await SamplingWorker(kit.database, engine, engine, groups, model=MODEL).step()
    finally:
        await engine.aclose()


def priorities(vllm: FakeVllm) -> list[int | None]:
    return [json.loads(one.body).get("priority") for one in vllm.requests]


@pytest.mark.parametrize(
    "busy",
    [
        load_metrics(running=8, waiting=40, kv_cache=0.99),
        load_metrics(running=8, waiting=1),
        load_metrics(running=8, kv_cache=0.99),
        load_metrics(running=8, kv_cache=float("nan")),
        load_metrics(running=8).replace(b"kv_cache_usage_perc", b"kv_cache_of_next_year"),
        b"",
    ],
    ids=["overloaded", "one waits", "the cache is full", "NaN", "no metric", "no metrics"],
)
async def test_candidates_go_to_the_vllm_that_has_room_and_to_none_that_users_need(
    kit: Kit, vllms: list[FakeVllm], busy: bytes
) -> None:
    kit.choose(kit.exchange("e1", prompt_token_ids=PROMPT))
    vllms[0].metrics = vllms[1].metrics = busy
    assert await sample_once(kit, vllms) == 0
    assert [vllm.requests for vllm in vllms] == [[], []]

    vllms[1].metrics = ROOM
    assert await sample_once(kit, vllms) == 1

    assert vllms[0].requests == []
    assert priorities(vllms[1]) == [PRIORITY] * 4  # whether it takes one, and three candidates


async def test_a_group_that_vllm_refuses_costs_it_one_request(
    kit: Kit, vllms: list[FakeVllm]
) -> None:
    (group_id,) = kit.choose(kit.exchange("e1", prompt_token_ids=PROMPT))
    for vllm in vllms:
        vllm.play(whole_reply(b'{"error": {"message": "too long"}}', "400 Bad Request"))

    for _ in range(3):
        await sample_once(kit, vllms)

    assert kit.row(group_id).reason == "request_refused"
    asked = [number for vllm in vllms for number in priorities(vllm)]
    assert asked == [PRIORITY, None]  # the question, and the candidate


async def test_a_vllm_that_hangs_over_its_load_holds_up_no_other_for_good(
    kit: Kit, vllms: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.vllm.sampler.METRICS_TIMEOUT_S", 0.05)
    kit.choose(kit.exchange("e1", prompt_token_ids=PROMPT))
    vllms[0].metrics = None  # the script answers
    vllms[0].play(asyncio.Event())

    assert await sample_once(kit, vllms) == 1

    assert len(vllms[0].requests) == 1

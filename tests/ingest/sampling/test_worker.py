from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import pytest
from sqlalchemy.orm import Session

from ingest.errors import (
    AdapterGoneError,
    EngineBusyError,
    EngineDownError,
    RequestRefusedError,
    SamplingError,
)
from ingest.grouping.request import LogprobsMode
from ingest.judge_watch import JudgeState, write_judge_state
from ingest.sampling.worker import SamplingWorker
from ingest.store.groups import append_answers, claim_groups
from ingest.vllm.load import LoadLimits
from ingest.vllm.sampler import LoadProbe, Sampler, SampleRequest
from ingest.vllm.watch import MAX_KV_CACHE_USAGE, MAX_RUNNING_REQUESTS, ReplicaSampler
from sidecar.conditions import Condition, read
from sidecar.errors import StoreError
from sidecar.records import Sampling
from sidecar.settings import Groups
from sidecar.store.database import Database
from sidecar.store.models import AliasRow
from support.clock import Clock
from support.fake_load import LoadedSampler
from support.ingest_kit import Kit

NOON = 1_795_262_400.0  # 2026-11-21 12:00 UTC


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


Make = Callable[..., SamplingWorker]
"""make(sampler, load, mode=, probe_interval_s=, **fields of the groups section)."""


@pytest.fixture
def make(kit: Kit, clock: Clock) -> Make:
    def worker(
        sampler: Sampler,
        load: LoadProbe | None = None,
        *,
        mode: LogprobsMode = "processed_logprobs",
        probe_interval_s: float = 0.5,
        most_running: int = MAX_RUNNING_REQUESTS,
        **settings: Any,
    ) -> SamplingWorker:
        values = {"size": 4, "concurrency": 16, **settings}
        groups = Groups(**values)
        replica = LoadedSampler(sampler, load or kit.ScriptedLoad())
        limits = LoadLimits(requests=most_running, kv_cache_usage=MAX_KV_CACHE_USAGE)
        engine = ReplicaSampler({"http://a": replica}, limits, interval_s=probe_interval_s)
        return SamplingWorker(
            kit.database,
            engine,
            engine,
            groups,
            model="smollm",
            logprobs_mode=mode,
            now=clock,
        )

    return worker


def told(kit: Kit) -> Condition | None:
    """What the store says of sampling."""
    with kit.database.read() as session:
        return read(session, "sampling")


async def test_a_group_is_completed_from_its_adapter(kit: Kit, make: Make) -> None:
    kit.route(champion="smollm--v2")
    sampling = Sampling(temperature=0.7, max_tokens=16)
    (group_id,) = kit.choose(kit.exchange("e1", adapter="smollm--v2", sampling=sampling))
    sampler = kit.FakeSampler("a", "b", "c")

    assert await make(sampler).step() == 1

    group = kit.group(group_id)
    assert [a.message for a in group.answers] == [kit.message(c) for c in ("served", *"abc")]
    assert [a.origin for a in group.answers] == ["served", "sampled", "sampled", "sampled"]
    assert {a.temperature for a in group.answers} == {0.7}
    assert all(a.untrainable_reason is None for a in group.answers)
    assert group.answers[1].token_ids == (7, 8, 9, 10, 2)
    assert kit.row(group_id).status == "sampled"
    assert (
        sampler.requests
        == [
            SampleRequest(
                upstream_model="smollm--v2",
                chat={
                    "model": "smollm",
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_tokens": 16,
                },
                temperature=0.7,
                max_tokens=16,
            )
        ]
        * 3
    )
    assert kit.counts("candidate") == {"kept": 3}
    assert kit.counts("sampling") == {"sampled": 1}
    assert kit.counts("sampling_tokens") == {"2026-11-21": 15}


@pytest.mark.parametrize(
    ("mode", "temperature"), [("processed_logprobs", 0.3), ("raw_logprobs", 1.0)]
)
async def test_candidates_have_the_requests_temperature_where_that_can_teach(
    kit: Kit, make: Make, mode: LogprobsMode, temperature: float
) -> None:
    kit.choose(kit.exchange("e1", sampling=Sampling(temperature=0.3)), logprobs_mode=mode)
    sampler = kit.FakeSampler()

    await make(sampler, mode=mode).step()

    asked = {(call.upstream_model, call.temperature) for call in sampler.requests}
    assert asked == {("smollm", temperature)}  # the base is asked for by its public name


async def test_free_answers_are_not_sampled_again(kit: Kit, make: Make) -> None:
    choices = tuple(kit.choice(f"c{n}", index=n) for n in range(3))
    full = tuple(kit.choice(f"c{n}", index=n) for n in range(4))
    kit.choose(kit.exchange("e1", choices=choices), kit.exchange("e2", choices=full))
    sampler = kit.FakeSampler()

    assert await make(sampler).step() == 2

    assert len(sampler.requests) == 1


async def test_another_prompt_is_dropped_and_counted(kit: Kit, make: Make) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))

    assert await make(kit.FakeSampler(prompt_token_ids=(1, 9, 9, 5))).step() == 0

    row = kit.row(group_id)
    assert (row.status, row.reason) == ("set_aside", "prompt_mismatch")
    assert len(kit.group(group_id).answers) == 1
    assert kit.counts("candidate") == {"prompt_mismatch": 3}
    assert kit.counts("sampling_tokens") == {"2026-11-21": 15}  # dropped, and paid for


async def test_an_adapter_that_is_gone_ends_its_group(kit: Kit, make: Make) -> None:
    kit.route(champion="v2")
    (group_id,) = kit.choose(kit.exchange("e1", adapter="v2"))
    kit.route(champion="v3")  # and v2 is not kept as the one before
    sampler = kit.FakeSampler(AdapterGoneError("404"))

    await make(sampler).step()

    assert kit.row(group_id).reason == "adapter_gone"
    assert kit.counts("sampling") == {"adapter_gone": 1}
    assert len(sampler.requests) == 1


async def test_a_base_that_is_not_found_costs_no_group(kit: Kit, make: Make) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))

    await make(kit.FakeSampler(AdapterGoneError("404"))).step()

    assert kit.row(group_id).status == "sampling"


async def test_the_rest_of_a_group_of_answers_alike_is_spared(kit: Kit, make: Make) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"), size=8)
    sampler = kit.FakeSampler("served")

    assert await make(sampler, size=8).step() == 0

    assert (kit.row(group_id).status, kit.row(group_id).reason) == (
        "set_aside",
        "identical_answers",
    )
    assert len(sampler.requests) == 3
    assert kit.counts("candidate") == {"kept": 3, "spared": 4}
    assert kit.counts("sampling_tokens") == {"2026-11-21": 15}


async def test_while_vllm_is_down_the_group_waits_at_no_cost(
    kit: Kit, make: Make, clock: Clock
) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    worker = make(kit.FakeSampler(EngineDownError("refused")))

    for _ in range(8):
        assert await worker.step() == 0

    row = kit.row(group_id)
    assert (row.status, row.sampling_attempts, row.lease_until) == ("sampling", 0, 0.0)
    assert await make(kit.FakeSampler()).step() == 1


async def test_failed_candidates_are_tried_again_later(kit: Kit, make: Make, clock: Clock) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    sampler = kit.FakeSampler("a", SamplingError("lengths_differ"), "b")
    worker = make(sampler)

    assert await worker.step() == 0
    assert len(kit.group(group_id).answers) == 3
    assert await worker.step() == 0  # left alone for 5 s
    clock.now += 5.0
    assert await worker.step() == 1

    assert len(sampler.requests) == 4
    assert kit.counts("candidate") == {"kept": 3, "failed": 1}


async def test_so_many_candidates_are_in_flight(kit: Kit, make: Make) -> None:
    kit.choose(*(kit.exchange(f"e{n}") for n in range(9)))
    sampler = kit.FakeSampler()
    sampler.hold = asyncio.Event()

    step = asyncio.create_task(make(sampler, concurrency=5).step())
    async with asyncio.timeout(60):
        while sampler.in_flight < 5:
            await asyncio.sleep(0.001)
        firsts, sampler.hold = sampler.hold, asyncio.Event()
        firsts.set()
        while len(sampler.requests) < 10:
            await asyncio.sleep(0.001)
    sampler.hold.set()

    assert await step == 5  # five groups, of which nine are there, keep five slots busy
    assert sampler.most_in_flight == 5
    assert len(sampler.requests) == 15


async def test_a_group_that_vllm_refuses_costs_one_request(
    kit: Kit, make: Make, clock: Clock
) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    sampler = kit.FakeSampler(RequestRefusedError("status 400"))
    worker = make(sampler, size=8)

    for _ in range(6):
        await worker.step()
        clock.now += 300.0

    assert len(sampler.requests) == 1
    assert (kit.row(group_id).status, kit.row(group_id).reason) == ("set_aside", "request_refused")
    assert kit.counts("candidate") == {"refused": 1}


@pytest.mark.parametrize("role", ["canary", "previous"])
async def test_an_adapter_that_vllm_lacks_is_waited_for(
    kit: Kit, make: Make, clock: Clock, role: str
) -> None:
    kit.route(champion="v2")
    (group_id,) = kit.choose(kit.exchange("e1", adapter="v2"))
    if role == "previous":
        with kit.database.write() as session:
            session.add(AliasRow(model="smollm", alias="previous", adapter="v2", generation=1))
    kit.route(champion="v3", canary="v2" if role == "canary" else None)
    restarted = kit.FakeSampler(AdapterGoneError("404"))
    worker = make(restarted)

    for _ in range(7):
        assert await worker.step() == 0
        assert await worker.step() == 0  # left alone for 5 s
        clock.now += 5.0

    assert len(restarted.requests) == 7
    row = kit.row(group_id)
    assert (row.status, row.sampling_attempts) == ("sampling", 0)
    assert kit.counts("candidate") == {"adapter_away": 7}
    assert await make(kit.FakeSampler()).step() == 1


async def test_a_busy_vllm_is_left_alone_as_long_as_it_says(
    kit: Kit, make: Make, clock: Clock
) -> None:
    ids = kit.choose(kit.exchange("e1"), kit.exchange("e2"))
    busy = kit.FakeSampler(EngineBusyError("status 429", headers={"retry-after": "20"}))
    worker = make(busy, concurrency=1)  # one group at a time

    for _ in range(8):  # more than the five rounds after which a group has failed
        await worker.step()
        clock.now += 19.9
        await worker.step()
        clock.now += 0.1

    assert len(busy.requests) == 8  # the other group is not sent in place of the one that waits
    assert {(kit.row(one).status, kit.row(one).sampling_attempts) for one in ids} == {
        ("sampling", 0)
    }
    assert kit.counts("candidate") == {"engine_busy": 8}
    assert await make(kit.FakeSampler()).step() == 2


@pytest.mark.parametrize(
    ("headers", "wait_s"), [({}, 5.0), ({"retry-after": "86400"}, 300.0)], ids=["unsaid", "a day"]
)
async def test_a_wait_that_vllm_does_not_state_is_short_and_a_long_one_is_cut(
    kit: Kit, make: Make, clock: Clock, headers: dict[str, str], wait_s: float
) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))

    await make(kit.FakeSampler(EngineBusyError("status 429", headers=headers))).step()

    assert kit.row(group_id).lease_until == NOON + wait_s


async def test_users_who_come_meanwhile_hold_the_rest_back(kit: Kit, make: Make) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    sampler = kit.FakeSampler()
    # Measured before the claim and before each candidate; ours in flight are not users'.
    load = kit.ScriptedLoad(0, 0, 0, 12, 0)
    worker = make(sampler, load, most_running=8, probe_interval_s=0.0)

    assert await worker.step() == 0

    assert kit.counts("candidate") == {"kept": 2, "held_back": 1}
    assert (kit.row(group_id).status, kit.row(group_id).sampling_attempts) == ("sampling", 0)
    assert await worker.step() == 0  # once is not enough
    assert await worker.step() == 1
    assert len(sampler.requests) == 3


async def test_an_engine_of_unknown_load_gets_none(kit: Kit, make: Make, clock: Clock) -> None:
    kit.choose(kit.exchange("e1"))
    sampler = kit.FakeSampler()
    load = kit.ScriptedLoad(SamplingError("no metrics"))
    worker = make(sampler, load, probe_interval_s=0.0)

    assert await worker.step() == 0
    clock.now += 60.0
    assert await worker.step() == 0

    assert sampler.requests == []
    why = told(kit)
    assert why is not None
    assert (why.since, why.message) == (
        NOON,
        "no candidates are sampled: the load of vLLM is not known: no metrics",
    )
    assert kit.counts("sampling_waits") == {"load_unknown": 1}
    load.users = [99]  # known, and no room: that is no trouble
    assert await worker.step() == 0
    assert told(kit) is None


async def test_users_who_leave_no_room_are_told_of(kit: Kit, make: Make, clock: Clock) -> None:
    load, sampler = kit.ScriptedLoad(99), kit.FakeSampler()
    worker = make(sampler, load, probe_interval_s=0.0)
    for _ in range(2):  # no group waits: nothing is lost
        await worker.step()
        clock.now += 600.0
    assert told(kit) is None
    kit.choose(kit.exchange("e1"))

    await worker.step()

    trouble = told(kit)
    assert trouble is not None
    assert "users have left no room for candidates in 10 min" in trouble.message
    assert kit.counts("sampling_waits") == {"no_room": 1}
    load.users = [0]
    while not sampler.requests:  # the gate opens after a few measurements
        await worker.step()
    assert told(kit) is None
    load.users = [99]
    kit.choose(kit.exchange("e2"))
    await worker.step()
    clock.now += 599.0
    await worker.step()
    assert told(kit) is None


@pytest.mark.both_stores
async def test_a_spent_day_waits_for_the_next(kit: Kit, make: Make, clock: Clock) -> None:
    kit.choose(*(kit.exchange(f"e{n}") for n in range(2)))
    settings = {"tokens_per_day": 15, "concurrency": 1}
    assert await make(kit.FakeSampler(), **settings).step() == 1  # 3 x 5

    restarted = make(kit.FakeSampler(), **settings)
    assert await restarted.step() == 0
    spent = told(kit)
    assert spent is not None
    assert spent.until == NOON + 12 * 3600
    why = "groups.tokens_per_day is spent: 15 candidate tokens today"
    assert spent.message.endswith(f": {why}")
    clock.now = NOON + 12 * 3600 - 1
    assert await restarted.step() == 0
    clock.now = NOON + 12 * 3600
    assert await restarted.step() == 1

    assert kit.counts("sampling_tokens") == {"2026-11-21": 15, "2026-11-22": 15}
    assert kit.counts("sampling_waits") == {"groups.tokens_per_day": 1}


def judge_is(kit: Kit, state: Literal["unknown", "works", "away", "rejected"]) -> None:
    with kit.database.write() as session:
        known = JudgeState(state=state, since=NOON, error="judge_rejected: 401")
        write_judge_state(session, known, now=NOON)


@pytest.mark.both_stores
async def test_nothing_is_sampled_for_a_judge_with_a_wrong_key(kit: Kit, make: Make) -> None:
    kit.choose(kit.exchange("e1"))
    sampler = kit.FakeSampler()
    sampling = make(sampler)
    judge_is(kit, "rejected")

    assert [await sampling.step() for _ in range(3)] == [0, 0, 0]

    assert sampler.requests == []
    why = told(kit)
    assert why is not None
    assert why.message.endswith(": the judge rejects every question: judge_rejected: 401")
    assert kit.counts("sampling_waits") == {"judge_rejected": 1}

    judge_is(kit, "works")
    assert await sampling.step() == 1
    assert told(kit) is None
    judge_is(kit, "rejected")
    assert await sampling.step() == 0
    assert kit.counts("sampling_waits") == {"judge_rejected": 2}


async def test_sampling_waits_while_the_judge_is_asked_first(kit: Kit, make: Make) -> None:
    kit.choose(kit.exchange("e1"))
    sampling = make(kit.FakeSampler())
    judge_is(kit, "unknown")

    assert await sampling.step() == 0

    assert kit.counts("sampling_waits") == {}
    judge_is(kit, "works")
    assert await sampling.step() == 1


@pytest.mark.both_stores
async def test_for_a_judge_that_is_away_16_groups_are_completed(kit: Kit, make: Make) -> None:
    kit.choose(*(kit.exchange(f"e{number:02}") for number in range(20)))
    sampling = make(kit.FakeSampler(), concurrency=1)
    judge_is(kit, "away")

    done = [await sampling.step() for _ in range(18)]

    assert done == [1] * 16 + [0, 0]
    assert kit.counts("sampling") == {"sampled": 16}
    assert kit.counts("sampling_waits") == {"judge_away": 1}


async def test_answers_of_a_worker_thought_dead_are_late(kit: Kit, make: Make) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    sampler = kit.FakeSampler()
    sampler.hold = asyncio.Event()
    slow = asyncio.create_task(make(sampler).step())
    await sampler.was_asked.wait()
    with kit.database.write() as session:  # the other one, after the lease
        answers = list(kit.group(group_id).answers) * 3
        append_answers(session, group_id, answers, size=4)
    sampler.hold.set()

    await slow

    assert len(kit.group(group_id).answers) == 4
    assert kit.counts("candidate") == {"late": 3}


async def test_a_stopped_worker_gives_its_groups_back(kit: Kit, make: Make, clock: Clock) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    sampler = kit.FakeSampler()
    sampler.hold = asyncio.Event()
    stop = asyncio.Event()
    running = asyncio.create_task(make(sampler).run(stop))
    await sampler.was_asked.wait()
    assert kit.row(group_id).lease_until > clock.now

    stop.set()
    await running

    assert sampler.in_flight == 0
    assert kit.row(group_id).lease_until == 0.0
    with kit.database.write() as session:
        claimed = claim_groups(session, "sampling", limit=1, now=clock.now, lease_s=1.0)
    assert claimed == [group_id]


async def test_samples_are_stored_when_the_store_is_back(
    kit: Kit, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group_id,) = kit.choose(kit.exchange("e1"))
    worker = make(kit.FakeSampler())
    write, refusals = Database.write, iter([False, True])  # claim, then the first try to store

    def sometimes(database: Database, **options: bool) -> AbstractContextManager[Session]:
        if next(refusals, False):
            raise StoreError("locked")
        return write(database, **options)

    monkeypatch.setattr(Database, "write", sometimes)

    assert await worker.step() == 1

    monkeypatch.undo()
    assert kit.row(group_id).status == "sampled"
    assert kit.counts("candidate") == {"kept": 3}

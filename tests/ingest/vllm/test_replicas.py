"""Candidates from several replicas: one is used, the next when it is away."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from ingest.errors import AdapterGoneError, EngineDownError, SamplingError
from ingest.vllm.replicas import ReplicaSampler
from ingest.vllm.sampler import SampledAnswer, SampleRequest
from support.ingest_kit import Kit

ASK = SampleRequest(upstream_model="m", chat={}, temperature=1.0, max_tokens=4)


class FakeReplica:
    """Answers under its own name, or raises `error`."""

    def __init__(self, kit: Kit, name: str) -> None:
        self.error: Exception | None = None
        self._sampler = kit.FakeSampler(f"by {name}")
        self._load = kit.ScriptedLoad(len(name))
        self.asked = 0

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return await self._sampler.sample(request)

    async def load(self) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return await self._load.load()


@pytest.fixture
def replicas(kit: Kit) -> dict[str, FakeReplica]:
    return {name: FakeReplica(kit, name) for name in ("a", "bb", "ccc")}


async def said(sampler: ReplicaSampler) -> str:
    return (await sampler.sample(ASK)).message.decode()


async def test_the_first_is_asked_while_it_answers(replicas: dict[str, FakeReplica]) -> None:
    sampler = ReplicaSampler(replicas)

    assert "by a" in await said(sampler)
    assert (await sampler.load()).running == 1
    assert [one.asked for one in replicas.values()] == [2, 0, 0]


async def test_when_it_is_away_the_next_takes_its_place_and_keeps_it(
    replicas: dict[str, FakeReplica],
) -> None:
    sampler = ReplicaSampler(replicas)
    replicas["a"].error = EngineDownError("connection refused")

    with capture_logs() as logs:
        assert (await sampler.load()).running == 2
    assert "by bb" in await said(sampler)

    assert [one.asked for one in replicas.values()] == [1, 2, 0]
    assert [(line["event"], line["replica"]) for line in logs] == [("sampling_moved", "bb")]
    replicas["a"].error = None
    replicas["bb"].error = EngineDownError("connection refused")
    replicas["ccc"].error = EngineDownError("connection refused")
    assert "by a" in await said(sampler)


async def test_a_load_that_cannot_be_told_moves_on_too(replicas: dict[str, FakeReplica]) -> None:
    sampler = ReplicaSampler(replicas)
    replicas["a"].error = SamplingError("no reply in time")

    assert (await sampler.load()).running == 2


async def test_an_adapter_that_one_replica_lacks_is_asked_of_the_next_without_moving(
    replicas: dict[str, FakeReplica],
) -> None:
    sampler = ReplicaSampler(replicas)
    replicas["a"].error = AdapterGoneError("404")

    assert "by bb" in await said(sampler)
    replicas["a"].error = None
    assert "by a" in await said(sampler)


async def test_a_bad_answer_is_not_asked_of_another(replicas: dict[str, FakeReplica]) -> None:
    sampler = ReplicaSampler(replicas)
    replicas["a"].error = SamplingError("status 400")

    with pytest.raises(SamplingError, match="400"):
        await said(sampler)
    assert replicas["bb"].asked == 0


async def test_when_all_are_away_the_first_one_s_error_is_raised(
    replicas: dict[str, FakeReplica],
) -> None:
    sampler = ReplicaSampler(replicas)
    for name, replica in replicas.items():
        replica.error = EngineDownError(name)

    with pytest.raises(EngineDownError, match=r"^a$"):
        await sampler.load()

"""The users' load on an engine, in memory: the `LoadProbe` and the `Room` for all tests.
`tests/rooms/test_load_contract.py` holds them to the contracts of the real ones."""

from __future__ import annotations

from dataclasses import dataclass

from ingest.vllm.load import EngineLoad, LoadLimits
from ingest.vllm.sampler import LoadProbe, SampledAnswer, Sampler, SampleRequest

LIMITS = LoadLimits(requests=8, kv_cache_usage=0.8)
"""Users' requests and a share of the KV cache for tests that have no settings."""


class ScriptedLoad:
    """Says the load that it was given, or the number of users' running requests; the last one
    again and again."""

    def __init__(self, *users: int | EngineLoad | Exception) -> None:
        self.users = list(users) or [0]

    async def load(self) -> EngineLoad:
        users = self.users.pop(0) if len(self.users) > 1 else self.users[0]
        if isinstance(users, Exception):
            raise users
        if isinstance(users, EngineLoad):
            return users
        return EngineLoad(running=users, waiting=0, kv_cache_usage=0.0)


@dataclass
class LoadedSampler:
    """A replica made of a sampler and the load that it tells."""

    sampler: Sampler
    probe: LoadProbe

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        return await self.sampler.sample(request)

    async def load(self) -> EngineLoad:
        return await self.probe.load()


class FakeRoom:
    """Whether users leave room in the engine; `error` is raised instead when set."""

    def __init__(self) -> None:
        self.open = True
        self.error: Exception | None = None

    async def is_open(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.open

"""The users' load on an engine, in memory: the `LoadProbe` and the `Room` for all tests.
`tests/rooms/test_load_contract.py` holds them to the contracts of the real ones."""

from __future__ import annotations

from ingest.vllm.load import EngineLoad


class ScriptedLoad:
    """Says the load that it was given; the last one again and again."""

    def __init__(self, *users: int | Exception) -> None:
        self.users = list(users) or [0]

    async def load(self) -> EngineLoad:
        users = self.users.pop(0) if len(self.users) > 1 else self.users[0]
        if isinstance(users, Exception):
            raise users
        return EngineLoad(running=users, waiting=0, kv_cache_usage=0.0)


class FakeRoom:
    """Whether users leave room in the engine; `error` is raised instead when set."""

    def __init__(self) -> None:
        self.open = True
        self.error: Exception | None = None

    async def is_open(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.open

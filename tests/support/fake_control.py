"""The in-memory `AdapterControl` for all tests. `tests/deploy/engine/test_vllm_control.py` holds it
to the contract of the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deploy.engine.vllm_control import Probe, Room
from deploy.errors import EngineError, InvalidAdapterError
from support.adapter_endpoints import MODEL


class FakeControl:
    """A vLLM's adapters in memory. `reach`: nats that an adapter moves every log-probability."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.away = False
        self.refuses: dict[str, str] = {}
        self.fails_to_load = 0
        self.reach: dict[str, float] = {}
        self.answers_as: dict[str, str] = {}
        self.strays = 0.0
        """Nats by which every answer to prompts of token ids is under -1."""
        self.garbles = 0
        """Number of coming probes that are answered with the log-probability -9999."""
        self.calls: list[tuple[str, str]] = []
        self.fails_to_unload = 0
        self.max_loras: int | None = None
        """`--max-loras`, once it tells."""
        self.busy: set[str] = set()
        """Adapters that answer a request."""
        self.hides_metrics = False
        """It answers `/metrics` with an error, or has no figures there."""
        self.unlisted: set[str] = set()
        """Adapters that it says it loaded, and does not have."""
        self.on_load: Callable[[str], None] = lambda name: None
        """Told of a load while vLLM would read the folder."""

    async def loaded(self) -> frozenset[str]:
        self._check()
        return frozenset(self.adapters)

    async def load(self, name: str, path: str) -> None:
        self._check()
        self.calls.append(("load", name))
        if name in self.refuses:
            raise InvalidAdapterError(self.refuses[name])
        if self.fails_to_load:
            self.fails_to_load -= 1
            raise EngineError("500 out of memory")
        self.on_load(name)
        if name not in self.unlisted:
            self.adapters.setdefault(name, path)

    async def unload(self, name: str) -> None:
        self._check()
        self.calls.append(("unload", name))
        if self.fails_to_unload:
            self.fails_to_unload -= 1
            raise EngineError("500 cannot unload")
        self.adapters.pop(name, None)

    async def probe(self, model_name: str, prompts: Sequence[Sequence[int]] | None = None) -> Probe:
        self._check()
        if model_name not in self.adapters and model_name != MODEL:
            raise EngineError(f"404 {model_name}")
        if self.garbles:
            self.garbles -= 1
            return Probe(model_in_reply=model_name, next_tokens=({13: -9999.0}, {14: -9999.0}))
        if prompts is not None:
            return Probe(
                model_in_reply=model_name,
                next_tokens=tuple({11: -1.0 - self.strays} for _ in prompts),
            )
        reach = self.reach.get(model_name, 0.0 if model_name == MODEL else 0.25)
        return Probe(
            model_in_reply=self.answers_as.get(model_name, model_name),
            next_tokens=({11: -1.0 - reach}, {12: -2.0 - reach}),
        )

    async def room(self) -> Room:
        self._check()
        if self.hides_metrics:
            return Room()
        return Room(max_loras=self.max_loras, busy=frozenset(self.busy), tells=True)

    def _check(self) -> None:
        if self.away:
            raise EngineError("vLLM gave no reply")

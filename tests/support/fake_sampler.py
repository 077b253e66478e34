"""The in-memory `Sampler` for all tests. `tests/ingest/vllm/test_sampler_contract.py` holds it to
the contract of the real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from ingest.vllm.sampler import SampledAnswer, SampleRequest

Step = str | Exception | Callable[[SampleRequest], str]


class FakeSampler:
    """Answers by a script of texts, errors, or functions of the request, over and over.

    Without a script it answers "answer 0", "answer 1" and so on. What `errors`, `texts`,
    `finish_reasons` and `logprobs` (of each token) hold for a model name comes before the script.
    """

    def __init__(self, *script: Step, prompt_token_ids: tuple[int, ...] = (1, 9, 9, 4)) -> None:
        self.script = script
        self.prompt_token_ids = prompt_token_ids
        self.errors: dict[str, Exception] = {}
        self.texts: dict[str, str] = {}
        self.finish_reasons: dict[str, str] = {}
        self.logprobs: dict[str, tuple[float, ...]] = {}
        self.requests: list[SampleRequest] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.hold: asyncio.Event | None = None
        """When set, every answer waits for it."""
        self.was_asked = asyncio.Event()

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        number = len(self.requests)
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.was_asked.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
            else:
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        model = request.upstream_model
        logprobs = self.logprobs.get(model, (-0.1, -0.2, -0.3, -0.4, -0.5))
        return SampledAnswer(
            message=json.dumps(
                {"role": "assistant", "content": self._text(number, request)}
            ).encode(),
            finish_reason=self.finish_reasons.get(model, "stop"),
            token_ids=(*range(7, 6 + len(logprobs)), 2),
            logprobs=logprobs,
            prompt_token_ids=self.prompt_token_ids,
            model=model,
        )

    def _text(self, number: int, request: SampleRequest) -> str:
        if request.upstream_model in self.errors:
            raise self.errors[request.upstream_model]
        if request.upstream_model in self.texts:
            return self.texts[request.upstream_model]
        step = self.script[number % len(self.script)] if self.script else f"answer {number}"
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, str) else step(request)

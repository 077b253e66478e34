"""A sampler that checks candidates' token ids against their text, as for served answers."""

from __future__ import annotations

import time
from collections.abc import Callable

from ingest.errors import SamplingError
from ingest.tokens.base_tokenizer import TokenCheck
from ingest.tokens.check import DISAGREES
from ingest.vllm.sampler import SampledAnswer, Sampler, SampleRequest
from sidecar.records import Choice


class CheckedSampler:
    """A `Sampler` that refuses an answer whose ids do not decode to its text."""

    def __init__(
        self, sampler: Sampler, check: TokenCheck, *, now: Callable[[], float] = time.time
    ) -> None:
        self._sampler = sampler
        self._check = check
        self._now = now

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        """See `Sampler.sample`. Raises: also SamplingError when ids and text disagree."""
        answer = await self._sampler.sample(request)
        self._check.poll(self._now())
        choice = Choice(
            index=0,
            message=answer.message,
            finish_reason=answer.finish_reason,
            token_ids=answer.token_ids,
        )
        # Candidates are requested without an echo, whatever the agent's request says.
        asked = {name: value for name, value in request.chat.items() if name != "echo"}
        if self._check.answer(choice, asked, answer.prompt_token_ids) == DISAGREES:
            raise SamplingError(f"{DISAGREES}: the answer's token ids do not decode to its text")
        return answer

"""Candidates whose token ids are checked against their text, as those of served answers are."""

from __future__ import annotations

import time
from collections.abc import Callable

from ingest.errors import SamplingError
from ingest.tokens.base_tokenizer import TokenCheck
from ingest.tokens.check import DISAGREES
from ingest.vllm.sampler import SampledAnswer, Sampler, SampleRequest
from sidecar.records import Choice


class CheckedSampler:
    """A `Sampler` that refuses an answer which its ids do not decode to."""

    def __init__(
        self, sampler: Sampler, check: TokenCheck, *, now: Callable[[], float] = time.time
    ) -> None:
        self._sampler = sampler
        self._check = check
        self._now = now

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        """As `Sampler.sample`. Raises: SamplingError, too, when ids and text disagree."""
        answer = await self._sampler.sample(request)
        self._check.look(self._now())
        choice = Choice(
            index=0,
            message=answer.message,
            finish_reason=answer.finish_reason,
            token_ids=answer.token_ids,
        )
        # Candidates are asked for without an echo, whatever the agent asked for.
        asked = {name: value for name, value in request.chat.items() if name != "echo"}
        if self._check.answer(choice, asked, answer.prompt_token_ids) == DISAGREES:
            raise SamplingError(f"{DISAGREES}: the answer's token ids are not those of its text")
        return answer

"""Several replicas of vLLM as one source of extra answers.

Candidates go to one replica, the one whose load was read: the throttle holds for it. When it is
away, or does not know the adapter, the next one takes its place. Users are spread by the proxy, not
here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import structlog

from ingest.errors import AdapterGoneError, EngineDownError, SamplingError
from ingest.vllm.load import EngineLoad
from ingest.vllm.sampler import LoadProbe, SampledAnswer, Sampler, SampleRequest, VllmSampler

Result = TypeVar("Result")

log = structlog.get_logger()


class Replica(Sampler, LoadProbe, Protocol):
    """One vLLM."""


class ReplicaSampler:
    """A `Sampler` and `LoadProbe` over one or more replicas. Close it with `aclose`."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        """replicas: by base URL, one at least, the first being the first to be asked."""
        self._replicas = list(replicas.items())
        self._now = 0
        """Place of the one in use."""

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        """As `Sampler.sample`. Raises: what the replica in use raised, if no other answers."""

        async def ask(replica: Replica) -> SampledAnswer:
            return await replica.sample(request)

        # Any other error is of this one answer: the next replica would only be asked for another.
        return await self._first(ask, (EngineDownError, AdapterGoneError))

    async def load(self) -> EngineLoad:
        """As `LoadProbe.load`, of the replica that candidates are sent to."""
        return await self._first(lambda replica: replica.load(), (SamplingError,))

    async def _first(
        self,
        ask: Callable[[Replica], Awaitable[Result]],
        passing: tuple[type[SamplingError], ...],
    ) -> Result:
        """Ask the replica in use, then the others; who answers is in use from then on."""
        first, errors = self._now, list[SamplingError]()
        for step in range(len(self._replicas)):
            place = (first + step) % len(self._replicas)
            url, replica = self._replicas[place]
            try:
                result = await ask(replica)
            except passing as error:
                errors.append(error)
                continue
            if place != first and not isinstance(errors[0], AdapterGoneError):
                self._move(first, place, url, errors[0])
            return result
        raise errors[0]

    def _move(self, first: int, place: int, url: str, error: SamplingError) -> None:
        if self._now == first:  # else another request has found one meanwhile
            self._now = place
            log.warning("sampling_moved", replica=url, reason=str(error))

    async def aclose(self) -> None:
        for _, replica in self._replicas:
            if isinstance(replica, VllmSampler):
                await replica.aclose()


def open_replicas(
    urls: Sequence[str], api_key: str | None = None, timeout_s: float = 120.0
) -> ReplicaSampler:
    """The samplers of `serving.upstreams`."""
    return ReplicaSampler({url: VllmSampler(url, api_key, timeout_s) for url in urls})

"""Several vLLM replicas as one source of candidates.

Candidates go to one replica, the one whose load is measured: the throttle applies to it. When it is
unreachable, or does not know the adapter, the next replica replaces it. Balancing users over
replicas is the proxy's work.
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
    """One vLLM replica."""


class ReplicaSampler:
    """A `Sampler` and `LoadProbe` over one or more replicas. Close it with `aclose`."""

    def __init__(self, replicas: Mapping[str, Replica]) -> None:
        """replicas: by base URL, at least one; the first is used first."""
        self._replicas = list(replicas.items())
        self._now = 0
        """Index of the replica in use."""

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        """See `Sampler.sample`. Raises: the error of the replica in use, if no other answers."""

        async def ask(replica: Replica) -> SampledAnswer:
            return await replica.sample(request)

        # Any other error concerns this one answer, so the next replica is not asked.
        return await self._first(ask, (EngineDownError, AdapterGoneError))

    async def load(self) -> EngineLoad:
        """Return the load of the replica that candidates are sent to. See `LoadProbe.load`."""
        return await self._first(lambda replica: replica.load(), (SamplingError,))

    async def _first(
        self,
        ask: Callable[[Replica], Awaitable[Result]],
        passing: tuple[type[SamplingError], ...],
    ) -> Result:
        """Ask the replica in use, then the others; the one that answers is used from then on."""
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
        if self._now == first:  # else another request has changed the replica meanwhile
            self._now = place
            log.warning("sampling_moved", replica=url, reason=str(error))

    async def aclose(self) -> None:
        for _, replica in self._replicas:
            if isinstance(replica, VllmSampler):
                await replica.aclose()


def open_replicas(
    urls: Sequence[str], api_key: str | None = None, timeout_s: float = 120.0
) -> ReplicaSampler:
    """Open a sampler over the replicas of `serving.upstreams`."""
    return ReplicaSampler({url: VllmSampler(url, api_key, timeout_s) for url in urls})

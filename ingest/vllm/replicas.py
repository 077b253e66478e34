"""Several vLLM replicas as one source of candidates.

The load of each replica is measured by itself, and a candidate goes to one that has room: of those
the one with the fewest candidates in flight. When it is unreachable, refuses for now, or does not
know the adapter, the next one with room is asked. Balancing users over replicas is the proxy's
work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from ingest.errors import AWAY, EngineDownError, NoRoomError, SamplingError
from ingest.vllm.load import LoadLimits
from ingest.vllm.sampler import LoadProbe, SampledAnswer, Sampler, SampleRequest, VllmSampler
from ingest.vllm.throttle import PROBE_INTERVAL_S, Throttle
from sidecar.settings import Groups

WAIT_S = 0.1
"""How long a candidate waits before it asks again for its turn beside others."""
LONGEST_WAIT_S = 30.0
"""How long it waits in all. Then its group is given back, with what it has by then."""


class Replica(Sampler, LoadProbe, Protocol):
    """One vLLM replica."""


@dataclass(frozen=True, slots=True)
class _Guarded:
    replica: Replica
    throttle: Throttle


class ReplicaSampler:
    """A `Sampler` over one or more replicas, and the `Room` in them. Close it with `aclose`."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        limits: LoadLimits,
        *,
        interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        """replicas: by base URL, at least one; of equals the first is asked first."""
        self._replicas = [
            _Guarded(one, Throttle(one, limits, interval_s=interval_s, replica=url))
            for url, one in replicas.items()
        ]

    async def is_open(self) -> bool:
        """Return True when a replica has room. Raises: SamplingError when no load is known."""
        return bool(await self._with_room())

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        """See `Sampler.sample`. Raises: the error of the first replica asked, if no other answers;
        NoRoomError when none has room, or none tells its load."""
        errors = list[SamplingError]()
        deadline = monotonic() + LONGEST_WAIT_S
        while not errors:
            try:
                replicas = await self._with_room()
            except EngineDownError:
                raise
            except SamplingError as error:
                raise NoRoomError(f"no vLLM tells its load: {error}") from error
            for one in replicas:
                if not one.throttle.has_slot():  # another candidate has taken it meanwhile
                    continue
                try:
                    with one.throttle.sending():
                        return await one.replica.sample(request)
                except AWAY as error:  # any other error concerns this one answer
                    errors.append(error)
            limited = any(one.throttle.is_gate_open for one in self._replicas)
            if errors or not limited or monotonic() > deadline:
                break
            await asyncio.sleep(WAIT_S)
        raise errors[0] if errors else NoRoomError("users need the capacity of every vLLM")

    async def _with_room(self) -> list[_Guarded]:
        """Return the replicas with room, the least busy first. Raises: as `is_open`."""
        found = await asyncio.gather(
            *(one.throttle.is_open() for one in self._replicas), return_exceptions=True
        )
        unknown = [one for one in found if isinstance(one, BaseException)]
        for error in unknown:
            if not isinstance(error, SamplingError) or len(unknown) == len(found):
                raise error
        pairs = zip(self._replicas, found, strict=True)
        return sorted(
            (one for one, is_open in pairs if is_open is True),
            key=lambda one: one.throttle.in_flight,
        )

    async def aclose(self) -> None:
        for one in self._replicas:
            if isinstance(one.replica, VllmSampler):
                await one.replica.aclose()


def open_replicas(
    urls: Sequence[str], api_key: str | None, groups: Groups, *, timeout_s: float = 120.0
) -> ReplicaSampler:
    """Open a sampler over the vLLMs at these base URLs, with the limits of `[groups]`."""
    return ReplicaSampler(
        {url: VllmSampler(url, api_key, timeout_s, priority=groups.priority) for url in urls},
        LoadLimits(
            requests=groups.max_running_requests,
            kv_cache_usage=groups.max_kv_cache_usage,
            max_slowdown=groups.max_slowdown,
        ),
    )

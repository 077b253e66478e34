"""Poll the vLLM replicas: which are healthy, and which models each of them lists.

Each replica has its own task, so a replica that hangs delays no other. A replica is down after two
failed polls and up again after the first good one. Between polls the relay itself notices failed
requests (`Replica.failed`) and missing adapters (`Replica.lacks`), and may ask for an early poll.
"""

from __future__ import annotations

import asyncio

import structlog

from sidecar.metrics.proxy import Metrics
from sidecar.relay.upstream.own_fields import KINDS
from sidecar.relay.upstream.replicas import Replica, Replicas
from sidecar.relay.upstream.vllm_status import VllmStatus

log = structlog.get_logger()
AGENT = "learning-sidecar-watch"
FAILED_POLLS_TO_DOWN = 2
SHORTEST_PAUSE_S = 0.1
"""Least interval between two polls outside the schedule."""


class ReplicaWatch:
    """`start` it, `stop` it. api_key: vLLM's own, for its list of models."""

    def __init__(
        self, replicas: Replicas, metrics: Metrics, *, interval_s: float, api_key: str | None
    ) -> None:
        self.statuses = tuple(VllmStatus(replica.url) for replica in replicas.all)
        self._replicas = replicas.all
        self._metrics = metrics
        self._interval_s = interval_s
        self._authorization = f"Bearer {api_key}" if api_key else None
        self._early = [asyncio.Event() for _ in self._replicas]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for replica, status, early in zip(self._replicas, self.statuses, self._early, strict=True):
            task = asyncio.create_task(self._follow(replica, status, early))
            self._tasks.append(task)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for status in self.statuses:
            await status.close()

    def poll_soon(self) -> None:
        """Poll now instead of at the next interval: a replica may list other models."""
        for early in self._early:
            early.set()

    def healthiest(self) -> VllmStatus:
        """A replica to ask; a healthy one if there is one."""
        pairs = zip(self._replicas, self.statuses, strict=True)
        return next((status for replica, status in pairs if replica.healthy), self.statuses[0])

    async def status_of_key(self, authorization: bytes | None) -> int | None:
        """Ask vLLM whether it knows this `Authorization`. Returns: the status of its reply; None:
        it gave none."""
        sent = None if authorization is None else authorization.decode("utf-8", "surrogateescape")
        reply = await self.healthiest().models(sent)
        return None if reply is None else reply.status

    async def _follow(self, replica: Replica, status: VllmStatus, early: asyncio.Event) -> None:
        failed = 0
        up = self._metrics.replica_up.labels(replica.url)
        in_flight = self._metrics.replica_in_flight.labels(replica.url)
        takes = {
            kind: self._metrics.replica_takes_fields.labels(replica.url, name)
            for kind, name in KINDS.items()
        }
        said: bool | None = None
        while True:
            if await status.reachable():
                failed = 0
                if said is False:
                    replica.came_back()
                replica.healthy = True
                replica.models = await self._models(status, replica.models)
            else:
                failed += 1
                # At the start one failed poll is enough: no poll has succeeded yet.
                if failed >= FAILED_POLLS_TO_DOWN or said is None:
                    replica.healthy = False
                    replica.models = None
            if replica.healthy is not said:
                said = replica.healthy
                _say(replica)
            up.set(float(replica.healthy))
            in_flight.set(replica.in_flight)
            for kind, gauge in takes.items():
                gauge.set(float(not replica.fields.refused & kind))
            early.clear()
            try:
                await asyncio.wait_for(early.wait(), self._interval_s)
                await asyncio.sleep(SHORTEST_PAUSE_S)
            except TimeoutError:
                continue

    async def _models(
        self, status: VllmStatus, known: frozenset[str] | None
    ) -> frozenset[str] | None:
        reply = await status.models(self._authorization, agent=AGENT)
        if reply is None:
            return known
        if reply.status != 200:  # vLLM wants a key that is not configured
            return None
        cards = reply.body.get("data")
        if not isinstance(cards, list):  # another server answered
            return known
        return frozenset(str(card.get("id")) for card in cards if isinstance(card, dict))


def _say(replica: Replica) -> None:
    if replica.healthy:
        log.info("upstream_reachable", url=replica.url)
    else:
        log.warning(
            "upstream_unreachable",
            url=replica.url,
            check="is vLLM running, and does serving.upstreams name its address?",
        )

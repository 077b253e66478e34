"""Poll the vLLM replicas: which are there, which are healthy, and which models each of them lists.

Each replica has its own task, so a replica that hangs delays no other. A replica is down after two
failed polls and up again after the first good one. Between polls the relay itself notices failed
requests (`Replica.failed`) and missing adapters (`Replica.lacks`), and may ask for an early poll.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from sidecar.errors import UpstreamError
from sidecar.metrics.hot import Gauge
from sidecar.metrics.proxy import Metrics
from sidecar.relay.heads import request_lines
from sidecar.relay.replicas import Replica, Replicas
from sidecar.relay.reply_parser import ReplyHead, ReplyReader
from sidecar.relay.upstream import KINDS, UpstreamPool, endpoint
from sidecar.upstreams import LOOKUP_S, Upstreams

# The few requests that the sidecar itself sends to vLLM.

log = structlog.get_logger()
TIMEOUT_S = 2.0
MAX_BODY_BYTES = 16 * 2**20
"""A longer reply is not accepted as a list of models."""
AGENT = "learning-sidecar"


@dataclass(frozen=True, slots=True)
class ModelsReply:
    """vLLM's answer to `GET /v1/models`."""

    status: int
    body: dict[str, Any]  # Any: the cards are passed on as they are


class VllmStatus:
    """One vLLM. Close it at the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = UpstreamPool(endpoint(url), connect_timeout_s=TIMEOUT_S)

    async def reachable(self) -> bool:
        """True if vLLM answers that it is healthy."""
        try:
            status, _ = await self._ask(b"/health", ())
        except UpstreamError as error:
            log.debug("vllm_unreachable", url=self.url, why=str(error))
            return False
        return status == 200

    async def models(self, authorization: str | None, *, agent: str = AGENT) -> ModelsReply | None:
        """vLLM's model list, asked with this key; None when it gives none. agent: who asks, as
        vLLM's log will show it."""
        lines = [b"User-Agent: " + agent.encode()]
        if authorization is not None:
            lines.append(b"Authorization: " + authorization.encode("utf-8", "surrogateescape"))
        try:
            status, text = await self._ask(b"/v1/models", lines)
            body = json.loads(text)
        except (UpstreamError, ValueError, RecursionError) as error:  # the last: nested too deeply
            log.debug("vllm_unreachable", url=self.url, why=str(error))
            return None
        return ModelsReply(status, body) if isinstance(body, dict) else None

    async def close(self) -> None:
        self._pool.close()

    async def _ask(
        self, target: bytes, lines: tuple[bytes, ...] | list[bytes]
    ) -> tuple[int, bytes]:
        """Status and body. Raises: UpstreamError."""
        where = self._pool.endpoint
        head = request_lines(b"GET", where.prefix + target, lines, host=where.authority)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                reply = await self._try(head, reuse=True)
                if reply is None:  # the server had closed the kept connection
                    reply = await self._try(head, reuse=False)
        except TimeoutError as error:
            raise UpstreamError(f"no answer within {TIMEOUT_S:g} s") from error
        if reply is None:
            raise UpstreamError("the connection was closed as soon as it was open")
        return reply

    async def _try(self, head: bytes, *, reuse: bool) -> tuple[int, bytes] | None:
        """One try. None: the connection was closed before any byte of the reply."""
        connection = self._pool.take_idle() if reuse else None
        if connection is None:
            connection = await self._pool.connect()
            if not connection.usable:
                return None
        reply = _Reply()
        connection.send(reply, head + b"\r\n\r\n", b"", head_only=False)
        try:
            return await reply.ended
        finally:
            if not reply.whole:
                connection.abort()


class _Reply(ReplyReader):
    """Reads one reply."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[tuple[int, bytes] | None] = (
            asyncio.get_running_loop().create_future()
        )
        self.whole = False
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0

    def reply_head(self, head: ReplyHead) -> None:
        self._status = head.status

    def reply_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_BODY_BYTES:
            self._pieces.append(data)
        elif not self.ended.done():
            self.ended.set_exception(UpstreamError(f"more than {MAX_BODY_BYTES} bytes came"))

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        return False

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        if complete:
            self.whole = True
            if not self.ended.done():
                self.ended.set_result((self._status, b"".join(self._pieces)))

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        self.whole = True  # there is nothing left to abort
        if self.ended.done():
            return
        if nothing_came:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(UpstreamError(why))


WATCH_AGENT = "learning-sidecar-watch"
FAILED_POLLS_TO_DOWN = 2
MOST_SHOWN = 500
"""Addresses with gauges in the metrics of one process, in all its time. The table of metrics, which
has room for 2,400 and more, gives no row back."""
SHORTEST_PAUSE_S = 0.1
"""Least interval between two polls outside the schedule."""


class _Watched:
    """A replica, what asks it, and when to ask it early."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.status = VllmStatus(replica.url)
        self.early = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class ReplicaWatch:
    """`start` it, `stop` it."""

    def __init__(
        self,
        replicas: Replicas,
        metrics: Metrics,
        *,
        interval_s: float,
        api_key: str | None,
        upstreams: Upstreams | None = None,
    ) -> None:
        """api_key: vLLM's own, for its list of models.
        upstreams: names the replicas that come and go; None: these stay."""
        self._replicas = replicas
        self._watched = [_Watched(replica) for replica in replicas.all]
        self._metrics = metrics
        self._interval_s = interval_s
        self._authorization = f"Bearer {api_key}" if api_key else None
        self._upstreams = upstreams
        self._discovery: asyncio.Task[None] | None = None
        self._shown = set[str]()
        """Replicas whose gauges are in the table of metrics, see `MOST_SHOWN`."""

    @property
    def statuses(self) -> Sequence[VllmStatus]:
        return [one.status for one in self._watched]

    def start(self) -> None:
        for one in self._watched:
            one.task = asyncio.create_task(self._follow(one))
        if self._upstreams is not None and self._upstreams.follows_dns:
            self._discovery = asyncio.create_task(self._discover(self._upstreams))

    async def stop(self) -> None:
        tasks = [self._discovery, *(one.task for one in self._watched)]
        await asyncio.gather(*map(_cancelled, tasks))
        for one in self._watched:
            await one.status.close()

    def poll_soon(self) -> None:
        """Poll now instead of at the next interval: a replica may list other models."""
        for one in self._watched:
            one.early.set()

    def healthiest(self) -> VllmStatus:
        """A replica to ask; a healthy one if there is one."""
        first = self._watched[0]
        return next((one for one in self._watched if one.replica.healthy), first).status

    async def _discover(self, upstreams: Upstreams) -> None:
        while True:
            await asyncio.sleep(LOOKUP_S)
            await self.become(upstreams.now())

    async def become(self, urls: Sequence[str]) -> None:
        """Begin with the replicas that have come, and end with those that have gone: what they have
        in flight ends as it would have. urls: of all, at least one."""
        gone = [one for one in self._watched if one.replica.url not in urls]
        known = {one.replica.url for one in self._watched}
        come = [_Watched(self._new(url)) for url in urls if url not in known]
        if not gone and not come:
            return
        self._watched = [one for one in self._watched if one not in gone] + come
        self._replicas.become([one.replica for one in self._watched])
        for one in come:
            log.info("upstream_found", url=one.replica.url)
            one.task = asyncio.create_task(self._follow(one))
        for one in gone:
            log.info("upstream_gone", url=one.replica.url)
            await _cancelled(one.task)
            for gauge in self._gauges(one.replica):
                gauge.forget()
            one.replica.pool.close()
            await one.status.close()

    def _new(self, url: str) -> Replica:
        timeout_s = self._watched[0].replica.pool.connect_timeout_s
        replica = Replica(endpoint(url), connect_timeout_s=timeout_s)
        replica.healthy = False  # until its first poll: it may not have the adapters yet
        return replica

    def _gauges(self, replica: Replica) -> Sequence[Gauge]:
        """Return the gauges of a replica: is it up, its requests in flight, and for each of `KINDS`
        whether it takes these fields."""
        metrics, url = self._metrics, replica.url
        if url not in self._shown and len(self._shown) >= MOST_SHOWN:
            return [Gauge(memoryview(bytearray(8)).cast("d")) for _ in range(2 + len(KINDS))]
        self._shown.add(url)
        takes = (metrics.replica_takes_fields.labels(url, name) for name in KINDS.values())
        return metrics.replica_up.labels(url), metrics.replica_in_flight.labels(url), *takes

    async def status_of_key(self, authorization: bytes | None) -> int | None:
        """Ask vLLM whether it knows this `Authorization`. Returns: the status of its reply; None:
        it gave none."""
        sent = None if authorization is None else authorization.decode("utf-8", "surrogateescape")
        reply = await self.healthiest().models(sent)
        return None if reply is None else reply.status

    async def _follow(self, watched: _Watched) -> None:
        replica, status, early = watched.replica, watched.status, watched.early
        failed = 0
        up, in_flight, *takes = self._gauges(replica)
        said: bool | None = None
        while True:
            if await status.reachable():
                failed = 0
                if said is False:
                    replica.came_back()
                replica.models = await self._models(status, replica.models)
                replica.healthy = True
            else:
                failed += 1
                # At the start one failed poll is enough: no poll has succeeded yet.
                if failed >= FAILED_POLLS_TO_DOWN or said is None:
                    replica.healthy = False
                    replica.models = None
            if replica.healthy is not said:
                said = replica.healthy
                if said:
                    log.info("upstream_reachable", url=replica.url)
                else:
                    check = "is vLLM running, and does serving.upstreams name its address?"
                    log.warning("upstream_unreachable", url=replica.url, check=check)
            up.set(float(replica.healthy))
            in_flight.set(replica.in_flight)
            for kind, gauge in zip(KINDS, takes, strict=True):
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
        reply = await status.models(self._authorization, agent=WATCH_AGENT)
        if reply is None:
            return known
        if reply.status != 200:  # vLLM wants a key that is not configured
            return None
        cards = reply.body.get("data")
        if not isinstance(cards, list):  # another server answered
            return known
        return frozenset(str(card.get("id")) for card in cards if isinstance(card, dict))


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""The proxy process: builds the relay, the application, capture and routing, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

import structlog
import uvicorn

from sidecar.access.admission import open_access
from sidecar.access.key_source import KeySource
from sidecar.access.limits import open_limits
from sidecar.app import make_app
from sidecar.capture.outbox import Outbox, outbox_path
from sidecar.capture.recorder import LIMITS, Capture, ExchangeSink, Yielding
from sidecar.capture.sampling_rule import SamplingRule
from sidecar.feedback import LOCKED_S, FeedbackReceiver, FeedbackWriter
from sidecar.logs import RateLimitedLog
from sidecar.metrics.families import MetricTable
from sidecar.metrics.loop_lag import LoopLag
from sidecar.metrics.proxy import Metrics
from sidecar.processes import Readiness
from sidecar.relay import flight
from sidecar.relay.context import RelayContext
from sidecar.relay.replicas import Replica, Replicas
from sidecar.relay.server import RelayServer
from sidecar.relay.upstream import Endpoint, endpoint
from sidecar.relay.watch import ReplicaWatch
from sidecar.routing.source import FollowedLines
from sidecar.scoring import SocketPicker, socket_path
from sidecar.settings import Settings, open_keyring
from sidecar.tracing.spans import Propagation, request_spans
from sidecar.tracing.telemetry import Tracing
from sidecar.unix_socket import bind
from sidecar.upstreams import Upstreams
from sidecar.workers.worker import ORPHAN_DRAIN_S, PROBED, READY, Handover, ParentLine

log = structlog.get_logger()
CONNECT_TIMEOUT_S = 5.0
"""Longest time to connect to one vLLM; then the next replica is asked."""
ROUTING_POLL_S = 0.2
"""How often the routing table is looked up; bounds how long a rollback and a revoked key take to be
obeyed."""
HEALTH_INTERVAL_S = 2.0
"""Seconds between two questions for the health and the adapters of a vLLM."""
SLOW_FIRST_BYTE_S = 10.0
"""While a canary runs, a reply whose first byte comes later counts as slow in the breaker."""
CAPTURE_STOP_S = 10.0


class Proxy:
    """One proxy process. Call `start` once, then `stop` once."""

    def __init__(
        self,
        settings: Settings,
        tracing: Tracing | None = None,
        sink: ExchangeSink | None = None,
        handover: Handover | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """tracing: None exports neither spans nor OpenTelemetry metrics.
        sink: stores exchanges; None opens the bus of `bus.url`.
        handover: what the parent of several workers passes on; None for a single process.
        clock: unix seconds; decides when keys expire and limits refill."""
        self._settings = settings
        others: list[memoryview] = []
        breakers: dict[str, memoryview] = {}
        self.metrics_table, row = MetricTable(), 0
        if handover is not None:
            self.metrics_table, others, breakers = handover.table()
            row = handover.slot - 1
        self.metrics = Metrics(self.metrics_table, others)
        upstreams = Upstreams(settings.serving.upstreams)
        self._socket_path = settings.state_dir / f"proxy-{settings.proxy.port}.sock"
        if handover is not None:
            name = f"proxy-{handover.port}-{handover.slot}.sock"
            self._socket_path = settings.state_dir / name
        bus = outbox_path(settings.bus.url, settings.state_dir)
        yield_cpu = Yielding()
        keyring = open_keyring(settings.store)
        sink = sink or Outbox(
            bus,
            max_bytes=settings.bus.max_bytes,
            on_rows_gone=self.metrics.outbox_rows_gone.inc,
            yield_cpu=yield_cpu,
            keyring=keyring,
        )
        spans = request_spans(tracing, settings.telemetry) if tracing is not None else None
        traced = tracing is not None and tracing.spans is not None
        propagation = Propagation()
        self.capture = Capture(LIMITS, sink, self.metrics, spans, yield_cpu)
        self._keys = KeySource(self.metrics) if settings.access.mode == "keys" else None
        self.lines = FollowedLines(
            settings.lines,
            store_url=settings.store.url,
            state_dir=settings.state_dir,
            poll_s=ROUTING_POLL_S,
            metrics=self.metrics,
            port=settings.proxy.port if handover is None else handover.port,
            slot=None if handover is None else handover.slot,
            memory=breakers,
            row=row,
            rows=max(1, len(others)),
            readers=() if self._keys is None else (self._keys,),
        )
        self.routing, self.breaker = self.lines.default
        app = Endpoint(url="the sidecar's application", unix_path=self._socket_path)
        vllms = map(endpoint, upstreams.now())
        replicas = Replicas([Replica(one, connect_timeout_s=CONNECT_TIMEOUT_S) for one in vllms])
        api_key = settings.serving.api_key
        self._watch = ReplicaWatch(
            replicas,
            self.metrics,
            interval_s=HEALTH_INTERVAL_S,
            api_key=api_key.get_secret_value() if api_key is not None else None,
            upstreams=upstreams,
        )
        limits = handover.limits if handover is not None else None
        limiter, self._limits_file = open_limits(settings, self.metrics, limits, clock)
        self._relay = RelayServer(
            RelayContext(
                proxy=settings.proxy,
                access=open_access(settings, self._keys, limiter, self.metrics),
                clock=clock,
                sampling=SamplingRule(
                    settings.capture.sample_rate,
                    projects=settings.capture.projects,
                    surfaces={str(name): rate for name, rate in settings.capture.surfaces.items()},
                ),
                replicas=replicas,
                models_changed=self._watch.poll_soon,
                app=Replica(app, connect_timeout_s=CONNECT_TIMEOUT_S),
                routing=self.routing,
                own_lines=self.lines.own,
                capture=self.capture,
                metrics=self.metrics,
                breaker=self.breaker,
                slow_first_byte_s=SLOW_FIRST_BYTE_S,
                best_of=settings.best_of,
                picker=SocketPicker(socket_path(settings.state_dir))
                if settings.best_of.enabled
                else None,
                rate_limited_log=RateLimitedLog(),
                outgoing_trace=propagation.outgoing if traced else None,
            )
        )
        self._feedback = FeedbackReceiver(
            FeedbackWriter(
                Outbox(
                    bus,
                    max_bytes=settings.bus.max_bytes,
                    busy_timeout_s=LOCKED_S,
                    on_rows_gone=self.metrics.outbox_rows_gone.inc,
                    keyring=keyring,
                )
            ),
            self.metrics,
            may_ask=self._watch.status_of_key if settings.access.mode == "upstream" else None,
            clock=clock,
        )
        self.readiness = Readiness(self._say_probed)
        self._parent: ParentLine | None = None
        if handover is not None:
            self._parent = ParentLine(handover, self._relay, self.readiness)
        self._lag = LoopLag(self.metrics.event_loop_lag, self.metrics_table.give_sign)
        self._app_server = _AppServer(
            uvicorn.Config(
                make_app(
                    self.metrics,
                    self.lines,
                    self._watch,
                    self._keys,
                    self._feedback,
                    self.readiness,
                ),
                log_config=None,
                access_log=False,
                date_header=False,
                lifespan="off",
            )
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, parent_gone: Callable[[], None] | None = None) -> int:
        """Start to serve. Returns: the port. Raises: OSError.

        parent_gone: called when the parent of several workers has died; call `stop` then.
        """
        self.lines.source.poll()  # so that the first request follows the table
        port = await self._relay.start(self._parent.own if self._parent is not None else None)
        listener = bind(self._socket_path)  # only the port's holder may replace it
        self.lines.source.start()
        self.capture.start()
        if self._limits_file is not None:
            self._limits_file.start()
        self._tasks.append(asyncio.create_task(self._app_server.serve(sockets=[listener])))
        self._lag.start()
        self.metrics.workers_alive.set(1)
        self.metrics_table.open()
        log.info(
            "proxy_ready", host=self._settings.proxy.host, port=port, compiled=relay_is_compiled()
        )
        self._watch.start()
        if self._parent is not None:
            self._parent.open(parent_gone)
            self._parent.say(READY)
        return port

    def _say_probed(self) -> None:
        if self._parent is not None:
            self._parent.say(PROBED)

    async def stop(self) -> None:
        """Finish the requests in flight, write the captures, and stop."""
        drain_s = self._settings.proxy.drain_timeout_s
        if self._parent is not None:
            self._parent.drain()  # first, so that other workers take new connections
            if self._parent.orphaned:
                drain_s = min(drain_s, ORPHAN_DRAIN_S)
        await self._relay.stop(drain_s)
        self._lag.stop()
        self._app_server.stopping.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._feedback.stop()
        await self._watch.stop()
        self.lines.source.stop()
        await asyncio.to_thread(self.lines.stop)
        if self._limits_file is not None:
            await self._limits_file.stop()
        if not await asyncio.to_thread(self.capture.stop, CAPTURE_STOP_S):
            log.error("captures_lost_at_stop", waited_s=CAPTURE_STOP_S)
        self._socket_path.unlink(missing_ok=True)
        if self._parent is not None:
            self._parent.close()
        self.metrics_table.close()
        log.info("proxy_stopped")


def relay_is_compiled() -> bool:
    """Return True if the relay's modules are compiled extensions."""
    return not flight.__file__.endswith(".py")


class _AppServer(uvicorn.Server):
    """uvicorn without its signal handlers, because the process has its own, and without its timer,
    which would interrupt the relay ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.stopping.wait()

"""The proxy process: relay, application, capture and routing put together, and taken apart."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn
from opentelemetry.trace import TracerProvider

from sidecar.app import make_app
from sidecar.capture import Capture, ExchangeSink
from sidecar.errors import SettingsError
from sidecar.metrics import Metrics
from sidecar.outbox import Outbox, outbox_path
from sidecar.relay.context import RelayContext
from sidecar.relay.rare_log import RareLog
from sidecar.relay.server import RelayServer
from sidecar.relay.upstream import Endpoint, UpstreamPool, endpoint
from sidecar.routing_source import RoutingSource
from sidecar.settings import Settings
from sidecar.spans import RequestSpans
from sidecar.vllm_status import VllmStatus

log = structlog.get_logger()
MAX_UNIX_PATH = 100
"""Linux takes 107 bytes, macOS 103."""
UPSTREAM_RETRY_S = 2.0
CAPTURE_STOP_S = 10.0


class Proxy:
    """One proxy. `start`, then `stop`; both once."""

    def __init__(
        self, settings: Settings, tracing: TracerProvider, sink: ExchangeSink | None = None
    ) -> None:
        """sink: where exchanges go; None takes the one that `bus.url` names."""
        self._settings = settings
        self.metrics = Metrics()
        vllm = endpoint(settings.serving.upstreams[0])
        self._socket_path = settings.state_dir / f"proxy-{settings.proxy.port}.sock"
        bus = outbox_path(settings.bus.url)
        sink = sink or Outbox(bus, max_rows=settings.bus.max_rows)
        self.capture = Capture(settings.capture, sink, self.metrics, RequestSpans(tracing))
        self.routing = RoutingSource(
            settings.store.url,
            settings.serving.model,
            poll_s=settings.proxy.routing_poll_s,
            metrics=self.metrics,
        )
        timeout_s = settings.proxy.connect_timeout_s
        app = Endpoint(url="the sidecar's application", unix_path=str(self._socket_path))
        self._relay = RelayServer(
            RelayContext(
                proxy=settings.proxy,
                sample_rate=settings.capture.sample_rate,
                vllm=UpstreamPool(vllm, connect_timeout_s=timeout_s),
                app=UpstreamPool(app, connect_timeout_s=timeout_s),
                routing=self.routing,
                capture=self.capture,
                metrics=self.metrics,
                rare_log=RareLog(),
            )
        )
        self._status = VllmStatus(vllm.url)
        self._app_server = _AppServer(
            uvicorn.Config(
                make_app(self.metrics, self.routing, self._status),
                log_config=None,
                access_log=False,
                date_header=False,
                lifespan="off",
            )
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Be ready. Returns the port. Raises: OSError, SettingsError."""
        # The port first: who holds it may take over the socket's path, and nobody else.
        port = await self._relay.start()
        listener = _listen(self._socket_path)
        self.routing.start()
        self.capture.start()
        self._tasks.append(asyncio.create_task(self._app_server.serve(sockets=[listener])))
        log.info("proxy_ready", host=self._settings.proxy.host, port=port)
        self._tasks.append(asyncio.create_task(self._watch_for_upstream()))
        return port

    async def stop(self) -> None:
        """Finish what is in flight, write what is captured, and end."""
        await self._relay.stop(self._settings.proxy.drain_timeout_s)
        self._app_server.stopping.set()
        self._tasks[-1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._status.close()
        self.routing.stop()
        if not await asyncio.to_thread(self.capture.stop, CAPTURE_STOP_S):
            log.error("captures_lost_at_stop", waited_s=CAPTURE_STOP_S)
        self._socket_path.unlink(missing_ok=True)
        log.info("proxy_stopped")

    async def _watch_for_upstream(self) -> None:
        """Say once that vLLM is not there, and once that it is; `/readyz` says it at any time."""
        said = False
        while not await self._status.reachable():
            if not said:
                log.warning(
                    "upstream_unreachable",
                    url=self._status.url,
                    check="is vLLM running, and does serving.upstreams name its address?",
                )
                said = True
            await asyncio.sleep(UPSTREAM_RETRY_S)
        log.info("upstream_reachable", url=self._status.url)


class _AppServer(uvicorn.Server):
    """uvicorn without its signal handlers (the process has its own) and without its ten ticks a
    second, which would stop at each of them a loop that relays."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.stopping.wait()


def _listen(path: Path) -> socket.socket:
    if len(str(path).encode()) > MAX_UNIX_PATH:
        raise SettingsError(
            f"state_dir: {path} is too long for a unix socket ({MAX_UNIX_PATH} bytes); "
            "choose a shorter state_dir"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a process that was killed; a live one holds the port
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    return listener

"""The vLLMs that control loads adapters into, as they come and go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import structlog

from deploy.engine.reconcile import Fleet, Reconciler
from deploy.engine.vllm_control import AdapterControl, VllmControl
from deploy.registry.leases import keep_since
from deploy.supervise import Loop
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.upstreams import Upstreams

log = structlog.get_logger()
RECONCILE_S = 2.0
"""Interval of reconciling a reachable vLLM's adapters with the store."""
RECONCILE_AWAY_S = 0.25
"""Interval while vLLM is unreachable: until the champion is loaded again, its users get errors."""
KEEPALIVE_S = 2.0
"""Idle time after which we close a connection, before vLLM does (5 s)."""


@dataclass(frozen=True, slots=True)
class _Engine:
    client: httpx.AsyncClient
    control: VllmControl
    reconciler: Reconciler
    changed: asyncio.Event
    loop: Loop
    task: asyncio.Task[None]


class Engines:
    """One client, one reconciler and its loop for each vLLM. For one event loop.

    `fleet` and `controls` have those that serve users: no user waits for a vLLM that only samples;
    it gets its adapters, and decides nothing.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        *,
        acts: Callable[[], bool],
        folder_of: Callable[[str, str], str],
    ) -> None:
        """acts: False while another control does. folder_of: as `Reconciler` takes it."""
        self.fleet = Fleet({})
        self.controls: dict[str, AdapterControl] = {}
        """Changes between awaits of who iterates over it."""
        self._settings = settings
        self._database = database
        self._acts = acts
        self._folder_of = folder_of
        self._serving = Upstreams(settings.serving.upstreams)
        self._sampling = Upstreams(settings.only_sampling)
        self._engines: dict[str, _Engine] = {}
        self._asyncio = asyncio.get_running_loop()

    @property
    def follows_dns(self) -> bool:
        return self._serving.follows_dns or self._sampling.follows_dns

    @property
    def loops(self) -> Sequence[Loop]:
        return [one.loop for one in self._engines.values()]

    def loaded(self) -> frozenset[str]:
        """Return the adapters that some vLLM has loaded."""
        return frozenset[str]().union(
            *(one.reconciler.view.loaded for one in self._engines.values())
        )

    def wake(self) -> None:
        """Reconcile all now. From any thread."""
        for one in tuple(self._engines.values()):
            self._asyncio.call_soon_threadsafe(one.changed.set)

    async def follow(self) -> None:
        """Begin with the vLLMs that have come, and end with those that have gone."""
        serving, sampling = self._serving.now(), self._sampling.now()
        gone = self._engines.keys() - {*serving, *sampling}
        for url in (*serving, *sampling):
            if url not in self._engines:
                log.info("engine_found", replica=url)
                self._engines[url] = self._open(url)
        self.controls.clear()
        self.controls.update((url, self._engines[url].control) for url in serving)
        self.fleet.reconcilers = {url: self._engines[url].reconciler for url in serving}
        for url in gone:
            log.info("engine_gone", replica=url)
            await self._close(self._engines.pop(url))
            if self._acts():
                await asyncio.to_thread(keep_since, self._database, url, (), time.time())

    async def aclose(self) -> None:
        for one in self._engines.values():
            await self._close(one)

    def _open(self, url: str) -> _Engine:
        settings = self._settings
        client = vllm_client(settings, url)
        control, changed = VllmControl(client), asyncio.Event()
        reconciler = Reconciler(
            database=self._database,
            control=control,
            model=settings.serving.model,
            max_loras=settings.serving.max_loras,
            replica=url,
            own=[line.name for line in settings.lines[1:]],
            acts=self._acts,
            folder_of=self._folder_of,
            changed=changed,
        )

        def every_s() -> float:
            return RECONCILE_S if reconciler.view.away is None else RECONCILE_AWAY_S

        loop = Loop(f"reconcile {url}", reconciler.reconcile, every_s, changed)
        task = asyncio.create_task(loop.run())
        return _Engine(client, control, reconciler, changed, loop, task)

    async def _close(self, engine: _Engine) -> None:
        engine.task.cancel()
        await asyncio.gather(engine.task, return_exceptions=True)
        await engine.client.aclose()


def vllm_client(settings: Settings, url: str) -> httpx.AsyncClient:
    """Open a client of one vLLM, with its key."""
    key = settings.serving.api_key
    return httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key.get_secret_value()}"} if key else {},
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
        trust_env=False,  # a web proxy must not be used for the operator's own vLLM
    )

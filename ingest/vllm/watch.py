"""Keep the facts about vLLM (`ingest.grouping.request`) up to date.

The facts are measured, read from files, or stated in the settings. vLLM is probed every five
minutes, since it may restart with other flags. While it cannot be probed, the last facts hold, also
after a restart of ingest; before the first probe there are only the base model's files and the
settings.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Protocol

import structlog

from ingest.errors import AWAY, EngineDownError, NoRoomError, SamplingError
from ingest.grouping.request import UNKNOWN, EngineFacts, merge, read_defaults, state
from ingest.vllm.load import LoadLimits
from ingest.vllm.probe import PROBED, probe
from ingest.vllm.sampler import (
    CANDIDATE_S,
    LoadProbe,
    SampledAnswer,
    Sampler,
    SampleRequest,
    VllmSampler,
)
from ingest.vllm.throttle import PROBE_INTERVAL_S, Throttle
from sidecar.settings import Groups, Serving, Settings
from sidecar.upstreams import Upstreams

SOON_S = 1.0
"""Wait before the next probe of a vLLM that refuses connections: it may be starting."""
LATER_S = 60.0
"""Wait before the next probe of a vLLM that gives wrong replies: a probe costs ingest seconds."""
AGAIN_S = 300.0

Probe = Callable[[str, str, str | None], EngineFacts]
"""Signature of `ingest.vllm.probe.probe`."""
Start = Callable[[Callable[[], None]], None]
"""Runs a probe, at once or in a thread."""

log = structlog.get_logger()


@dataclass(slots=True)
class ProbeRun:
    """One probe of vLLM: its thread writes it until `ended` is set, then the watch reads it."""

    facts: EngineFacts | None = None
    """None when no replica answered."""
    why: SamplingError | None = None
    ended: threading.Event = field(default_factory=threading.Event)


def start_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread that does not keep the process from ending."""
    threading.Thread(target=work, name="engine-watch", daemon=True).start()


class EngineWatch:
    """Probes vLLM when due, in a separate thread, because vLLM may be slow to answer.

    All methods are called from one thread.
    """

    def __init__(
        self, serving: Serving, *, ask: Probe = probe, start: Start = start_thread
    ) -> None:
        self._serving = serving
        self._ask = ask
        self._start = start
        self._probe_at = 0.0
        self._running: ProbeRun | None = None
        self._last: EngineFacts | None = None
        """The facts as last measured or recalled; None before that."""
        self._logged = ""
        self.facts = state(UNKNOWN, serving)

    @property
    def ready(self) -> bool:
        """False while the first probe runs: decisions that need its facts should wait."""
        return self._running is None or self._last is not None or self.facts.known

    def recall(self, facts: EngineFacts) -> None:
        """Take over the facts of an earlier process."""
        self._last = facts
        self.facts = state(facts, self._serving)

    def poll(self, now: float) -> bool:
        """Start a probe that is due, and take over the result of one that has ended.

        now: Unix seconds. Returns: True when `facts` changed.
        """
        if self._running is None:
            if now < self._probe_at or state(UNKNOWN, self._serving).known:
                return False  # not due, or the settings state every fact
            self._running = ProbeRun()
            self._start(partial(self._measure, self._running))
        run = self._running
        if not run.ended.is_set():
            return False
        self._running = None
        before = self.facts
        if run.facts is not None:
            self._probe_at = now + AGAIN_S
            held = _with_files(run.facts, self._serving.base_model_path)
            self._last = held
        else:
            self._probe_at = now + (SOON_S if isinstance(run.why, EngineDownError) else LATER_S)
            held = self._last or _with_files(UNKNOWN, self._serving.base_model_path)
        self.facts = state(held, self._serving)
        self._log_change(run.why)
        return self.facts != before

    def _measure(self, run: ProbeRun) -> None:
        """Probe the replicas; merge the facts of those that answer, or keep the last error."""
        serving = self._serving
        key = serving.api_key.get_secret_value() if serving.api_key is not None else None
        found = []
        try:
            for url in Upstreams(serving.upstreams).now():
                try:
                    found.append(self._ask(url, serving.model, key))
                except SamplingError as error:
                    run.why = error
        finally:
            if found:
                run.facts, run.why = merge(found), None
            run.ended.set()

    def _log_change(self, why: SamplingError | None) -> None:
        facts = self.facts
        missing = [
            setting
            for setting, value in (
                ("serving.sampling_defaults", facts.defaults),
                ("serving.grammar", facts.grammar),
            )
            if value is None
        ]
        reason = str(why) if why is not None else "vLLM does not show it"
        message = f"{facts} {missing and reason}"
        if message == self._logged:
            return
        self._logged = message
        if missing:
            log.warning(
                "engine_not_known",
                why=reason,
                costs="requests with missing sampling fields, or with tools, are not learned from",
                to_do=f"vLLM is probed again; or set {' and '.join(missing)}",
            )
        else:
            log.info("engine_known", defaults=sorted(facts.defaults or ()), grammar=facts.grammar)


def _with_files(facts: EngineFacts, base_model_path: str) -> EngineFacts:
    """Complete measured facts with the defaults in the base model's files."""
    read = read_defaults(base_model_path)
    if facts.defaults is None:
        return EngineFacts(defaults=read, grammar=facts.grammar)
    return EngineFacts(
        defaults=facts.defaults | ((read or frozenset()) - frozenset(PROBED)), grammar=facts.grammar
    )


# Several vLLM replicas as one source of candidates.

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
        upstreams: Upstreams | None = None,
        opened: Callable[[str], Replica] | None = None,
    ) -> None:
        """replicas: by base URL, at least one; of equals the first is asked first.
        upstreams: names those that come and go, which `opened` opens; None: `replicas` stay."""
        self._limits = limits
        self._interval_s = interval_s
        self._upstreams = upstreams
        self._opened = opened
        self._gone = list[_Guarded]()
        self._replicas = {url: self._guarded(url, one) for url, one in replicas.items()}

    def _guarded(self, url: str, replica: Replica) -> _Guarded:
        throttle = Throttle(replica, self._limits, interval_s=self._interval_s, replica=url)
        return _Guarded(replica, throttle)

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
            limited = any(one.throttle.is_gate_open for one in self._replicas.values())
            if errors or not limited or monotonic() > deadline:
                break
            await asyncio.sleep(WAIT_S)
        raise errors[0] if errors else NoRoomError("users need the capacity of every vLLM")

    async def _with_room(self) -> list[_Guarded]:
        """Return the replicas with room, the least busy first. Raises: as `is_open`."""
        await self._follow()
        guarded = [*self._replicas.values()]
        found = await asyncio.gather(
            *(one.throttle.is_open() for one in guarded), return_exceptions=True
        )
        unknown = [one for one in found if isinstance(one, BaseException)]
        for error in unknown:
            if not isinstance(error, SamplingError) or len(unknown) == len(found):
                raise error
        pairs = zip(guarded, found, strict=True)
        return sorted(
            (one for one, is_open in pairs if is_open is True),
            key=lambda one: one.throttle.in_flight,
        )

    async def _follow(self) -> None:
        """Take in the vLLMs that have come, and leave out those that have gone."""
        if self._upstreams is None or not self._upstreams.follows_dns:
            return
        urls = self._upstreams.now()
        if self._opened is not None and list(urls) != list(self._replicas):
            known = self._replicas
            self._gone += [one for url, one in known.items() if url not in urls]
            self._replicas = {
                url: known.get(url) or self._guarded(url, self._opened(url)) for url in urls
            }
        for one in [one for one in self._gone if not one.throttle.in_flight]:
            self._gone.remove(one)
            await _close(one.replica)

    async def aclose(self) -> None:
        for one in (*self._replicas.values(), *self._gone):
            await _close(one.replica)


async def _close(replica: Replica) -> None:
    if isinstance(replica, VllmSampler):
        await replica.aclose()


MAX_RUNNING_REQUESTS = 48
"""A vLLM where users have more running and waiting requests than this gets no candidates."""
MAX_KV_CACHE_USAGE = 0.8
"""A vLLM whose KV cache is fuller than this share gets no candidates."""


def engine_of(settings: Settings) -> ReplicaSampler:
    """Open the vLLMs that sample candidates."""
    serving, groups = settings.serving, settings.groups
    api_key = serving.api_key.get_secret_value() if serving.api_key is not None else None
    urls = groups.sampling_upstreams or serving.upstreams
    return open_replicas(urls, api_key, groups)


def gate_engine_of(settings: Settings, *, max_slowdown: float = 0.0) -> ReplicaSampler:
    """Open the vLLMs that serve users, for answers that are compared.

    max_slowdown: share by which they may slow users; 0: no limit, as for the gate, since score and
    control would each take the other's candidates for users', and a canary would wait for its gate
    for as long as groups are sampled.
    """
    serving = settings.serving
    api_key = serving.api_key.get_secret_value() if serving.api_key is not None else None
    groups = settings.groups.model_copy(update={"max_slowdown": max_slowdown})
    return open_replicas(serving.upstreams, api_key, groups)


def open_replicas(
    urls: Sequence[str], api_key: str | None, groups: Groups, *, timeout_s: float = CANDIDATE_S
) -> ReplicaSampler:
    """Open a sampler over the vLLMs at these base URLs, with the limits of `[groups]`."""
    upstreams = Upstreams(urls)

    def opened(url: str) -> VllmSampler:
        return VllmSampler(url, api_key, timeout_s, priority="auto")

    return ReplicaSampler(
        {url: opened(url) for url in upstreams.now()},
        LoadLimits(
            requests=MAX_RUNNING_REQUESTS,
            kv_cache_usage=MAX_KV_CACHE_USAGE,
            max_slowdown=groups.max_slowdown,
        ),
        upstreams=upstreams,
        opened=opened,
    )

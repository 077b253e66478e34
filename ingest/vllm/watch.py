"""Keep the facts about vLLM (`ingest.grouping.engine_facts`) up to date.

The facts are measured, read from files, or stated in the settings. vLLM is probed every five
minutes, since it may restart with other flags. While it cannot be probed, the last facts hold, also
after a restart of ingest; before the first probe there are only the base model's files and the
settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from ingest.errors import EngineDownError, SamplingError
from ingest.grouping.engine_facts import UNKNOWN, EngineFacts, merge, state
from ingest.grouping.generation_config import read_defaults
from ingest.vllm.probe import PROBED, probe
from sidecar.settings import Serving

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
            for url in serving.upstreams:
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
        defaults=facts.defaults | ((read or frozenset()) - frozenset(PROBED)),
        grammar=facts.grammar,
    )

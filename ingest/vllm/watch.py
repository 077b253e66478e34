"""Keep what is known of vLLM fresh: measured, read from files, or stated
(`ingest.grouping.engine_facts`).

A vLLM that was measured is measured again every five minutes, since it may come back with other
flags. While it cannot be measured, what was last known holds, also over a restart of ingest; before
that only the base model's files and the settings speak.
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
"""Until the next look at a vLLM that refuses connections: it may be starting."""
LATER_S = 60.0
"""Until the next look at one that does not answer as it should: looking costs ingest seconds."""
AGAIN_S = 300.0

Probe = Callable[[str, str, str | None], EngineFacts]
"""As `ingest.vllm.probe.probe`."""
Start = Callable[[Callable[[], None]], None]
"""Runs a look, at once or in a thread."""

log = structlog.get_logger()


@dataclass(slots=True)
class Look:
    """One look: written by its thread until `ended` is set, then read by the watch."""

    facts: EngineFacts | None = None
    """None when no replica answered."""
    why: SamplingError | None = None
    ended: threading.Event = field(default_factory=threading.Event)


def start_thread(work: Callable[[], None]) -> None:
    """Run it in a thread that does not keep the process from ending."""
    threading.Thread(target=work, name="engine-watch", daemon=True).start()


class EngineWatch:
    """Looks when it is due, in a thread of its own: vLLM may be slow to answer. All else of it is
    used by one thread."""

    def __init__(
        self, serving: Serving, *, ask: Probe = probe, start: Start = start_thread
    ) -> None:
        self._serving = serving
        self._ask = ask
        self._start = start
        self._look_at = 0.0
        self._under_way: Look | None = None
        self._last: EngineFacts | None = None
        """As last measured or recalled."""
        self._said = ""
        self.facts = state(UNKNOWN, serving)

    @property
    def ready(self) -> bool:
        """False while the first look is under way: what it decides should wait for it."""
        return self._under_way is None or self._last is not None or self.facts.known

    def recall(self, facts: EngineFacts) -> None:
        """Take over what an earlier process found out."""
        self._last = facts
        self.facts = state(facts, self._serving)

    def look(self, now: float) -> bool:
        """Begin a look that is due, and take in one that has ended. Returns: whether `facts`
        changed."""
        if self._under_way is None:
            if now < self._look_at or state(UNKNOWN, self._serving).known:
                return False  # not due, or all is stated
            self._under_way = Look()
            self._start(partial(self._measure, self._under_way))
        look = self._under_way
        if not look.ended.is_set():
            return False
        self._under_way = None
        before = self.facts
        if look.facts is not None:
            self._look_at = now + AGAIN_S
            held = _with_files(look.facts, self._serving.base_model_path)
            self._last = held
        else:
            self._look_at = now + (SOON_S if isinstance(look.why, EngineDownError) else LATER_S)
            held = self._last or _with_files(UNKNOWN, self._serving.base_model_path)
        self.facts = state(held, self._serving)
        self._say(look.why)
        return self.facts != before

    def _measure(self, look: Look) -> None:
        """Find out the facts of the replicas that answer; else why the last of them does not."""
        serving = self._serving
        key = serving.api_key.get_secret_value() if serving.api_key is not None else None
        found = []
        try:
            for url in serving.upstreams:
                try:
                    found.append(self._ask(url, serving.model, key))
                except SamplingError as error:
                    look.why = error
        finally:
            if found:
                look.facts, look.why = merge(found), None
            look.ended.set()

    def _say(self, why: SamplingError | None) -> None:
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
        said = f"{facts} {missing and reason}"
        if said == self._said:
            return
        self._said = said
        if missing:
            log.warning(
                "engine_not_known",
                why=reason,
                costs="unsaid sampling values, or requests with tools, are not learned from",
                to_do=f"looked at again by itself; or state {' and '.join(missing)}",
            )
        else:
            log.info("engine_known", defaults=sorted(facts.defaults or ()), grammar=facts.grammar)


def _with_files(facts: EngineFacts, base_model_path: str) -> EngineFacts:
    """What is measured, and from the base model's files what a measurement does not show."""
    read = read_defaults(base_model_path)
    if facts.defaults is None:
        return EngineFacts(defaults=read, grammar=facts.grammar)
    return EngineFacts(
        defaults=facts.defaults | ((read or frozenset()) - frozenset(PROBED)),
        grammar=facts.grammar,
    )

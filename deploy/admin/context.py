"""What every route of the admin API works with."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deploy.admin.reception import Refusals
from deploy.engine.fleet import Fleet
from deploy.engine.reconcile import EngineView
from deploy.supervise.loops import LoopView
from sidecar.settings import Canary as CanarySettings
from sidecar.store.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    database: Database
    model: str
    rules: CanarySettings
    fleet: Fleet
    token_digests: tuple[str, ...] = ()
    """SHA-256 hex of the accepted bearer tokens; none: this machine's own tools are let in."""
    refusals: Refusals = field(default_factory=Refusals)
    """Counts requests that no route saw."""
    on_change: Callable[[], None] = lambda: None
    """Told after every change of what vLLM should have loaded."""
    clock: Callable[[], float] = time.time
    loops: Callable[[], Mapping[str, LoopView]] = dict
    """How the loops of this process do, by name."""

    @property
    def engine(self) -> EngineView:
        return self.fleet.view()

    def loaded(self) -> frozenset[str] | None:
        """Adapters in every vLLM that answers, when last asked; None while none does."""
        engine = self.engine
        return None if engine.away is not None else engine.loaded

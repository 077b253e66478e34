"""The dependencies that every route of the admin API shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from deploy.admin.reception import Refusals
from deploy.engine.fleet import Fleet
from deploy.engine.reconcile import EngineView
from deploy.examiner import Examiner
from deploy.supervise.loops import LoopView
from sidecar.settings import Canary as CanarySettings
from sidecar.settings import Groups, Watch
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    database: Database
    model: str
    rules: CanarySettings
    fleet: Fleet
    watch: Watch = field(default_factory=Watch)
    tokens: tuple[str, ...] = ()
    """As `admin.tokens`; empty: local processes need no token."""
    refusals: Refusals = field(default_factory=Refusals)
    """Counter of requests refused before routing."""
    on_change: Callable[[], None] = lambda: None
    """Called after every change of the adapters that vLLM should have loaded."""
    clock: Callable[[], float] = time.time
    examiner: Examiner | None = None
    """The judge of the gate; None: control has none."""
    hooks: tuple[str, ...] = ()
    """Names of the web hooks."""
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    """Has the budgets of the judges."""
    groups: Groups = field(default_factory=Groups)
    """Has the budgets of sampling."""
    most_pending_groups: int = 256
    """Groups that may wait before no new one begins."""
    loops: Callable[[], Mapping[str, LoopView]] = dict
    """Returns the state of the control process's loops, by name."""

    lease: Callable[[], tuple[bool, str]] = lambda: (True, "")
    """Returns whether this control acts, and else who does, in words."""

    @property
    def engine(self) -> EngineView:
        return self.fleet.view()

    def loaded(self) -> frozenset[str] | None:
        """Return the adapters loaded in every reachable vLLM; None while none is reachable."""
        engine = self.engine
        return None if engine.away is not None else engine.loaded

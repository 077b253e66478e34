"""The dependencies that every route of the admin API shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from deploy.admin.paging import SHOWN
from deploy.admin.progress import ProgressReader
from deploy.admin.reception import Refusals
from deploy.conditions import control_conditions, in_order, read_conditions
from deploy.engine.reconcile import EngineView, Fleet
from deploy.errors import UnknownProjectError
from deploy.examiner import Examiner
from deploy.funnel import read_funnel
from deploy.registry import canaries, versions
from deploy.supervise import LoopView
from sidecar.conditions import Condition
from sidecar.lines import Line
from sidecar.settings import (
    Canary as CanarySettings,
    Groups,
    Judge as JudgeSettings,
    Learner,
    Watch,
)
from sidecar.settings.learning import Rehearsals
from sidecar.store.database import Database
from sidecar.store.models import CanaryRow


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    database: Database
    model: str
    """Name of the default line, which is the public model name."""
    rules: CanarySettings
    fleet: Fleet
    lines: tuple[Line, ...] = ()
    """All lines of adapters; empty: the default one alone."""
    watch: Watch = field(default_factory=Watch)
    tokens: tuple[str, ...] = ()
    """As `admin.tokens`; empty: local processes need no token."""
    refusals: Refusals = field(default_factory=Refusals)
    """Counter of requests refused before routing."""
    on_change: Callable[[], None] = lambda: None
    """Called after every change of the adapters that vLLM should have loaded."""
    clock: Callable[[], float] = time.time
    learner: Learner = field(default_factory=Learner)
    """Has the schedule of runs."""
    examiner: Examiner | None = None
    """The judge of the gate; None: control has none."""
    hooks: tuple[str, ...] = ()
    """Names of the web hooks."""
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    """Has the budgets of the judges."""
    groups: Groups = field(default_factory=Groups)
    """Has the budgets of sampling."""
    rehearsals: Rehearsals = field(default_factory=Rehearsals)
    most_pending_groups: int = 256
    """Groups that may wait before no new one begins."""
    loops: Callable[[], Mapping[str, LoopView]] = dict
    """Returns the state of the control process's loops, by name."""

    progress: ProgressReader = field(default_factory=ProgressReader)
    lease: Callable[[], tuple[bool, str]] = lambda: (True, "")
    """Returns whether this control acts, and else who does, in words."""

    def whole_line(self, project: str | None) -> Line:
        """Return a project's line; the default line for None. Raises: UnknownProjectError."""
        for line in self.all_lines:
            if line.project == project:
                return line
        name = (project or "")[:SHOWN]
        raise UnknownProjectError(f"{name} is none of the projects in serving.own_adapters")

    def line_of(self, project: str | None) -> str:
        """Return the name of the line. Raises: UnknownProjectError."""
        return self.whole_line(project).name

    def canary_row(self, session: Session, canary_id: str, project: str | None) -> CanaryRow:
        """Return a canary's row. project: of whose line it must be; None: of any.

        Raises: UnknownCanaryError; UnknownProjectError.
        """
        line = self.line_of(project) if project is not None else None
        return canaries.find_row(session, canary_id, line)

    @property
    def all_lines(self) -> tuple[Line, ...]:
        """The default one first."""
        return self.lines or (Line(name=self.model),)

    def conditions(self, session: Session, line: str, now: float) -> list[Condition]:
        """Return every condition, what needs a person first. line: its name; now: Unix seconds."""
        stored = read_conditions(
            session,
            self.all_lines,
            read_funnel(session, *(one.name for one in self.all_lines)),
            watch=self.watch,
            most_pending=self.most_pending_groups,
            now=now,
        )
        own = control_conditions(
            session,
            engine=self.engine,
            loops=self.loops(),
            lease=self.lease(),
            examiner=self.examiner,
            hooks=self.hooks,
            champion=versions.champion(session, line),
        )
        return in_order([*stored, *own])

    @property
    def engine(self) -> EngineView:
        return self.fleet.view()

    def loaded(self) -> frozenset[str] | None:
        """Return the adapters loaded in every reachable vLLM; None while none is reachable."""
        engine = self.engine
        return None if engine.away is not None else engine.loaded

"""What the doctor looks at, as records. `look` fills them, `rules` judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.funnel.pile_up import PileUp
from deploy.funnel.read import Funnel
from deploy.funnel.stages import Name
from deploy.preflight.findings import Finding
from ingest.intake.bus_report import BusState
from ingest.judge_watch.state import JudgeState
from ingest.noise.state import NoiseState
from ingest.sampling.budget import Spent
from ingest.verifiers.state import VerifierSeen
from sidecar.lines import Line
from sidecar.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """What became of the newest records: the funnel's counts reach back to the store's beginning,
    and what was wrong last year must not be named today."""

    selections: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest exchanges by `selection`."""
    served: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest groups' served answers by `trainable`, or by why they are masked."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest groups by status; of those that ended without an adapter by reason."""
    detail: str = ""
    """What the newest group that ended says in words."""
    started_ahead_s: float = 0.0
    """Least number of seconds by which the newest exchanges began after they were stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    status: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFacts:
    """What the store says of one line of adapters."""

    line: Line
    learner_paused: bool = False
    run: LastRun | None = None
    adapter: tuple[str, str, str] | None = None
    """Name, state and reason of the newest adapter."""
    canary: str = ""
    """What the open canary waits for."""
    sessions_a_day: float = 0.0
    """Of the last week; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What the store says."""

    funnel: Funnel
    bus: BusState | None = None
    spent: Spent | None = None
    """The budget of sampling that is spent."""
    judge: JudgeState | None = None
    """The judge, as score last saw it."""
    noise: NoiseState | None = None
    """The noise of the judge that the settings name."""
    verifiers: tuple[VerifierSeen, ...] = ()
    """Verifiers, as score last saw them."""
    waiting_for_verifiers: Mapping[str, int] = field(default_factory=dict)
    """Groups that wait for a verifier, by its name."""
    pile_up: PileUp | None = None
    """Why no new group begins; None while there is room."""
    lines: tuple[LineFacts, ...] = ()
    """The lines of adapters, the default one first."""
    recent: Recent = Recent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the rules judge."""

    now: float
    """Unix seconds, by this machine's clock."""
    settings: Settings
    store: StoreFacts | None = None
    """None: there is no store yet, or it cannot be read; then `findings` says why."""
    findings: tuple[Finding, ...] = ()
    """What the checks of `config check --online` found."""
    verifiers_tried: bool = False
    """The verifiers were tried just now; then `findings` has those that fail."""
    running: frozenset[str] = frozenset()
    """Processes of this machine that hold a lock in `state_dir`."""
    answering: frozenset[str] = frozenset()
    """Which of `proxy` and `control` answer on their ports."""
    loads_refused: Mapping[str, str] = field(default_factory=dict)
    """Adapter -> why a vLLM refuses to load it, as control saw it."""
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    """Whose clock -> seconds that it is ahead of this machine's."""
    next_run_at: float | None = None
    """When the schedule is due next; None: not by the clock."""
    schedule_error: str = ""
    """Why the schedule never comes."""
    unchecked: tuple[str, ...] = ()
    """Checks that gave no result in time, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A stage at which records stop, and the likely cause."""

    stage: Name
    cause: str
    """A short name, for programs."""
    text: str
    """What is seen, and why that stops records."""
    to_do: str
    project: str | None = None
    """Whose line of adapters it is about; None: the default one, or all."""

"""Records of deploy: an adapter version, and the canary that it must pass to serve all users.

A `Canary` is one row of the `canary` table, frozen: the pure rules read it, and only the store's
writers (`transitions`, `rollback`) change the row.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deploy.evidence.live import Approval, MetricState
from sidecar.records import BASE
from sidecar.routing.table import is_adapter_name

AdapterState = Literal[
    "registered", "gating", "ramping", "champion", "retired", "rejected", "rolled_back"
]
"""registered: waits for its canary; rejected: never answered a user (invalid, without effect, or
failed the gate); rolled_back: had traffic and lost it; retired: replaced by another adapter."""

Phase = Literal[
    "queued",
    "loading",
    "gating",
    "ramping",
    "promoted",
    "rolled_back",
    "inconclusive",
    "withdrawn",
]
"""queued: waits until the canary that runs has ended; withdrawn: left the queue without a trial."""
_VERSION = re.compile(r".+--(v\d+)-[0-9a-f]{12}")
LEARNER_AWAY_S = 180.0
"""A learner that told nothing for so long is away: it tells its decision every minute."""
LOADS = "vLLM loads it"
"""A canary's reason until vLLM has answered for the first time."""
ACTIVE_PHASES: tuple[Phase, ...] = ("loading", "gating", "ramping")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """One immutable adapter folder and its state."""

    name: str
    """Adapter name in vLLM, never used twice."""
    model: str
    version: int
    digest: str
    path: str
    parent: str
    """Adapter name that training continued from, or "base"."""
    run_id: str | None
    state: AdapterState
    reason: str | None
    created_at: float
    forgotten_at: float | None = None
    """When content was forgotten that it, or an adapter that it continues, had learned from."""
    removed_at: float | None = None
    """When retention removed the folder, in Unix seconds; None: it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The staged roll-out of one candidate, from its loading and gate to the decision."""

    canary_id: str
    model: str
    candidate: str
    champion: str
    """Adapter name that the candidate is compared with, or "base"."""
    phase: Phase
    paused: bool
    reason: str | None
    """What the canary waits for, or why it ended, in words."""
    step: int
    """Index into `steps` while ramping."""
    steps: tuple[int, ...]
    """Weights of the ramp in basis points, frozen when the canary began."""
    salt: str
    created_at: float
    step_started_at: float
    """Time of the last transition, in Unix seconds."""
    stopped_s: float
    """Seconds since `step_started_at` in which the clock stopped: paused, or judge or vLLM away."""
    stopped_at: float | None
    """Time at which the clock stopped, in Unix seconds; None while it runs."""
    ended_at: float | None
    generation: int
    taken_out: str | None = None
    """Why the proxy's breaker took the candidate out while the canary was paused."""
    tick_errors: int = 0
    """Consecutive ticks that ended with an error caused by this canary."""
    tick_error_at: float = 0.0
    """Time of the last such tick, in Unix seconds."""
    gate_judges: tuple[str, ...] = ()
    """Judge models and rubric hashes that scored its gate, as the evidence names them."""
    anchor: str = BASE
    """Adapter name that does not move with promotions, or "base"; fixed when the canary began."""
    ramp_began_at: float = 0.0
    """Unix seconds from which on users' sessions count: the first step, or a resume under a new
    salt."""
    ramp_after_seq: int = 0
    """Exchanges of the ramp have larger numbers."""
    ramp_after_told: int = 0
    """The same of feedback and outcomes."""
    told: tuple[str, ...] = ()
    """What clients told of both arms, in words."""
    proven: frozenset[str] = frozenset()
    """Claims that judged groups have proven (`deploy.registry.proof_rule`): they stay so."""
    waived_step: int | None = None
    """Step whose shortest time and fewest sessions and exchanges an operator waived."""
    metrics: Mapping[str, MetricState] = field(default_factory=dict)
    """What numbers from outside said, by the metric's name."""
    approval: Approval | None = None
    """The move that waits for the operator's service, or did; None: none does."""
    tries: tuple[str, ...] = ()
    """Ids of earlier canaries of this candidate against the same champion and anchor, the oldest
    first: their groups count too."""
    tried_since: float | None = None
    """When the first of them began, Unix seconds; None: this one is the first."""
    judge_gives_reward: bool | None = None
    """True when the gate's judge also scores what the candidate learned from; None: not known."""

    @property
    def active(self) -> bool:
        return self.phase in ACTIVE_PHASES

    @property
    def step_waived(self) -> bool:
        """True when the present step may end without its time, sessions and exchanges."""
        return self.phase == "ramping" and self.waived_step == self.step

    @property
    def weight_bp(self) -> int:
        """Share of sessions that the candidate answers now, in basis points."""
        serves = self.phase == "ramping" and self.taken_out is None and self.readable
        return self.steps[self.step] if serves else 0

    @property
    def readable(self) -> bool:
        """False when the store's record of the ramp or of the candidate's name is damaged: the
        canary must end."""
        return 0 <= self.step < len(self.steps) and is_adapter_name(self.candidate)


def trial_of(line: str, candidate: str, champion: str, salt: str) -> Canary:
    """Describe a comparison as the gate's parts take it: a canary that is nowhere stored, and whose
    clock stands at 0. line: its name. salt: what seeds and the id are drawn from."""
    return Canary(
        canary_id=f"trial-{salt}",
        model=line,
        candidate=candidate,
        champion=champion,
        anchor=champion,
        phase="gating",
        paused=False,
        reason=None,
        step=0,
        steps=(),
        salt=salt,
        created_at=0.0,
        step_started_at=0.0,
        stopped_s=0.0,
        stopped_at=None,
        ended_at=None,
        generation=0,
    )


def version_of(adapter: str) -> str:
    """`v12` of `<model>--v12-<digest>`; another name as it is. Pure."""
    match = _VERSION.fullmatch(adapter)
    return match[1] if match else adapter


def short(adapter: object) -> str:
    """`v12` of `<model>--v12-<digest>`; "the base model"; another name as it is. Pure."""
    name = str(adapter)
    return "the base model" if name == BASE else version_of(name)


def comes_next(state: str, step: int, steps: Sequence[int]) -> str:
    """Say what follows a step of a canary (0 is the first): the promotion or the next one. Pure."""
    return "promotion" if state == "ramping" and step + 1 >= len(steps) else "next step"


def nobody_has(adapter: str, loaded: Iterable[Collection[str] | None]) -> bool:
    """Return True when some vLLM answers, and none that does has loaded the adapter. Pure.

    loaded: the adapters of each vLLM; None: it does not answer. Everybody has the base.
    """
    known = [one for one in loaded if one is not None]
    return adapter != BASE and bool(known) and all(adapter not in one for one in known)


# How long a reason of the audit may be. Loads nothing: every start of the command imports it.

MAX_REASON = 2_000
"""Characters."""


def cut_reason(reason: str) -> str:
    """Leave out what a reason has beyond `MAX_REASON`. Pure."""
    return reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 1] + "…"

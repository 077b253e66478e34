"""The records of the learner: what it trains on, what a run hands on, what each step measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.settings import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableRow:
    """One answer of a group, as the loss sees it."""

    token_ids: tuple[int, ...]
    """[S] sampled ids."""
    logprobs: tuple[float, ...]
    """[S] nats, recorded when the ids were sampled, at `temperature`."""
    advantage: float
    """Score minus the group's mean, in score units."""
    temperature: float
    """Above 0; the trainer's logits are divided by it, as the server's were."""
    trainable: bool
    """False: counts in the mean of its group, and never in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """select -> pack. G answers to one prompt, with their advantages."""

    group_id: str
    adapter: str
    """vLLM name of the LoRA that sampled the answers; "base" when none did."""
    prompt_token_ids: tuple[int, ...]
    """[P], P >= 1."""
    rows: tuple[TrainableRow, ...]
    """[G]"""
    scores: tuple[float, ...]
    """[G] unitless, 0..1."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one group cannot be trained on."""

    reason: str
    """A drop reason of the data dictionary."""
    text: str
    """The details, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimiser step. Token figures are over its trainable tokens."""

    step: int
    """1 is the first."""
    groups: int
    answers: int
    """Trainable ones."""
    tokens: int
    """Trainable ones: the loss's denominator."""
    computed_tokens: int
    """Tokens that went through the decoder; each prompt once per pack."""
    reward_mean: float
    reward_spread: float
    """Mean over the groups of the population standard deviation of their scores."""
    loss: float
    ratio_mean: float
    clip_share: float
    """Share of tokens whose gradient the clip took away, 0..1."""
    approx_kl: float
    """nats per token, KL(behaviour || policy) estimated by mean(r - 1 - log r)."""
    entropy: float
    """nats per token, of the policy's own distribution."""
    grad_norm: float
    """Before clipping."""
    seconds: float
    tokens_per_s: float
    """`computed_tokens` over `seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Distance, before any step, between what vLLM recorded and what the trainer computes under
    the adapter that sampled the answers."""

    mean: float
    """nats per token, mean(recorded - recomputed): an estimate of KL(server || trainer)."""
    mean_abs: float
    """nats per token, mean |recorded - recomputed|."""
    max_abs: float
    ratio_mean: float
    """Mean importance ratio; 1 when both agree."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """What a run starts from: the champion's adapter, or the base (no path)."""

    name: str
    """vLLM name, or "base"."""
    version: int = 0
    digest: str = ""
    path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """run -> trainer. Everything that a trainer needs, and nothing of the store."""

    base_model_path: str
    parent: Parent
    groups: tuple[TrainingGroup, ...]
    settings: Learner
    folder: Path
    """Existing empty folder that receives the PEFT files."""
    check_stop: Callable[[], None]
    """Called between packs. Raises RunStoppedError when the run must end."""
    samplers: Mapping[str, Parent] = field(default_factory=dict)
    """Registered adapters, other than the parent and the base, that sampled some of the groups."""
    report: Callable[[str], None] = lambda place: None
    """Called with the id of the group that is computed next, and with "" outside any group. A run
    that is killed is blamed on the group that was reported last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """trainer -> run. The weights are in the job's folder, if any group was trained on."""

    metrics: tuple[StepMetrics, ...]
    """Empty: no group was usable, and nothing was written."""
    drift: Drift | None
    """Over every token that was trained on; None when there is none."""
    algorithm: Mapping[str, object]
    """What the settings do not say: loss, optimiser, arithmetic. JSON values, for the lineage."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Group id -> why the trainer left the group out."""
    drifted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Group id -> indices of answers that were left out of the loss because they drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """train -> canary. A registered, immutable adapter version."""

    adapter: str
    """vLLM name `<model>--v<version>-<digest12>`, never used twice."""
    parent: str
    """Adapter that it continues, and the one to return to; "base" when it is the first."""
    version: int
    digest: str
    path: Path
    """Absolute, as vLLM sees it."""

"""Records of the learner: training groups, jobs and outcomes, and the metrics of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from learner.ranks import Alone, Ranks
from sidecar.settings import Learner

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableRow:
    """One answer of a group, with the values that the loss needs."""

    token_ids: tuple[int, ...]
    """[S] sampled ids."""
    logprobs: tuple[float, ...]
    """[S] nats, recorded when the ids were sampled, at `temperature`."""
    advantage: float
    """How much better it is than its trainable siblings, by `learner.advantage`."""
    temperature: float
    """Above 0; the trainer's logits are divided by it, as the server's were."""
    trainable: bool
    """False: it has no part in the loss."""
    counted: bool = True
    """False: it has no part in the baseline of its group either (`learner.grpo.advantages`)."""
    start: tuple[float, ...] = ()
    """[S] nats, under the policy at the start of the run; empty when the loss does not read
    them."""
    recorded: bool = True
    """False: `logprobs` are zeros, and the check puts recomputed ones in their place."""
    kept: tuple[bool, ...] = ()
    """[S] False: the token has no part in the loss, though the answer has. Empty: all have one. A
    trainable row keeps at least one token."""

    @property
    def kept_tokens(self) -> int:
        """Number of tokens that have a part in the loss of a trainable row."""
        return sum(self.kept) if self.kept else len(self.token_ids)

    def of_kept(self, values_S: Sequence[T]) -> list[T]:
        """Return the values of the tokens that have a part in the loss, in order."""
        return list(compress(values_S, self.kept)) if self.kept else list(values_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """G answers to one prompt, with their advantages (selection -> packing)."""

    group_id: str
    adapter: str
    """vLLM name of the LoRA that sampled the answers; "base" when none did."""
    prompt_token_ids: tuple[int, ...]
    """[P] token ids of the prompt, P >= 1."""
    rows: tuple[TrainableRow, ...]
    """[G] the answers."""
    scores: tuple[float, ...]
    """[G] rewards, unitless, 0..1: the judge's scores, or what verifiers made of them. In the place
    of one that is no such number stands the mean of those that count. Answers that count and are
    the same have the mean of their rewards."""
    unshared: tuple[float, ...] = ()
    """[G] the same, each answer's own, to be shared again when one of them counts no more. Empty:
    they are `scores`."""
    masked_by: str | None = None
    """What forbade tokens while the answers were sampled, or may have; None: nothing did."""
    sessions: tuple[int, ...] = ()
    """[G] number of the session that a row is a part of, for a group of whole sessions: they are
    compared, and not the rows. Empty: each row is an answer by itself."""
    weights: tuple[float, ...] = ()
    """[G] with `sessions`: what a row's advantage is multiplied by, so that the loss is a mean per
    session."""
    steps: tuple[float, ...] = ()
    """[G] with `sessions`: advantage of the row's step among other answers to its prompt, times the
    weight of such advantages; 0: it has none."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of what is compared: answers, or sessions."""
        if not self.sessions:
            return self.scores
        return tuple(dict(zip(self.sessions, self.scores, strict=True)).values())


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why one group cannot be trained on."""

    reason: str
    """A drop reason of the data dictionary."""
    text: str
    """The details, for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswers:
    """What the check before the first step decided about the answers of a group."""

    left_out: Mapping[int, str] = field(default_factory=dict)
    """Index of an answer -> why it has no part in the loss."""
    recomputed: tuple[int, ...] = ()
    """Indices of answers whose log-probabilities the trainer computed itself."""
    masked_tokens: Mapping[int, int] = field(default_factory=dict)
    """Index of an answer that is trained on -> its tokens that a mask of the server touched."""
    tokens: int = 0
    """Tokens that are trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one optimiser step. Means per token are over its trainable tokens."""

    step: int
    """Number of the step, from 1."""
    groups: int
    answers: int
    """Number of trainable answers."""
    tokens: int
    """Number of trainable tokens. The loss is divided by it, by the answers (`grpo`, `gspo`) or by
    answers times `LOSS_LENGTH` (`dr_grpo`)."""
    computed_tokens: int
    """Number of tokens that went through the decoder; each prompt once per pack."""
    reward_mean: float
    reward_spread: float
    """Mean over the groups of the population standard deviation of their scores."""
    loss: float
    ratio_mean: float
    clip_share: float
    """Share of tokens whose gradient the loss or a mask of `learner.grpo.losses` removes,
    0..1."""
    approx_kl: float
    """nats per token, KL(behaviour || policy) estimated by mean(r - 1 - log r)."""
    entropy: float
    """nats per token, of the policy's own distribution at each answer's temperature."""
    grad_norm: float
    """L2 norm of the gradient before it was scaled down to `MAX_GRAD_NORM`."""
    update_norm: float
    """L2 norm of the change of the adapter's weights."""
    learning_rate: float
    """Rate of this step, by the signals of its groups."""
    seconds: float
    tokens_per_s: float
    """`computed_tokens` over `seconds`."""
    masked_answers: int = 0
    """Answers of the step's groups that have no part in the loss."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """`answers.REASON` -> how many of `masked_answers`; `groups.REASON` -> groups that the trainer
    has left out of the run by the time of this step."""
    masked_tokens: int = 0
    """Tokens of trainable answers that a mask of the server touched: they have no part in the loss,
    and are not counted in `tokens`."""
    answer_tokens: float = 0.0
    """Mean length of a trainable answer, in tokens."""
    drift: float = 0.0
    """nats per token, mean |recorded - policy| before this step: the server's rounding, and what
    the steps before it changed."""
    kl_base: float | None = None
    """nats per token, KL(policy || base) before this step, estimated on `kl_base_tokens` tokens
    (`learner.grpo.base_kl`); None: not measured."""
    kl_base_tokens: int = 0
    kl_coef: float = 0.0
    """Weight of that divergence in the step's loss: `kl_coef` over the budget, else 0."""
    sample_size: float | None = None
    """Effective sample size of the tokens of sessions, as a share of their number, by how likely
    they were at the start of the run (`learner.grpo.answers.sample_size`); None: there are none."""
    alignment: float = 0.0
    """Of groups of sessions: how far the steps before made those likelier that ended better
    (`learner.grpo.chance`)."""
    alignment_variance: float = 0.0
    """Its variance, were the rewards of each group given to its sessions by lot."""
    peak_memory_bytes: int = 0
    """Peak of the process so far; on a GPU, of what torch holds there."""

    @property
    def flat(self) -> dict[str, float | None]:
        """Each figure by name, for those who take single numbers: `left_out.REASON` is one."""
        figures = asdict(self)
        left_out = figures.pop("left_out")
        return {**figures, **{f"left_out.{reason}": n for reason, n in left_out.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Difference, before any step, between recorded and recomputed log-probabilities.

    vLLM recorded them; the trainer recomputes them with the adapter that sampled the answers.
    """

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
    """The start of a run: the champion's adapter, or the base (no path)."""

    name: str
    """vLLM name, or "base"."""
    version: int = 0
    digest: str = ""
    path: Path | None = None


StageName = Literal["checking", "anchoring", "training"]
Phase = Literal["loading", "checking", "anchoring", "training", "measuring", "saving"]
"""`checking`: recorded log-probabilities against recomputed ones. `anchoring`: log-probabilities at
the start of the run, for the losses that read them. `measuring`: the divergence from the base after
the last step."""
End = Literal["ok", "failed", "killed"]
"""How a run ended, for those who show it. `ok`: it published, or found nothing to learn. `killed`:
it left its work to the next start, which goes on with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One group of a stage."""

    group_id: str
    answers: int
    """Trainable ones."""
    tokens: int
    """Tokens of its prompt and of its trainable answers."""
    step: int = 0
    """Optimiser step that it belongs to, from 1; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pass of a run over some groups."""

    name: StageName
    parts: tuple[Part, ...]
    """In the order in which they are computed."""
    steps: int = 0
    """Optimiser steps of the stage; 0: it takes none."""

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def answers(self) -> int:
        return sum(part.answers for part in self.parts)


class Watch(Protocol):
    """Told by a trainer what it does, from the thread that does it. It raises nothing."""

    def phase(self, name: Phase) -> None:
        """A phase begins in which nothing is counted."""

    def plan(self, stages: Sequence[Stage]) -> None:
        """The first of these stages begins now; the others follow. It replaces an older plan."""

    def done(self, group_id: str) -> None:
        """This group of the present stage is computed, or given up."""

    def begin_steps(self, done: Sequence[StepMetrics]) -> None:
        """The steps begin, or begin anew: those that were told before do not count.

        done: the steps that the run did before it was killed, behind which it goes on.
        """

    def step(self, metrics: StepMetrics) -> None:
        """An optimiser step is done."""


class Silent:
    """A watch that tells nobody."""

    def phase(self, name: Phase) -> None: ...
    def plan(self, stages: Sequence[Stage]) -> None: ...
    def done(self, group_id: str) -> None: ...
    def begin_steps(self, done: Sequence[StepMetrics]) -> None: ...
    def step(self, metrics: StepMetrics) -> None: ...


class Checkpoints(Protocol):
    """Keeps what a killed run goes on from."""

    def newest(self) -> Path | None:
        """Return the folder of the newest checkpoint; None when there is none."""

    def keep(self, fill: Callable[[Path], None]) -> None:
        """Keep another checkpoint in place of the one before; one that the disk refuses costs
        itself (logged).

        fill: writes the files into the folder that it gets.
        Raises: RunStoppedError when the run is another process's by now.
        """

    def discard(self, why: str) -> None:
        """Remove every checkpoint, and log why. Raises: OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """Everything that a trainer needs, without the store (run -> trainer)."""

    base_model_path: str
    parent: Parent
    groups: tuple[TrainingGroup, ...]
    settings: Learner
    folder: Path
    """Existing empty folder that receives the PEFT files."""
    check_stop: Callable[[], None]
    """Called between packs. Raises RunStoppedError when the run must end."""
    quiet: int = 0
    """Groups that the run left out because their scores differ by no more than noise: they make the
    steps smaller (`learner.grpo.optimizer`)."""
    signals: Sequence[float] | None = ()
    """z of earlier runs of the line, the newest first, by which the gate of sessions decides
    (`learner.grpo.chance`); None: it does not, since what it decided is known."""
    least_spread: Mapping[str, float] = field(default_factory=dict)
    """Group id -> least spread of its rewards, score units, by the noise of its judge."""
    references: Mapping[str, float] = field(default_factory=dict)
    """Group id -> signal, score units, from which on it counts in full; `REFERENCE_SPREAD` of
    `learner.grpo.advantages` where it is missing."""
    samplers: Mapping[str, Parent] = field(default_factory=dict)
    """Registered adapters, other than the parent and the base, that sampled some of the groups."""
    masked: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Group id -> index of an answer that came not trainable -> why; no weight depends on it."""
    report: Callable[[str], None] = lambda place: None
    """Called with the id of the group that is computed next, and with "" outside any group. If the
    run is killed, the group that was reported last is blamed."""
    watch: Watch = field(default_factory=Silent)
    checkpoints: Checkpoints | None = None
    """Where the run's progress is kept after each step, and found after it was killed; None:
    nowhere. What is found is of this job: the run compared all that its result depends on."""
    ranks: Ranks = field(default_factory=Alone)
    """The processes that compute it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """Result of a trainer (trainer -> run). Weights, if there are any, are in the job's folder."""

    metrics: tuple[StepMetrics, ...]
    """Metrics of each step; empty when no group was usable and nothing was written."""
    drift: Drift | None
    """Drift over every token that was trained on; None when there is none."""
    algorithm: Mapping[str, object]
    """Facts beyond the settings (loss, optimiser, arithmetic), as JSON values for the lineage."""
    signal: float | None = None
    """z of the run's sessions (`learner.grpo.chance`); None: there were too few, or none."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Group id -> fault, for the groups that the trainer left out."""
    answers: Mapping[str, CheckedAnswers] = field(default_factory=dict)
    """Group id -> what the check decided, for the groups that it let through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A registered, immutable adapter version (training -> canary)."""

    adapter: str
    """vLLM name `<model>--v<version>-<digest12>`, never used twice."""
    parent: str
    """Adapter that it continues, and the target of a return; "base" when it is the first."""
    version: int
    digest: str
    path: Path
    """Absolute path of its folder, as vLLM sees it."""

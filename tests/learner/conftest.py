"""A tiny model, a store and groups to learn from, shared by the learner's tests."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from ingest.records import Answer, Group, ScoredGroup
from ingest.store.groups import mark_sampled, mark_scored, save_group
from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest
from learner.records import (
    CheckedAnswers,
    Drift,
    Parent,
    StepMetrics,
    TrainableRow,
    TrainingGroup,
    TrainingJob,
    TrainingOutcome,
)
from learner.runs.train import Run, Trainer
from sidecar.settings import Learner, Serving, Settings, Store
from sidecar.store.codec import pack_ids
from sidecar.store.database import Database, compress
from sidecar.store.models import (
    AdapterRow,
    AliasRow,
    CounterRow,
    ExchangeRow,
    GroupRow,
    JudgeNoiseDayRow,
)
from support.clock import Clock
from support.stores import NewStore

if TYPE_CHECKING:
    from learner.policy.logprobs import Policy

VOCABULARY = 48
NOW = 1_000_000.0

PutGroup = Callable[[ScoredGroup], None]
PutVersion = Callable[..., str]
NewRun = Callable[..., Run]
"""The fixtures of these names; each fixture's docstring gives its arguments."""


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer random Llama on disk."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)  # the matrices are tiny: a second thread only waits
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def database(new_store: NewStore) -> Database:
    return new_store()


@pytest.fixture
def learner_settings() -> Learner:
    return Learner(
        min_groups=2,
        rank=4,
        alpha=8,
        precision="float32",
        groups_per_step=9,
        learning_rate=0.02,
        threads=1,
        pack_tokens=2048,
    )


@pytest.fixture
def policy(tiny_base: Path, learner_settings: Learner) -> Policy:
    """The tiny model with a fresh adapter, which changes nothing yet."""
    from learner.policy.adapter_io import load_policy

    return load_policy(str(tiny_base), Parent(name="base"), learner_settings)


def job_of(groups: Sequence[TrainingGroup], settings: Learner, **changes: Any) -> TrainingJob:
    """A job from the base, without files."""
    job = TrainingJob(
        base_model_path="",
        parent=Parent(name="base"),
        groups=tuple(groups),
        settings=settings,
        folder=Path("unused"),
        check_stop=lambda: None,
    )
    return replace(job, **changes)


@pytest.fixture
def settings(
    database: Database, tmp_path: Path, tiny_base: Path, learner_settings: Learner
) -> Settings:
    return Settings(
        serving=Serving(model="m", base_model_path=str(tiny_base)),
        store=Store(url=database.url),
        state_dir=tmp_path / "state",
        learner=learner_settings.model_copy(update={"adapters_dir": tmp_path / "adapters"}),
    )


def make_row(
    token_ids: Sequence[int],
    advantage: float = 1.0,
    *,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    trainable: bool = True,
    kept: Sequence[bool] = (),
) -> TrainableRow:
    return TrainableRow(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs) if logprobs is not None else (-1.0,) * len(token_ids),
        advantage=advantage,
        temperature=temperature,
        trainable=trainable,
        kept=tuple(kept),
    )


def make_group(
    prompt: Sequence[int],
    rows: Sequence[TrainableRow],
    *,
    adapter: str = "base",
    group_id: str = "g",
) -> TrainingGroup:
    """Scores follow the advantages."""
    return TrainingGroup(
        group_id=group_id,
        adapter=adapter,
        prompt_token_ids=tuple(prompt),
        rows=tuple(rows),
        scores=tuple(0.5 + row.advantage / 2 for row in rows),
    )


def logprobs_of(
    policy: Policy, prompt: Sequence[int], answers: Sequence[Sequence[int]]
) -> list[tuple[float, ...]]:
    """[answers][tokens] nats under the policy."""
    return own_logprobs(policy, make_group(prompt, [make_row(ids) for ids in answers]))


def own_logprobs(policy: Policy, group: TrainingGroup) -> list[tuple[float, ...]]:
    """[trainable rows][tokens] nats under the policy."""
    import torch

    from learner.policy.packing import pack_group

    rows = [replace(row, kept=()) for row in group.rows if row.trainable]
    (pack,) = pack_group(replace(group, rows=tuple(rows)), max_tokens=10_000)
    with torch.no_grad():
        values = policy.logprobs(pack)[0].split([len(row.token_ids) for row in rows])
    return [tuple(one.tolist()) for one in values]


def on_policy(policy: Policy, group: TrainingGroup) -> TrainingGroup:
    """The group as if the policy had sampled it."""
    found = iter(own_logprobs(policy, group))
    rows = [replace(row, logprobs=next(found)) if row.trainable else row for row in group.rows]
    return replace(group, rows=tuple(rows))


def with_effect(policy: Policy, std: float = 0.1) -> Policy:
    """Let the adapter change the answers: its matrices B are 0 in a fresh one."""
    import torch

    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return policy


def group_outcomes(database: Database) -> dict[str, tuple[str, str | None]]:
    """Group id -> status and reason."""
    with database.read() as session:
        rows = session.scalars(select(GroupRow)).all()
        return {row.group_id: (row.status, row.reason) for row in rows}


def counters(database: Database, stage: str = "learn") -> dict[str, int]:
    with database.read() as session:
        rows = session.scalars(select(CounterRow).where(CounterRow.stage == stage))
        return {row.reason: row.count for row in rows if row.count}


def make_answer(index: int, **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "index": index,
        "origin": "sampled",
        "message": b"{}",
        "token_ids": (5, 6, 7 + index),
        "logprobs": (-1.0, -2.0, -3.0),
        **changes,
    }
    return Answer(**values)


def make_scored_group(
    scores: Sequence[float],
    *,
    answers: Sequence[Answer] | None = None,
    group_id: str = "g",
    **changes: Any,
) -> ScoredGroup:
    """changes: of the fields of `Group`."""
    given = answers if answers is not None else [make_answer(i) for i in range(len(scores))]
    base = Group(
        group_id=group_id,
        exchange_id=f"x-{group_id}",
        session_key="h:s",
        session_id="h:s",
        adapter="base",
        request=b"{}",
        prompt_token_ids=(1, 2, 3),
        answers=tuple(given),
    )
    return ScoredGroup(
        group=replace(base, **changes),
        scores=tuple(scores),
        explanations=("",) * len(given),
        judge_model="judge",
        rubric_hash="rubric",
    )


@pytest.fixture
def put_group(database: Database) -> PutGroup:
    """Write a group into the store, as the scoring process leaves it."""

    def put(scored: ScoredGroup) -> None:
        group = scored.group
        judged = (scored.scores, scored.explanations, scored.judge_model, scored.rubric_hash)
        with database.write() as session:
            session.add(_exchange_row(group))
            session.flush()
            save_group(session, group, now=NOW)
            mark_sampled(session, group.group_id)
            mark_scored(session, group.group_id, *judged, NOW)

    return put


@pytest.fixture
def two_groups(put_group: PutGroup) -> None:
    """Groups `a` and `b`, which a run can learn from."""
    put_group(make_scored_group([0.0, 1.0], group_id="a"))
    put_group(make_scored_group([0.2, 0.6], group_id="b"))


def _exchange_row(group: Group) -> ExchangeRow:
    return ExchangeRow(
        exchange_id=group.exchange_id,
        stored_at=NOW,
        started_at=NOW,
        surface="chat",
        public_model="m",
        adapter=group.adapter,
        arm="champion",
        propensity=1.0,
        replica="",
        session_key=group.session_key,
        session_id=group.session_id,
        held_out=False,
        request_body=compress(group.request),
        prompt_token_ids=pack_ids(group.prompt_token_ids),
        sampling={},
        timings={},
        stream=False,
        status=200,
        outcome="ok",
        trace_id="",
        project="default",
        user="",
    )


@pytest.fixture
def put_version(database: Database, tmp_path: Path) -> PutVersion:
    """put_version(version, parent, state=, champion=): a registered version. Returns its name."""

    def put(
        version: int, parent: str = "base", *, state: str = "retired", champion: bool = False
    ) -> str:
        name = f"m--v{version}-{version:012x}"
        folder = tmp_path / f"adapter-{version}"
        folder.mkdir()
        (folder / CONFIG).write_text("{}")
        (folder / WEIGHTS).write_bytes(b"weights of %d" % version)
        with database.write() as session:
            session.add(
                AdapterRow(
                    name=name,
                    model="m",
                    version=version,
                    digest=folder_digest(folder),
                    path=str(folder),
                    parent=parent,
                    state=state,
                    created_at=NOW,
                )
            )
            if champion:
                session.merge(AliasRow(model="m", alias="champion", adapter=name, generation=1))
        return name

    return put


@dataclass
class FakeTrainer:
    """Writes the bytes it was told to, or raises what it was told to."""

    weights: bytes = b"weights"
    error: BaseException | None = None
    on_train: Callable[[TrainingJob], None] = lambda job: None
    answers: dict[str, CheckedAnswers] = field(default_factory=dict)
    jobs: list[TrainingJob] = field(default_factory=list)

    def train(self, job: TrainingJob) -> TrainingOutcome:
        self.jobs.append(job)
        self.on_train(job)
        if self.error is not None:
            raise self.error
        (job.folder / CONFIG).write_text(json.dumps({"peft_type": "LORA"}))
        (job.folder / WEIGHTS).write_bytes(self.weights)
        figures = {**dict.fromkeys(StepMetrics.__dataclass_fields__, 0.25), "left_out": {}}
        step = StepMetrics(**{**figures, "step": 1, "loss": 0.1})  # type: ignore[arg-type]
        drift = Drift(mean=0.0, mean_abs=0.01, max_abs=0.1, ratio_mean=1.0, tokens=12)
        return TrainingOutcome(
            metrics=(step,), drift=drift, algorithm={"loss": "fake"}, answers=self.answers
        )


@pytest.fixture
def fake_trainer() -> FakeTrainer:
    return FakeTrainer()


@pytest.fixture
def new_run(
    settings: Settings, database: Database, clock: Clock, fake_trainer: FakeTrainer
) -> NewRun:
    """new_run(run_id, trainer=, **learner settings)."""

    def make(run_id: str = "r1", trainer: Trainer | None = None, **changes: Any) -> Run:
        learner = settings.learner.model_copy(update=changes)
        return Run(
            settings.model_copy(update={"learner": learner}),
            database,
            lambda: trainer if trainer is not None else fake_trainer,
            run_id=run_id,
            clock=clock,
            heartbeat_s=0.01,
        )

    return make


@pytest.fixture(autouse=True)
def _draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw the curves takes longer than to train a tiny model. A run of `learner.processes` in
    `distributed/test_torchrun.py` draws them."""

    def put(steps: Sequence[Any], path: Path, *, title: str) -> None:
        path.write_bytes(title.encode())

    monkeypatch.setattr("learner.progress.export.draw", put)


@pytest.fixture(autouse=True)
def _quiet_libraries() -> Iterator[None]:
    """peft and transformers warn about their own affairs; our own warnings stay errors."""
    with warnings.catch_warnings():
        for module in ("peft", "transformers", "torch"):
            warnings.filterwarnings("ignore", module=rf"{module}(\..*)?")
        yield


def put_noise(database: Database, sd: float) -> None:
    """The judge's noise as score stores it: sd of a pass, from 50 groups."""
    with database.write() as session:
        session.add(
            JudgeNoiseDayRow(
                rubric_hash="rubric", judge_model="judge", day=4, groups=50, freedom=201,
                squares=200 * sd**2, by_position=0.0, of_position=1.0, flips=0.0,
            )
        )  # fmt: skip

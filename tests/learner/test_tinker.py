"""A run on a server of the Tinker API: what is sent, what is learned, and how it fails."""

from __future__ import annotations

import io
import itertools
import json
import sys
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from learner import tinker
from learner.adapter_folder import CARD, CONFIG, CURVES, LINEAGE, WEIGHTS
from learner.errors import (
    FaultyGroupsError,
    NonFiniteError,
    ParentError,
    RunStoppedError,
    TinkerServerError,
)
from learner.grpo import optimizer
from learner.grpo.losses import objective
from learner.grpo.trainer import GrpoTrainer
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.records import Parent, TrainingGroup, TrainingJob
from learner.runs.train import Run
from learner.tinker import (
    STATE,
    Datum,
    TinkerLora,
    TinkerServer,
    TinkerTrainer,
    datum,
    pushes,
    state_of,
    unpack,
)
from sidecar.settings import Learner, Settings
from sidecar.store.database import Database
from support.clock import Clock
from tests.learner.conftest import job_of, make_group, make_row, on_policy


def test_a_datum_has_the_next_token_as_target_and_values_at_the_answer_alone() -> None:
    answer = make_row([8, 9])

    found = datum(make_group([5, 6, 7], [answer]), answer, [-0.5, -0.25], [2.0, 3.0])

    assert found == {
        "tokens": [5, 6, 7, 8],
        "target_tokens": [6, 7, 8, 9],
        "logprobs": [0.0, 0.0, -0.5, -0.25],
        "advantages": [0.0, 0.0, 2.0, 3.0],
    }


def test_all_data_of_a_step_are_as_long_as_the_longest() -> None:
    groups = [
        make_group([5, 6, 7], [make_row([8]), make_row([8, 9, 10])]),
        make_group([5], [make_row([6]), make_row([7])]),
    ]

    _, data = pushes(groups, [[[-1.0], [-1.0] * 3], [[-1.0], [-1.0]]], objective(Learner()), True)

    assert data[2]["tokens"] == [5, 0, 0, 0, 0]
    assert [len(of) for one in data for of in one.values()] == [5] * 16


def advantages(data: Sequence[Datum]) -> list[float]:
    return [value for one in data for value in one["advantages"] if value]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # Ratios: 2 at the first token of the good answer, 1 at its second, 4 at the bad one's.
        # cispo: weight min(r, 5) or min(r, 3) of a bad one, times A, over the 3 tokens.
        ("cispo", [2 * 0.5 / 3, 0.5 / 3, -3 * 0.5 / 3]),
        # grpo: r A, none where 2 > 1.28; a bad one is bounded, so has none either; a mean over the
        # 2 answers of the mean over their tokens.
        ("grpo", [0.5 / 2 / 2]),
        # dapo: as grpo, over the 3 tokens.
        ("dapo", [0.5 / 3]),
    ],
)
def test_the_advantages_that_are_sent_are_minus_the_slopes_of_the_loss(
    loss: str, expected: list[float]
) -> None:
    half, quarter = -0.6931471805599453, -1.3862943611198906
    rows = [
        make_row([8, 9], 0.5, logprobs=[2 * half, half]),
        make_row([7], -0.5, logprobs=[2 * quarter]),
    ]
    settings = Learner.model_validate({"loss": loss})

    sums, data = pushes(
        [make_group([5], rows)], [[[half, half], [2 * half]]], objective(settings), True
    )

    # log 4 = -2 half: the bad answer was recorded with 4 half, and has 2 half now.
    assert advantages(data) == pytest.approx(expected)
    assert sums.tokens == 3
    assert sums.ratio == pytest.approx(2 + 1 + 4)


def test_a_token_that_is_not_kept_is_not_pushed() -> None:
    rows = [make_row([8, 9, 10], 1.0, kept=[True, False, True]), make_row([7], -1.0)]
    values = [[[-1.0, -9.0, -1.0], [-1.0]]]

    _, data = pushes([make_group([5], rows)], values, objective(Learner(loss="cispo")), True)

    assert data[0]["advantages"] == pytest.approx([1 / 3, 0.0, 1 / 3])


def test_a_group_without_a_finite_gradient_is_named() -> None:
    groups = [make_group([5], [make_row([8]), make_row([7])], group_id="bad")]

    with pytest.raises(NonFiniteError) as raised:
        pushes(groups, [[[float("nan")], [-1.0]]], objective(Learner()), True)

    assert list(raised.value.faults) == ["bad"]


class PeftLora:
    """The API's `importance_sampling` and Adam, written anew around the tiny model."""

    def __init__(self, job: TrainingJob, start: Parent, *, means: bool) -> None:
        self.policy = load_policy(job.base_model_path, start, job.settings)
        self.means = means
        self.steps = 0
        trained = [p for p in self.policy.model.parameters() if p.requires_grad]
        # As ours beside the gradient: 4 sequences of 5 tokens.
        eps = 1e-8 / 20 if means else 1e-8
        self.adam = torch.optim.AdamW(trained, betas=(0.9, 0.99), eps=eps, weight_decay=0.0)
        self.trained = trained

    def _logprobs(self, data: Sequence[Datum]) -> torch.Tensor:
        tokens = torch.tensor([one["tokens"] for one in data])
        targets = torch.tensor([one["target_tokens"] for one in data])
        logits: torch.Tensor = self.policy.model(input_ids=tokens).logits.float()
        return logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    def forward(self, data: Sequence[Datum]) -> list[list[float]]:
        with torch.no_grad():
            found: list[list[float]] = self._logprobs(data).tolist()
        return found

    def step(self, data: Sequence[Datum], rate: float) -> Mapping[str, float]:
        sent, advantages = (
            torch.tensor([one[name] for one in data]) for name in ("logprobs", "advantages")
        )
        loss = -(self._logprobs(data) - sent).exp() * advantages
        (loss.mean(-1).mean() if self.means else loss.sum()).backward()
        if not self.means:
            torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        self.adam.zero_grad()
        self.steps += 1
        return {"some/grad_norm": 0.5}

    def save(self, folder: Path) -> str:
        """As SkyRL writes it: a config without target modules."""
        config = self.policy.model.peft_config["default"]
        said = {"r": config.r, "lora_alpha": config.lora_alpha, "peft_type": "LORA"}
        (folder / CONFIG).write_text(json.dumps(said))
        weights = get_peft_model_state_dict(self.policy.model, save_embedding_layers=False)
        save_file({name: one.contiguous() for name, one in weights.items()}, folder / WEIGHTS)
        return "tinker://run/weights/x"


def opening(loras: list[PeftLora], *, means: bool = False) -> Any:
    """A connection whose server has the base, and no state of any version."""

    def connect(job: TrainingJob) -> Callable[[Parent], PeftLora]:
        def opened(start: Parent) -> PeftLora:
            if start.name != "base":
                state_of(start)
            loras.append(PeftLora(job, start, means=means))
            return loras[-1]

        return opened

    return connect


@pytest.fixture
def job(tiny_base: Path, learner_settings: Learner, tmp_path: Path) -> TrainingJob:
    """Four groups that the base gave; two steps."""
    settings = learner_settings.model_copy(update={"groups_per_step": 2})
    policy = load_policy(str(tiny_base), Parent(name="base"), settings)
    groups = [
        make_group(
            [n, 2, 3], [make_row([4 + n, 5], 0.5), make_row([6, 7 + n, 8], -0.5)], group_id=str(n)
        )
        for n in range(4)
    ]
    return job_of(
        [rounded(policy, one) for one in groups],
        settings,
        base_model_path=str(tiny_base),
        folder=made(tmp_path / "adapter"),
    )


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def rounded(policy: Policy, group: TrainingGroup) -> TrainingGroup:
    """Let the policy have given the answers, up to some rounding."""
    rows = [
        replace(row, logprobs=tuple(one + 0.01 for one in row.logprobs))
        for row in on_policy(policy, group).rows
    ]
    return replace(group, rows=tuple(rows))


@pytest.mark.parametrize(
    ("loss", "means"),
    [
        ("dppo_tv", False),
        ("gspo", False),
        ("dr_grpo", False),
        ("ppo_decoupled", False),
        ("grpo", True),
    ],
)
def test_each_loss_gives_the_adapter_of_our_own_trainer(
    loss: str, means: bool, job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if means:  # such a server clips no gradient
        monkeypatch.setattr(optimizer, "MAX_GRAD_NORM", 1e9)
    job = replace(job, settings=job.settings.model_copy(update={"loss": loss}))
    ours = GrpoTrainer().train(replace(job, folder=made(tmp_path / "ours")))

    theirs = TinkerTrainer(opening([], means=means)).train(job)

    here, there = load_file(tmp_path / "ours" / WEIGHTS), load_file(job.folder / WEIGHTS)
    assert here.keys() == there.keys()
    start = load_policy(job.base_model_path, job.parent, job.settings).model
    for name, one in get_peft_model_state_dict(start, save_embedding_layers=False).items():
        a, b = (found[name].double() - one.double() for found in (here, there))
        assert float((a - b).norm() / a.norm()) < 0.01, name
    assert (job.folder / CONFIG).read_text() == (tmp_path / "ours" / CONFIG).read_text()
    for a, b in zip(ours.metrics, theirs.metrics, strict=True):
        for name in ("loss", "ratio_mean", "approx_kl", "learning_rate", "tokens", "reward_mean"):
            assert getattr(b, name) == pytest.approx(getattr(a, name), rel=1e-3, abs=1e-5), name
    assert theirs.algorithm[STATE] == "tinker://run/weights/x"
    assert theirs.drift is not None
    assert theirs.drift.mean == pytest.approx(0.01, abs=1e-4)


def test_a_run_goes_on_from_the_adapter_of_the_one_before(job: TrainingJob, tmp_path: Path) -> None:
    first = TinkerTrainer(opening([])).train(job)
    (job.folder / LINEAGE).write_text(json.dumps({"algorithm": dict(first.algorithm)}))
    parent = Parent(name="m--v1", path=job.folder)
    policy = load_policy(job.base_model_path, parent, job.settings)
    told = [rounded(policy, replace(one, adapter=parent.name)) for one in job.groups]
    again = replace(job, parent=parent, groups=(*told, replace(job.groups[0], group_id="old")))
    ours, theirs = made(tmp_path / "ours"), made(tmp_path / "theirs")
    GrpoTrainer().train(replace(again, folder=ours))

    outcome = TinkerTrainer(opening([])).train(replace(again, folder=theirs))

    assert outcome.faults == {}  # the base, which gave the group `old`, is at hand too
    before, here, there = (load_file(one / WEIGHTS) for one in (job.folder, ours, theirs))
    for name, one in before.items():
        a, b = (found[name].double() - one.double() for found in (here, there))
        assert float((a - b).norm() / a.norm()) < 0.01, name


@pytest.mark.usefixtures("two_groups")
def test_a_run_registers_the_adapter_with_its_state_in_the_lineage(
    settings: Settings, database: Database, clock: Clock
) -> None:
    wide = settings.learner.model_copy(update={"max_drift": 10.0})  # nobody gave these answers
    settings = settings.model_copy(update={"learner": wide})
    trainer = TinkerTrainer(opening([]))

    candidate = Run(settings, database, lambda: trainer, run_id="r1", clock=clock).start()

    lineage = json.loads((candidate.path / LINEAGE).read_text())
    assert (
        state_of(Parent(name=candidate.adapter, path=candidate.path)) == lineage["algorithm"][STATE]
    )
    assert [one["step"] for one in lineage["metrics"]] == [1]
    assert sorted(one.name for one in candidate.path.iterdir()) == sorted(
        [CARD, CONFIG, CURVES, LINEAGE, WEIGHTS]
    )


def test_answers_of_another_temperature_count_as_not_recorded(job: TrainingJob) -> None:
    first = job.groups[0]
    rows = tuple(replace(one, temperature=0.5) for one in first.rows)
    groups = (replace(first, rows=rows), *job.groups[1:])

    outcome = TinkerTrainer(opening([])).train(replace(job, groups=groups))

    assert outcome.answers["0"].recomputed == (0, 1)
    assert outcome.answers["1"].recomputed == ()


def test_a_group_of_an_adapter_that_the_server_does_not_have_is_left_out(
    job: TrainingJob, tmp_path: Path
) -> None:
    other = Parent(name="m--v1-0", path=tmp_path)
    groups = (replace(job.groups[0], adapter=other.name), *job.groups[1:])

    outcome = TinkerTrainer(opening([])).train(
        replace(job, groups=groups, samplers={other.name: other})
    )

    assert {one: fault.reason for one, fault in outcome.faults.items()} == {"0": "drift_unchecked"}


def test_sessions_whose_rewards_say_no_more_than_chance_have_no_part_in_the_adapter(
    job: TrainingJob, tmp_path: Path
) -> None:
    sessions = [
        replace(one, group_id=f"s{n}", sessions=(0, 1), weights=(1.0, 1.0), steps=(0.0, 0.0))
        for n, one in enumerate(job.groups[:1])
    ]
    loras: list[PeftLora] = []

    outcome = TinkerTrainer(opening(loras)).train(replace(job, groups=(*job.groups[1:], *sessions)))

    assert {one: fault.reason for one, fault in outcome.faults.items()} == {"s0": "by_chance"}
    assert len(loras) == 2
    alone = TinkerTrainer(opening([])).train(
        replace(job, groups=job.groups[1:], folder=made(tmp_path / "alone"))
    )
    assert len(alone.metrics) == len(outcome.metrics)
    here, there = (load_file(one / WEIGHTS) for one in (job.folder, tmp_path / "alone"))
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize(
    ("alpha", "kind", "why"),
    [
        ("8", torch.float32, r"its lora_alpha is '8'; learner\.alpha is 8"),
        (8, torch.float64, "its matrices are of another kind than bf16"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(
    alpha: object, kind: torch.dtype, why: str, job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = PeftLora.save

    def other(self: PeftLora, folder: Path) -> str:
        state = save(self, folder)
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, "lora_alpha": alpha}))
        weights = load_file(folder / WEIGHTS)
        save_file({name: one.to(kind) for name, one in weights.items()}, folder / WEIGHTS)
        return state

    monkeypatch.setattr(PeftLora, "save", other)

    with pytest.raises(ParentError, match=why):
        TinkerTrainer(opening([])).train(job)


@pytest.mark.parametrize("text", ["{}", '{"algorithm": {}}', "[", '{"algorithm": 1}'])
def test_a_version_without_a_state_is_refused_in_words(text: str, tmp_path: Path) -> None:
    (tmp_path / LINEAGE).write_text(text)

    with pytest.raises(ParentError, match="v was not trained on a Tinker server"):
        state_of(Parent(name="v", path=tmp_path))


class RequestFailedError(Exception):
    """As of the package."""


def served(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]) -> None:
    """Put a package in the place of `tinker`. make: its `ServiceClient`."""
    package = SimpleNamespace(
        ServiceClient=make, RequestFailedError=RequestFailedError, types=SimpleNamespace()
    )
    monkeypatch.setitem(sys.modules, "tinker", package)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)


def asking(job: TrainingJob, **changes: Any) -> TrainingJob:
    wanted = {"tinker_url": "http://127.0.0.1:1", **changes}
    return replace(job, settings=job.settings.model_copy(update=wanted))


def test_without_the_package_the_error_names_the_extra(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)

    with pytest.raises(TinkerServerError, match=r"pip install '\.\[tinker\]'"):
        TinkerServer(asking(job))


def test_a_server_that_does_not_answer_ends_the_run(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    served(monkeypatch, lambda **_: end.wait(60))
    monkeypatch.setattr("learner.ranks.TIMEOUT_S", 0.1)

    with pytest.raises(TinkerServerError, match=r"failed at connecting: no answer in 0\.1 s"):
        TinkerServer(asking(job))
    end.set()


def test_a_run_that_is_stopped_does_not_wait_for_the_server(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()
    served(monkeypatch, lambda **_: end.wait(60))

    def stop() -> None:
        raise RunStoppedError("asked to stop")

    with pytest.raises(RunStoppedError):
        TinkerServer(replace(asking(job), check_stop=stop))
    end.set()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestFailedError("out of memory"), FaultyGroupsError),
        (ConnectionError("refused"), TinkerServerError),
    ],
)
def test_what_a_server_refuses_may_be_the_groups_fault_and_nothing_else_is(
    error: Exception, kind: type[Exception], job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, lambda **_: SimpleNamespace())
    server = TinkerServer(asking(job))

    def fail() -> None:
        raise error

    with pytest.raises(kind, match="failed at a step") as raised:
        server.call("a step", fail, FaultyGroupsError)
    assert type(raised.value) is kind


def replies(*rows: list[float]) -> SimpleNamespace:
    return SimpleNamespace(
        loss_fn_outputs=[{"logprobs": SimpleNamespace(data=one)} for one in rows], metrics=[1.0]
    )


@pytest.mark.parametrize(
    "reply",
    [
        replies([-1.0, -2.0]),
        replies(),
        replies([-1.0, -2.0], [-1.0]),
        replies([-1.0, -2.0], [-1.0, float("nan")]),
        SimpleNamespace(loss_fn_outputs=[{}, {}], metrics={"grad_norm": "big"}),
        SimpleNamespace(),
    ],
)
def test_nonsense_of_a_server_is_no_groups_fault(
    reply: SimpleNamespace, job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, lambda **_: SimpleNamespace())
    server = TinkerServer(asking(job))
    server.sdk.types.AdamParams = SimpleNamespace
    monkeypatch.setattr(TinkerLora, "_sent", lambda self, data: data)
    future = SimpleNamespace(result=lambda: reply)
    calls = ("forward", "forward_backward", "optim_step")
    lora = TinkerLora(server, SimpleNamespace(**dict.fromkeys(calls, lambda *_: future)))

    with pytest.raises(TinkerServerError, match="failed at a forward pass"):
        lora.forward([{"tokens": [1, 2]}, {"tokens": [3, 4]}])
    with pytest.raises(TinkerServerError, match="failed at a step"):
        lora.step([{"tokens": [1, 2]}], 0.1)


def test_an_archive_is_read_up_to_a_size(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served(monkeypatch, lambda **_: SimpleNamespace(create_rest_client=lambda: rest))
    monkeypatch.setattr(tinker, "MAX_FILE_BYTES", 8)
    reply = SimpleNamespace(iter_bytes=lambda: itertools.repeat(b"x" * 6, 4))
    reply.raise_for_status = lambda: reply
    monkeypatch.setattr(httpx, "stream", lambda *_, **__: nullcontext(reply))

    def told(**said: str) -> Callable[..., SimpleNamespace]:
        return lambda *_: SimpleNamespace(result=lambda: SimpleNamespace(**said))

    rest = SimpleNamespace(get_checkpoint_archive_url=told(url="http://127.0.0.1:1"))
    client = SimpleNamespace(save_weights_for_sampler=told(path="tinker://run/weights/x"))

    with pytest.raises(TinkerServerError, match="the archive has more than 16 bytes"):
        TinkerLora(TinkerServer(asking(job)), client).save(tmp_path)


def test_a_server_of_ones_own_needs_no_key(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str | None] = []
    served(monkeypatch, lambda api_key, **_: keys.append(api_key))

    TinkerServer(asking(job))
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    TinkerServer(asking(job))

    assert keys == ["tml-none", None]  # None: the package reads the variable itself


def test_of_an_archive_the_two_files_alone_are_written(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in (f"./deep/{CONFIG}", f"../{WEIGHTS}", "../evil.txt"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"ok"))
        link = tarfile.TarInfo("link/adapter_config.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    buffer.seek(0)

    with tarfile.open(fileobj=buffer) as archive:
        unpack(archive, made(tmp_path / "in"))

    found = {one.name: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    assert found == {CONFIG: b"ok", WEIGHTS: b"ok"}
    assert (tmp_path / "in" / WEIGHTS).is_file()

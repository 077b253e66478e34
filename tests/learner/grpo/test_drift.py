"""Drift by answer, by group and in all; whose adapter an answer is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest
from learner.errors import DriftError
from learner.grpo.answers import NOISE_DEVIATIONS, TOKEN_NOISE, excess, measure
from learner.grpo.trainer import run_steps
from learner.policy.adapter_io import load_policy, save_adapter
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import Drift, Parent, TrainableRow, TrainingGroup, TrainingJob
from sidecar.settings import Learner

if TYPE_CHECKING:
    from tests.learner.conftest import MakeGroup, MakeRow


MODEL = Path(__file__).parents[3] / ".models" / "smollm2-135m"
PROMPT = (1, 2, 3)
ANSWERS = tuple(tuple(range(first, first + 12)) for first in (4, 10, 16, 22, 28, 34, 8, 14))


def test_drift_is_measured_from_the_differences() -> None:
    drift = measure([0.1, -0.3, 0.2])

    assert drift.mean == pytest.approx(0.0, abs=1e-12)
    assert drift.mean_abs == pytest.approx(0.2)
    assert drift.max_abs == pytest.approx(0.3)
    # (e^-0.1 + e^0.3 + e^-0.2) / 3 = (0.904837 + 1.349859 + 0.818731) / 3
    assert drift.ratio_mean == pytest.approx(1.024476, abs=1e-6)
    assert drift.tokens == 3


def test_few_tokens_are_allowed_the_noise_of_their_mean_and_no_more() -> None:
    for tokens in (1, 4, 100, 10_000):
        allowed = 0.1 + NOISE_DEVIATIONS * TOKEN_NOISE / math.sqrt(tokens)
        inside = Drift(
            mean=0.0, mean_abs=allowed - 1e-6, max_abs=1.0, ratio_mean=1.0, tokens=tokens
        )
        assert excess(inside, 0.1) is None
        assert excess(replace(inside, mean_abs=allowed + 1e-6), 0.1) is not None


def test_a_ratio_far_from_one_is_too_much_though_the_mean_is_small() -> None:
    drift = Drift(mean=0.0, mean_abs=0.05, max_abs=3.0, ratio_mean=1.2, tokens=1000)

    assert "before the first step is 1.2000" in (excess(drift, 0.1) or "")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30])
def test_differences_that_are_no_numbers_are_too_much(value: float) -> None:
    assert excess(measure([0.0, value, -value, 0.0]), 0.1) is not None


def logprobs_of(
    policy: Policy, prompt: Sequence[int], answers: Sequence[Sequence[int]]
) -> list[tuple[float, ...]]:
    rows = [
        TrainableRow(
            token_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            advantage=0.0,
            temperature=1.0,
            trainable=True,
        )
        for ids in answers
    ]
    group = TrainingGroup(
        group_id="", adapter="", prompt_token_ids=tuple(prompt), rows=tuple(rows), scores=(0.0,)
    )
    (pack,) = pack_group(group, max_tokens=10_000)
    with torch.no_grad():
        values = policy.logprobs(pack)[0].split([len(ids) for ids in answers])
    return [tuple(value.tolist()) for value in values]


Sampled = Callable[..., TrainingGroup]


@pytest.fixture
def sampled(group: MakeGroup, row: MakeRow) -> Sampled:
    """sampled(policy, group_id, adapter=, shifts=): recorded under this policy, and shifted."""

    def make(
        under: Policy, group_id: str, *, adapter: str = "base", shifts: Sequence[float] = (0.0,) * 8
    ) -> TrainingGroup:
        recorded = logprobs_of(under, PROMPT, ANSWERS)
        rows = [
            row(ids, (-1.0) ** place / 2, logprobs=[value + shift for value in values])
            for place, (ids, values, shift) in enumerate(
                zip(ANSWERS, recorded, shifts, strict=True)
            )
        ]
        return group(PROMPT, rows, adapter=adapter, group_id=group_id)

    return make


def job(
    groups: Sequence[TrainingGroup],
    settings: Learner,
    *,
    parent: Parent | None = None,
    samplers: Sequence[Parent] = (),
) -> TrainingJob:
    return TrainingJob(
        base_model_path="",
        parent=parent or Parent(name="base"),
        groups=tuple(groups),
        settings=settings,
        folder=Path("unused"),
        check_stop=lambda: None,
        samplers={one.name: one for one in samplers},
    )


def test_the_answer_that_drifts_is_left_out_alone(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    """0.437 nats of one answer in eight are 0.055 in the mean of its group."""
    groups = [
        sampled(policy, "good"),
        sampled(policy, "one", shifts=(0.0, 0.437, *(0.0,) * 6)),
    ]

    outcome, _ = run_steps(policy, job(groups, learner_settings))

    assert outcome.faults == {}
    assert outcome.answers["one"].left_out == {1: "drift"}
    assert outcome.answers["good"].left_out == {}
    assert outcome.metrics[0].answers == 15
    assert outcome.drift is not None
    assert outcome.drift.mean_abs < 1e-5


def test_a_group_that_drifts_is_left_out_alone(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    """0.437 nats of one group in five are 0.087 in the mean of the step, under the limit of 0.1."""
    groups = [sampled(policy, str(number)) for number in range(4)]
    groups.append(sampled(policy, "bad", shifts=(0.437,) * 8))

    outcome, _ = run_steps(policy, job(groups, learner_settings))

    assert [(name, fault.reason) for name, fault in outcome.faults.items()] == [("bad", "drift")]
    assert "8 of 8 answers drift" in outcome.faults["bad"].text
    assert "differ by 0.4370 nats a token over 12 tokens" in outcome.faults["bad"].text
    assert outcome.metrics[0].groups == 4


def test_a_group_drifts_though_none_of_its_answers_does_by_itself(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    # An answer of 12 tokens may be off by 0.1 + 0.3 / sqrt(12) = 0.187, the group of 96 by 0.131.
    groups = [sampled(policy, "good"), sampled(policy, "bad", shifts=(0.15,) * 8)]

    outcome, _ = run_steps(policy, job(groups, learner_settings))

    assert "over 96 tokens; 0.1306 is allowed" in outcome.faults["bad"].text


def test_all_groups_drift_though_none_does_by_itself(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    groups = [sampled(policy, str(number), shifts=(0.125,) * 8) for number in range(8)]

    with pytest.raises(DriftError, match=r"all groups together drift: .* 0\.1250 nats"):
        run_steps(policy, job(groups, learner_settings))


@pytest.fixture
def ancestor(
    policy: Policy, tiny_base: Path, tmp_path: Path, learner_settings: Learner
) -> tuple[Policy, Parent]:
    """A version of another rank whose answers differ from the base's, and what the store says."""
    other = load_policy(
        str(tiny_base), Parent(name="base"), learner_settings.model_copy(update={"rank": 2})
    )
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in other.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    folder = tmp_path / "ancestor"
    folder.mkdir()
    save_adapter(other, folder)
    return other, Parent(name="v1", version=1, digest=folder_digest(folder), path=folder)


def test_a_stale_group_is_compared_with_the_adapter_that_sampled_it(
    policy: Policy,
    sampled: Sampled,
    learner_settings: Learner,
    ancestor: tuple[Policy, Parent],
) -> None:
    """No group of this run was sampled by its parent, and every one is checked."""
    under, version = ancestor
    groups = [
        sampled(under, "exact", adapter="v1"),
        sampled(under, "second", adapter="v1"),
        sampled(policy, "of the base, said to be of v1", adapter="v1"),
    ]
    gap = [
        abs(a - b)
        for one, other in zip(groups[0].rows, groups[2].rows, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    ]
    assert sum(gap) / len(gap) > 0.3
    before = logprobs_of(policy, PROMPT, ANSWERS)

    no_steps = learner_settings.model_copy(update={"learning_rate": 1e-30})
    outcome, _ = run_steps(policy, job(groups, no_steps, samplers=[version]))

    assert [(name, fault.reason) for name, fault in outcome.faults.items()] == [
        ("of the base, said to be of v1", "drift")
    ]
    assert outcome.drift is not None
    assert outcome.drift.max_abs < 1e-5
    # The ratio is against what was recorded: far from 1 for another adapter's answers.
    assert outcome.metrics[0].approx_kl > 0.01
    assert logprobs_of(policy, PROMPT, ANSWERS) == before
    assert {p.requires_grad for n, p in policy.model.named_parameters() if "lora" in n} == {True}
    assert list(policy.model.peft_config) == ["default"]


def test_the_check_of_another_adapter_changes_nothing_of_the_training(
    tiny_base: Path,
    policy: Policy,
    sampled: Sampled,
    learner_settings: Learner,
    ancestor: tuple[Policy, Parent],
) -> None:
    own = [sampled(policy, "a"), sampled(policy, "b")]
    foreign = sampled(policy, "drifts", adapter="v1")
    alone = load_policy(str(tiny_base), Parent(name="base"), learner_settings)

    run_steps(policy, job([*own, foreign], learner_settings, samplers=[ancestor[1]]))
    run_steps(alone, job(own, learner_settings))

    assert logprobs_of(policy, PROMPT, ANSWERS) == logprobs_of(alone, PROMPT, ANSWERS)


def test_a_group_of_the_base_is_compared_with_the_base(
    policy: Policy,
    tiny_base: Path,
    sampled: Sampled,
    learner_settings: Learner,
    ancestor: tuple[Policy, Parent],
) -> None:
    under, version = ancestor
    of_rank = learner_settings.model_copy(update={"rank": 2})
    trained = load_policy(str(tiny_base), version, of_rank)
    groups = [
        sampled(policy, "of the base"),
        sampled(under, "of the parent", adapter="v1"),
        sampled(under, "of the parent, said to be of the base"),
    ]

    outcome, _ = run_steps(trained, job(groups, learner_settings, parent=version))

    assert list(outcome.faults) == ["of the parent, said to be of the base"]


def test_behind_a_grammar_the_free_tokens_are_trained_as_if_they_were_all(
    tiny_base: Path, policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    """Every third token is recorded as a grammar of the server would: above the policy's own. The
    run equals, to the bit, one whose rows say which tokens they keep."""
    whole = sampled(policy, "g")
    free = tuple(at % 3 != 0 for at in range(12))
    raised = [
        replace(
            row,
            logprobs=tuple(
                value if keep else min(value + 1.5, -0.001)
                for value, keep in zip(row.logprobs, free, strict=True)
            ),
        )
        for row in whole.rows
    ]
    touched = replace(whole, rows=tuple(raised), masked_by="masked_by_response_format")
    told = replace(whole, rows=tuple(replace(row, kept=free) for row in whole.rows))
    other = load_policy(str(tiny_base), Parent(name="base"), learner_settings)

    outcome, _ = run_steps(policy, job([touched], learner_settings))
    expected, _ = run_steps(other, job([told], learner_settings))

    assert outcome.answers["g"].masked_tokens == dict.fromkeys(range(8), 4)
    assert outcome.answers["g"].tokens == 64
    (step,) = outcome.metrics
    assert (step.tokens, step.masked_tokens, step.answer_tokens) == (64, 32, 12)
    assert step.grad_norm == expected.metrics[0].grad_norm > 0
    assert logprobs_of(policy, PROMPT, ANSWERS) == logprobs_of(other, PROMPT, ANSWERS)
    assert outcome.drift is not None
    assert outcome.drift.max_abs < 1e-5


def test_logprobs_that_are_missing_are_those_of_the_adapter_that_sampled(
    policy: Policy,
    sampled: Sampled,
    learner_settings: Learner,
    ancestor: tuple[Policy, Parent],
) -> None:
    """The step has the ratio against the ancestor, as if it had been recorded."""
    under, version = ancestor
    known = sampled(under, "g", adapter="v1")
    missing = replace(
        known,
        rows=tuple(replace(row, logprobs=(0.0,) * 12, recorded=False) for row in known.rows),
    )
    no_steps = learner_settings.model_copy(update={"learning_rate": 1e-30})

    found, _ = run_steps(policy, job([missing], no_steps, samplers=[version]))
    expected, _ = run_steps(policy, job([known], no_steps, samplers=[version]))

    assert found.answers["g"].recomputed == tuple(range(8))
    assert found.drift is None
    assert found.metrics[0].loss == pytest.approx(expected.metrics[0].loss, abs=1e-6)
    assert found.metrics[0].approx_kl == pytest.approx(expected.metrics[0].approx_kl, abs=1e-5)
    assert found.metrics[0].approx_kl > 0.01


def test_one_foreign_token_id_costs_its_answer_alone(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    group = sampled(policy, "g")
    no_steps = learner_settings.model_copy(update={"learning_rate": 1e-30})
    for token in (48, -1, 10**9):
        bad = replace(group.rows[3], token_ids=(token, *group.rows[3].token_ids[1:]))
        rows = (*group.rows[:3], bad, *group.rows[4:])

        outcome, _ = run_steps(policy, job([replace(group, rows=rows)], no_steps))

        assert outcome.answers["g"].left_out == {3: "token_out_of_vocabulary"}
        assert outcome.metrics[0].answers == 7


@pytest.mark.parametrize("kind", ["no row", "no folder", "altered", "nonsense"])
def test_a_group_whose_sampler_is_not_at_hand_is_not_trained_on(
    policy: Policy,
    sampled: Sampled,
    learner_settings: Learner,
    ancestor: tuple[Policy, Parent],
    kind: str,
) -> None:
    under, version = ancestor
    folder = version.path
    assert folder is not None
    if kind == "no folder":
        version = replace(version, path=folder / "gone")
    if kind == "altered":
        (folder / WEIGHTS).write_bytes(b"x" + (folder / WEIGHTS).read_bytes()[1:])
    if kind == "nonsense":
        (folder / CONFIG).write_text("[]")
    groups = [sampled(policy, "own"), *(sampled(under, str(n), adapter="v1") for n in range(3))]

    samplers = [] if kind == "no row" else [version]
    outcome, _ = run_steps(policy, job(groups, learner_settings, samplers=samplers))

    assert {fault.reason for fault in outcome.faults.values()} == {"drift_unchecked"}
    assert list(outcome.faults) == ["0", "1", "2"]
    assert outcome.metrics[0].groups == 1


def test_a_run_without_any_checked_group_trains_on_nothing(
    policy: Policy, sampled: Sampled, learner_settings: Learner
) -> None:
    groups = [sampled(policy, str(n), adapter="v1") for n in range(3)]

    outcome, _ = run_steps(policy, job(groups, learner_settings))

    assert outcome.metrics == ()
    assert outcome.drift is None
    assert len(outcome.faults) == 3


@pytest.mark.timeout(600)
@pytest.mark.skipif(not MODEL.exists(), reason="the real model is not on this machine")
def test_the_real_model_as_a_bf16_server_passes_and_cut_sampling_does_not(row: MakeRow) -> None:
    """SmolLM2 in bf16 stands for the server: what it samples passes, group by group and answer by
    answer. Sampled at temperature 0.7, top_p 0.8, top_k 20 and recorded as 1, it does not."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # beside other work a second thread mostly waits
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sampler = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    server = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for content in ("Write two sentences about rain.", "Write two sentences about bread.")
    ]

    def answers(prompt: list[int], *, cut: bool) -> TrainingGroup:
        values = {"temperature": 0.7, "top_p": 0.8, "top_k": 20} if cut else {"top_k": 0}
        prompt_1P = torch.tensor([prompt])
        with torch.no_grad():
            found = sampler.generate(
                prompt_1P.repeat(4, 1),
                attention_mask=torch.ones_like(prompt_1P).repeat(4, 1),
                do_sample=True,
                max_new_tokens=12,
                min_new_tokens=12,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=tokenizer.eos_token_id,
                **values,
            )
            ids_GS = found.sequences[:, len(prompt) :]
            logits_GSV = server(found.sequences).logits[:, len(prompt) - 1 : -1].float()
        if cut:
            logits_GSV = torch.stack(found.scores, dim=1)
        logprobs_GS = logits_GSV.log_softmax(-1).gather(-1, ids_GS[..., None])[..., 0]
        rows = [
            row(ids.tolist(), 0.1, logprobs=values.tolist())
            for ids, values in zip(ids_GS, logprobs_GS, strict=True)
        ]
        return TrainingGroup(
            group_id=f"{'cut' if cut else 'plain'} {prompt[-5]}",
            adapter="base",
            prompt_token_ids=tuple(prompt),
            rows=tuple(rows),
            scores=(0.0, 1.0, 0.0, 1.0),
        )

    plain = [replace(answers(prompt, cut=False), group_id=str(prompt)) for prompt in asked]
    cut = replace(answers(asked[0], cut=True), group_id="cut")
    settings = Learner(precision="float32", rank=4, groups_per_step=9)
    policy = load_policy(str(MODEL), Parent(name="base"), settings)

    outcome, _ = run_steps(policy, job([*plain, cut], settings))

    assert [(name, fault.reason) for name, fault in outcome.faults.items()] == [("cut", "drift")]
    assert not any(found.left_out for found in outcome.answers.values())
    assert outcome.drift is not None
    assert 0.01 < outcome.drift.mean_abs < 0.06

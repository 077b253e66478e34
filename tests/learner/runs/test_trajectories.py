"""Sessions ranked as wholes: rows of several turns, each sampled token trained on once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingest.sessions.rows import SampledAnswer, TokenRow, TokenTurn, join_rows
from learner.errors import GroupTooSmallError
from learner.grpo.trainer import run_steps
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import Parent, TrainableRow, TrainingGroup, TrainingJob
from learner.runs.selection import SampledWith, Trajectory, trajectory_groups
from sidecar.settings import Learner

BASE = SampledWith(adapter="base", temperature=1.0)
TASK = (1, 2, 3)
TURNS: dict[str, tuple[str | None, tuple[int, ...], tuple[int, ...]]] = {
    # exchange: (parent, what the client adds, what the policy says)
    "a1": (None, TASK, (10, 11)),
    "a2": ("a1", (20, 21), (12, 13, 14)),
    "b1": (None, TASK, (15,)),
    "b2": ("b1", (22,), (16, 17)),
}


def session(policy: Policy | None, *names: str) -> list[TokenRow]:
    """The rows of these exchanges, with the policy's own log-probabilities."""
    said: dict[str, tuple[int, ...]] = {}
    turns = []
    for name in names:
        parent, added, answer = TURNS[name]
        prompt = (*said.get(parent or "", ()), *added)
        said[name] = (*prompt, *answer)
        values = (-1.0,) * len(answer) if policy is None else logprobs_of(policy, prompt, answer)
        sampled = SampledAnswer(index=0, token_ids=answer, logprobs=values)
        turns.append(
            TokenTurn(exchange_id=name, parent=parent, prompt_token_ids=prompt, answers=(sampled,))
        )
    return join_rows(turns)


def logprobs_of(
    policy: Policy, prompt: tuple[int, ...], answer: tuple[int, ...], temperature: float = 1.0
) -> tuple[float, ...]:
    """Return the log-probabilities of one exchange by itself, as the server computed them."""
    row = TrainableRow(
        token_ids=answer,
        logprobs=(0.0,) * len(answer),
        advantage=0.0,
        temperature=temperature,
        trainable=True,
    )
    group = TrainingGroup(
        group_id="", adapter="", prompt_token_ids=prompt, rows=(row,), scores=(0.0,)
    )
    (pack,) = pack_group(group, max_tokens=1000)
    with torch.no_grad():
        return tuple(policy.logprobs(pack)[0].tolist())


def groups_of(
    *trajectories: Trajectory, sampled_with: dict[str, SampledWith] | None = None
) -> list[TrainingGroup]:
    how = sampled_with if sampled_with is not None else dict.fromkeys(TURNS, BASE)
    return trajectory_groups(trajectories, how, group_id="t", advantage="mean")


def both(policy: Policy | None = None) -> list[Trajectory]:
    return [
        Trajectory(rows=tuple(session(policy, "a1", "a2")), reward=0.9),
        Trajectory(rows=tuple(session(policy, "b1", "b2")), reward=0.3),
    ]


def test_a_session_is_one_row_in_which_only_sampled_tokens_are_targets() -> None:
    (group,) = groups_of(*both())

    assert group.prompt_token_ids == TASK
    first, second = group.rows
    assert first.token_ids == (10, 11, 20, 21, 12, 13, 14)
    assert first.kept == (True, True, False, False, True, True, True)
    assert first.logprobs == (-1.0, -1.0, 0.0, 0.0, -1.0, -1.0, -1.0)
    assert second.token_ids == (15, 22, 16, 17)
    assert second.kept == (True, False, True, True)
    assert (first.advantage, second.advantage) == pytest.approx((0.3, -0.3))
    assert group.scores == (0.9, 0.3)


def test_its_log_probabilities_are_those_of_each_exchange_by_itself(
    policy: Policy, learner_settings: Learner
) -> None:
    """The check before the first step finds no difference, and takes all of them."""
    (group,) = groups_of(*both(policy))
    job = TrainingJob(
        base_model_path="",
        parent=Parent(name="base"),
        groups=(group,),
        settings=learner_settings,
        folder=Path("unused"),
        check_stop=lambda: None,
    )

    outcome, _ = run_steps(policy, job)

    assert outcome.drift is not None
    assert outcome.drift.max_abs < 1e-5
    assert outcome.drift.tokens == 2 + 3 + 1 + 2
    (step,) = outcome.metrics
    assert (step.answers, step.tokens, step.masked_tokens) == (2, 8, 0)
    assert step.computed_tokens == 3 + 6 + 3, "each token of a session once, but for the last"
    assert step.ratio_mean == pytest.approx(1.0, abs=1e-5)
    # -(5 tokens * 0.3 - 3 tokens * 0.3) / 8
    assert step.loss == pytest.approx(-0.075, abs=1e-5)


def test_its_gradient_is_that_of_each_exchange_by_itself(policy: Policy) -> None:
    (group,) = groups_of(*both(policy))

    def gradient(groups: list[TrainingGroup]) -> torch.Tensor:
        policy.model.zero_grad()
        for one in groups:
            (pack,) = pack_group(one, max_tokens=1000)
            values_N = policy.logprobs(pack)[0]
            (values_N * torch.tensor(pack.advantages)).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad])

    alone = []
    for names, advantage in ((("a1", "a2"), 0.3), (("b1", "b2"), -0.3)):
        (row,) = session(None, *names)
        for answer in row.answers:
            prompt, ids = row.token_ids[: answer.start], row.token_ids[answer.start : answer.stop]
            made = TrainableRow(
                token_ids=tuple(ids),
                logprobs=(0.0,) * len(ids),
                advantage=advantage,
                temperature=1.0,
                trainable=True,
            )
            alone.append(
                TrainingGroup(
                    group_id="",
                    adapter="",
                    prompt_token_ids=tuple(prompt),
                    rows=(made,),
                    scores=(0.0,),
                )
            )
    expected = gradient(alone)

    assert len(alone) == 4
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient([group]), expected, atol=1e-6, rtol=1e-4)


def test_a_session_whose_history_was_rewritten_has_two_rows_with_one_advantage() -> None:
    rewritten = join_rows(
        [
            TokenTurn(
                exchange_id="a1",
                parent=None,
                prompt_token_ids=TASK,
                answers=(SampledAnswer(index=0, token_ids=(10, 11), logprobs=(-1.0, -1.0)),),
            ),
            TokenTurn(
                exchange_id="a2",
                parent="a1",
                prompt_token_ids=(1, 2, 9, 9),
                answers=(SampledAnswer(index=0, token_ids=(12,), logprobs=(-2.0,)),),
            ),
        ]
    )

    (group,) = groups_of(Trajectory(rows=tuple(rewritten), reward=0.9), both()[1])

    assert group.prompt_token_ids == (1, 2), "what all rows begin with"
    assert [row.token_ids for row in group.rows] == [
        (3, 10, 11),
        (9, 9, 12),
        (3, 15, 22, 16, 17),
    ]
    assert [row.kept_tokens for row in group.rows] == [2, 1, 3]
    assert [row.advantage for row in group.rows] == pytest.approx([0.3, 0.3, -0.3])


def test_answers_of_other_adapters_and_temperatures_are_targets_of_their_own() -> None:
    how = {
        "a1": BASE,
        "a2": SampledWith(adapter="v1", temperature=1.0),
        "b1": SampledWith(adapter="base", temperature=0.7),
    }

    of_base, of_v1 = groups_of(*both(), sampled_with=how)

    assert (of_base.group_id, of_base.adapter) == ("t/base", "base")
    assert [(row.token_ids, row.temperature) for row in of_base.rows] == [
        ((10, 11), 1.0),
        ((15,), 0.7),
    ]
    assert (of_v1.group_id, of_v1.adapter) == ("t/v1", "v1")
    (row,) = of_v1.rows
    assert row.kept == (False, False, False, False, True, True, True)
    assert row.advantage == pytest.approx(0.3), "b2 is context, and its session still ranks"


@pytest.mark.parametrize(
    ("trajectories", "expected"),
    [
        pytest.param([Trajectory(rows=(), reward=0.1)] * 2, [], id="no-rows"),
        pytest.param(
            [
                Trajectory(rows=tuple(session(None, "a1")), reward=0.5),
                Trajectory(rows=(), reward=0.5),
            ],
            [0.0],
            id="one-row-and-equal-rewards",
        ),
    ],
)
def test_odd_trajectories(trajectories: list[Trajectory], expected: list[float]) -> None:
    found = groups_of(*trajectories)

    assert [row.advantage for group in found for row in group.rows] == expected


def test_one_trajectory_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(GroupTooSmallError):
        groups_of(both()[0])


@pytest.mark.parametrize("prompt", [(7,), (1, 2, 9)], ids=["nothing-alike", "system-prompt-alike"])
def test_sessions_with_other_first_prompts_are_other_tasks_and_make_no_group(
    prompt: tuple[int, ...],
) -> None:
    row: Any = join_rows(
        [
            TokenTurn(
                exchange_id="b1",
                parent=None,
                prompt_token_ids=prompt,
                answers=(SampledAnswer(index=0, token_ids=(8,), logprobs=(-1.0,)),),
            )
        ]
    )

    assert groups_of(both()[0], Trajectory(rows=tuple(row), reward=0.1)) == []

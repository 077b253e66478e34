"""Sessions ranked as wholes: rows of several turns, each sampled token trained on once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from ingest.sessions.rows import SampledAnswer, TokenRow, TokenTurn, join_rows
from ingest.tasks.material import TaskGroup, TaskSession
from learner.grpo.advantages import assign_rows, session_scores
from learner.grpo.answers import Judged, leave_out_far, sample_size
from learner.grpo.losses import LOSSES
from learner.grpo.optimizer import unweighted
from learner.grpo.trainer import run_steps
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import CheckedAnswers, Fault, TrainingGroup
from learner.runs.selection import alike, task_group
from sidecar.settings import Learner
from tests.learner.conftest import job_of, logprobs_of, make_group, make_row

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
        values = (
            (-1.0,) * len(answer) if policy is None else logprobs_of(policy, prompt, [answer])[0]
        )
        sampled = SampledAnswer(index=0, token_ids=answer, logprobs=values)
        turns.append(
            TokenTurn(exchange_id=name, parent=parent, prompt_token_ids=prompt, answers=(sampled,))
        )
    return join_rows(turns)


def attempt(
    rows: Sequence[TokenRow], reward: float, steps: Mapping[str, float] | None = None
) -> TaskSession:
    return TaskSession(
        session_id="s",
        reward=reward,
        source="outcome",
        exchange_ids=(),
        rows=tuple(rows),
        steps=dict.fromkeys(TURNS, 1.0) if steps is None else steps,
    )


def task_of(*sessions: TaskSession) -> TaskGroup:
    return TaskGroup(
        group_id="tg_1",
        key_kind="header",
        adapter="base",
        judge_model="",
        rubric_hash="",
        sessions=sessions,
    )


def group_of(
    *sessions: TaskSession, loss: str = "dapo", steps: Mapping[str, float] | None = None
) -> TrainingGroup:
    group = task_group(task_of(*sessions), steps or {}, loss=loss)
    assert group is not None
    return group


def both(policy: Policy | None = None) -> list[TaskSession]:
    return [
        attempt(session(policy, "a1", "a2"), 0.9),
        attempt(session(policy, "b1", "b2"), 0.3),
    ]


def answer(tokens: int, token: int) -> SampledAnswer:
    return SampledAnswer(index=0, token_ids=(token,) * tokens, logprobs=(-1.0,) * tokens)


def rewritten(tokens: int) -> list[TokenRow]:
    """A session whose client has rewritten the conversation: two rows."""
    return join_rows(
        [
            TokenTurn(
                exchange_id="a1", parent=None, prompt_token_ids=TASK, answers=(answer(tokens, 10),)
            ),
            TokenTurn(
                exchange_id="a2",
                parent="a1",
                prompt_token_ids=(1, 2, 9, 9),
                answers=(answer(1, 12),),
            ),
        ]
    )


def test_a_session_is_one_row_in_which_only_sampled_tokens_are_targets() -> None:
    group = group_of(*both())

    assert group.prompt_token_ids == TASK
    first, second = group.rows
    assert first.token_ids == (10, 11, 20, 21, 12, 13, 14)
    assert first.kept == (True, True, False, False, True, True, True)
    assert first.logprobs == (-1.0, -1.0, 0.0, 0.0, -1.0, -1.0, -1.0)
    assert second.token_ids == (15, 22, 16, 17)
    assert second.kept == (True, False, True, True)
    # Leave-one-out: 0.9 - 0.3. Of 4 tokens a session on average the first has 5, the other 3.
    assert (first.advantage, second.advantage) == pytest.approx((0.6 * 4 / 5, -0.6 * 4 / 3))
    assert group.sessions == (0, 1)
    assert group.scores == (0.9, 0.3)


def test_its_log_probabilities_are_those_of_each_exchange_by_itself(
    policy: Policy, learner_settings: Learner
) -> None:
    """The check before the first step finds no difference, and takes all of them."""
    group = group_of(*both(policy))
    # One group cannot tell whether its rewards are chance.
    job = job_of([group], learner_settings, signals=None)

    outcome, _ = run_steps(policy, job)

    assert outcome.drift is not None
    assert outcome.drift.max_abs < 1e-5
    assert outcome.drift.tokens == 2 + 3 + 1 + 2
    (step,) = outcome.metrics
    assert (step.answers, step.tokens, step.masked_tokens) == (2, 8, 0)
    assert step.computed_tokens == 3 + 6 + 3, "each token of a session once, but for the last"
    assert step.ratio_mean == pytest.approx(1.0, abs=1e-5)
    # Each session has the mean over its own tokens, so 0.6 and -0.6 cancel.
    assert step.loss == pytest.approx(0.0, abs=1e-5)


def test_its_gradient_is_that_of_each_exchange_by_itself(policy: Policy) -> None:
    group = group_of(*both(policy))

    def gradient(groups: list[TrainingGroup]) -> torch.Tensor:
        policy.model.zero_grad()
        for one in groups:
            (pack,) = pack_group(one, max_tokens=1000)
            values_N = policy.logprobs(pack)[0]
            (values_N * torch.tensor(pack.advantages)).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad])

    alone = []
    for names, advantage in ((("a1", "a2"), 0.6 * 4 / 5), (("b1", "b2"), -0.6 * 4 / 3)):
        (row,) = session(None, *names)
        for answer in row.answers:
            prompt, ids = row.token_ids[: answer.start], row.token_ids[answer.start : answer.stop]
            made = make_row(ids, advantage, logprobs=(0.0,) * len(ids))
            alone.append(make_group(prompt, [made]))
    expected = gradient(alone)

    assert len(alone) == 4
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient([group]), expected, atol=1e-6, rtol=1e-4)


def test_a_session_whose_history_was_rewritten_has_two_rows_with_one_advantage() -> None:
    group = group_of(attempt(rewritten(2), 0.9), both()[1])

    assert group.prompt_token_ids == (1, 2), "what all rows begin with"
    assert [row.token_ids for row in group.rows] == [
        (3, 10, 10),
        (9, 9, 12),
        (3, 15, 22, 16, 17),
    ]
    assert [row.kept_tokens for row in group.rows] == [2, 1, 3]
    assert [row.advantage for row in group.rows] == pytest.approx([0.6, 0.6, -0.6])


def test_steps_that_are_not_exact_and_other_temperatures() -> None:
    group = group_of(
        attempt(session(None, "a1", "a2"), 0.9, {"a1": 1.0}),
        attempt(session(None, "b1", "b2"), 0.3, {"b1": 0.7, "b2": 1.0}),
    )

    assert [(row.kept_tokens, row.temperature) for row in group.rows] == [
        (2, 1.0),
        (1, 0.7),
        (2, 1.0),
    ]
    assert group.sessions == (0, 1, 1)
    of_first, *of_second = [row.advantage * row.kept_tokens for row in group.rows]
    assert of_first == pytest.approx(-sum(of_second)), "each session weighs as much as the other"


def test_a_step_with_other_answers_has_both_advantages() -> None:
    group = group_of(*both(), steps={"a2": -0.2})

    assert [row.kept_tokens for row in group.rows] == [2, 3, 3]
    assert [row.advantage for row in group.rows] == pytest.approx(
        [0.6 * 4 / 5, (0.6 - 0.2) * 4 / 5, -0.6 * 4 / 3]
    )


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_each_session_counts_alike_in_groups_of_other_lengths(loss: str) -> None:
    long = group_of(attempt(rewritten(400), 1.0), attempt(rewritten(400), 0.0), loss=loss)
    short = group_of(*both(), loss=loss)

    found = alike([long, short], loss)

    def of(group: TrainingGroup) -> list[float]:
        sums = dict.fromkeys(group.sessions, 0.0)
        for row, number in zip(group.rows, group.sessions, strict=True):
            length = row.kept_tokens if LOSSES[loss].mean == "answer" else 1
            weight = row.advantage / (1.0 if group is found[0] else 0.6)  # spread of the rewards
            sums[number] += abs(weight) * row.kept_tokens / length
        return list(sums.values())

    by_length = [value for group in found for value in of(group)]
    if LOSSES[loss].mean == "length":  # a constant in place of each length: a token counts alike
        by_length = [abs(one.weights[0]) for one in found]
    assert by_length == pytest.approx([by_length[0]] * len(by_length))
    assert [len(unweighted(one)) for one in found] == [len(one.rows) for one in found]
    assert {abs(row.advantage) for row in unweighted(found[0])} == {1.0}


def test_dr_grpo_divides_each_session_by_a_constant() -> None:
    group = group_of(attempt(rewritten(10), 1.0), both()[1], loss="dr_grpo")

    # Its denominator counts rows, 3, where 2 sessions are compared.
    assert [row.advantage for row in group.rows] == pytest.approx([1.05, 1.05, -1.05])


def test_the_baseline_is_over_sessions_whatever_row_is_left_out() -> None:
    third = attempt(session(None, "b1"), 0.0)
    group = group_of(attempt(rewritten(2), 0.9), both()[1], third)

    assert session_scores(group, [False, True, True, True]) == {0: 0.9, 1: 0.3, 2: 0.0}
    found = assign_rows(group, [False, True, True, True], "mean")
    assert found[0] == 0.0
    assert found[1:] == pytest.approx([row.advantage for row in group.rows[1:]])
    assert assign_rows(group, [False, False, True, True], "mean")[2:] == pytest.approx(
        [0.3 * group.weights[2], -0.3 * group.weights[3]]
    )


@pytest.mark.parametrize(
    "sessions",
    [
        pytest.param([attempt((), 0.1), attempt((), 0.9)], id="no-rows"),
        pytest.param([attempt(session(None, "a1"), 0.5), attempt((), 0.4)], id="one-has-rows"),
        pytest.param(
            [
                attempt(session(None, "a1"), 0.5),
                attempt(
                    join_rows(
                        [
                            TokenTurn(
                                exchange_id="b1",
                                parent=None,
                                prompt_token_ids=(7,),
                                answers=(answer(1, 8),),
                            )
                        ]
                    ),
                    0.1,
                ),
            ],
            id="nothing-alike",
        ),
    ],
)
def test_sessions_that_make_no_group(sessions: list[TaskSession]) -> None:
    assert task_group(task_of(*sessions), {}, loss="dapo") is None


def test_a_session_is_left_out_whole_where_one_turn_moved_too_far(
    learner_settings: Learner,
) -> None:
    group = group_of(*both(), attempt(session(None, "a1"), 0.6))
    start = [list(row.logprobs) for row in group.rows]
    start[0][1] -= 2.2  # of two tokens: 1.1 nats a token
    rows = tuple(replace(r, start=tuple(s)) for r, s in zip(group.rows, start, strict=True))
    group = replace(group, rows=rows)

    found = leave_out_far(group, CheckedAnswers(), learner_settings)

    assert isinstance(found, Judged)
    assert found.answers.left_out == {0: "geometric"}
    assert [row.advantage > 0 for row in found.group.rows] == [False, False, True]
    assert sample_size([group]) == pytest.approx(
        (9 + math.exp(-2.2)) ** 2 / (10 * (9 + math.exp(-4.4)))
    )
    assert sample_size([replace(group, sessions=())]) is None


def test_a_group_of_which_a_few_tokens_carry_the_sum_is_dropped(
    learner_settings: Learner,
) -> None:
    group = group_of(*both())
    start = [list(row.logprobs) for row in group.rows]
    start[0][0] += 4.0
    start[0][1] -= 4.0  # the turn's mean has not moved
    rows = tuple(replace(r, start=tuple(s)) for r, s in zip(group.rows, start, strict=True))

    found = leave_out_far(replace(group, rows=rows), CheckedAnswers(), learner_settings)

    assert isinstance(found, Fault)
    assert found.reason == "sample_size"

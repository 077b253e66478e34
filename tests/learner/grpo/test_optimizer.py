"""The update: how far it moves, what makes it move less, and what each of its constants does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import Parameter

from learner.errors import NonFiniteError
from learner.grpo.optimizer import OptimizerState, SignalAdamW, UpdateRule

SIZE = 400
RULE = UpdateRule(rate=0.01, betas=(0.9, 0.99), warmup=0, reference=0.25, max_norm=1e9)


def rule(**changes: object) -> UpdateRule:
    return replace(RULE, **changes)  # type: ignore[arg-type]


def new_parameter() -> dict[str, Parameter]:
    return {"w": Parameter(torch.zeros(SIZE))}


def noise(seed: int, groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in range(groups)]


def run(
    steps: list[list[torch.Tensor]],
    *,
    rule: UpdateRule = RULE,
    signal: float = 0.25,
    state: OptimizerState | None = None,
    quiet: float = 0.0,
) -> tuple[torch.Tensor, SignalAdamW]:
    """Steps over groups with these gradients. Returns the weights and the optimiser."""
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, rule, state)
    for groups in steps:
        for gradient in groups:
            parameters["w"].grad = gradient.clone()
            optimizer.add_group(signal)
        optimizer.add_quiet(quiet)
        optimizer.step()
    return parameters["w"].detach().clone(), optimizer


def next_run(runs: int) -> OptimizerState:
    """What the next run of a line begins with, after some runs of three steps of 4 groups."""
    state: OptimizerState | None = None
    for number in range(runs):
        _, optimizer = run([noise(100 * number + step, 4) for step in range(3)], state=state)
        state = beside_an_adapter(optimizer.state)
    assert state is not None
    return state


def beside_an_adapter(state: OptimizerState) -> OptimizerState:
    return OptimizerState(steps=state.steps, second=state.second)


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.pow(2).mean().sqrt())


def test_groups_that_agree_at_the_reference_signal_move_every_weight_by_the_rate() -> None:
    (direction,) = noise(0, 1)
    moved, _ = run([[direction] * 16])
    torch.testing.assert_close(moved, -0.01 * direction.sign(), atol=1e-6, rtol=1e-3)


def test_groups_that_do_not_agree_move_it_by_one_over_the_root_of_their_number() -> None:
    for groups in (4, 16, 64):
        moved, _ = run([noise(groups, groups)])
        assert rms(moved) == pytest.approx(0.01 / math.sqrt(groups), rel=0.15)


def test_three_steps_of_noise_move_five_times_less_than_three_of_signal() -> None:
    """16 groups a step, half of whose gradient they share, against none."""
    shared = noise(0, 1)[0]
    signal = [[shared + one for one in noise(step, 16)] for step in (1, 2, 3)]
    nothing = [noise(step, 16) for step in (4, 5, 6)]
    ratio = rms(run(nothing)[0]) / rms(run(signal)[0])
    assert ratio < 0.5
    agreed = [[shared] * 16] * 3
    assert rms(run(nothing)[0]) < 0.2 * rms(run(agreed)[0])


@pytest.mark.parametrize("factor", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("runs_before", [0, 1, 3, 8])
def test_the_update_shrinks_with_the_advantages(factor: float, runs_before: int) -> None:
    steps = [noise(step, 8) for step in range(3)]
    weak = [[factor * gradient for gradient in groups] for groups in steps]
    state = next_run(runs_before) if runs_before else None
    whole, _ = run(steps, state=state)
    small, _ = run(weak, signal=0.25 * factor, state=state)
    assert rms(small) == pytest.approx(factor * rms(whole), rel=0.01)


@pytest.mark.parametrize("runs_before", [0, 1, 8])
def test_quiet_groups_shrink_every_step_of_every_run(runs_before: int) -> None:
    steps = [noise(step, 4) for step in range(3)]
    state = next_run(runs_before) if runs_before else None
    whole, _ = run(steps, state=state)
    beside, _ = run(steps, state=state, quiet=36)
    torch.testing.assert_close(beside, whole * 4 / (4 + 36), atol=1e-9, rtol=1e-5)


def test_a_run_moves_in_its_own_direction_and_not_in_that_of_the_run_before() -> None:
    first, second = noise(1, 1)[0], noise(2, 1)[0]
    before, optimizer = run([[first] * 4] * 3)
    after, _ = run([[second] * 4] * 3, state=beside_an_adapter(optimizer.state))
    similar = torch.nn.functional.cosine_similarity
    assert abs(float(similar(after, before, dim=0))) < 0.15
    assert float(similar(after, -second, dim=0)) > 0.7


def test_gradients_that_grow_from_run_to_run_do_not_move_a_weight_beyond_the_rate() -> None:
    """The parent's second moment alone would lag behind: 10 times the rate."""
    _, optimizer = run([noise(step, 4) for step in range(200)])
    large = [[1_000 * one for one in noise(7, 4)]]
    moved, _ = run(large, state=beside_an_adapter(optimizer.state))
    assert moved.abs().max() <= 0.01 * (1 + 1e-5)


def test_what_had_large_gradients_is_damped_in_the_next_run() -> None:
    loud = torch.where(torch.arange(SIZE) < SIZE // 2, 10.0, 1.0)
    _, optimizer = run([[loud * one for one in noise(step, 4)] for step in range(50)])
    moved, _ = run([noise(60, 4)], state=beside_an_adapter(optimizer.state))
    assert rms(moved[: SIZE // 2]) < 0.2 * rms(moved[SIZE // 2 :])


def test_it_does_not_grow_beyond_the_reference() -> None:
    steps = [noise(0, 8)]
    whole, _ = run(steps)
    strong, _ = run([[4 * gradient for gradient in steps[0]]], signal=1.0)
    torch.testing.assert_close(strong, whole)


def test_a_weight_never_moves_further_than_the_rate_in_a_first_step() -> None:
    for seed in range(20):
        moved, _ = run([noise(seed, 1 + seed % 5)], signal=0.3)
        assert moved.abs().max() <= 0.01 * (1 + 1e-6)


def test_in_a_long_run_a_weight_moves_at_most_2_35_times_the_rate() -> None:
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RULE)
    largest, before = 0.0, torch.zeros(SIZE)
    for step in range(540):
        parameters["w"].grad = torch.full((SIZE,), 1e-4 if step < 500 else 1.0)
        optimizer.add_group(0.25)
        optimizer.step()
        largest = max(largest, float((parameters["w"].detach() - before).abs().max()))
        before = parameters["w"].detach().clone()
    assert 1.0 < largest / 0.01 <= 2.35


def test_the_rate_is_the_size_of_the_update() -> None:
    one, _ = run([noise(0, 4)])
    ten, _ = run([noise(0, 4)], rule=rule(rate=0.1))
    torch.testing.assert_close(ten, 10 * one)


def test_a_step_has_the_gradient_of_its_own_groups_alone() -> None:
    """With betas 0 nothing of the first step is left in the second."""
    plain = rule(betas=(0.0, 0.0))
    first, second = noise(1, 4), noise(2, 4)
    both, _ = run([first, second], rule=plain)
    torch.testing.assert_close(both, run([first], rule=plain)[0] + run([second], rule=plain)[0])


def test_momentum_carries_a_direction_into_the_next_step() -> None:
    """After (1, 0): m = 0.09 / 0.19 and v = 0.0099 / 0.0199, in units of g and of g^2."""
    (direction,) = noise(3, 1)
    one, _ = run([[direction]])
    two, _ = run([[direction], [torch.zeros(SIZE)]])
    expected = -0.01 * (0.09 / 0.19) / math.sqrt(0.0099 / 0.0199) * direction.sign()
    torch.testing.assert_close(two - one, expected, atol=1e-6, rtol=1e-3)


def test_a_gradient_beyond_the_norm_is_scaled_down_and_the_update_with_it() -> None:
    (direction,) = noise(4, 1)
    norm = float(direction.norm())
    whole, _ = run([[direction]])
    half, optimizer = run([[direction]], rule=rule(max_norm=norm / 2))
    torch.testing.assert_close(half, whole / 2, atol=1e-6, rtol=1e-3)
    same, _ = run([[direction]], rule=rule(max_norm=norm * 2))
    torch.testing.assert_close(same, whole)
    assert optimizer.state.steps == 1


def test_the_rate_rises_over_the_warm_up_and_a_next_run_goes_on_from_there() -> None:
    (direction,) = noise(5, 1)
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, rule(warmup=3))
    rates = []
    for _ in range(2):
        parameters["w"].grad = direction.clone()
        optimizer.add_group(0.25)
        rates.append(optimizer.step().rate)
    resumed = SignalAdamW(parameters, rule(warmup=3), optimizer.state)
    for _ in range(3):
        parameters["w"].grad = direction.clone()
        resumed.add_group(0.25)
        rates.append(resumed.step().rate)
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_a_run_that_goes_on_after_a_kill_equals_one_in_one_go() -> None:
    steps = [noise(step, 3) for step in range(4)]
    state = next_run(1)
    whole, _ = run(steps, state=state)
    first, optimizer = run(steps[:2], state=state)
    second, _ = run(steps[2:], state=optimizer.state)
    torch.testing.assert_close(first + second, whole, atol=1e-8, rtol=1e-6)


def test_the_next_run_has_the_second_moment_of_all_steps_before_it() -> None:
    steps = [noise(step, 3) for step in range(4)]
    _, one = run(steps)
    _, first = run(steps[:2])
    _, second = run(steps[2:], state=beside_an_adapter(first.state))
    assert (one.state.steps, second.state.steps, second.state.run_steps) == (4, 4, 2)
    assert torch.equal(one.state.second["w"], second.state.second["w"])


def test_a_state_is_not_changed_by_the_run_that_continues_it() -> None:
    _, optimizer = run([noise(0, 3)])
    state = optimizer.state
    before = {name: one.clone() for name, one in state.second.items()}
    run([noise(1, 3)], state=state)
    assert torch.equal(state.second["w"], before["w"])
    assert state.steps == 1


def test_it_says_how_far_it_moved() -> None:
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RULE)
    (direction,) = noise(6, 1)
    parameters["w"].grad = direction.clone()
    optimizer.add_group(0.25)
    update = optimizer.step()
    assert update.grad_norm == pytest.approx(float(direction.norm()))
    assert update.update_norm == pytest.approx(float(parameters["w"].detach().norm()))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RULE)
    parameters["w"].grad = torch.full((SIZE,), math.nan)
    optimizer.add_group(0.25)
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert not parameters["w"].any()
    assert optimizer.state.steps == 0


def test_a_gradient_whose_square_overflows_changes_nothing_and_leaves_the_moments() -> None:
    """An infinite second moment would stay, and no later step would move the weight."""
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RULE)
    parameters["w"].grad = torch.full((SIZE,), 1e25)
    optimizer.add_group(0.25)
    with pytest.raises(NonFiniteError, match=r"the square of the gradient.*overflows"):
        optimizer.step()
    assert not parameters["w"].any()
    assert not optimizer.state.second["w"].any()


def test_groups_without_a_signal_move_nothing() -> None:
    moved, _ = run([[torch.zeros(SIZE)] * 3], signal=0.0)
    assert not moved.any()


@pytest.mark.parametrize("quiet", [0.5, 3, 15])
def test_groups_without_a_signal_shrink_the_step_as_zero_gradients_do_in_a_mean(
    quiet: float,
) -> None:
    groups = noise(0, 5)
    whole, _ = run([groups])
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RULE)
    for gradient in groups:
        parameters["w"].grad = gradient.clone()
        optimizer.add_group(0.25)
    optimizer.add_quiet(quiet)
    optimizer.step()

    torch.testing.assert_close(
        parameters["w"].detach(), whole * 5 / (5 + quiet), atol=1e-7, rtol=1e-3
    )


def test_quiet_groups_count_in_their_own_step_alone() -> None:
    (direction,) = noise(0, 1)
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, rule(betas=(0.0, 0.0)))
    moved = []
    for quiet in (3, 0):
        before = parameters["w"].detach().clone()
        parameters["w"].grad = direction.clone()
        optimizer.add_group(0.25)
        optimizer.add_quiet(quiet)
        optimizer.step()
        moved.append(rms(parameters["w"].detach() - before))

    assert moved == pytest.approx([0.0025, 0.01], rel=1e-3)


@pytest.mark.parametrize("signal", [0.0, 2e-7])
def test_a_group_without_a_signal_counts_and_adds_nothing(signal: float) -> None:
    """Alone it moves nothing. Beside a sound one q is doubled, as n is 2: 1 / sqrt(2) is left."""
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RULE)
    parameters["w"].grad = 1e-9 * noise(1, 1)[0]
    optimizer.add_group(signal)
    assert optimizer.step().update_norm == 0.0

    (direction,) = noise(2, 1)
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RULE)
    for gradient, its in ((direction, 0.25), (direction * 1e3, signal)):
        parameters["w"].grad = gradient.clone()
        optimizer.add_group(its)
    optimizer.step()
    expected = -0.01 / math.sqrt(2) * direction.sign()
    torch.testing.assert_close(parameters["w"].detach(), expected, atol=1e-6, rtol=1e-3)

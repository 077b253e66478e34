"""The update: how far it moves, what makes it move less, and what each of its constants does."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import Parameter

from learner.errors import NonFiniteError
from learner.grpo import optimizer as module, trainer
from learner.grpo.optimizer import Moments, SignalAdamW

SIZE = 400
RATE = 0.01


@pytest.fixture(autouse=True)
def unclipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAD_NORM", 1e9)


def new_parameter() -> dict[str, Parameter]:
    return {"w": Parameter(torch.zeros(SIZE))}


def noise(seed: int, groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) for _ in range(groups)]


def run(
    steps: list[list[torch.Tensor]],
    *,
    rate: float = RATE,
    share: float = 1.0,
    moments: Moments | None = None,
    quiet: float = 0.0,
) -> tuple[torch.Tensor, SignalAdamW]:
    """Steps over groups with these gradients. Returns the change of the weights, the optimiser."""
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, rate, moments)
    for groups in steps:
        for gradient in groups:
            optimizer.gradient["w"].add_(gradient)
            optimizer.add_group(share)
        optimizer.add_quiet(quiet)
        optimizer.step()
    return parameters["w"].detach().clone(), optimizer


def test_a_first_step_moves_every_weight_by_the_rate_against_its_gradient() -> None:
    groups = noise(0, 16)
    moved, _ = run([groups])
    torch.testing.assert_close(
        moved, -RATE * torch.stack(groups).sum(0).sign(), atol=1e-6, rtol=1e-3
    )


@pytest.mark.parametrize("factor", [0.1, 0.01, 0.001])
def test_the_update_shrinks_with_the_advantages(factor: float) -> None:
    steps = [noise(step, 8) for step in range(3)]
    weak = [[factor * gradient for gradient in groups] for groups in steps]
    whole, _ = run(steps)
    small, _ = run(weak, share=factor)
    torch.testing.assert_close(small, factor * whole, atol=1e-8, rtol=1e-3)


def test_a_group_counts_with_its_own_share() -> None:
    """One of four in full, one by half, two that say nothing: 3 / 8 of the rate."""
    optimizer = SignalAdamW(new_parameter(), RATE)
    for share in (1.0, 0.5, 0.0, 0.0):
        optimizer.add_group(share)
    assert optimizer.step().rate == pytest.approx(RATE * 3 / 8)


def test_the_step_is_as_large_whatever_the_size_of_the_gradients() -> None:
    steps = [noise(0, 8)]
    whole, _ = run(steps)
    strong, _ = run([[4 * gradient for gradient in steps[0]]])
    torch.testing.assert_close(strong, whole)


def test_in_a_long_run_a_weight_moves_at_most_2_35_times_the_rate() -> None:
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RATE)
    largest, before = 0.0, torch.zeros(SIZE)
    for step in range(540):
        optimizer.gradient["w"].fill_(1e-4 if step < 500 else 1.0)
        optimizer.add_group(1.0)
        optimizer.step()
        largest = max(largest, float((parameters["w"].detach() - before).abs().max()))
        before = parameters["w"].detach().clone()
    assert 1.0 < largest / RATE <= 2.35


def test_momentum_carries_a_direction_into_the_next_step() -> None:
    """After (1, 0): m = 0.09 / 0.19 and v = 0.0099 / 0.0199, in units of g and of g^2."""
    (direction,) = noise(3, 1)
    one, _ = run([[direction]])
    two, _ = run([[direction], [torch.zeros(SIZE)]])
    expected = -RATE * (0.09 / 0.19) / math.sqrt(0.0099 / 0.0199) * direction.sign()
    torch.testing.assert_close(two - one, expected, atol=1e-6, rtol=1e-3)


def test_a_gradient_beyond_the_norm_is_scaled_down_in_the_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (direction,) = noise(4, 1)
    norm = float(direction.norm())
    for limit, factor in ((norm / 2, 0.5), (norm * 2, 1.0)):
        monkeypatch.setattr(module, "MAX_GRAD_NORM", limit)
        _, optimizer = run([[direction]])
        first = optimizer.moments.first["w"]
        torch.testing.assert_close(first, 0.1 * factor * direction, atol=1e-6, rtol=1e-3)


def test_a_run_that_goes_on_after_a_kill_equals_one_in_one_go() -> None:
    steps = [noise(step, 3) for step in range(4)]
    whole, _ = run(steps)
    first, optimizer = run(steps[:2])
    second, _ = run(steps[2:], moments=optimizer.moments)
    torch.testing.assert_close(first + second, whole, atol=1e-8, rtol=1e-6)


def test_it_says_how_far_it_moved() -> None:
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RATE)
    (direction,) = noise(6, 1)
    optimizer.gradient["w"].add_(direction)
    optimizer.add_group(1.0)
    update = optimizer.step()
    assert update.grad_norm == pytest.approx(float(direction.norm()))
    assert update.update_norm == pytest.approx(float(parameters["w"].detach().norm()))
    assert update.rate == RATE


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RATE)
    optimizer.gradient["w"].fill_(math.nan)
    optimizer.add_group(1.0)
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert not parameters["w"].any()
    assert (optimizer.moments.steps, dict(optimizer.moments.first)) == (0, {})


def test_what_was_forgotten_has_no_part_in_the_step() -> None:
    (direction,) = noise(7, 1)
    parameters = new_parameter()
    optimizer = SignalAdamW(parameters, RATE)
    optimizer.gradient["w"].fill_(math.nan)
    optimizer.add_group(0.0)
    optimizer.forget()
    optimizer.gradient["w"].add_(direction)
    optimizer.add_group(1.0)
    optimizer.step()
    torch.testing.assert_close(parameters["w"].detach(), run([[direction]])[0])


@pytest.mark.parametrize("groups", [0, 3])
def test_groups_without_a_signal_move_nothing(groups: int) -> None:
    """Also where rounding left a gradient, and where there is none at all."""
    moved, _ = run([[1e-9 * one for one in noise(1, groups)]], share=0.0)
    assert not moved.any()


@pytest.mark.parametrize("quiet", [0.5, 3, 15])
def test_groups_that_were_left_out_shrink_each_step_as_zero_gradients_do_in_a_mean(
    quiet: float,
) -> None:
    steps = [noise(step, 5) for step in range(3)]
    whole, _ = run(steps)
    beside, _ = run(steps, quiet=quiet)
    torch.testing.assert_close(beside, whole * 5 / (5 + quiet), atol=1e-7, rtol=1e-3)


def test_quiet_groups_count_in_their_own_step_alone() -> None:
    optimizer = SignalAdamW(new_parameter(), RATE)
    rates = []
    for quiet in (3, 0):
        optimizer.add_group(1.0)
        optimizer.add_quiet(quiet)
        rates.append(optimizer.step().rate)
    assert rates == pytest.approx([RATE / 4, RATE])


def test_gradients_are_finite_with_their_squares_and_summed_beyond_fp32() -> None:
    tensors = {str(n): Parameter(torch.full((3,), 1e18)) for n in range(9)}
    for one in tensors.values():
        one.grad = torch.full((3,), 1e18)
    assert trainer._finite(tensors)
    # its square, 2.7e37, is beyond what fp32 can sum
    norm = module._norm([one.detach() for one in tensors.values()] * 99)
    assert norm == pytest.approx(1e18 * (27 * 99) ** 0.5)
    for odd in (math.nan, math.inf, -1e20):
        tensors["3"].grad = torch.tensor([1.0, odd, 2.0])
        assert not trainer._finite(tensors)

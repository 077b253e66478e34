"""When a loaded adapter counts as live."""

from __future__ import annotations

import math

import pytest

from deploy.engine.vllm_control import Probe, compare, divergence


def probe(name: str, *logprobs: float) -> Probe:
    """One prompt for each log-probability; the tokens are 5, 6, …"""
    return Probe(
        model_in_reply=name,
        next_tokens=tuple({5 + place: nats} for place, nats in enumerate(logprobs)),
    )


BASE = probe("m", -1.0, -2.0)


def test_an_adapter_that_changes_log_probabilities_is_live() -> None:
    liveness = compare(
        "m--v1", adapter=probe("m--v1", -1.5, -2.0), base_before=BASE, base_after=BASE
    )

    assert liveness.live
    assert (liveness.mean_difference, liveness.max_difference, liveness.noise) == (0.25, 0.5, 0.0)
    assert liveness.reason == "live: differs from the base by 0.25 nats a token"


def test_an_adapter_that_says_what_the_base_says_is_not_live() -> None:
    liveness = compare(
        "m--v1", adapter=probe("m--v1", -1.0, -2.0), base_before=BASE, base_after=BASE
    )

    assert not liveness.live
    assert "its log-probabilities are the base's" in liveness.reason


def test_a_reply_under_another_name_is_not_live() -> None:
    liveness = compare("m--v1", adapter=probe("m", -9.0, -9.0), base_before=BASE, base_after=BASE)

    assert not liveness.live
    assert liveness.reason == "not live: the reply to m--v1 names m"


@pytest.mark.parametrize(("moved", "live"), [(0.15, False), (0.25, True)])
def test_the_difference_must_be_twice_the_base_s_own_noise(moved: float, live: bool) -> None:
    noisy = probe("m", -1.1, -2.1)  # 0.1 a token away from the first probe of the base

    liveness = compare(
        "m--v1",
        adapter=probe("m--v1", -1.0 - moved, -2.0 - moved),
        base_before=BASE,
        base_after=noisy,
    )

    assert liveness.live is live
    assert liveness.noise == pytest.approx(0.1)


def test_a_token_that_is_no_longer_likely_counts_by_how_far_it_fell_at_least() -> None:
    base = Probe(model_in_reply="m", next_tokens=({1: -0.5, 2: -1.5},))
    other = Probe(model_in_reply="m--v1", next_tokens=({1: -0.75, 3: -2.0},))

    liveness = compare("m--v1", adapter=other, base_before=base, base_after=base)

    # Token 1 moved by 0.25; token 2 was at -1.5 and is at -2.0 or below.
    assert (liveness.mean_difference, liveness.max_difference) == (0.375, 0.5)
    assert liveness.tokens == 2


def test_no_tokens_prove_nothing() -> None:
    empty = Probe(model_in_reply="m--v1", next_tokens=())

    liveness = compare("m--v1", adapter=empty, base_before=BASE, base_after=BASE)

    assert not liveness.live
    assert liveness.reason == "not live: the probe gave no log-probabilities to compare"


NONSENSE = probe("m", -9999.0, -9999.0)


@pytest.mark.parametrize(
    ("before", "adapter", "after"),
    [
        (NONSENSE, (-1.5, -2.0), BASE),
        (BASE, (-1.5, -2.0), NONSENSE),
        (BASE, (-9999.0, -9999.0), BASE),
        (NONSENSE, (-9999.0, -9999.0), NONSENSE),
        (BASE, (-1.5, -2.0), probe("m", -3.0, -2.5)),
        (probe("m", math.nan, -1.0), (-1.5, -2.0), BASE),
    ],
)
def test_a_probe_that_vllm_answered_wrongly_decides_nothing(
    before: Probe, adapter: tuple[float, float], after: Probe
) -> None:
    liveness = compare(
        "m--v1", adapter=probe("m--v1", *adapter), base_before=before, base_after=after
    )

    assert (liveness.unsure, liveness.live) == (True, False)
    assert "decides nothing" in liveness.reason


def test_an_adapter_whose_log_probabilities_are_not_finite_is_not_live() -> None:
    liveness = compare(
        "m--v1", adapter=probe("m--v1", math.nan, -2.0), base_before=BASE, base_after=BASE
    )

    assert (liveness.unsure, liveness.live) == (False, False)
    assert "not finite" in liveness.reason


def of(*probabilities: float, first: int = 5) -> Probe:
    """One prompt, whose likeliest tokens are `first` and those behind it."""
    listed = {first + place: math.log(value) for place, value in enumerate(probabilities)}
    return Probe(model_in_reply="m", next_tokens=(listed,))


def test_a_divergence_is_that_of_the_listed_tokens_and_the_rest() -> None:
    exact = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)  # the rest is 0.25 in both

    assert divergence(of(0.5, 0.25), of(0.25, 0.5)) == pytest.approx(exact)
    assert divergence(of(0.5, 0.25), of(0.5, 0.25)) == 0.0


def test_tokens_that_the_other_does_not_list_have_at_most_its_least_probability() -> None:
    base, far = of(0.9, 0.05), of(0.6, 0.3, 0.0001, first=100)

    found = divergence(base, far)

    assert found == pytest.approx(
        0.95 * math.log(0.95 / 0.0002) + 0.05 * math.log(0.05 / 0.9998), rel=1e-6
    )
    assert divergence(base, of(0.01, first=100)) > 3.0, "two tokens have 0.02 at most there"
    assert divergence(of(0.1), of(0.5, first=100)) == 0.0, "nothing is known to differ"


def test_probabilities_that_rounding_took_over_one_are_no_infinite_divergence() -> None:
    found = divergence(of(0.5, 0.25), of(0.6, 0.4000001))

    assert math.isfinite(found)
    assert found < 10.0

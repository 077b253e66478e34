"""When a loaded adapter counts as live."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from deploy.engine.vllm_control import Probe, compare, compare_served, divergence, read_probe_file
from deploy.errors import InvalidAdapterError, NotAsRegisteredError
from learner.adapter_folder import LINEAGE, PROBE, ProbeFile, render_probe


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


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        (probe("m--v1", -1.0, -2.0), "its log-probabilities are the base's"),
        (probe("m", -9.0, -9.0), "the reply to m--v1 names m"),
        (probe("m--v1"), "the probe gave no log-probabilities to compare"),
        (probe("m--v1", math.nan, -2.0), "not finite"),
    ],
)
def test_what_shows_no_effect_is_not_live(adapter: Probe, why: str) -> None:
    liveness = compare("m--v1", adapter=adapter, base_before=BASE, base_after=BASE)

    assert (liveness.unsure, liveness.live) == (False, False)
    assert liveness.reason.startswith("not live: ")
    assert why in liveness.reason


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


# Is the adapter that vLLM serves the one that was trained? Numbers worked by hand.


TRAINED = ProbeFile(
    prompts=((1,), (1, 2)),
    likeliest=({7: -0.25, 8: -1.5, 9: -3.0}, {7: -0.5}),
    tolerance=0.1,
)


def served(*next_tokens: dict[int, float]) -> Probe:
    return Probe(model_in_reply="m--v1", next_tokens=next_tokens)


def test_rounding_is_no_difference() -> None:
    found = compare_served(TRAINED, served({7: -0.3, 8: -1.35}, {7: -0.45}))

    assert (found.same, found.unsure, found.tokens) == (True, False, 3)
    assert found.mean_difference == pytest.approx((0.05 + 0.15 + 0.05) / 3)
    assert found.max_difference == pytest.approx(0.15)
    assert found.reason == "served as trained: 0.0833 nats a token from the learner's"


def test_another_adapter_is_refused_with_its_numbers() -> None:
    found = compare_served(TRAINED, served({7: -0.5, 8: -1.25}, {7: -0.5}))

    assert not found.same
    assert not found.unsure
    assert found.reason.startswith(
        "not what was trained: vLLM's log-probabilities are 0.167 nats a token from the learner's "
        "over 3 tokens (largest 0.25, allowed 0.1)"
    )


def test_a_log_probability_that_is_no_number_is_refused() -> None:
    assert not compare_served(TRAINED, served({7: float("nan")}, {7: -0.5})).same


@pytest.mark.parametrize(("effect", "same"), [(0.0, False), (0.6, False), (0.7, True)])
def test_a_share_of_the_adapter_s_effect_is_taken_for_rounding(effect: float, same: bool) -> None:
    found = compare_served(TRAINED, served({7: -0.5, 8: -1.25}, {7: -0.5}), effect=effect)

    assert found.mean_difference == pytest.approx(0.5 / 3)
    assert found.same is same
    assert found.tolerance == pytest.approx(max(0.1, effect / 4))


def test_a_token_that_the_learner_does_not_list_counts_from_its_least_one() -> None:
    found = compare_served(TRAINED, served({5: -1.0}, {6: -2.0}))

    # 5 is 2 nats above the least of the first prompt, 6 below the least of the second.
    assert found.mean_difference == pytest.approx((2.0 + 0.0) / 2)
    assert not found.same


@pytest.mark.parametrize(
    ("answered", "words"),
    [
        (served({7: -0.25}), "gave no log-probabilities for some"),
        (served({7: -0.25}, {}), "gave no log-probabilities for some"),
        (served({7: -9999.0}, {7: -0.5}), "-9999"),
        (served(), "gave no log-probabilities for some"),
    ],
)
def test_a_wrong_answer_decides_nothing(answered: Probe, words: str) -> None:
    found = compare_served(TRAINED, answered)

    assert (found.same, found.unsure) == (False, True)
    assert words in found.reason


@pytest.mark.parametrize(
    "lineage", ["", "[]", "{}", '{"algorithm": 3}', '{"algorithm": {"probe_sha256": null}}']
)
def test_a_lineage_that_names_no_file_asks_for_none(tmp_path: Path, lineage: str) -> None:
    if lineage:
        (tmp_path / LINEAGE).write_text(lineage)

    assert read_probe_file(tmp_path) is None


def test_a_damaged_lineage_is_not_the_registered_one(tmp_path: Path) -> None:
    (tmp_path / PROBE).write_text(render_probe(TRAINED))
    (tmp_path / LINEAGE).write_text("{")

    with pytest.raises(NotAsRegisteredError, match=r"lineage.json: cannot be read"):
        read_probe_file(tmp_path)


def test_the_file_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    (tmp_path / PROBE).write_text(render_probe(TRAINED))
    assert read_probe_file(tmp_path) == TRAINED

    (tmp_path / PROBE).write_text("{")
    with pytest.raises(InvalidAdapterError, match=r"probe.json: Expecting"):
        read_probe_file(tmp_path)


def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / PROBE).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(InvalidAdapterError, match="symbolic link"):
        read_probe_file(tmp_path)

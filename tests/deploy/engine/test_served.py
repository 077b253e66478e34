"""Is the adapter that vLLM serves the one that was trained? Numbers worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.engine.vllm_control import Probe, compare_served, read_probe_file
from deploy.errors import InvalidAdapterError, NotAsRegisteredError
from learner.adapter_folder import LINEAGE, PROBE, ProbeFile, render_probe

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


def test_a_log_probability_that_is_no_number_is_refused() -> None:
    found = compare_served(TRAINED, served({7: float("nan")}, {7: -0.5}))

    assert not found.same


def test_a_folder_without_the_file_has_nothing_to_compare(tmp_path: Path) -> None:
    assert read_probe_file(tmp_path) is None


@pytest.mark.parametrize(
    "lineage", ["[]", "{}", '{"algorithm": 3}', '{"algorithm": {"probe_sha256": null}}']
)
def test_a_lineage_that_names_no_file_asks_for_none(tmp_path: Path, lineage: str) -> None:
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

"""The shipped groups are sound."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from ingest.calibration.figures import KnownGroup
from ingest.calibration.running import read_groups
from ingest.calibration.shipped import NAME, PATH
from ingest.privacy.texts import View, default_view
from ingest.ruler.ruler import merge_identical

GROUPS = read_groups(PATH.read_text(encoding="utf-8"), NAME)
ROOT = Path(__file__).resolve().parents[3]


def test_there_are_enough_groups_of_enough_kinds() -> None:
    tasks = Counter(group.task for group in GROUPS)

    assert len(GROUPS) == 70
    assert len(tasks) == 9
    assert min(tasks.values()) >= 6
    assert tasks["refund question"] == tasks["refund decision"] == 8
    assert sum(bool(group.tools) for group in GROUPS) == 16
    assert sum(len(group.context) > 2 for group in GROUPS) >= 16


def test_a_kind_of_answer_has_one_score() -> None:
    answers = [one for group in GROUPS for one in group.candidates]

    assert len({one.kind for one in answers}) == 17
    assert len({(one.kind, one.score) for one in answers}) == 17


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.group_id)
def test_a_group_has_one_best_answer_and_no_two_alike(group: KnownGroup) -> None:
    messages = [one.message for one in group.candidates]
    kinds = [one.kind for one in group.candidates]

    assert len(merge_identical(messages)[0]) == len(messages)
    assert kinds.count("faithful") == 1
    assert {better for better, worse in group.pairs if kinds[worse] == "verbose"} <= {
        kinds.index("faithful")
    }
    assert 4 <= len(messages) <= 8


def test_nothing_in_them_is_hidden_from_the_judge() -> None:
    for group in GROUPS:
        answers = [one.message for one in group.candidates]
        whole = View(context=list(group.context), tools=list(group.tools), answers=answers)
        assert default_view()(whole) == whole, group.group_id


def test_a_wheel_has_the_file() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    assert any(PATH.match(pattern) for pattern in patterns)

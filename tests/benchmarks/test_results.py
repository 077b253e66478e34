"""What a benchmark leaves behind: the contract's JSON, and 1 when a target does not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results import at_least, at_most, exit_code, write


def test_a_value_on_the_bound_holds() -> None:
    assert at_most("ratio", 1.6, 1.6).holds
    assert at_least("share", 0.95, 0.95).holds


def test_a_value_beyond_the_bound_does_not_hold() -> None:
    assert not at_most("ratio", 1.6001, 1.6).holds
    assert not at_least("share", 0.9499, 0.95).holds


@pytest.mark.parametrize(("values", "code"), [((1.0, 2.0), 0), ((1.0, 2.1), 1), ((None,), 1)])
def test_the_exit_code_is_1_when_any_target_fails(
    values: tuple[float | None, ...], code: int
) -> None:
    assert exit_code([at_most("ratio", value, 2.0) for value in values]) == code


def test_the_file_has_the_form_of_the_contract(tmp_path: Path) -> None:
    targets = [at_most("CPU", 1.23456, 1.6)]

    path = write(
        "relay", [{"contender": "nginx", "rps": 1.0}], targets, machine={}, folder=tmp_path
    )

    assert path == tmp_path / "relay.json"
    assert json.loads(path.read_text()) == {
        "name": "relay",
        "machine": {},
        "rows": [{"contender": "nginx", "rps": 1.0}],
        "targets": [{"what": "CPU", "value": 1.2346, "target": "<= 1.6", "holds": True, "why": ""}],
    }
    assert list(tmp_path.iterdir()) == [path]

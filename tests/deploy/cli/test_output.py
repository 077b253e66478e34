"""The text that commands print of a record and of a listing."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.cli.output import found_lines, print_found

NOW = 1_795_262_400.0  # 2026-11-21 12:00 UTC


def test_a_record_is_in_words_and_not_in_values_of_python() -> None:
    record: dict[str, Any] = {
        "paused": True,
        "changed": False,
        "reason": None,
        "name": "",
        "scopes": ["infer", "operate"],
        "aliases": [],
        "before": {},
        "step": 0,
        "weight_bp": 2_050,
        "at": NOW - 60,
    }

    assert found_lines(record, NOW) == [
        "paused: yes",
        "changed: no",
        "reason: -",
        "name: -",
        "scopes: infer, operate",
        "aliases: -",
        "before: -",
        "step: 0",
        "weight_bp: 2050 (20.5%)",
        "at: 2026-11-21T11:59:00Z (1 min ago)",
    ]


def test_an_empty_line_stands_between_two_records_of_a_listing() -> None:
    listing = {"items": [{"name": "a"}, {"name": "b", "after": {"paused": False}}]}

    assert found_lines(listing, NOW) == ["name: a", "", "name: b", "after:", "  paused: no"]


def test_an_empty_listing_says_none() -> None:
    assert found_lines({"items": []}, NOW) == ["none"]


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_damaged_row_of_a_listing_is_named(
    capsys: pytest.CaptureFixture[str], output: str
) -> None:
    found: dict[str, Any] = {"items": [], "damaged": ["key a is damaged in the store: scopes"]}

    print_found(found, output)

    shown = capsys.readouterr()
    where = shown.err if output == "text" else shown.out
    assert "key a is damaged in the store: scopes" in where

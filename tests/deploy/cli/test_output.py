"""The text that commands print of a record and of a listing."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.admin.text import reply_lines
from deploy.cli.output import print_found
from deploy.text import record_lines, table_lines

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
        "steps": [500, 2_000],
        "at": NOW - 60,
        "next_step_earliest_at": NOW - 3_600,
    }

    assert record_lines(record, NOW) == [
        "paused: yes",
        "changed: no",
        "reason: -",
        "name: -",
        "scopes: infer, operate",
        "aliases: -",
        "before: -",
        "step: 0",
        "weight_bp: 2050 (20.5%)",
        "steps: 5%, 20%",
        "at: 2026-11-21T11:59:00Z (1 min ago)",
        "next_step_earliest_at: 2026-11-21T11:00:00Z (1 h ago); the step has lasted long enough, "
        "and `reason` says what else it needs",
    ]


def test_an_empty_line_stands_between_two_records_of_a_listing() -> None:
    listing = {"items": [{"name": "a"}, {"name": "b", "after": {"paused": False}}]}

    assert record_lines(listing, NOW) == ["name: a", "", "name: b", "after:", "  paused: no"]


def test_each_item_of_a_list_in_a_record_begins_with_a_dash() -> None:
    record = {"metrics": [{"name": "a", "of": [{"x": 1}]}, {"name": "b", "why": "-"}], "end": 1}

    assert record_lines(record, NOW) == [
        "metrics:",
        "  - name: a",
        "    of:",
        "      - x: 1",
        "  - name: b",
        "    why: -",
        "end: 1",
    ]


def test_an_empty_listing_says_none() -> None:
    assert record_lines({"items": []}, NOW) == ["none"]


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_damaged_row_of_a_listing_is_named(
    capsys: pytest.CaptureFixture[str], output: str
) -> None:
    found: dict[str, Any] = {"items": [], "damaged": ["key a is damaged in the store: scopes"]}

    print_found(found, output)

    shown = capsys.readouterr()
    where = shown.err if output == "text" else shown.out
    assert "key a is damaged in the store: scopes" in where


ADAPTER: dict[str, Any] = {
    "name": "m--v7-0123456789ab",
    "version": 7,
    "state": "rolled_back",
    "reason": "9% of the canary's 210 replies failed, 1% before",
    "digest": "0123456789ab" + 52 * "c",
    "path": "/var/lib/sidecar/adapters/m--v7",
    "parent": "m--v6-ba9876543210",
    "created_at": NOW - 7_200.0,
    "forgotten_at": None,
    "removed_at": NOW,
    "aliases": ["anchor", "previous"],
    "banned": "9% of the canary's 210 replies failed, 1% before",
    "loaded": None,
}


def test_a_table_wraps_its_last_column_and_cuts_nothing_off() -> None:
    rows = [("v1", "one two three four five six"), ("v10", "a\nb")]

    assert table_lines(("name", "why"), rows, 29) == [
        "name  why",
        "v1    one two three four five",
        "      six",
        "v10   a b",
    ]
    assert table_lines(("name", "why"), rows)[1] == "v1    one two three four five six"
    assert table_lines(("name", "why"), []) == ["none"]


def test_adapters_audit_and_runs_are_tables_that_fit_a_terminal() -> None:
    change = {
        "seq": 12_345,
        "at": NOW,
        "actor": "token:86f65e28",
        "action": "canary.rolled_back",
        "subject": 32 * "e",
        "reason": "rollback: replies got worse",
    }
    run = {
        "run_id": 32 * "d",
        "status": "interrupted",
        "reason": "it was killed",
        "started_at": NOW - 60.0,
        "parent": "base",
        "adapter": "m--v7-0123456789ab",
        "counts": {"used": 96},
    }

    adapters, audit, runs = (
        list(reply_lines(path, {"items": [one]}, NOW, 100))
        for path, one in (("/adapters", ADAPTER), ("/audit", change), ("/runs", run))
    )

    assert max(map(len, [*adapters, *audit, *runs])) <= 100
    assert adapters[0].split() == ["version", "state", "made", "from", "aliases", "loaded", "why"]
    assert " ".join(" ".join(adapters[1:]).split()) == (
        "v7 rolled_back 2 h ago v6 anchor, previous - 9% of the canary's 210 replies failed, "
        "1% before; banned; its folder is removed"
    )
    assert audit[1].split()[:7] == [
        "12345", "2026-11-21", "12:00", "token:86f65e28", "canary.rolled_back", "eeeeeeee",
        "rollback:",
    ]  # fmt: skip
    assert runs[1].split() == [
        32 * "d", "interrupted", "1", "min", "ago", "base", "v7", "96", "it", "was", "killed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "project", "shown"),
    [
        ("m--v1-0a0b0c0d0e0f", None, "v1"),
        ("m@@shop--v1-0a0b0c0d0e0f", "shop", "v1 of shop"),
        (32 * "e", "shop", "eeeeeeee of shop"),
        ("m@@shop", "shop", "m of shop"),
        ("learner of shop", "shop", "learner of shop"),
        ("learner", None, "learner"),
    ],
)
def test_the_audit_says_whose_line_a_change_is_of_and_that_its_times_are_utc(
    subject: str, project: str | None, shown: str
) -> None:
    change = {
        "seq": 1, "at": NOW, "actor": "me", "action": "x", "subject": subject,
        "project": project, "reason": "why",
    }  # fmt: skip

    heads, line = reply_lines("/audit", {"items": [change]}, NOW)

    assert heads.split("  ")[1].strip() == "at (UTC)"
    assert [cell.strip() for cell in line.split("  ") if cell][4:] == [shown, "why"]

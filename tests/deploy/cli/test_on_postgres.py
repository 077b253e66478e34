"""The commands that open the store themselves, on PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.cli.conftest import Command

postgres_only = pytest.mark.parametrize("store_kind", ["postgres"], indirect=True)
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(config: Path, sidecar: Command) -> Run:
    """run(store_url, *arguments): (exit code, what it prints, what it complains)."""

    def run(url: str, *arguments: str) -> tuple[int, str, str]:
        config.write_text(f"[store]\nurl = {json.dumps(url)}\n[serving]\nmodel = 'm'\n")
        return sidecar.said(*arguments)

    return run


@postgres_only
def test_keys_a_rollback_and_lineage_work_on_a_store_that_they_make(
    empty_store: str, run: Run
) -> None:
    code, key, _ = run(empty_store, "keys", "create", "--project", "shop")
    assert code == 0
    assert "sk-sidecar-" in key

    code, listed, _ = run(empty_store, "keys", "ls", "-o", "json")
    assert (code, [one["project"] for one in json.loads(listed)["items"]]) == (0, ["shop"])

    code, done, _ = run(
        empty_store, "rollback", "--offline", "--to", "base", "--reason", "x", "-o", "json"
    )
    assert (code, json.loads(done)["to"]) == (0, "base")

    code, _, why = run(empty_store, "lineage", "v1")
    assert code == 1
    assert "no adapter of m matches 'v1'" in why


@postgres_only
def test_a_store_without_tables_is_one_line_that_says_what_to_do(
    empty_store: str, run: Run
) -> None:
    code, _, why = run(empty_store, "lineage", "v1")

    assert code == 1
    assert len(why.splitlines()) == 1
    assert "does not exist; start ingest or control, which make the tables" in why


def test_a_server_that_is_away_is_one_line_without_the_password(run: Run) -> None:
    code, _, why = run("postgresql://joe:s3cret@127.0.0.1:1/x", "lineage", "v1")

    assert code == 1
    assert len(why.splitlines()) == 1
    assert "refused" in why
    assert "s3cret" not in why

"""`sidecar hooks test`: what each receiver answered, in words and as JSON, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.admin.client import AdminClient
from support.outside_server import OutsideServer, outside_server
from tests.deploy.cli.conftest import Command


@pytest.fixture
def server(config: Path) -> Iterator[OutsideServer]:
    """The receiver of one of two hooks; nobody listens for the other."""
    with outside_server() as receiver:
        config.write_text(
            f'[serving]\nmodel = "m"\n[notify.hooks.ops]\nurl = "{receiver.url}/in"\n'
            'secret_env = "HOOK_KEY"\n[notify.hooks.chat]\nurl = "http://127.0.0.1:9/x"\n'
            'secret_env = "HOOK_KEY"\n'
        )
        yield receiver


def test_a_secret_that_is_not_set_is_asked_for_where_the_command_runs(
    sidecar: Command, server: OutsideServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOOK_KEY", raising=False)

    assert sidecar("hooks", "test", "ops") == 1
    assert sidecar.err == (
        "sidecar: ops: environment variable HOOK_KEY is not set here; set it to the secret for the "
        "process that sends this, control or a command\n"
    )


def test_each_receiver_is_told_of(
    sidecar: Command, server: OutsideServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_KEY", "a secret")

    assert sidecar.said("hooks", "test", "ops")[:2] == (0, "ops: taken\n")
    assert sidecar.said("hooks", "test")[:2] == (1, "ops: taken\n")
    assert "chat: it cannot be reached" in sidecar.err
    assert "a secret" not in sidecar.err
    assert sidecar("hooks", "test", "nobody") == 1
    assert "no hook is called nobody" in sidecar.err
    assert sidecar("hooks", "test", "-o", "json") == 1
    found = json.loads(sidecar.out)
    assert found["ops"] == {"taken": True, "error": None}
    assert found["chat"]["taken"] is False
    assert [json.loads(one.body)["type"] for one in server.asked] == ["test"] * 3


def test_hooks_are_listed_in_sentences(sidecar: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = {
        "name": "ops", "tries": 2, "next_at": 1.0, "delivered": 1, "dead": 0, "told_at": None,
        "error": "status 500", "new": "field",
    }  # fmt: skip
    monkeypatch.setattr(AdminClient, "get", lambda *_: {"hooks": [hook]})

    assert sidecar("hooks", "ls") == 0
    assert sidecar.out == (
        "Hook ops: 1 event taken; the last one: never.\n  FAILS (2 times in a row): status 500\n"
    )
    assert sidecar.json("hooks", "ls")["items"][0]["dead"] == 0

"""`sidecar hooks test`: what each receiver answered, in words and as JSON, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.admin.client import AdminClient
from deploy.cli.main import main
from support.outside_server import OutsideServer, outside_server


def run(folder: Path, server: OutsideServer, *words: str) -> int:
    config = folder / "sidecar.toml"
    config.write_text(
        f'[serving]\nmodel = "m"\n[notify.hooks.ops]\nurl = "{server.url}/in"\n'
        'secret_env = "HOOK_KEY"\n[notify.hooks.chat]\nurl = "http://127.0.0.1:9/x"\n'
        'secret_env = "HOOK_KEY"\n'
    )
    return main(["--config", str(config), "hooks", "test", *words])


def test_a_secret_that_is_not_set_is_asked_for_where_the_command_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOOK_KEY", raising=False)

    with outside_server() as server:
        code = run(tmp_path, server, "ops")

    assert code == 1
    assert capsys.readouterr().err == (
        "sidecar: ops: environment variable HOOK_KEY is not set here; set it to the secret for the "
        "process that sends this, control or a command\n"
    )


def test_each_receiver_is_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_KEY", "a secret")
    with outside_server() as server:
        codes = [run(tmp_path, server, *words) for words in (("ops",), (), ("nobody",))]
        said = capsys.readouterr()
        json_code = run(tmp_path, server, "-o", "json")

    assert codes == [0, 1, 1]
    assert said.out == "ops: taken\nops: taken\n"
    assert "chat: it cannot be reached" in said.err
    assert "no hook is called nobody" in said.err
    assert "a secret" not in said.out + said.err
    found = json.loads(capsys.readouterr().out)
    assert json_code == 1
    assert found["ops"] == {"taken": True, "error": None}
    assert found["chat"]["taken"] is False
    assert [json.loads(one.body)["type"] for one in server.asked] == ["test"] * 3


def test_hooks_are_listed_in_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = {
        "name": "ops", "tries": 2, "next_at": 1.0, "delivered": 1, "dead": 0, "told_at": None,
        "error": "status 500", "new": "field",
    }  # fmt: skip
    monkeypatch.setattr(AdminClient, "get", lambda *_: {"hooks": [hook]})
    config = tmp_path / "sidecar.toml"
    config.write_text('[serving]\nmodel = "m"\n')

    code = main(["--config", str(config), "hooks", "ls"])
    text = capsys.readouterr().out
    main(["--config", str(config), "hooks", "ls", "-o", "json"])

    assert code == 0
    assert text == (
        "Hook ops: 1 event taken; the last one: never.\n  FAILS (2 times in a row): status 500\n"
    )
    assert json.loads(capsys.readouterr().out)["items"][0]["dead"] == 0

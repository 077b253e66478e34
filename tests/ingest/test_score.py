"""The scoring process: its start, its idling without a judge, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ingest.judge_watch import read_judge_state
from ingest.score import main
from ingest.store.groups import load_scored_group
from sidecar.processes import VARIABLE
from sidecar.store.database import Database
from support.fake_judge import scores_reply, shown_answers
from support.task_kit import TaskKit
from tests.ingest.conftest import JudgeKit, put_group


def start(config: Path, told_by: int | None = None) -> subprocess.Popen[str]:
    """told_by: the pipe's end for its reports to `sidecar up`."""
    told = () if told_by is None else (told_by,)
    return subprocess.Popen(
        [sys.executable, "-m", "ingest.score", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, VARIABLE: "" if told_by is None else str(told_by)},
        pass_fds=told,
    )


def write_config(tmp_path: Path, **judge: Any) -> Path:
    path = tmp_path / "sidecar.toml"
    # Port 9 is nobody's: the engine is down all the time.
    lines = [
        "[serving]",
        'upstreams = ["http://127.0.0.1:9"]',
        "[store]",
        f'url = "sqlite:///{tmp_path}/store.db"',
        "[telemetry]",
        "log_json = true",
        "[judge]",
        *(f"{name} = {json.dumps(value)}" for name, value in judge.items()),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def read_event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """Read log lines until the event comes."""
    assert process.stderr is not None
    for line in process.stderr:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == name:
            return event
    raise AssertionError(f"the process ended without {name}")


def test_without_a_judge_it_says_so_once_and_idles_until_told_to_stop(tmp_path: Path) -> None:
    with start(write_config(tmp_path)) as process:
        event = read_event(process, "score_off")
        assert "judge.model is empty" in event["why"]
        assert "SIDECAR_JUDGE__MODEL" in event["to_do"]
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert not (tmp_path / "store.db").exists()


def test_without_a_judge_outcomes_still_make_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_TASKS__LEARN", "outcome")
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()
    tasks = TaskKit(database, size=4)
    for number in range(4):
        tasks.session(f"s{number}", success=number == 0)
    with start(write_config(tmp_path)) as process:
        read_event(process, "score_off")
        assert read_event(process, "task_groups_drawn")["groups"] == 1
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 0
    assert [one.status for one in tasks.groups()] == ["scored"]
    database.close()


async def test_a_wrong_key_is_on_the_terminal_and_in_the_store_seconds_after_the_start(
    tmp_path: Path, judge_kit: JudgeKit
) -> None:
    """`sidecar up` reads the pipe; `sidecar status` reads the store."""
    refusal = {"error": {"message": "Incorrect API key", "type": "x", "code": "y"}}
    server = judge_kit.serve((401, refusal))
    config = write_config(
        tmp_path, model="openai/x", api_base=server.url, api_key="sk-quite-wrong-1"
    )
    ours, theirs = os.pipe()
    with start(config, told_by=theirs) as process:
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            told = [pipe.readline(), pipe.readline()]
        event = read_event(process, "judge_down")
        process.send_signal(signal.SIGTERM)
        read_event(process, "score_stopped")

    assert told[0] == "ready \n"
    assert told[1].startswith("say judge rejects every question, so nothing is learned: judge_rej")
    assert "Incorrect API key" in told[1]
    assert "sk-quite-wrong-1" not in told[1]
    assert event["reason"] == "judge_rejected"
    assert len(server.requests) == 1
    with closing(Database(f"sqlite:///{tmp_path}/store.db")) as store, store.read() as session:
        known = read_judge_state(session)
    assert known is not None
    assert known.state == "rejected"


def test_wrong_settings_are_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(write_config(tmp_path, modell="x"))]) == 2
    assert capsys.readouterr().err == ("unknown setting judge.modell; did you mean judge.model?\n")


def test_a_store_that_is_none_is_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store.db").write_bytes(b"this is no database, however long one looks at it" * 100)

    assert main(["--config", str(write_config(tmp_path, model="openai/x"))]) == 1
    assert "store_not_ready" in capsys.readouterr().err


async def test_it_verifies_by_the_settings(tmp_path: Path, judge_kit: JudgeKit) -> None:
    def judge(request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        shown = shown_answers(request["messages"])
        return 200, judge_kit.completion(scores_reply(dict.fromkeys(shown, 0.5)))

    with closing(Database(f"sqlite:///{tmp_path}/store.db")) as store:
        store.upgrade()
        put_group(store, "g1", "short", "much longer")
        server = judge_kit.serve(judge)
        config = write_config(
            tmp_path, model="openai/x", api_base=server.url, api_key="sk-a-key", passes=1
        )
        with config.open("a") as file:
            file.write(
                '\n[reward.verifiers.brief]\nkind = "length"\nmax_characters = 5\n'
                "timeout_s = 60.0\n[reward.verifiers.absent]\nkind = 'entry_point'\n"
                "entry_point = 'nobody'\n"
            )
        with start(config) as process:
            absent = read_event(process, "verifier_failed")
            read_event(process, "group_scored")
            process.send_signal(signal.SIGTERM)
            read_event(process, "score_stopped")
        with store.read() as session:
            found = load_scored_group(session, "g1")

    assert (absent["verifier"], absent["reason"]) == ("absent", "not_loaded")
    assert found is not None
    assert found.scores == (0.5, 0.5)
    assert found.rewards == (0.75, 0.25)

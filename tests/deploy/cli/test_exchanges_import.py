"""`sidecar exchanges import`: the log of another gateway goes through the bus of this host."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import content
from sidecar.capture.outbox import OutboxReader
from sidecar.feedback import decode_feedback, is_feedback
from sidecar.records import decode_exchange
from support.ingest_kit import make_exchange
from support.migrated_store import open_migrated
from tests.deploy.cli.conftest import Command
from tests.ingest.conftest import ScriptedServer

ASKED = [{"role": "user", "content": "Where is it?"}]
ROW: dict[str, Any] = {
    "id": "obs-1",
    "trace_id": "a" * 32,
    "type": "GENERATION",
    "start_time": "2026-09-21 14:13:20.500000",
    "input": ASKED,
    "output": "On its way.",
    "session_id": "s1",
}
SCORE = {
    "id": "1",
    "name": "good",
    "timestamp": "2026-09-22",
    "observation_id": "obs-1",
    "value": 4,
}

Run = Callable[..., tuple[int, str, str]]


class Renderer:
    """A vLLM that has `/tokenize` alone."""

    def __init__(self) -> None:
        self.status_of: Callable[[object], int] = lambda _: 200
        self.server = ScriptedServer(self.answer)

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return self.status_of(body), {"tokens": [1, 2, 3], "count": 3, "max_model_len": 99}


@pytest.fixture
def vllm() -> Iterator[Renderer]:
    made = Renderer()
    with closing(made.server):
        yield made


@pytest.fixture
def run(tmp_path: Path, vllm: Renderer, config: Path, sidecar: Command) -> Run:
    open_migrated(tmp_path / "store.db").close()
    config.write_text(
        f'[serving]\nupstreams = ["{vllm.server.url.removesuffix("/v1")}"]\nmodel = "smollm"\n'
        f'api_key = "k"\n[store]\nurl = "sqlite:///{tmp_path}/store.db"\n'
        f'[bus]\nurl = "sqlite:///{tmp_path}/bus.db"\n'
    )
    return partial(sidecar.said, "exchanges", "import")


def log_of(tmp_path: Path, *rows: dict[str, Any]) -> str:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def on_bus(tmp_path: Path) -> list[bytes]:
    reader = OutboxReader(tmp_path / "bus.db")
    rows = reader.read(0, 1000)
    reader.close()
    return [row.payload for row in rows]


def test_a_log_and_its_scores_go_to_the_bus(tmp_path: Path, run: Run, vllm: Renderer) -> None:
    rows = log_of(tmp_path, SCORE, ROW, {**ROW, "type": "SPAN"})

    code, out, _ = run("langfuse", rows, "--score", "good=1:5")

    assert code == 0
    assert out.splitlines() == [
        "sent to ingest, which stores each row once: 1 exchange, 1 score",
        "left out: 1 no_chat",
    ]
    exchange, score = on_bus(tmp_path)
    found = decode_exchange(exchange)
    assert (found.adapter, found.origin, found.prompt_token_ids) == ("base", "imported", (1, 2, 3))
    assert is_feedback(score)
    told = decode_feedback(score)
    assert (told.target, told.score) == (found.exchange_id, 0.5)
    assert vllm.server.requests == [{"model": "smollm", "messages": ASKED}]
    assert vllm.server.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize("status", [400, 500], ids=["refused", "fails-on-it"])
def test_a_prompt_that_vllm_does_not_take_does_not_stop_the_others(
    tmp_path: Path, run: Run, vllm: Renderer, status: int
) -> None:
    vllm.status_of = lambda body: status if "poison" in json.dumps(body) else 200
    poison = {**ROW, "id": "obs-2", "input": [{"role": "user", "content": "poison"}]}

    code, out, _ = run("langfuse", log_of(tmp_path, poison, ROW))

    assert code == 0
    assert out.splitlines() == [
        "sent to ingest, which stores each row once: 1 exchange, 0 scores",
        "left out: 1 not_rendered",
    ]


def test_a_log_of_which_nothing_can_be_imported_ends_with_1(tmp_path: Path, run: Run) -> None:
    assert run("langfuse", log_of(tmp_path, {**ROW, "type": "SPAN"}))[0] == 1


def test_without_a_vllm_nothing_is_imported(tmp_path: Path, run: Run, vllm: Renderer) -> None:
    vllm.status_of = lambda _: 503

    code, out, err = run("langfuse", log_of(tmp_path, ROW))

    assert (code, out) == (1, "")
    assert "renders no prompt" in err
    assert on_bus(tmp_path) == []


def test_another_vllm_is_asked_where_the_first_is_away(
    tmp_path: Path, run: Run, vllm: Renderer, config: Path
) -> None:
    url = vllm.server.url.removesuffix("/v1")
    config.write_text(config.read_text().replace(f'"{url}"', f'"http://127.0.0.1:9", "{url}"'))

    code, out, _ = run("langfuse", log_of(tmp_path, ROW, {**ROW, "id": "obs-2"}))

    assert (code, out.split(": ")[1]) == (0, "2 exchanges, 0 scores\n")


def test_a_bus_that_nothing_reads_is_not_filled_up(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sidecar.capture.outbox import Outbox

    outbox = Outbox(tmp_path / "bus.db", max_rows=100)
    outbox.write([make_exchange("live")])
    outbox.close()
    monkeypatch.setattr(content, "WAITING", 0)
    monkeypatch.setattr(content, "UNREAD_S", 0.0)

    code, _, err = run("langfuse", log_of(tmp_path, ROW))

    assert code == 1
    assert "nothing reads it" in err
    assert len(on_bus(tmp_path)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("splunk", "log.jsonl"),
        ("langfuse", "missing.jsonl"),
        ("langfuse", "log.jsonl", "--score", "good=5"),
        ("langfuse", "log.jsonl", "--score", "good=1:1"),
        ("langfuse", "log.jsonl", "--project", "a/b"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, run: Run, arguments: tuple[str, ...]) -> None:
    log_of(tmp_path, ROW)
    files = [str(tmp_path / one) if one.endswith("jsonl") else one for one in arguments]

    code, out, err = run(*files)

    assert code in (1, 2)
    assert (out, len(err.splitlines())) == ("", 1)

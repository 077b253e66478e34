"""The example of a runner: an ART rollout moved over in a few lines, asked over HTTP, and played
against a model that plays a script."""

from __future__ import annotations

import difflib
import importlib.util
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingest.tasks.runner import runner_app

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "rehearsals"
CALL = {"id": "call_1", "type": "function"}
REFUND = {**CALL, "function": {"name": "refund", "arguments": '{"order": "A7"}'}}


def code_of(name: str) -> list[str]:
    """The lines below the page's own docstring."""
    return (EXAMPLES / name).read_text().split('"""', 2)[2].splitlines()


def test_an_art_rollout_moves_over_in_at_most_fifteen_lines() -> None:
    lines = list(difflib.unified_diff(code_of("with_art.py"), code_of("runner.py"), n=0))[2:]
    changed = [line for line in lines if line[0] == "+" and line[1:].strip()]
    gone = [line for line in lines if line[0] == "-" and line[1:].strip()]
    assert 0 < len(changed) <= 15
    assert len(gone) <= 15


@pytest.mark.tier_2
async def test_the_example_plays_an_attempt_and_tells_its_end(judge_kit: Any) -> None:
    spec = importlib.util.spec_from_file_location("example_runner", EXAMPLES / "runner.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def reply(message: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
        return 200, {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "support",
            "choices": [choice],
        }

    vllm = judge_kit.serve(
        reply({"content": None, "tool_calls": [REFUND]}), reply({"content": "Done."})
    )
    ask = {
        "task_id": "ex_1",
        "attempt": 0,
        "session_id": "rehearsal-1",
        "project": "default",
        "model": "support",
        "base_url": vllm.url,
        "headers": {"x-sidecar-session": "rehearsal-1"},
        "messages": [{"role": "user", "content": "Refund A7"}],
        "tools": [],
        "timeout_s": 60.0,
    }
    transport = httpx.ASGITransport(app=runner_app(example.rollout))
    async with httpx.AsyncClient(transport=transport, base_url="http://runner") as client:
        answer = await client.post("/attempts", json=ask)

    assert json.loads(answer.content)["error"] is None
    assert json.loads(answer.content)["outcome"] == 1.0
    assert len(vllm.requests) == 2
    assert vllm.requests[1]["messages"][2]["content"] == "refunded A7"
    sent = [{name.lower(): value for name, value in one.items()} for one in vllm.headers]
    assert {one["x-sidecar-session"] for one in sent} == {"rehearsal-1"}

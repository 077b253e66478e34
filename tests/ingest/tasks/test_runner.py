"""A runner made of one function: what it is asked, what it answers, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ingest import Trajectory, serve_runner
from ingest.tasks.runner import RunnerError, RunnerModel, Scenario, read_answer, runner_app

ASK = {
    "task_id": "ex_1",
    "task_name": "refund-7",
    "attempt": 2,
    "session_id": "rehearsal-1",
    "project": "default",
    "model": "support",
    "base_url": "http://127.0.0.1:8080/v1",
    "headers": {"x-sidecar-session": "rehearsal-1"},
    "messages": [{"role": "user", "content": "a refund, please"}],
    "tools": [],
    "timeout_s": 5.0,
}


async def ask(rollout: Any, *, token: str = "", **changes: Any) -> tuple[int, dict[str, Any]]:
    transport = httpx.ASGITransport(app=runner_app(rollout, token="secret" if token else ""))
    async with httpx.AsyncClient(transport=transport, base_url="http://runner") as client:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        reply = await client.post("/attempts", json={**ASK, **changes}, headers=headers)
    return reply.status_code, json.loads(reply.content)


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        (None, {"outcome": None, "success": None, "error": None}),
        (0.5, {"outcome": 0.5, "success": None, "error": None}),
        (True, {"outcome": None, "success": True, "error": None}),
        (Trajectory(messages=[], reward=1), {"outcome": 1.0, "success": None, "error": None}),
    ],
)
async def test_what_a_rollout_returns_is_the_answer(result: Any, answer: dict[str, Any]) -> None:
    seen: list[tuple[RunnerModel, Scenario]] = []

    async def rollout(model: RunnerModel, scenario: Scenario) -> Any:
        seen.append((model, scenario))
        return result

    assert await ask(rollout) == (200, answer)
    ((model, scenario),) = seen
    client = model.openai_client()
    assert str(client.base_url) == "http://127.0.0.1:8080/v1/"
    assert client.default_headers["x-sidecar-session"] == "rehearsal-1"
    assert model.get_inference_name() == "support"
    assert (scenario.task_id, scenario.attempt) == ("ex_1", 2)
    assert scenario.messages == ASK["messages"]


@pytest.mark.parametrize("result", [float("nan"), float("inf"), "1", [1.0]])
async def test_what_is_no_outcome_is_an_error(result: Any) -> None:
    async def rollout(model: RunnerModel, scenario: Scenario) -> Any:
        return result

    status, answer = await ask(rollout)

    assert (status, answer["outcome"], answer["success"]) == (200, None, None)
    assert "RunnerError" in answer["error"]


async def test_an_exception_and_a_rollout_without_an_end_are_errors() -> None:
    import asyncio

    async def raises(model: RunnerModel, scenario: Scenario) -> float:
        raise KeyError("order 7")

    async def hangs(model: RunnerModel, scenario: Scenario) -> float:
        await asyncio.Event().wait()
        return 1.0

    assert (await ask(raises))[1]["error"] == "KeyError: 'order 7'"
    assert (await ask(hangs, timeout_s=0.01))[1]["error"].startswith("TimeoutError")


async def test_a_runner_with_a_token_answers_no_other_caller() -> None:
    async def rollout(model: RunnerModel, scenario: Scenario) -> float:
        return 1.0

    assert (await ask(rollout, token="secret"))[0] == 200
    assert (await ask(rollout, token="another"))[0] == 401


def test_a_runner_that_others_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDECAR_RUNNER_TOKEN", raising=False)
    with pytest.raises(RunnerError, match="SIDECAR_RUNNER_TOKEN"):
        serve_runner(None, host="0.0.0.0")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        b"null",
        b'{"outcome": NaN}',
        b'{"outcome": 1e999}',
        b'{"outcome": 1e13}',
        b'{"outcome": "1"}',
        b'{"outcome": 1, "outcome": 0}',
        b'{"reward": 1}',
        b'{"outcome": 1, "error": "the tool was away"}',
        b'{"success": 1}',
        b'{"comment": "' + b"x" * 70_000 + b'"}',
    ],
)
def test_an_answer_that_does_not_count_is_refused(body: bytes) -> None:
    with pytest.raises(RunnerError):
        read_answer(body)


def test_an_ask_says_all_that_the_page_says() -> None:
    assert set(ASK) == set(Scenario.__struct_fields__)

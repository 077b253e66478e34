"""LiteLLM as a judge, over real HTTP: what is sent, what errors become, what stays secret."""

from __future__ import annotations

import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from ingest.errors import JudgeUnavailableError
from sidecar.hiding import HIDDEN

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


MESSAGES = [{"role": "user", "content": "what?"}]
SCHEMA = {"type": "object", "properties": {"scores": {"type": "array"}}}
KEY = "sk-test-key-1"


def failure(message: str = "no") -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "code": "y"}}


async def test_model_key_and_parameters_are_sent(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    judge = judge_kit.litellm_judge(server.url, params={"temperature": 0.25, "max_tokens": 77})
    await judge.complete(MESSAGES, SCHEMA)
    assert server.requests == [
        {"model": "local-judge", "messages": MESSAGES, "temperature": 0.25, "max_tokens": 77}
    ]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


async def test_the_schema_is_sent_to_a_model_that_takes_one(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    await judge_kit.litellm_judge(server.url, model="openai/gpt-4o-mini").complete(MESSAGES, SCHEMA)
    assert server.requests[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "scores", "strict": True, "schema": SCHEMA},
    }


async def test_a_priced_model_reports_its_cost_and_another_none(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, {**judge_kit.completion("ok"), "model": "gpt-4o-mini"}))
    priced = judge_kit.litellm_judge(server.url, model="openai/gpt-4o-mini")
    unpriced = judge_kit.litellm_judge(server.url)
    # 12 prompt tokens at $0.15 and 3 completion tokens at $0.60 per million.
    assert (await priced.complete(MESSAGES, SCHEMA)).cost_usd == pytest.approx(3.6e-6)
    server.script = [(200, judge_kit.completion("ok"))]
    assert (await unpriced.complete(MESSAGES, SCHEMA)).cost_usd is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 422, 429, 500, 502, 503, 504, 529])
async def test_no_error_is_retried_or_lets_the_key_out(judge_kit: JudgeKit, status: int) -> None:
    server = judge_kit.serve((status, failure(f"the key {KEY} or sk-other-9 is no good")))
    judge = judge_kit.litellm_judge(server.url)
    with pytest.raises(JudgeUnavailableError) as raised:
        await judge.complete(MESSAGES, SCHEMA)
    assert len(server.requests) == 1
    told = "".join(traceback.format_exception(raised.value))
    assert KEY not in told
    assert "sk-other-9" not in told
    assert "judge openai/local-judge: " in str(raised.value)
    assert "is no good" in str(raised.value)


@pytest.mark.parametrize("reply", ["error", "text"])
async def test_a_key_given_in_the_parameters_is_in_no_text(judge_kit: JudgeKit, reply: str) -> None:
    key = "hush-gateway-1"
    error, text = (400, failure(f"wrong {key}")), (200, judge_kit.completion(f"it is {key}"))
    server = judge_kit.serve(error if reply == "error" else text)
    judge = judge_kit.litellm_judge(server.url, params={"extra_headers": {"X-Api-Key": key}})
    if reply == "error":
        with pytest.raises(JudgeUnavailableError) as raised:
            await judge.complete(MESSAGES, SCHEMA)
        told = "".join(traceback.format_exception(raised.value))
    else:
        told = (await judge.complete(MESSAGES, SCHEMA)).text
    assert server.headers[0]["x-api-key"] == key
    assert key not in told
    assert HIDDEN in told


@pytest.mark.parametrize(
    ("body", "words"),
    # LiteLLM's own limit is per read: only ours ends a reply that comes byte by byte.
    [(None, "openai/local-judge"), (b" ", r"did not answer in 0\.2 s")],
    ids=["silent", "dripping"],
)
async def test_a_judge_that_hangs_is_given_up_after_the_time_limit(
    judge_kit: JudgeKit, body: bytes | None, words: str
) -> None:
    server = judge_kit.serve((0, body))
    judge = judge_kit.litellm_judge(server.url, timeout_s=0.2)
    await judge._load()  # else the time to load LiteLLM would count
    with pytest.raises(JudgeUnavailableError, match=words):
        await judge.complete(MESSAGES, SCHEMA)


@pytest.mark.parametrize("timeout_s", [0.001, 0.003, 0.01])
async def test_a_call_given_up_before_it_is_sent_is_unavailable(
    judge_kit: JudgeKit, timeout_s: float
) -> None:
    server = judge_kit.serve((0, None))
    judge = judge_kit.litellm_judge(server.url, timeout_s=timeout_s)
    with pytest.raises(JudgeUnavailableError, match="openai/local-judge"):
        await judge.complete(MESSAGES, SCHEMA)


async def test_nobody_listening_is_unavailable(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, {}))
    url = server.url
    server.close()
    with pytest.raises(JudgeUnavailableError):
        await judge_kit.litellm_judge(url).complete(MESSAGES, SCHEMA)


@pytest.mark.parametrize("model", ["openai/local-judge", "hosted_vllm/local-judge"])
async def test_a_page_in_place_of_json_is_unavailable(judge_kit: JudgeKit, model: str) -> None:
    server = judge_kit.serve((200, b"<html>login</html>"))
    with pytest.raises(JudgeUnavailableError):
        await judge_kit.litellm_judge(server.url, model=model).complete(MESSAGES, SCHEMA)


async def test_a_model_that_litellm_does_not_know_says_what_to_do(judge_kit: JudgeKit) -> None:
    judge = judge_kit.litellm_judge("http://127.0.0.1:9/v1", model="nonsense")
    with pytest.raises(JudgeUnavailableError, match="LLM Provider NOT provided"):
        await judge.complete(MESSAGES, SCHEMA)


@pytest.mark.parametrize("text", [None, "a\ud800b\x00c"])
async def test_text_that_nobody_can_store_is_mended(judge_kit: JudgeKit, text: str | None) -> None:
    server = judge_kit.serve((200, judge_kit.completion(text)))
    reply = await judge_kit.litellm_judge(server.url).complete(MESSAGES, SCHEMA)
    assert reply.text == ("" if text is None else "a?bc")


async def test_no_choice_at_all_is_an_empty_reply(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, {**judge_kit.completion("x"), "choices": []}))
    assert (await judge_kit.litellm_judge(server.url).complete(MESSAGES, SCHEMA)).text == ""


def test_litellm_is_not_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, ingest.ruler.judging; from sidecar.settings import Judge; "
        "from ingest.ruler.judge import LiteLlmJudge; LiteLlmJudge(Judge(model='openai/x')); "
        "sys.exit('litellm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

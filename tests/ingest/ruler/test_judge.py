"""LiteLLM as a judge, over real HTTP: what is sent, what errors become, what stays secret."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from ingest import score
from ingest.errors import JudgeRejectedError, JudgeTooLongError, JudgeUnavailableError
from ingest.ruler.judge import LiteLlmJudge, context_tokens_of
from ingest.ruler.prompt import reply_schema
from sidecar.hiding import HIDDEN
from sidecar.settings import Judge as JudgeSettings

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


MESSAGES = [{"role": "user", "content": "what?"}]
SCHEMA = reply_schema(("ab", "cd"))
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "scores", "strict": True, "schema": SCHEMA},
}
NO_SCHEMA = (400, {"error": {"message": "response_format of type json_schema is not supported"}})
OWN = ("openai/local-judge", "hosted_vllm/x", "openrouter/x/y", "litellm_proxy/x")
"""Models of which LiteLLM does not know whether they take a schema."""
KEY = "sk-test-key-1"


def failure(message: str = "no") -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "code": "y"}}


async def test_model_key_and_parameters_are_sent(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    judge = judge_kit.litellm_judge(server.url, params={"temperature": 0.25, "max_tokens": 77})
    await judge.complete(MESSAGES, SCHEMA)
    assert server.requests == [
        {
            "model": "local-judge",
            "messages": MESSAGES,
            "temperature": 0.25,
            "max_tokens": 77,
            "response_format": FORMAT,
        }
    ]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("model", [*OWN, "openai/gpt-4o-mini"])
async def test_the_schema_is_sent_to_a_model_that_may_take_one(
    judge_kit: JudgeKit, model: str
) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    await judge_kit.litellm_judge(server.url, model=model).complete(MESSAGES, SCHEMA)
    assert server.requests[0]["response_format"] == FORMAT


async def test_ollama_gets_the_schema_in_its_own_parameter(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, {"message": {"role": "assistant", "content": "ok"}}))
    judge = judge_kit.litellm_judge(server.url, model="ollama_chat/x")
    await judge.complete(MESSAGES, SCHEMA)
    assert server.requests[0]["format"] == SCHEMA


async def test_a_server_that_takes_no_schema_is_asked_once_with_it(judge_kit: JudgeKit) -> None:
    good = (200, judge_kit.completion("ok"))
    server = judge_kit.serve(lambda body: NO_SCHEMA if "response_format" in body else good)
    judge = judge_kit.litellm_judge(server.url)

    replies = [await judge.complete(MESSAGES, SCHEMA) for _ in range(3)]

    assert [reply.text for reply in replies] == ["ok"] * 3  # no outage, and nobody's fault
    asked = ["response_format" in request for request in server.requests]
    assert asked == [True, False, False, False]


async def test_a_refusal_that_only_quotes_the_word_is_not_remembered(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((400, failure("what is response_format? is not allowed")))
    judge = judge_kit.litellm_judge(server.url)
    with pytest.raises(JudgeRejectedError, match="is not allowed"):
        await judge.complete(MESSAGES, SCHEMA)
    server.script = [(200, judge_kit.completion("ok"))]
    await judge.complete(MESSAGES, SCHEMA)
    asked = ["response_format" in request for request in server.requests]
    assert asked == [True, False, True]


async def test_an_outage_after_the_refused_schema_is_an_outage(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve(NO_SCHEMA, (503, failure("away")))
    with pytest.raises(JudgeUnavailableError, match="away") as raised:
        await judge_kit.litellm_judge(server.url).complete(MESSAGES, SCHEMA)
    assert raised.value.reason == "judge_unavailable"


@pytest.mark.parametrize(
    ("model", "sent"),
    [
        ("hosted_vllm/x", True),
        ("openai/gpt-audio", False),  # LiteLLM knows that it takes none
    ],
)
async def test_the_schema_is_sent_unless_the_model_is_known_to_take_none(
    judge_kit: JudgeKit, model: str, sent: bool
) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    judge = judge_kit.litellm_judge(server.url, model=model)
    await judge.complete(MESSAGES, SCHEMA)
    assert ("response_format" in server.requests[0]) is sent


async def test_the_format_named_in_the_parameters_is_left_alone(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    wanted = {"type": "json_object"}
    judge = judge_kit.litellm_judge(server.url, params={"response_format": wanted})
    await judge.complete(MESSAGES, SCHEMA)
    assert server.requests[0]["response_format"] == wanted


@pytest.mark.parametrize(("answers", "tokens"), [(2, 512), (8, 1280), (16, 2304)])
async def test_a_reply_may_take_256_tokens_and_128_for_each_answer(
    judge_kit: JudgeKit, answers: int, tokens: int
) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    schema = reply_schema([f"a{number}" for number in range(answers)])
    await judge_kit.litellm_judge(server.url).complete(MESSAGES, schema)
    assert server.requests[0]["max_tokens"] == tokens


@pytest.mark.parametrize(
    ("model", "params"),
    [
        ("openai/o3", {}),  # LiteLLM knows that it reasons
        ("hosted_vllm/x", {"reasoning_effort": "low"}),
        ("hosted_vllm/x", {"max_completion_tokens": 99}),
    ],
)
async def test_a_judge_that_thinks_or_has_a_limit_gets_none_from_us(
    judge_kit: JudgeKit, model: str, params: dict[str, Any]
) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    await judge_kit.litellm_judge(server.url, model=model, params=params).complete(MESSAGES, SCHEMA)
    assert "max_tokens" not in server.requests[0]
    expected = params.get("max_completion_tokens")
    assert server.requests[0].get("max_completion_tokens") == expected


def cut(judge_kit: JudgeKit, text: str | None, **more: Any) -> tuple[int, dict[str, Any]]:
    reply = judge_kit.completion(text)
    reply["choices"][0]["finish_reason"] = "length"
    reply["choices"][0]["message"] |= more
    return 200, reply


@pytest.mark.parametrize(
    ("text", "more"),
    [("<think>The first", {}), (None, {"reasoning_content": "The first"})],
)
async def test_a_judge_that_is_cut_while_it_thinks_is_asked_again_without_a_limit(
    judge_kit: JudgeKit, text: str | None, more: dict[str, Any]
) -> None:
    thought = cut(judge_kit, text, **more)
    good = (200, judge_kit.completion("ok"))
    server = judge_kit.serve(lambda body: thought if "max_tokens" in body else good)
    judge = judge_kit.litellm_judge(server.url)

    replies = [await judge.complete(MESSAGES, SCHEMA) for _ in range(2)]

    assert [(reply.text, reply.cut) for reply in replies] == [("ok", False)] * 2
    assert ["max_tokens" in request for request in server.requests] == [True, False, False]


async def test_a_judge_that_talks_without_end_is_cut_and_said_to_be(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve(cut(judge_kit, '{"scores": [{"id'))
    reply = await judge_kit.litellm_judge(server.url).complete(MESSAGES, SCHEMA)
    assert (reply.text, reply.cut) == ('{"scores": [{"id', True)
    assert len(server.requests) == 1


async def test_a_limit_of_the_operators_own_is_kept(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve(cut(judge_kit, "<think>The first"))
    judge = judge_kit.litellm_judge(server.url, params={"max_tokens": 7})
    assert (await judge.complete(MESSAGES, SCHEMA)).cut
    assert [request["max_tokens"] for request in server.requests] == [7]


async def test_a_priced_model_reports_its_cost_and_another_none(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, {**judge_kit.completion("ok"), "model": "gpt-4o-mini"}))
    priced = judge_kit.litellm_judge(server.url, model="openai/gpt-4o-mini")
    unpriced = judge_kit.litellm_judge(server.url)
    # 12 prompt tokens at $0.15 and 3 completion tokens at $0.60 per million.
    assert (await priced.complete(MESSAGES, SCHEMA)).cost_usd == pytest.approx(3.6e-6)
    server.script = [(200, judge_kit.completion("ok"))]
    assert (await unpriced.complete(MESSAGES, SCHEMA)).cost_usd is None


@pytest.mark.parametrize("status", [400, 401, 429, 500, 529])
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


async def test_a_call_given_up_before_it_is_sent_is_unavailable(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((0, None))
    judge = judge_kit.litellm_judge(server.url, timeout_s=0.001)
    with pytest.raises(JudgeUnavailableError, match="openai/local-judge"):
        await judge.complete(MESSAGES, SCHEMA)


async def test_nobody_listening_is_unavailable(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, {}))
    url = server.url
    server.close()
    with pytest.raises(JudgeUnavailableError):
        await judge_kit.litellm_judge(url).complete(MESSAGES, SCHEMA)


async def test_a_model_that_litellm_does_not_know_says_what_to_do(judge_kit: JudgeKit) -> None:
    judge = judge_kit.litellm_judge("http://127.0.0.1:9/v1", model="nonsense")
    with pytest.raises(JudgeUnavailableError, match="LLM Provider NOT provided"):
        await judge.complete(MESSAGES, SCHEMA)


@pytest.mark.parametrize("text", [None, "a\ud800b\x00c"])
async def test_text_that_nobody_can_store_is_mended(judge_kit: JudgeKit, text: str | None) -> None:
    server = judge_kit.serve((200, judge_kit.completion(text)))
    reply = await judge_kit.litellm_judge(server.url).complete(MESSAGES, SCHEMA)
    assert reply.text == ("" if text is None else "a?bc")


def test_litellm_is_not_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, ingest.ruler.judging; from sidecar.settings import Judge; "
        "from ingest.ruler.judge import LiteLlmJudge; LiteLlmJudge(Judge(model='openai/x')); "
        "sys.exit('litellm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_without_litellm_the_judge_is_unavailable_and_scoring_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sidecar.processes.find_spec", lambda name: name != "litellm" or None)
    monkeypatch.setenv("SIDECAR_JUDGE__MODEL", "openai/x")
    install = "litellm cannot be imported; run `pip install 'learning-sidecar[judge]'`"

    with pytest.raises(JudgeUnavailableError, match=re.escape(install)):
        await LiteLlmJudge(JudgeSettings(model="openai/x")).complete(MESSAGES, SCHEMA)
    assert score.main([]) == 1
    assert capsys.readouterr().err.startswith(f"sidecar score: {install}")


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"model": "openai/gpt-4o"}, 128_000),
        ({"model": "anthropic/no-such-model"}, None),
        ({"model": "hosted_vllm/qwen3"}, None),
        ({"model": "hosted_vllm/qwen3", "context_tokens": 32_768}, 32_768),
        ({"model": "openai/gpt-4o", "context_tokens": 8_192}, 8_192),
        ({"model": "ollama/qwen3", "params": {"num_ctx": 4_096}}, 4_096),
    ],
)
async def test_a_judge_knows_its_context_as_set_or_from_litellm(
    settings: dict[str, Any], tokens: int | None
) -> None:
    judge = LiteLlmJudge(JudgeSettings(**settings))
    assert await context_tokens_of(judge) == tokens


async def test_a_prompt_that_the_judge_finds_too_long_is_told_apart(judge_kit: JudgeKit) -> None:
    words = "This model's maximum context length is 4096 tokens, however you requested 5000 tokens"
    failed = {"error": {"message": words, "type": "x", "code": "context_length_exceeded"}}
    server = judge_kit.serve((400, failed))
    with pytest.raises(JudgeTooLongError) as raised:
        await judge_kit.litellm_judge(server.url).complete(MESSAGES, SCHEMA)
    assert raised.value.asked

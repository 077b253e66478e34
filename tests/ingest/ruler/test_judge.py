"""LiteLLM as a judge, over real HTTP: what is sent, what errors become, what stays secret."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from structlog.testing import capture_logs

from ingest import score
from ingest.errors import (
    IngestError,
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeTooLongError,
    JudgeUnavailableError,
)
from ingest.ruler import bounded_replies
from ingest.ruler.judge import (
    MOST_TRIES,
    SEARCHES,
    LiteLlmJudge,
    context_tokens_of,
    explain,
    without,
)
from ingest.ruler.prompt import reply_schema
from sidecar.hiding import HIDDEN, hidden_values
from sidecar.settings import Judge as JudgeSettings
from support.fake_judge import FakeJudge
from tests.ingest.conftest import JudgeKit

MESSAGES = [{"role": "user", "content": "what?"}]
SCHEMA = reply_schema(("ab", "cd"))
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "scores", "strict": True, "schema": SCHEMA},
}
NO_SCHEMA = (400, {"error": {"message": "response_format of type json_schema is not supported"}})
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
        ("hosted_vllm/x", FORMAT),
        ("openai/gpt-4o-mini", FORMAT),
        ("openai/gpt-audio", None),  # LiteLLM knows that it takes none
    ],
)
async def test_the_schema_is_sent_unless_the_model_is_known_to_take_none(
    judge_kit: JudgeKit, model: str, sent: Any
) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    await judge_kit.litellm_judge(server.url, model=model).complete(MESSAGES, SCHEMA)
    assert server.requests[0].get("response_format") == sent


async def test_the_format_named_in_the_parameters_is_left_alone(judge_kit: JudgeKit) -> None:
    server = judge_kit.serve((200, judge_kit.completion("ok")))
    wanted = {"type": "json_object"}
    judge = judge_kit.litellm_judge(server.url, params={"response_format": wanted})
    await judge.complete(MESSAGES, SCHEMA)
    assert server.requests[0]["response_format"] == wanted


@pytest.mark.parametrize(("answers", "tokens"), [(2, 512), (16, 2304)])
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


@pytest.mark.parametrize("status", [401, 429, 500])
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
        ({"model": "hosted_vllm/qwen3", "context_tokens": 32_768}, 32_768),
        ({"model": "openai/gpt-4o", "context_tokens": 8_192}, 8_192),
        ({"model": "ollama/qwen3", "params": {"num_ctx": 4_096}}, 4_096),
    ],
)
async def test_a_judge_knows_its_context(settings: dict[str, Any], tokens: int | None) -> None:
    judge = LiteLlmJudge(JudgeSettings(**settings))
    assert await context_tokens_of(judge) == tokens


async def test_a_prompt_that_the_judge_finds_too_long_is_told_apart(judge_kit: JudgeKit) -> None:
    words = "This model's maximum context length is 4096 tokens, however you requested 5000 tokens"
    failed = {"error": {"message": words, "type": "x", "code": "context_length_exceeded"}}
    server = judge_kit.serve((400, failed))
    with pytest.raises(JudgeTooLongError) as raised:
        await judge_kit.litellm_judge(server.url).complete(MESSAGES, SCHEMA)
    assert raised.value.asked


# What LiteLLM raises, sorted by what it means; over real HTTP where an answer is involved.

MODELS = [
    "openai/local-judge",
    "hosted_vllm/local-judge",
    "anthropic/claude-3-5-haiku-20241022",
    "gemini/gemini-2.0-flash",
]


def shaped(completion: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return {**completion, "choices": [{"index": 0, "finish_reason": "stop", **choice}]}


async def raised_by(judge_kit: JudgeKit, model: str, *reply: Any) -> IngestError:
    judge = judge_kit.litellm_judge(judge_kit.serve(reply).url, model=model)
    with pytest.raises((JudgeUnavailableError, JudgeRefusalError)) as raised:
        await judge.complete(MESSAGES, SCHEMA)
    return raised.value


@pytest.mark.parametrize("model", MODELS[:3])
@pytest.mark.parametrize(
    ("status", "code"), [(429, "insufficient_quota"), (402, "y"), (403, "insufficient_balance")]
)
async def test_an_account_without_credit_is_no_rate_limit(
    judge_kit: JudgeKit, model: str, status: int, code: str
) -> None:
    body = {"error": {"message": "no", "type": code, "code": code}}

    raised = await raised_by(judge_kit, model, status, body, ("retry-after", "1"))

    assert type(raised) is JudgeNoCreditError


MEANS: dict[int, type[JudgeUnavailableError]] = {
    **dict.fromkeys((400, 401, 403, 404, 413, 422), JudgeRejectedError),
    **dict.fromkeys((408, 500, 502, 503, 504), JudgeUnavailableError),
    **dict.fromkeys((429, 529), JudgeBusyError),
}


@pytest.mark.parametrize(
    ("model", "status"),
    [(MODELS[0], one) for one in MEANS] + [(m, s) for m in MODELS[1:] for s in (401, 503, 429)],
)
async def test_a_status_means_the_same(judge_kit: JudgeKit, model: str, status: int) -> None:
    assert type(await raised_by(judge_kit, model, status, failure())) is MEANS[status]


@pytest.mark.parametrize(
    "body",
    [
        b"<html>login</html>",
        b"null",
        b'{"choices": [{"mess',
        b"[" * 100_000,
        failure("upstream failed"),
        {"choices": [None]},
        "message",
        "content",
    ],
    ids=lambda body: str(body)[:20],
)
async def test_a_200_without_a_completion_is_garbled(judge_kit: JudgeKit, body: Any) -> None:
    whole = judge_kit.completion("x")
    shapes = {
        "message": shaped(whole, message=None),
        "content": shaped(whole, message={"role": "assistant", "content": 5}),
    }
    body = shapes.get(body, body) if isinstance(body, str) else body
    assert type(await raised_by(judge_kit, MODELS[0], 200, body)) is JudgeGarbledError


@pytest.mark.parametrize(
    "usage",
    [
        ["12"],
        {"prompt_tokens": "many", "completion_tokens": {}, "total_tokens": None},
        {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": "none"},
        {"prompt_tokens": 12, "completion_tokens": 3, "completion_tokens_details": {"a": "b"}},
    ],
    ids=str,
)
async def test_a_reply_with_an_odd_usage_is_taken(judge_kit: JudgeKit, usage: Any) -> None:
    body = {**judge_kit.completion("paid for"), "usage": usage}
    judge = judge_kit.litellm_judge(judge_kit.serve((200, body)).url)

    reply = await judge.complete(MESSAGES, SCHEMA)

    assert reply.text == "paid for"
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cost_usd) == (None, None, None)


@pytest.mark.parametrize("model", MODELS[1:3])
async def test_a_reply_that_unpacks_to_much_is_left_before_it_is_in_memory(
    judge_kit: JudgeKit, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 0

    def watched(body: bytes) -> bytes:
        nonlocal size
        size = max(size, len(body))
        return body

    monkeypatch.setattr(bounded_replies, "without_odd_usage", watched)
    bomb = gzip.compress(b" " * (4 * bounded_replies.MAX_BYTES))
    error = await raised_by(judge_kit, model, 200, bomb, ("content-encoding", "gzip"))
    assert isinstance(error, JudgeGarbledError)
    assert size == 0


async def test_calls_of_others_to_litellm_are_left_as_they_are() -> None:
    """A program that uses RULER's functions has LiteLLM, and may stream, itself."""
    seen: list[Any] = []

    class Handler:
        @staticmethod
        def create_async_transport() -> Any:
            return httpx.MockTransport(lambda _: httpx.Response(200, stream=Endless(seen)))

    class Endless(httpx.AsyncByteStream):
        def __init__(self, seen: list[Any]) -> None:
            self._seen = seen

        async def __aiter__(self) -> Any:
            while True:
                self._seen.append(None)
                yield b" " * 2**20

    bounded_replies.bound_replies(Handler)
    transport = Handler.create_async_transport()
    request = httpx.Request("POST", "http://127.0.0.1/")
    await transport.handle_async_request(request)
    assert seen == []
    with bounded_replies.a_judge_is_asked(), pytest.raises(httpx.DecodingError):
        await transport.handle_async_request(request)
    assert len(seen) == bounded_replies.MAX_BYTES // 2**20 + 1


async def test_a_packed_reply_is_read(judge_kit: JudgeKit) -> None:
    body = gzip.compress(json.dumps(judge_kit.completion("packed")).encode())
    server = judge_kit.serve((200, body, ("content-encoding", "gzip")))
    judge = judge_kit.litellm_judge(server.url)
    reply = await judge.complete(MESSAGES, SCHEMA)
    assert (reply.text, reply.prompt_tokens) == ("packed", 12)


async def test_retry_after_is_read_and_makes_any_error_a_limit(judge_kit: JudgeKit) -> None:
    for status in (429, 503):
        error = await raised_by(judge_kit, MODELS[0], status, failure(), ("retry-after", "20"))
        assert isinstance(error, JudgeBusyError)
        assert error.retry_after_s == 20.0


def test_the_text_is_one_line_without_secrets_and_can_be_stored() -> None:
    params = {"extra_headers": {"X-Api-Key": "hush-1"}, "temperature": 0, "api_token": "hush-2"}
    error = ValueError(
        "hush-1 hush-2 sk-abc at https://me:pw@host/v1\n\x1b[31mred\ud800\x00"
        "\nTraceback (most recent call last): more"
    )
    text = explain(error, model="m", secrets=list(hidden_values(params)))
    shown = f"{HIDDEN} {HIDDEN} {HIDDEN} at https://{HIDDEN}@host/v1 ?[31mred?"
    assert text == f"judge m: {shown}"


PEM = (
    "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEF\nAASCBKcwggSjAgEAAoIBAQ\n-----END KEY-----\n"
)


@pytest.mark.parametrize(
    ("params", "quoted"),
    [
        ({"fallbacks": [{"api_key": "hush-in-a-list"}]}, "no key hush-in-a-list here"),
        ({"vertex_credentials": PEM}, f"cannot read {PEM} as JSON"),
        ({"vertex_credentials": PEM}, f"cannot read {PEM!r} as JSON"),
        ({"vertex_credentials": PEM}, "line 2: MIIEvQIBADANBgkqhkiG9w0BAQEF is odd"),
        ({"credentials": {"inner": "hush-below"}}, "hush-below"),
        ({"user": "hush-free-form"}, "user hush-free-form is unknown"),
        ({"extra_query": {"code": "hush/with space"}}, "GET /v1?code=hush%2Fwith+space failed"),
        ({"extra_body": {"pin_token": 12345678}}, "bad pin 12345678"),
        ({}, "request had x-goog-api-key: hush-unknown-1"),
        ({}, "{'password': 'hush-unknown-2'}"),
    ],
)
def test_an_error_quotes_nothing_that_judge_params_hide(params: Any, quoted: str) -> None:
    text = explain(ValueError(quoted), model="m", secrets=list(hidden_values(params)))

    assert HIDDEN in text
    for piece in ("hush", "MIIEvQ", "AASCBK", "12345678"):
        assert piece not in text


def test_what_a_text_must_not_quote_is_no_word_of_every_day() -> None:
    params = {"temperature": 0.2, "reasoning_effort": "a-long-effort", "user": "me", "api_key": "x"}

    assert list(hidden_values(params)) == []


def test_a_long_text_is_cut() -> None:
    long = explain(ValueError("x" * 10_000), model="m", secrets=[])
    assert (len(long) < 320, long.endswith("xxx…"), "x" * 250 in long) == (True, True, True)


async def test_a_missing_key_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judge = LiteLlmJudge(JudgeSettings(model="openai/gpt-4.1-mini"))

    with pytest.raises(JudgeRejectedError, match="set the API key of the judge's provider"):
        await judge.complete(MESSAGES, SCHEMA)


def test_a_long_message_is_sorted_and_explained_in_bounded_time() -> None:
    """Score's event loop does this. 80 kB of "missing " took 11 s, 40,000 letters took 18 s."""
    sorted_ = subprocess.run(
        [
            sys.executable,
            "-c",
            "from ingest.ruler.judge import explain, next_forms, sort_error\n"
            "for part in ['a', '://', 'missing ', 'api_key ', 'token ', 'é', 'x=\\n']:\n"
            " error = Exception((part * 4_000_000)[:4_000_000])\n"
            " error.status_code = 400\n"
            " next_forms({'messages': []}, (), error, needed=(), search=True)\n"
            " sort_error(error, explain(error, model='m', secrets=['s' * 20]), now=0.0)\n"
            " error.status_code = 500\n"
            " sort_error(error, 'x', now=0.0)",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert sorted_.returncode == 0, sorted_.stderr


def test_half_a_secret_at_the_cut_is_not_shown() -> None:
    secret = "k3y-" + "z" * 400
    hidden = f"token={'y' * 15_000} "
    text = explain(Exception(f"{hidden}{'x ' * 400}{secret}"), model="m", secrets=[secret])

    assert "zzz" not in text
    assert "yyy" not in text


# One contract for every judge: the scripted fake, and LiteLLM against a real HTTP server.

TALK = [{"role": "system", "content": "judge"}, {"role": "user", "content": "what?"}]
TOO_LONG = {"error": {"message": "This model's maximum context length is 10 tokens.", "code": 400}}

Build = Callable[..., Any]


@pytest.fixture(params=["scripted", "litellm"])
def build(request: pytest.FixtureRequest, judge_kit: JudgeKit) -> Build:
    """Make a judge that plays these replies: texts, "down" or "refused"."""

    def scripted(*replies: str) -> Any:
        errors = {"down": JudgeUnavailableError("down"), "refused": JudgeRefusalError("refused")}
        return FakeJudge(*(errors.get(reply, reply) for reply in replies))

    def litellm(*replies: str) -> Any:
        errors = {"down": (503, {"error": {"message": "away"}}), "refused": (400, TOO_LONG)}
        script = [errors.get(reply, (200, judge_kit.completion(reply))) for reply in replies]
        return judge_kit.litellm_judge(judge_kit.serve(*script).url)

    return scripted if request.param == "scripted" else litellm


async def test_it_gives_the_text_and_the_figures(build: Build) -> None:
    judge = build('{"scores": []}')
    reply = await judge.complete(TALK, SCHEMA)
    assert reply.text == '{"scores": []}'
    assert reply.prompt_tokens > 0
    assert reply.completion_tokens > 0
    assert reply.seconds > 0
    assert judge.model


async def test_an_outage_is_unavailable_and_passes(build: Build) -> None:
    judge = build("down", "fine")
    with pytest.raises(JudgeUnavailableError):
        await judge.complete(TALK, SCHEMA)
    assert (await judge.complete(TALK, SCHEMA)).text == "fine"


async def test_a_conversation_that_is_too_long_is_refused(build: Build) -> None:
    with pytest.raises(JudgeRefusalError):
        await build("refused").complete(TALK, SCHEMA)


async def test_the_conversation_is_left_as_it_was(build: Build) -> None:
    messages = [dict(message) for message in TALK]
    await build("fine").complete(messages, SCHEMA)
    assert messages == TALK


# What a judge does not take is found out by asking, remembered, and left out.

CONVERSATION = [{"role": "system", "content": "Be fair."}, {"role": "user", "content": "what?"}]
PARAMS = {"temperature": 0.5, "seed": 7, "top_p": 0.9}
PARTS = ("response_format", "max_tokens", "max_completion_tokens", "system", *PARAMS)


class RefusedError(Exception):
    status_code = 400


class TooLongError(RefusedError):
    pass


class FilteredError(RefusedError):
    pass


class Provider:
    """Stands for LiteLLM and a server that refuses parts of requests."""

    exceptions = SimpleNamespace(
        ContextWindowExceededError=TooLongError, ContentPolicyViolationError=FilteredError
    )

    def __init__(self, refuses: frozenset[str] = frozenset(), *, names: bool = True) -> None:
        self.refuses, self.names = refuses, names
        self.error: Exception | None = None
        self.asked: list[dict[str, Any]] = []

    async def acompletion(self, **request: Any) -> Any:
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        sent = {*request, *(one["role"] for one in request["messages"])}
        if bad := sorted(self.refuses & sent):
            named = "the system role" if bad[0] == "system" else f"'{bad[0]}'"
            raise RefusedError(f"{named} is not supported" if self.names else "Bad Request")
        message = SimpleNamespace(content="ok")
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])


def judge_of(
    provider: Provider,
    on_without: Callable[[tuple[str, ...]], None] = lambda _: None,
    **changes: Any,
) -> LiteLlmJudge:
    given_settings = {"model": "openai/alias", "params": PARAMS, **changes}
    judge = LiteLlmJudge(JudgeSettings(**given_settings), on_without=on_without)
    judge._litellm = provider
    return judge


def ask(judge: LiteLlmJudge, times: int = 1) -> list[str]:
    async def all_of_them() -> list[str]:
        return [(await judge.complete(CONVERSATION, SCHEMA)).text for _ in range(times)]

    return asyncio.run(all_of_them())


@settings(max_examples=60, derandomize=True)
@given(refuses=st.frozensets(st.sampled_from(PARTS)))
def test_what_a_judge_refuses_by_name_costs_bounded_tries(refuses: frozenset[str]) -> None:
    provider = Provider(refuses)
    judge = judge_of(provider)

    assert ask(judge, 3) == ["ok"] * 3

    # max_tokens is sent, and in its place max_completion_tokens
    met = refuses - ({"max_completion_tokens"} if "max_tokens" not in refuses else set())
    assert len(provider.asked) == 3 + len(met) <= 3 + MOST_TRIES
    last = provider.asked[-1]
    assert not refuses & {*last, *(one["role"] for one in last["messages"])}
    kept = set(PARTS) - {"system", "max_completion_tokens"} - refuses
    assert kept <= {*last}
    assert ("max_completion_tokens" in last) == (
        "max_tokens" in refuses and "max_completion_tokens" not in refuses
    )
    if "system" in refuses:
        assert last["messages"] == [{"role": "user", "content": "Be fair.\n\nwhat?"}]


@pytest.mark.parametrize("part", [one for one in PARTS if one != "max_completion_tokens"])
def test_a_refusal_without_a_name_is_searched_and_only_its_cause_is_left_out(part: str) -> None:
    provider, told = Provider(frozenset({part}), names=False), list[tuple[str, ...]]()
    judge = judge_of(provider, told.append)

    with capture_logs() as logged:
        assert ask(judge, 2) == ["ok", "ok"]

    assert told == [(part,)]
    assert [one["without"] for one in logged if one["event"] == "judge_asked_without"] == [[part]]
    assert len(provider.asked) <= 2 + MOST_TRIES
    assert ("seed" in provider.asked[-1]) == (part != "seed")


def test_several_causes_without_a_name_are_left_out_together() -> None:
    provider = Provider(frozenset({"response_format", "seed"}), names=False)

    assert ask(judge_of(provider), 2) == ["ok", "ok"]

    assert provider.asked[-1].keys().isdisjoint({"response_format", "seed", "max_tokens"})


def test_a_judge_that_refuses_everything_costs_few_requests() -> None:
    provider = Provider()
    provider.error = RefusedError("Bad Request")
    judge = judge_of(provider, params={})

    for _ in range(5):
        with pytest.raises(JudgeRejectedError, match="Bad Request"):
            ask(judge)

    # schema, limit, role and all of them, at the first calls
    assert len(provider.asked) == 5 + SEARCHES * 4
    provider.error = None
    assert ask(judge) == ["ok"]
    assert "max_tokens" in provider.asked[-1]


def test_once_a_judge_has_answered_a_refusal_without_a_name_is_the_questions() -> None:
    provider = Provider()
    judge = judge_of(provider)
    assert ask(judge) == ["ok"]
    provider.error = RefusedError("Bad Request")

    with pytest.raises(JudgeRejectedError):
        ask(judge)

    assert len(provider.asked) == 2


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (TooLongError("max_tokens and the prompt are too long"), JudgeTooLongError),
        (type("Away", (Exception,), {"status_code": 503})("temperature"), JudgeUnavailableError),
    ],
)
def test_no_refusal_of_a_part_is_asked_once(error: Exception, becomes: type[Exception]) -> None:
    provider = Provider()
    provider.error = error

    with pytest.raises(becomes):
        ask(judge_of(provider))

    assert len(provider.asked) == 1


def test_an_operators_limit_is_renamed_and_never_left_out() -> None:
    provider = Provider(frozenset({"max_tokens"}))

    assert ask(judge_of(provider, params={"max_tokens": 9})) == ["ok"]

    assert provider.asked[-1]["max_completion_tokens"] == 9
    provider.refuses |= {"max_completion_tokens"}
    with pytest.raises(JudgeRejectedError, match="max_completion_tokens"):
        ask(judge_of(provider, params={"max_tokens": 9}))


def test_system_messages_go_before_the_users_next_words() -> None:
    asked = [
        {"role": "system", "content": "a"}, {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"}, {"role": "system", "content": "d"},
    ]  # fmt: skip

    assert without({"messages": asked}, {"system"})["messages"] == [
        {"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]  # fmt: skip


async def test_over_http_as_openai_says_it(judge_kit: JudgeKit) -> None:
    """BerriAI/litellm#13390: LiteLLM translates the name for the models alone that it knows."""
    said = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_comp"
    error = {"message": f"{said}letion_tokens' instead.", "param": "max_tokens", "type": "x"}
    good = (200, judge_kit.completion("ok"))
    server = judge_kit.serve(lambda body: (400, {"error": error}) if "max_tokens" in body else good)
    judge = judge_kit.litellm_judge(server.url)

    replies = [await judge.complete(CONVERSATION, SCHEMA) for _ in range(2)]

    assert [one.text for one in replies] == ["ok", "ok"]
    assert ["max_completion_tokens" in one for one in server.requests] == [False, True, True]

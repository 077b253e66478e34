"""What LiteLLM raises, sorted by what it means; over real HTTP where an answer is involved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingest.errors import (
    IngestError,
    JudgeBusyError,
    JudgeGarbledError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.ruler.judge import LiteLlmJudge
from ingest.ruler.judge_errors import explain
from ingest.ruler.prompt import reply_schema
from sidecar.hiding import HIDDEN, hidden_values
from sidecar.settings import Judge as JudgeSettings

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


MESSAGES = [{"role": "user", "content": "what?"}]
MODELS = [
    "openai/local-judge",
    "hosted_vllm/local-judge",
    "anthropic/claude-3-5-haiku-20241022",
    "gemini/gemini-2.0-flash",
]


def failure(message: str = "no") -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "code": "y"}}


def shaped(completion: dict[str, Any], **choice: Any) -> dict[str, Any]:
    return {**completion, "choices": [{"index": 0, "finish_reason": "stop", **choice}]}


async def raised_by(judge_kit: JudgeKit, model: str, *reply: Any) -> IngestError:
    judge = judge_kit.litellm_judge(judge_kit.serve(reply).url, model=model)
    with pytest.raises((JudgeUnavailableError, JudgeRefusalError)) as raised:
        await judge.complete(MESSAGES, reply_schema(("ab", "cd")))
    return raised.value


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, JudgeRejectedError) for status in (400, 401, 403, 404, 413, 422)),
        *((status, JudgeUnavailableError) for status in (408, 500, 502, 503, 504)),
        *((status, JudgeBusyError) for status in (429, 529)),
    ],
)
async def test_a_status_means_the_same_whichever_provider_answers(
    judge_kit: JudgeKit, model: str, status: int, kind: type[Exception]
) -> None:
    assert type(await raised_by(judge_kit, model, status, failure())) is kind


@pytest.mark.parametrize("model", MODELS[:2])
@pytest.mark.parametrize(
    "body",
    [
        b"<html>login</html>",
        b"",
        b"null",
        b"[1]",
        b'{"choices": [{"mess',
        b"[" * 100_000,
        failure("upstream failed"),
        {"choices": None},
        {"choices": [None]},
        "message",
        "content",
        "usage",
    ],
    ids=lambda body: str(body)[:20],
)
async def test_a_200_without_a_completion_is_garbled_and_no_outage(
    judge_kit: JudgeKit, model: str, body: Any
) -> None:
    whole = judge_kit.completion("x")
    shapes = {
        "message": shaped(whole, message=None),
        "content": shaped(whole, message={"role": "assistant", "content": 5}),
        "usage": {**whole, "usage": "many"},
    }
    body = shapes.get(body, body) if isinstance(body, str) else body
    assert type(await raised_by(judge_kit, model, 200, body)) is JudgeGarbledError


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
    assert len(explain(ValueError("x" * 10_000), model="m", secrets=[])) < 320


async def test_a_missing_key_is_told_as_such_and_not_as_a_reply_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judge = LiteLlmJudge(JudgeSettings(model="openai/gpt-4.1-mini"))

    with pytest.raises(JudgeRejectedError, match="set the API key of the judge's provider"):
        await judge.complete([{"role": "user", "content": "what?"}], reply_schema(("ab", "cd")))

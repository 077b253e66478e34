"""What LiteLLM raises, sorted by what it means; over real HTTP where an answer is involved."""

from __future__ import annotations

from typing import Any

import pytest

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.judge_errors import explain, retry_after_s, secrets_in

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


async def raised_by(judge_kit: Any, model: str, *reply: Any) -> JudgeUnavailableError:
    judge = judge_kit.litellm_judge(judge_kit.serve(reply).url, model=model)
    with pytest.raises((JudgeUnavailableError, JudgeRefusalError)) as raised:
        await judge.complete(MESSAGES, {"type": "object"})
    error: JudgeUnavailableError = raised.value
    return error


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
    judge_kit: Any, model: str, status: int, kind: type[Exception]
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
    judge_kit: Any, model: str, body: Any
) -> None:
    whole = judge_kit.completion("x")
    shapes = {
        "message": shaped(whole, message=None),
        "content": shaped(whole, message={"role": "assistant", "content": 5}),
        "usage": {**whole, "usage": "many"},
    }
    body = shapes.get(body, body) if isinstance(body, str) else body
    assert type(await raised_by(judge_kit, model, 200, body)) is JudgeGarbledError


async def test_retry_after_is_read_and_makes_any_error_a_limit(judge_kit: Any) -> None:
    for status in (429, 503):
        error = await raised_by(judge_kit, MODELS[0], status, failure(), ("retry-after", "20"))
        assert isinstance(error, JudgeBusyError)
        assert error.retry_after_s == 20.0


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("20", 20.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
        ("9" * 400, None),
    ],
)
def test_a_retry_after_is_seconds_or_a_date_or_nothing(said: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": said}, 10.0) == seconds


def test_the_text_is_one_line_without_secrets_and_can_be_stored() -> None:
    params = {"extra_headers": {"X-Api-Key": "hush-1"}, "temperature": 0, "api_token": "hush-2"}
    error = ValueError(
        "hush-1 hush-2 sk-abc at https://me:pw@host/v1\n\x1b[31mred\ud800\x00"
        "\nTraceback (most recent call last): more"
    )
    text = explain(error, model="m", secrets=secrets_in(params))
    assert text == "judge m: *** *** *** at https://***@host/v1 ?[31mred?"


def test_a_long_text_is_cut() -> None:
    assert len(explain(ValueError("x" * 10_000), model="m", secrets=[])) < 320

"""What LiteLLM raises, sorted by what it means; over real HTTP where an answer is involved."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from ingest.errors import (
    IngestError,
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.ruler import bounded_replies
from ingest.ruler.judge import LiteLlmJudge, explain
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
async def test_a_status_means_the_same_whichever_provider_answers(
    judge_kit: JudgeKit, model: str, status: int
) -> None:
    assert type(await raised_by(judge_kit, model, status, failure())) is MEANS[status]


@pytest.mark.parametrize("model", MODELS[:1])
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
    }
    body = shapes.get(body, body) if isinstance(body, str) else body
    assert type(await raised_by(judge_kit, model, 200, body)) is JudgeGarbledError


@pytest.mark.parametrize("model", MODELS[:1])
@pytest.mark.parametrize(
    "usage",
    [
        "many",
        ["12"],
        5,
        {"prompt_tokens": "many", "completion_tokens": {}, "total_tokens": None},
        {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": "none"},
        {"prompt_tokens": 12, "completion_tokens": 3, "completion_tokens_details": {"a": "b"}},
    ],
    ids=str,
)
async def test_a_reply_with_an_odd_usage_is_taken_and_its_tokens_are_unknown(
    judge_kit: JudgeKit, model: str, usage: Any
) -> None:
    body = {**judge_kit.completion("paid for"), "usage": usage}
    judge = judge_kit.litellm_judge(judge_kit.serve((200, body)).url, model=model)

    reply = await judge.complete(MESSAGES, reply_schema(("ab", "cd")))

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


@pytest.mark.parametrize("model", MODELS[:2])
async def test_a_packed_reply_is_read(judge_kit: JudgeKit, model: str) -> None:
    body = gzip.compress(json.dumps(judge_kit.completion("packed")).encode())
    server = judge_kit.serve((200, body, ("content-encoding", "gzip")))
    judge = judge_kit.litellm_judge(server.url, model=model)
    reply = await judge.complete(MESSAGES, reply_schema(("ab", "cd")))
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
    assert len(explain(ValueError("x" * 10_000), model="m", secrets=[])) < 320


async def test_a_missing_key_is_told_as_such_and_not_as_a_reply_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    judge = LiteLlmJudge(JudgeSettings(model="openai/gpt-4.1-mini"))

    with pytest.raises(JudgeRejectedError, match="set the API key of the judge's provider"):
        await judge.complete([{"role": "user", "content": "what?"}], reply_schema(("ab", "cd")))


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

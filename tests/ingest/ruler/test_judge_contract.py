"""One contract for every judge: the scripted fake, and LiteLLM against a real HTTP server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from ingest.errors import JudgeRefusalError, JudgeUnavailableError
from ingest.ruler.prompt import reply_schema

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


MESSAGES = [{"role": "system", "content": "judge"}, {"role": "user", "content": "what?"}]
SCHEMA = reply_schema(("ab", "cd"))
TOO_LONG = {"error": {"message": "This model's maximum context length is 10 tokens.", "code": 400}}

Build = Callable[..., Any]


@pytest.fixture(params=["scripted", "litellm"])
def build(request: pytest.FixtureRequest, judge_kit: JudgeKit) -> Build:
    """Make a judge that plays these replies: texts, "down" or "refused"."""

    def scripted(*replies: str) -> Any:
        errors = {"down": JudgeUnavailableError("down"), "refused": JudgeRefusalError("refused")}
        return judge_kit.FakeJudge(*(errors.get(reply, reply) for reply in replies))

    def litellm(*replies: str) -> Any:
        errors = {"down": (503, {"error": {"message": "away"}}), "refused": (400, TOO_LONG)}
        script = [errors.get(reply, (200, judge_kit.completion(reply))) for reply in replies]
        return judge_kit.litellm_judge(judge_kit.serve(*script).url)

    return scripted if request.param == "scripted" else litellm


async def test_it_gives_the_text_and_the_figures(build: Build) -> None:
    judge = build('{"scores": []}')
    reply = await judge.complete(MESSAGES, SCHEMA)
    assert reply.text == '{"scores": []}'
    assert reply.prompt_tokens > 0
    assert reply.completion_tokens > 0
    assert reply.seconds > 0
    assert judge.model


async def test_rubbish_is_a_reply_like_any_other(build: Build) -> None:
    for text in ("", "no", "{", "\x00"):
        assert (await build(text).complete(MESSAGES, SCHEMA)).text.strip("\x00") == text.strip(
            "\x00"
        )


async def test_an_outage_is_unavailable_and_passes(build: Build) -> None:
    judge = build("down", "fine")
    with pytest.raises(JudgeUnavailableError):
        await judge.complete(MESSAGES, SCHEMA)
    assert (await judge.complete(MESSAGES, SCHEMA)).text == "fine"


async def test_a_conversation_that_is_too_long_is_refused(build: Build) -> None:
    with pytest.raises(JudgeRefusalError):
        await build("refused").complete(MESSAGES, SCHEMA)


async def test_the_conversation_is_left_as_it_was(build: Build) -> None:
    messages = [dict(message) for message in MESSAGES]
    await build("fine").complete(messages, SCHEMA)
    assert messages == MESSAGES

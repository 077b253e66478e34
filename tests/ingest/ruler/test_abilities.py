"""What a judge does not take is found out by asking, remembered, and left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies as st
from structlog.testing import capture_logs

from ingest.errors import JudgeRejectedError, JudgeTooLongError, JudgeUnavailableError
from ingest.ruler.judge import MOST_TRIES, SEARCHES, LiteLlmJudge, without
from ingest.ruler.prompt import reply_schema
from sidecar.settings import Judge as JudgeSettings

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit

SCHEMA = reply_schema(("ab", "cd"))
MESSAGES = [{"role": "system", "content": "Be fair."}, {"role": "user", "content": "what?"}]
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
        return [(await judge.complete(MESSAGES, SCHEMA)).text for _ in range(times)]

    return asyncio.run(all_of_them())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(refuses=st.frozensets(st.sampled_from(PARTS)))
def test_whatever_a_judge_refuses_by_name_it_answers_in_bounded_tries(
    refuses: frozenset[str],
) -> None:
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
def test_what_is_no_refusal_of_a_part_is_asked_once(
    error: Exception, becomes: type[Exception]
) -> None:
    provider = Provider()
    provider.error = error

    with pytest.raises(becomes):
        ask(judge_of(provider))

    assert len(provider.asked) == 1


@pytest.mark.parametrize(
    ("given_settings", "refuses"),
    [
        ({"params": {"max_tokens": 9}}, "max_completion_tokens"),
    ],
)
def test_what_the_operator_insists_on_is_never_left_out(
    given_settings: dict[str, Any], refuses: str
) -> None:
    provider = Provider(frozenset({refuses, "max_tokens"}))

    with pytest.raises(JudgeRejectedError, match=refuses):
        ask(judge_of(provider, **given_settings))


def test_an_operators_limit_is_renamed() -> None:
    provider = Provider(frozenset({"max_tokens"}))

    assert ask(judge_of(provider, params={"max_tokens": 9})) == ["ok"]

    assert provider.asked[-1]["max_completion_tokens"] == 9


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

    replies = [await judge.complete(MESSAGES, SCHEMA) for _ in range(2)]

    assert [one.text for one in replies] == ["ok", "ok"]
    assert ["max_completion_tokens" in one for one in server.requests] == [False, True, True]
    assert json.dumps(server.requests[1]["response_format"]) == json.dumps(
        server.requests[0]["response_format"]
    )

"""The sampler over real HTTP, against a server that answers as vLLM 0.32 does."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from ingest.errors import EngineBusyError, EngineDownError, RequestRefusedError, SamplingError
from ingest.vllm.load import EngineLoad
from ingest.vllm.sampler import PRIORITY, SampledAnswer, SampleRequest, VllmSampler
from support.fake_vllm import FakeVllm, SeenRequest, Step, load_metrics, whole_reply


def reply(**changes: Any) -> dict[str, Any]:
    """vLLM's reply to one question with two sampled tokens."""
    tokens = [{"token": t, "logprob": p, "bytes": [], "top_logprobs": []} for t, p in TOKENS]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi", "refusal": None, "reasoning": None},
        "logprobs": {"content": tokens},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": [5, 2],
    }
    body = {
        "id": "chatcmpl-1",
        "model": "smollm--v3",
        "choices": [{**choice, **changes.pop("choice", {})}],
        "usage": {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2},
        "prompt_token_ids": [1, 4, 9],
    }
    return {**body, **changes}


TOKENS = [("Hi", -0.5), ("<end>", -0.25)]


class Answering:
    """The script of a fake vLLM that answers every question alike, and remembers them."""

    server: FakeVllm

    def __init__(self) -> None:
        self.status = 200
        self.body: dict[str, Any] | bytes = reply()
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.silent = False
        self.extra = ""
        """Further lines of the reply's head."""
        self.refuses_priority = False
        self.url = ""

    def __call__(self, request: SeenRequest) -> Sequence[Step]:
        self.headers.append(request.headers)
        self.asked.append(json.loads(request.body))
        if self.silent:
            return [asyncio.Event()]
        data = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        refused = self.refuses_priority and "priority" in self.asked[-1]
        return [whole_reply(data, f"{400 if refused else self.status} X", self.extra)]


@pytest.fixture
async def vllm() -> AsyncIterator[Answering]:
    answering = Answering()
    metrics = load_metrics(running=2, waiting=1, kv_cache=0.125)
    fake = answering.server = FakeVllm(script=answering, metrics=metrics)
    await fake.start()
    answering.url = f"http://127.0.0.1:{fake.port}"
    yield answering
    await fake.stop()


@pytest.fixture
async def sampler(vllm: Answering) -> AsyncIterator[VllmSampler]:
    sampler = VllmSampler(vllm.url, "secret-key", timeout_s=60.0)
    yield sampler
    await sampler.aclose()


async def ask(
    sampler: VllmSampler, request: dict[str, Any] | None = None, **changes: Any
) -> SampledAnswer:
    values: dict[str, Any] = {"upstream_model": "smollm--v3", "temperature": 0.7, "max_tokens": 16}
    return await sampler.sample(
        SampleRequest(chat=request or {"messages": []}, **{**values, **changes})
    )


async def test_an_answer_comes_with_exact_ids_and_log_probabilities(sampler: VllmSampler) -> None:
    answer = await ask(sampler)

    assert json.loads(answer.message) == {"role": "assistant", "content": "Hi"}
    assert answer.finish_reason == "stop"
    assert answer.token_ids == (5, 2)
    assert answer.logprobs == (-0.5, -0.25)
    assert answer.prompt_token_ids == (1, 4, 9)
    assert answer.model == "smollm--v3"


async def test_the_prompt_is_kept_and_not_the_sampling(
    vllm: Answering, sampler: VllmSampler
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    kept = {
        "messages": messages,
        "tools": tools,
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "stop": ["\n"],
    }
    sampling = ("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    others = ("stream", "stream_options", "user", "logprobs", "top_logprobs", "a_field_of_2030")
    replaced: dict[str, Any] = {
        "model": "smollm",
        **dict.fromkeys((*sampling, *penalties, *others), 3),
    }

    await ask(sampler, kept | replaced, seed=42)

    assert vllm.asked == [
        {
            **kept,
            "model": "smollm--v3",
            "n": 1,
            "stream": False,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "watermarking": False,
            "seed": 42,
            "max_completion_tokens": 16,
            "logprobs": True,
            "return_token_ids": True,
        }
    ]
    assert vllm.headers[0]["authorization"] == "Bearer secret-key"


async def test_without_a_limit_or_seed_none_is_sent(vllm: Answering, sampler: VllmSampler) -> None:
    await ask(sampler, max_tokens=None)

    assert not {"max_tokens", "max_completion_tokens", "seed"} & vllm.asked[0].keys()


async def test_tool_calls_are_handed_on_as_they_are(vllm: Answering, sampler: VllmSampler) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
    vllm.body = reply(choice={"message": said})

    answer = await ask(sampler)

    expected = {"role": "assistant", "content": None, "tool_calls": calls}
    assert json.loads(answer.message) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"model": "smollm"}, "asked smollm--v3, smollm answered", id="model"),
        pytest.param({"choices": []}, "asked for 1 choice, got 0", id="no-choice"),
        pytest.param({"choice": {"token_ids": None}}, "no_token_ids", id="no-ids"),
        pytest.param({"choice": {"logprobs": None}}, "lengths_differ", id="no-logprobs"),
        pytest.param({"choice": {"token_ids": [5]}}, "lengths_differ", id="lengths"),
        ({"usage": {"completion_tokens": 3}}, "2 token ids for 3 tokens"),
        pytest.param({"prompt_token_ids": None}, "no_prompt_token_ids", id="no-prompt"),
        pytest.param({"usage": None}, "not a reply", id="no-usage"),
        (
            {"choice": {"logprobs": {"content": [{"logprob": -9999.0}, {"logprob": -0.5}]}}},
            "logprob_not_finite",
        ),
    ],
)
async def test_a_reply_that_does_not_add_up(
    vllm: Answering, sampler: VllmSampler, changes: dict[str, Any], reason: str
) -> None:
    vllm.body = reply(**changes)

    with pytest.raises(SamplingError, match=reason):
        await ask(sampler)


@pytest.mark.parametrize("body", [b"<html>", b"", b"[]", b'{"model": NaN}', b'{"model": "\xff"}'])
async def test_what_is_no_reply_is_refused(
    vllm: Answering, sampler: VllmSampler, body: bytes
) -> None:
    vllm.body = body

    with pytest.raises(SamplingError, match="not a reply"):
        await ask(sampler)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (413, RequestRefusedError),
        (422, RequestRefusedError),
        (500, SamplingError),
        (503, EngineDownError),
    ],
)
async def test_each_status_has_its_error(
    vllm: Answering, sampler: VllmSampler, status: int, error: type[SamplingError]
) -> None:
    vllm.status = status
    vllm.body = b'{"error": {"message": "because"}}'

    with pytest.raises(SamplingError) as caught:
        await ask(sampler)

    assert type(caught.value) is error


async def test_an_engine_that_never_answers_is_given_up(vllm: Answering) -> None:
    vllm.silent = True
    sampler = VllmSampler(vllm.url, timeout_s=1.0)

    with pytest.raises(SamplingError, match="no reply in time") as caught:
        await ask(sampler)

    assert type(caught.value) is SamplingError  # slow is the request's fault, not an outage
    await sampler.aclose()


async def test_the_load_is_read_from_the_metrics(sampler: VllmSampler) -> None:
    assert await sampler.load() == EngineLoad(running=2, waiting=1, kv_cache_usage=0.125)


async def test_a_429_comes_with_its_headers(vllm: Answering, sampler: VllmSampler) -> None:
    vllm.status, vllm.extra = 429, "Retry-After: 20\r\n"

    with pytest.raises(EngineBusyError) as caught:
        await ask(sampler)

    assert caught.value.headers["retry-after"] == "20"


@pytest.fixture
async def yielding(vllm: Answering) -> AsyncIterator[VllmSampler]:
    sampler = VllmSampler(vllm.url, timeout_s=60.0, priority="auto")
    yield sampler
    await sampler.aclose()


async def test_candidates_have_a_priority_after_users(
    vllm: Answering, yielding: VllmSampler
) -> None:
    await asyncio.gather(*(ask(yielding) for _ in range(3)))

    question, *candidates = vllm.asked
    assert (question["max_completion_tokens"], question["priority"]) == (1, PRIORITY)
    assert question["model"] == "smollm--v3"
    assert [body["priority"] for body in candidates] == [PRIORITY] * 3
    assert PRIORITY > 0  # that of a user's request without the field


async def test_no_candidate_has_a_priority_that_is_refused(
    vllm: Answering, yielding: VllmSampler
) -> None:
    vllm.refuses_priority = True

    for _ in range(3):
        await ask(yielding)

    assert ["priority" in body for body in vllm.asked] == [True, False, False, False]


async def test_a_vllm_that_was_away_is_asked_again(vllm: Answering, yielding: VllmSampler) -> None:
    await ask(yielding)
    port = vllm.server.port
    await vllm.server.stop()
    with pytest.raises(SamplingError):  # a kept connection may break first
        await ask(yielding)
    with pytest.raises(EngineDownError):
        await yielding.load()
    vllm.refuses_priority = True
    await vllm.server.start(port)

    await ask(yielding)

    assert ["priority" in body for body in vllm.asked] == [True, True, True, False]


@pytest.mark.parametrize("status", [404, 503])
async def test_a_reply_that_says_nothing_of_the_priority_is_asked_for_again(
    vllm: Answering, yielding: VllmSampler, status: int
) -> None:
    vllm.status = status
    with pytest.raises(SamplingError):
        await ask(yielding)
    vllm.status = 200

    await ask(yielding)

    assert vllm.asked[-1]["priority"] == PRIORITY


async def test_without_the_setting_there_is_no_priority(
    vllm: Answering, sampler: VllmSampler
) -> None:
    await ask(sampler)

    assert ["priority" in body for body in vllm.asked] == [False]


@pytest.mark.parametrize("odd", ["half a character: \ud800", math.nan])
async def test_a_recorded_request_that_is_no_json_is_refused(
    vllm: Answering, sampler: VllmSampler, odd: object
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi", "odd": odd}]}

    with pytest.raises(RequestRefusedError, match="cannot be sent again"):
        await ask(sampler, chat)
    assert vllm.asked == []

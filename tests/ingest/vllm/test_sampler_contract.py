"""One contract for every sampler: the fake, and the real one in front of vLLM's recorded bytes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ingest.errors import (
    AdapterGoneError,
    EngineBusyError,
    EngineDownError,
    RequestRefusedError,
    SamplingError,
)
from ingest.vllm.sampler import Sampler, SampleRequest, VllmSampler
from support.fake_sampler import FakeSampler
from support.fake_vllm import FakeVllm, recording, whole_reply

MODEL = "smollm2-135m"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": []}
REQUEST = SampleRequest(upstream_model=MODEL, chat=CHAT, temperature=0.7, max_tokens=16)
Build = Callable[..., Awaitable[Sampler]]


@pytest.fixture(params=["fake", "vllm"])
async def build(request: pytest.FixtureRequest) -> AsyncIterator[Build]:
    """Make a sampler that answers, or fails by `trouble`: "gone", "down", "busy", "refused"."""
    close: list[Callable[[], Awaitable[None]]] = []

    async def fake(trouble: str = "") -> Sampler:
        errors = {
            "gone": AdapterGoneError("404"),
            "down": EngineDownError("cannot connect"),
            "busy": EngineBusyError("status 429"),
            "refused": RequestRefusedError("status 400"),
        }
        return FakeSampler(*([errors[trouble]] if trouble else []))

    async def vllm(trouble: str = "") -> Sampler:
        statuses = {"gone": "404 Not Found", "busy": "429 X", "refused": "400 Bad Request"}
        answer = recording("chat.asked").reply
        server = FakeVllm(
            script=lambda _: [whole_reply(b"{}", statuses[trouble]) if trouble else answer]
        )
        await server.start()
        sampler = VllmSampler(f"http://127.0.0.1:{server.port}", timeout_s=30.0)
        close.extend((sampler.aclose, server.stop))
        if trouble == "down":
            await server.stop()
        return sampler

    yield fake if request.param == "fake" else vllm
    for step in close:
        await step()


async def test_an_answer_is_a_message_with_ids_and_log_probabilities(build: Build) -> None:
    answer = await (await build()).sample(REQUEST)

    said: dict[str, Any] = json.loads(answer.message)
    assert said["role"] == "assistant"
    assert isinstance(said["content"], str)
    assert len(answer.token_ids) == len(answer.logprobs) > 0
    assert all(logprob <= 0.0 for logprob in answer.logprobs)
    assert answer.prompt_token_ids
    assert answer.model == MODEL
    assert answer.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ("gone", AdapterGoneError),
        ("down", EngineDownError),
        ("busy", EngineBusyError),
        ("refused", RequestRefusedError),
    ],
)
async def test_each_trouble_is_an_error(
    build: Build, trouble: str, error: type[SamplingError]
) -> None:
    sampler = await build(trouble)

    with pytest.raises(SamplingError) as raised:
        await sampler.sample(REQUEST)

    assert type(raised.value) is error


async def test_the_recorded_request_is_left_as_it_was(build: Build) -> None:
    await (await build()).sample(REQUEST)

    assert CHAT == {"messages": [{"role": "user", "content": "hi"}], "tools": []}

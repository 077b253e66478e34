"""One contract suite for every `AdapterControl`, and what only the HTTP one can meet."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from deploy.engine.vllm_control import PROBE_PROMPTS, AdapterControl, Room, VllmControl, read_room
from deploy.errors import EngineError, InvalidAdapterError
from support.adapter_endpoints import MODEL, AdapterEndpoints
from support.fake_control import FakeControl
from support.fake_vllm import FakeVllm


@pytest.fixture
def vllm() -> AdapterEndpoints:
    return AdapterEndpoints()


@pytest.fixture
async def server(vllm: AdapterEndpoints) -> AsyncIterator[FakeVllm]:
    fake = FakeVllm(script=vllm)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def real(server: FakeVllm) -> AsyncIterator[VllmControl]:
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield VllmControl(client)


@pytest.fixture(params=["in memory", "over http"])
def control(
    request: pytest.FixtureRequest, fake_control: FakeControl, real: VllmControl
) -> AdapterControl:
    return fake_control if request.param == "in memory" else real


async def test_contract_nothing_is_loaded_at_first(control: AdapterControl) -> None:
    assert await control.loaded() == frozenset()


async def test_contract_loading_and_unloading_may_be_repeated(control: AdapterControl) -> None:
    await control.load("m--v1", "/a")
    await control.load("m--v1", "/a")
    await control.load("m--v2", "/b")
    assert await control.loaded() == {"m--v1", "m--v2"}

    await control.unload("m--v1")
    await control.unload("m--v1")
    assert await control.loaded() == {"m--v2"}


async def test_contract_a_probe_names_who_answered(control: AdapterControl) -> None:
    await control.load("m--v1", "/a")

    base, adapter = await control.probe(MODEL), await control.probe("m--v1")

    assert (base.model_in_reply, adapter.model_in_reply) == (MODEL, "m--v1")
    assert base.next_tokens == ({11: -1.0}, {12: -2.0})
    assert adapter.next_tokens == ({11: -1.25}, {12: -2.25})


async def test_contract_probing_what_is_not_loaded_is_an_engine_error(
    control: AdapterControl,
) -> None:
    with pytest.raises(EngineError):
        await control.probe("m--v9")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (400, "LoRA rank 64 is greater than max_lora_rank 16."),
        (404, "Loading lora m--v1 failed: No adapter found for <path>"),
    ],
)
async def test_a_folder_that_vllm_refuses_is_invalid(
    vllm: AdapterEndpoints, real: VllmControl, code: int, message: str
) -> None:
    vllm.bad_paths["/bad"] = (code, message)

    with pytest.raises(InvalidAdapterError, match=message.split()[1]):
        await real.load("m--v1", "/bad")


async def test_a_server_error_while_loading_is_not_the_adapter_s_fault(
    vllm: AdapterEndpoints, real: VllmControl
) -> None:
    vllm.bad_paths["/a"] = (500, "CUDA out of memory")

    with pytest.raises(EngineError, match="500 CUDA out of memory"):
        await real.load("m--v1", "/a")


async def test_a_vllm_without_run_time_loading_is_told_the_flags(
    vllm: AdapterEndpoints, real: VllmControl
) -> None:
    vllm.overrides[""] = (404, b'{"detail":"Not Found"}')

    with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await real.load("m--v1", "/a")


@pytest.mark.parametrize("reply", [(200, b"<html>"), (200, b"[]"), (200, b"{}"), (503, b"")])
async def test_a_reply_that_cannot_be_read_is_an_engine_error(
    vllm: AdapterEndpoints, real: VllmControl, reply: tuple[int, bytes]
) -> None:
    vllm.overrides[""] = reply

    with pytest.raises(EngineError):
        await real.loaded()
    with pytest.raises(EngineError):
        await real.probe(MODEL)


async def test_a_vllm_that_is_down_is_an_engine_error(server: FakeVllm, real: VllmControl) -> None:
    await server.stop()

    for call in (real.loaded(), real.load("a", "/a"), real.unload("a"), real.probe("a")):
        with pytest.raises(EngineError, match="gave no reply"):
            await call


async def test_the_sampled_token_beside_the_likeliest_is_left_out(
    vllm: AdapterEndpoints, real: VllmControl
) -> None:
    top = {f"token_id:{number}": -float(number) for number in (1, 2, 3, 4, 5, 9)}
    body = {"model": MODEL, "choices": [{"index": 0, "logprobs": {"top_logprobs": [top]}}]}
    vllm.overrides[""] = (200, json.dumps(body).encode())

    probe = await real.probe(MODEL)

    assert probe.next_tokens == ({1: -1.0, 2: -2.0, 3: -3.0, 4: -4.0, 5: -5.0},)


async def test_contract_a_probe_asks_the_prompts_that_it_is_given(control: AdapterControl) -> None:
    await control.load("m--v1", "/a")

    found = await control.probe("m--v1", [(1, 2), (1, 2, 3)])

    assert len(found.next_tokens) == 2
    assert found.model_in_reply == "m--v1"


async def test_contract_the_room_is_told_after_the_first_request(
    control: AdapterControl, vllm: AdapterEndpoints, fake_control: FakeControl
) -> None:
    assert await control.room() == Room(tells=True)
    vllm.max_loras = fake_control.max_loras = 2
    assert await control.room() == Room(max_loras=2, tells=True)

    vllm.busy = fake_control.busy = {"m--v1", "m--v2"}

    busy = frozenset({"m--v1", "m--v2"})
    assert await control.room() == Room(max_loras=2, busy=busy, tells=True)


async def test_a_vllm_that_hides_its_metrics_tells_no_room(
    real: VllmControl, vllm: AdapterEndpoints
) -> None:
    figures = b'vllm:num_requests_running 1\nvllm:lora_requests_info{max_lora="2"} 1\n'
    vllm.overrides["/metrics"] = (403, figures)
    assert await real.room() == Room()

    vllm.overrides["/metrics"] = (200, b"python_info 1.0\n")  # --disable-log-stats

    assert await real.room() == Room(tells=False)


def test_what_waits_is_busy_and_rubbish_is_left_out() -> None:
    labels = 'max_lora="4",running_lora_adapters="a",waiting_lora_adapters="b"'
    metrics = f"vllm:lora_requests_info{{{labels}}} 2.0\nvllm:lora_requests_info{{}} 3.0\n"

    assert read_room(metrics) == Room(max_loras=4, busy=frozenset({"a", "b"}))
    assert read_room("vllm:lora_requests_info") == Room()


async def test_a_timeout_is_told_by_its_name() -> None:
    def hang(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("", request=request)

    async with httpx.AsyncClient(
        base_url="http://vllm", transport=httpx.MockTransport(hang)
    ) as client:
        with pytest.raises(EngineError, match=r"gave no reply: ReadTimeout$"):
            await VllmControl(client).load("m--v1", "/a")


async def test_the_probe_asks_for_one_token_after_each_prompt_and_no_prompt_logprobs(
    vllm: AdapterEndpoints, real: VllmControl
) -> None:
    """These would take a vLLM on the CPU down when another request is in the batch."""
    await real.probe(MODEL, [(1, 2), (3,)])
    await real.probe(MODEL)

    (_, given), (path, fixed) = vllm.seen
    assert path == "/v1/completions"
    assert (given["prompt"], fixed["prompt"]) == ([[1, 2], [3]], list(PROBE_PROMPTS))
    assert (fixed["max_tokens"], fixed["logprobs"]) == (1, 5)
    assert "prompt_logprobs" not in {*given, *fixed}

"""One contract suite for every `AdapterControl`, and what only the HTTP one can meet."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deploy.engine.vllm_control import PROBE_PROMPTS, AdapterControl, VllmControl
from deploy.errors import EngineError, InvalidAdapterError

MODEL = "m"


class FakeVllm:
    """The adapter endpoints of vLLM 0.32, in words and codes as seen, over real HTTP."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.bad_paths: dict[str, tuple[int, str]] = {}
        self.override: tuple[int, bytes] | None = None
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        self.headers.append(headers)
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or "{}")
        self.seen.append((path, body))
        status, reply = self._answer(method, path, body)
        writer.write(
            b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            % (status, len(reply))
            + reply
        )
        await writer.drain()
        writer.close()

    def _answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if self.override is not None:
            return self.override
        if path == "/v1/models":
            cards = [{"id": MODEL, "parent": None}]
            cards += [{"id": name, "parent": MODEL} for name in self.adapters]
            return 200, json.dumps({"data": cards}).encode()
        if path == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], body["lora_path"])
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(body["lora_name"], None) is None:
                return _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            return 200, b"Success: LoRA adapter removed successfully."
        if path == "/v1/completions":
            return self._complete(body)
        return 404, b'{"detail":"Not Found"}'

    def _load(self, name: str, path: str) -> tuple[int, bytes]:
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if path in self.bad_paths:
            return _error(*self.bad_paths[path])
        self.adapters[name] = path
        return 200, f"Success: LoRA adapter '{name}' added successfully.".encode()

    def _complete(self, body: dict[str, Any]) -> tuple[int, bytes]:
        name = body["model"]
        if name != MODEL and name not in self.adapters:
            return _error(404, f"The model `{name}` does not exist.")
        reach = 0.0 if name == MODEL else 0.25
        tops = [{"token_id:11": -1.0 - reach}, {"token_id:12": -2.0 - reach}]
        choices = [{"index": i, "logprobs": {"top_logprobs": [top]}} for i, top in enumerate(tops)]
        return 200, json.dumps({"model": name, "choices": choices[::-1]}).encode()


def _error(code: int, message: str) -> tuple[int, bytes]:
    return code, json.dumps({"error": {"message": message, "type": "X", "code": code}}).encode()


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    fake = FakeVllm()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def real(vllm: FakeVllm) -> AsyncIterator[VllmControl]:
    async with httpx.AsyncClient(base_url=vllm.url, trust_env=False) as client:
        yield VllmControl(client)


@pytest.fixture(params=["in memory", "over http"])
def control(request: pytest.FixtureRequest, fake_control: Any, real: VllmControl) -> AdapterControl:
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
    vllm: FakeVllm, real: VllmControl, code: int, message: str
) -> None:
    vllm.bad_paths["/bad"] = (code, message)

    with pytest.raises(InvalidAdapterError, match=message.split()[1]):
        await real.load("m--v1", "/bad")


async def test_a_server_error_while_loading_is_not_the_adapter_s_fault(
    vllm: FakeVllm, real: VllmControl
) -> None:
    vllm.bad_paths["/a"] = (500, "CUDA out of memory")

    with pytest.raises(EngineError, match="500 CUDA out of memory"):
        await real.load("m--v1", "/a")


async def test_a_vllm_without_run_time_loading_is_told_the_flags(
    vllm: FakeVllm, real: VllmControl
) -> None:
    vllm.override = (404, b'{"detail":"Not Found"}')

    with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await real.load("m--v1", "/a")


@pytest.mark.parametrize("reply", [(200, b"<html>"), (200, b"[]"), (200, b"{}"), (503, b"")])
async def test_a_reply_that_cannot_be_read_is_an_engine_error(
    vllm: FakeVllm, real: VllmControl, reply: tuple[int, bytes]
) -> None:
    vllm.override = reply

    with pytest.raises(EngineError):
        await real.loaded()
    with pytest.raises(EngineError):
        await real.probe(MODEL)


async def test_a_vllm_that_is_down_is_an_engine_error(vllm: FakeVllm, real: VllmControl) -> None:
    await vllm.stop()

    for call in (real.loaded(), real.load("a", "/a"), real.unload("a"), real.probe("a")):
        with pytest.raises(EngineError, match="gave no reply"):
            await call
    await vllm.start()


async def test_the_probe_asks_for_one_token_after_each_prompt_and_no_prompt_logprobs(
    vllm: FakeVllm, real: VllmControl
) -> None:
    await real.probe(MODEL)

    path, body = vllm.seen[-1]
    assert path == "/v1/completions"
    assert body["prompt"] == list(PROBE_PROMPTS)
    assert (body["max_tokens"], body["logprobs"]) == (1, 5)
    # It would take a vLLM on the CPU down when another request is in the batch.
    assert "prompt_logprobs" not in body


async def test_the_sampled_token_beside_the_likeliest_is_left_out(
    vllm: FakeVllm, real: VllmControl
) -> None:
    top = {f"token_id:{number}": -float(number) for number in (1, 2, 3, 4, 5, 9)}
    body = {"model": MODEL, "choices": [{"index": 0, "logprobs": {"top_logprobs": [top]}}]}
    vllm.override = (200, json.dumps(body).encode())

    probe = await real.probe(MODEL)

    assert probe.next_tokens == ({1: -1.0, 2: -2.0, 3: -3.0, 4: -4.0, 5: -5.0},)

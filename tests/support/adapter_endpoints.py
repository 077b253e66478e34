"""The adapter endpoints of vLLM 0.32, in words and codes as seen: a script for the `FakeVllm`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from typing import Any

from support.fake_vllm import FakeVllm, SeenRequest, Step, load_metrics, whole_reply

MODEL = "m"


class AdapterEndpoints:
    """Keeps a set of adapters as a vLLM does. The script of one `FakeVllm`."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.loads: list[str] = []
        """Names of the adapters in the order in which they were loaded."""
        self.bad_paths: dict[str, tuple[int, str]] = {}
        """Folder -> the status and the words with which it is refused."""
        self.overrides: dict[str, tuple[int, bytes]] = {}
        """Path of a request, or "" for all -> the status and the body of every reply."""
        self.fails_on_logprobs = False
        """A request of a chat for log-probabilities is answered 500."""
        self.max_loras: int | None = None
        """What its metrics tell, as after a first request; None: before."""
        self.busy: set[str] = set()
        """Adapters that answer a request, by its metrics."""
        self.ahead_s = 0.0
        """Seconds that its clock is ahead."""
        self.seen: list[tuple[str, dict[str, Any]]] = []
        """Path and body of each request."""

    def __call__(self, request: SeenRequest) -> Sequence[Step]:
        method, path, _ = request.line.split(" ")
        body = json.loads(request.body or b"{}")
        self.seen.append((path, body))
        status, reply = self._answer(method, path, body)
        date = formatdate(time.time() + self.ahead_s, usegmt=True)
        head, _, rest = whole_reply(reply, f"{status} X").partition(b"\r\ndate: ")
        return [head + b"\r\ndate: " + date.encode() + b"\r\n" + rest.partition(b"\r\n")[2]]

    def _answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if self.fails_on_logprobs and path == "/v1/chat/completions" and body.get("logprobs"):
            return _error(500, "list index out of range")
        if (override := self.overrides.get(path, self.overrides.get(""))) is not None:
            return override
        if (method, path) == ("GET", "/v1/models"):
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
        if path == "/v1/chat/completions":
            return self._chat(body)
        if path == "/metrics":
            return 200, load_metrics() + self._lora_metrics()
        return 404, b'{"detail":"Not Found"}'

    def _load(self, name: str, path: str) -> tuple[int, bytes]:
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if path in self.bad_paths:
            return _error(*self.bad_paths[path])
        self.adapters[name] = path
        self.loads.append(name)
        return 200, f"Success: LoRA adapter '{name}' added successfully.".encode()

    def _complete(self, body: dict[str, Any]) -> tuple[int, bytes]:
        name = body["model"]
        if name != MODEL and name not in self.adapters:
            return _error(404, f"The model `{name}` does not exist.")
        reach = 0.0 if name == MODEL else 0.25
        tops = [{"token_id:11": -1.0 - reach}, {"token_id:12": -2.0 - reach}]
        choices = [{"index": i, "logprobs": {"top_logprobs": [top]}} for i, top in enumerate(tops)]
        return 200, json.dumps({"model": name, "choices": choices[::-1]}).encode()

    def _lora_metrics(self) -> bytes:
        """As vLLM 0.32 with `--enable-lora`."""
        text = "# TYPE vllm:lora_requests_info gauge\n"
        if self.max_loras is not None:
            for at, busy in ((1.5e9, "gone"), (1.795e9, ",".join(sorted(self.busy)))):
                labels = f'max_lora="{self.max_loras}",running_lora_adapters="{busy}"'
                labels += ',waiting_lora_adapters=""'
                text += f"vllm:lora_requests_info{{{labels}}} {at:e}\n"
        return text.encode()

    def _chat(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Answer with the name that was asked."""
        name = body["model"]
        if name != MODEL and name not in self.adapters:
            return _error(404, f"The model `{name}` does not exist.")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": f"says {name}"},
            "finish_reason": "stop",
            "token_ids": [7],
            "logprobs": {"content": [{"token": "x", "logprob": -0.5}]},
        }
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"model": name, "choices": [choice], "usage": usage, "prompt_token_ids": [5]}
        return 200, json.dumps(reply).encode()


def _error(code: int, message: str) -> tuple[int, bytes]:
    return code, json.dumps({"error": {"message": message, "type": "X", "code": code}}).encode()


@contextlib.contextmanager
def vllm_in_thread(
    endpoints: AdapterEndpoints | None = None,
) -> Iterator[tuple[str, AdapterEndpoints]]:
    """A fake vLLM for tests without an event loop. Gives: its URL, and its endpoints."""
    endpoints = endpoints or AdapterEndpoints()
    fake = FakeVllm(script=endpoints)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(fake.start(), loop).result(10)
        yield f"http://127.0.0.1:{fake.port}", endpoints
    finally:
        asyncio.run_coroutine_threadsafe(_end(fake), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(fake: FakeVllm) -> None:
    await fake.stop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def sound_vllm() -> Iterator[tuple[str, AdapterEndpoints]]:
    """Serve a vLLM with all that the sidecar's checks ask for. Returns: its URL, and itself."""
    answer = {"prompt_token_ids": [1], "choices": [{"token_ids": [2]}]}
    with vllm_in_thread() as (url, endpoints):
        endpoints.overrides = {
            "/metrics": (200, b"# HELP vllm:lora_requests_info Running stats\n"),
            "/v1/load_lora_adapter": (400, b"{}"),
            "/v1/chat/completions": (200, json.dumps(answer).encode()),
        }
        yield url, endpoints

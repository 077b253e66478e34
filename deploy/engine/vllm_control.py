"""Control vLLM's adapters: list, load, unload and probe them.

`AdapterControl` is the interface: `VllmControl` implements it over HTTP, the tests in memory, and
one contract suite runs against both. Loading and unloading are idempotent. A name is never loaded
again with other files, because vLLM's prefix cache is keyed by the name.

The probe requests one token after each of the fixed prompts and reads the likeliest tokens'
log-probabilities, so adapter and base are compared at the same positions. It must not request
`prompt_logprobs`: next to any other request, that fails in vLLM's LoRA kernels for the CPU (0.32,
`punica_cpu.add_lora_logits`) and stops the whole engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from deploy.engine.probe import Probe
from deploy.errors import EngineError, InvalidAdapterError

PROBE_PROMPTS = (
    "A customer writes: my parcel has not arrived. The agent answers:",
    "A customer writes: my parcel has not arrived. The agent answers: I am",
    "To reset your password, open the settings page and",
    "The capital of France is",
    "Thank you for your question. The",
    "def add(a, b):\n    return",
    "Once upon a time there was a",
    "Question: is the shop open on Sunday?\nAnswer:",
)
LIKELIEST = 5
"""Next tokens compared for each prompt; every vLLM allows this many (`--max-logprobs`)."""
LORA_METRIC = "vllm:lora_requests_info"
"""A metric that vLLM (0.32) has only with `--enable-lora`. Its label `max_lora` is the flag's
value."""
LOAD_METRIC = "vllm:num_requests_running"
"""A metric that every vLLM has, unless it was started with `--disable-log-stats`."""
_LORA_REQUESTS = re.compile(rf"^{LORA_METRIC}\{{([^}}\n]*)\}} ([0-9.e+]{{1,40}})$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
CALL_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 120.0
"""Timeout of a load: vLLM reads the weights during the call, after a running batch has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a vLLM tells of its adapters, after its first request."""

    max_loras: int | None = None
    """Its `--max-loras`; None: it does not tell."""
    busy: frozenset[str] = frozenset()
    """Adapters that answer a request now, or that one waits for."""
    tells: bool = False
    """Its metrics can be read: an adapter that is not `busy` answers nothing."""


class AdapterControl(Protocol):
    """The operations that deploy needs of a vLLM replica."""

    async def loaded(self) -> frozenset[str]:
        """Return the names of the loaded adapters. Raises: EngineError when vLLM is unreachable."""
        ...

    async def load(self, name: str, path: str) -> None:
        """Load a PEFT folder under a name; no effect when the name is loaded already.

        Raises: InvalidAdapterError when vLLM refuses the folder, EngineError when it fails.
        """
        ...

    async def unload(self, name: str) -> None:
        """Unload a name; no effect when it is not loaded. Raises: EngineError."""
        ...

    async def probe(self, model_name: str, prompts: Sequence[Sequence[int]] | None = None) -> Probe:
        """Probe an adapter, or the base model by its name.

        prompts: token ids; None: the fixed prompts.
        Raises: EngineError, also when the name is not loaded.
        """
        ...

    async def room(self) -> Room:
        """Return what it tells of its adapters' places and requests. Raises: EngineError."""
        ...


class VllmControl:
    """`AdapterControl` over vLLM's HTTP API (`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`)."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        """client: with vLLM's base URL and key; the caller closes it."""
        self._client = client

    async def loaded(self) -> frozenset[str]:
        reply = await self._ask("GET", "/v1/models", timeout_s=CALL_TIMEOUT_S)
        _raise_for_status(reply, "list models")
        try:
            cards = reply.json()["data"]
            # A base model's card has no parent; an adapter's names its base.
            return frozenset(card["id"] for card in cards if card.get("parent") is not None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"vLLM's list of models cannot be read: {error}") from error

    async def load(self, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        reply = await self._ask(
            "POST", "/v1/load_lora_adapter", json=body, timeout_s=LOAD_TIMEOUT_S
        )
        if reply.is_success or (reply.status_code == 400 and "already been loaded" in reply.text):
            return
        if reply.status_code == 404 and _error_message(reply) is None:
            raise EngineError(
                "vLLM has no /v1/load_lora_adapter; start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        if reply.status_code in (400, 404, 422):
            raise InvalidAdapterError(f"vLLM refused {name}: {_error_text(reply)}")
        _raise_for_status(reply, f"load {name}")

    async def unload(self, name: str) -> None:
        body = {"lora_name": name}
        reply = await self._ask(
            "POST", "/v1/unload_lora_adapter", json=body, timeout_s=CALL_TIMEOUT_S
        )
        if reply.status_code == 404 and _error_message(reply) is not None:
            return
        _raise_for_status(reply, f"unload {name}")

    async def probe(self, model_name: str, prompts: Sequence[Sequence[int]] | None = None) -> Probe:
        body = {
            "model": model_name,
            "prompt": list(PROBE_PROMPTS) if prompts is None else list(map(list, prompts)),
            "max_tokens": 1,
            "logprobs": LIKELIEST,
            "return_tokens_as_token_ids": True,
            # Every sampling parameter is set: generation_config could truncate the distribution.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        reply = await self._ask("POST", "/v1/completions", json=body, timeout_s=LOAD_TIMEOUT_S)
        _raise_for_status(reply, f"probe {model_name}")
        try:
            return _read_probe(reply.json())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise EngineError(f"vLLM's reply to the probe cannot be read: {error!r}") from error

    async def room(self) -> Room:
        reply = await self._ask("GET", "/metrics", timeout_s=CALL_TIMEOUT_S)
        return read_room(reply.text) if reply.is_success else Room()

    async def _ask(
        self, method: str, path: str, *, timeout_s: float, json: dict[str, Any] | None = None
    ) -> httpx.Response:
        try:
            return await self._client.request(method, path, json=json, timeout=timeout_s)
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__  # a timeout says nothing
            raise EngineError(f"vLLM at {self._client.base_url} gave no reply: {why}") from error


def read_room(metrics: str) -> Room:
    """Read vLLM's metrics. Each combination of labels stays there, with the time at which it last
    held: the newest one holds. Pure."""
    tells = LOAD_METRIC in metrics
    newest, room = -1.0, Room(tells=tells)
    for found in _LORA_REQUESTS.finditer(metrics):
        labels, at = dict(_LABEL.findall(found[1])), float(found[2])
        if at >= newest and labels.get("max_lora", "").isdigit():
            busy = f"{labels.get('running_lora_adapters', '')},"
            busy += labels.get("waiting_lora_adapters", "")
            names = frozenset(name for name in busy.split(",") if name)
            newest, room = at, Room(max_loras=int(labels["max_lora"]), busy=names, tells=tells)
    return room


def _read_probe(body: dict[str, Any]) -> Probe:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return Probe(
        model_in_reply=body["model"],
        next_tokens=tuple(_likeliest(choice["logprobs"]["top_logprobs"][0]) for choice in choices),
    )


def _likeliest(logprobs: dict[str, float]) -> dict[int, float]:
    """Return the LIKELIEST entries of {"token_id:17": nats}, which also holds the sampled token."""
    by_id = {int(name.removeprefix("token_id:")): float(nats) for name, nats in logprobs.items()}
    return dict(sorted(by_id.items(), key=lambda item: (-item[1], item[0]))[:LIKELIEST])


def _raise_for_status(reply: httpx.Response, what: str) -> None:
    if not reply.is_success:
        raise EngineError(f"vLLM failed to {what}: {reply.status_code} {_error_text(reply)}")


def _error_message(reply: httpx.Response) -> str | None:
    """Return vLLM's error message, or None when the error is not vLLM's (an unknown path)."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _error_text(reply: httpx.Response) -> str:
    return _error_message(reply) or reply.text[:200]

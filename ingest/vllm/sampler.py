"""Sample one more answer to a recorded request from vLLM; an inexact answer is refused.

No tool is executed: tool calls in an answer are only text. A reply is accepted only when it names
the requested model and its ids, log-probabilities and token count agree; anything else raises
`SamplingError`, whose message is the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import httpx
import msgspec
import structlog

from ingest.errors import (
    AdapterGoneError,
    EngineBusyError,
    EngineDownError,
    RequestRefusedError,
    SamplingError,
)
from ingest.grouping.request import candidate_body, why_inexact
from ingest.tokens import DISAGREES, TokenCheck
from ingest.vllm.load import EngineLoad, parse_load
from sidecar.records import Choice, ids_of
from sidecar.replies.choices import read_whole
from sidecar.replies.parts import UnreadableReplyError, message_json

CHAT_PATH = "/v1/chat/completions"
METRICS_PATH = "/metrics"
CANDIDATE_S = 120.0
"""Longest time of one candidate."""
KEEPALIVE_S = 2.0
"""Idle time after which we close a connection, well before vLLM's uvicorn does (5 s)."""
METRICS_TIMEOUT_S = 5.0
UNAVAILABLE = (502, 503, 504)
REFUSED = (400, 413, 422)
PRIORITY = 1_000_000
"""Lower comes first in vLLM, and a request without the field has 0: users come before candidates,
and push them out of the engine when it is full."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """A request for one more answer."""

    upstream_model: str
    """Name of the adapter in vLLM, or of the base model."""
    chat: Mapping[str, Any]
    """The recorded chat request; its messages and tools are sent."""
    temperature: float
    max_tokens: int | None
    """None: only the model's context limits the length."""
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """One answer, with the sampling data that vLLM reports."""

    message: bytes
    """The canonical assistant message as JSON (`sidecar.replies.parts`)."""
    finish_reason: str | None
    token_ids: tuple[int, ...]
    """[S] sampled ids, S >= 1."""
    logprobs: tuple[float, ...]
    """[S] nats, finite."""
    prompt_token_ids: tuple[int, ...]
    """[P] ids of the prompt as vLLM rendered it."""
    model: str
    """Model or adapter that answered, as the reply names it."""


class Sampler(Protocol):
    """Samples further answers to chat requests."""

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        """Sample one answer to the messages and tools, with a temperature only.

        Raises: one of the subclasses of SamplingError, or SamplingError with the reason.
        """


class Room(Protocol):
    """Tells whether the users' load leaves capacity in the engine."""

    async def is_open(self) -> bool:
        """Return True when there is capacity. Raises: SamplingError when the load is unknown."""


class LoadProbe(Protocol):
    """Measures how busy the engine is."""

    async def load(self) -> EngineLoad:
        """Return the engine's present load. Raises: SamplingError when it is unknown."""


class VllmSampler:
    """A `Sampler` and `LoadProbe` over vLLM's HTTP API. Close it with `aclose`."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        *,
        priority: Literal["auto", "off"] = "off",
    ) -> None:
        """priority: `auto`: requests have a low priority if vLLM takes the field."""
        self._asks_priority = priority == "auto"
        self._takes_priority: bool | None = None
        """None: not asked since vLLM was last away."""
        self._asking = asyncio.Lock()
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=timeout_s,
            # The caller limits requests in flight; a limit here would cause pool timeouts instead.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEPALIVE_S),
            # The sampler talks to the operator's own vLLM: a web proxy must not be used for it.
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        body = candidate_body(
            request.chat,
            upstream_model=request.upstream_model,
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed,
            priority=PRIORITY if await self._priority(request.upstream_model) else None,
        )
        try:
            asked = self._client.build_request("POST", CHAT_PATH, json=body)
        except (RecursionError, ValueError) as error:  # nested too deep, half a character, NaN
            raise RequestRefusedError(
                f"the request cannot be sent again as JSON: {error}"
            ) from error
        response = await self._send(asked)
        if response.status_code == 404:
            raise AdapterGoneError(
                f"vLLM serves no {request.upstream_model}: {response.text[:300]}"
            )
        why = f"status {response.status_code}: {response.text[:300]}"
        if response.status_code in REFUSED:
            raise RequestRefusedError(why)
        if response.status_code == 429:
            raise EngineBusyError(why, headers=response.headers)
        if response.status_code != 200:
            raise SamplingError(why)
        return read_reply(response.content, asked=request.upstream_model)

    async def _priority(self, model: str) -> bool:
        """Return True when vLLM takes the field `priority`; it is asked with one token.

        One that schedules first come first served ignores the field (0.32) or refuses it (older).
        """
        if not self._asks_priority:
            return False
        async with self._asking:
            if self._takes_priority is None:
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": "hi"}],
                    "max_completion_tokens": 1,
                    "priority": PRIORITY,
                }
                reply = await self._send(self._client.build_request("POST", CHAT_PATH, json=body))
                # Another status says nothing of the field: it is asked again with the next request.
                if reply.status_code == 200 or reply.status_code in REFUSED:
                    self._takes_priority = reply.status_code == 200
                    log.info(
                        "sampling_priority",
                        replica=str(self._client.base_url),
                        sent=self._takes_priority,
                    )
            return self._takes_priority is True

    async def load(self) -> EngineLoad:
        request = self._client.build_request("GET", METRICS_PATH, timeout=METRICS_TIMEOUT_S)
        response = await self._send(request)
        if response.status_code != 200:
            raise SamplingError(f"{METRICS_PATH}: status {response.status_code}")
        return parse_load(response.text)

    async def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await self._client.send(request)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._takes_priority = None  # it may come back with other options
            raise EngineDownError(f"{request.url}: cannot connect: {error}") from error
        except httpx.TimeoutException as error:
            raise SamplingError(f"{request.url}: no reply in time") from error
        except httpx.HTTPError as error:
            raise SamplingError(f"{request.url}: {type(error).__name__}: {error}") from error
        if response.status_code in UNAVAILABLE:
            raise EngineDownError(f"{request.url}: status {response.status_code}")
        return response


def read_reply(body: bytes, *, asked: str) -> SampledAnswer:
    """Read and check a reply with one choice. Pure. Raises: SamplingError with the defect."""
    try:
        reply = read_whole(body)
        prompt = ids_of(reply.prompt_ids)
    except (UnreadableReplyError, msgspec.MsgspecError, RecursionError) as error:
        raise SamplingError(f"not a reply: {error}") from error
    if reply.completion_tokens is None:
        raise SamplingError("not a reply: it has no usage")
    if reply.models != {asked}:
        raise SamplingError(f"asked {asked}, {', '.join(reply.models) or 'nobody'} answered")
    if len(reply.choices) != 1:
        raise SamplingError(f"asked for 1 choice, got {len(reply.choices)}")
    (choice,) = reply.choices.values()
    problem = why_inexact(choice.token_ids, choice.logprobs)
    if problem is None and len(choice.token_ids) != reply.completion_tokens:
        problem = f"{len(choice.token_ids)} token ids for {reply.completion_tokens} tokens"
    if problem is None and not prompt:
        problem = "no_prompt_token_ids"
    if problem is not None:
        raise SamplingError(problem)
    return SampledAnswer(
        message=message_json(choice.message),
        finish_reason=choice.finish_reason,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        prompt_token_ids=prompt,
        model=asked,
    )


# A sampler that checks candidates' token ids against their text, as for served answers.


class CheckedSampler:
    """A `Sampler` that refuses an answer whose ids do not decode to its text."""

    def __init__(
        self, sampler: Sampler, check: TokenCheck, *, now: Callable[[], float] = time.time
    ) -> None:
        self._sampler = sampler
        self._check = check
        self._now = now

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        """See `Sampler.sample`. Raises: also SamplingError when ids and text disagree."""
        answer = await self._sampler.sample(request)
        self._check.poll(self._now())
        choice = Choice(
            index=0,
            message=answer.message,
            finish_reason=answer.finish_reason,
            token_ids=answer.token_ids,
        )
        # Candidates are requested without an echo, whatever the agent's request says.
        asked = {name: value for name, value in request.chat.items() if name != "echo"}
        if self._check.answer(choice, asked, answer.prompt_token_ids) == DISAGREES:
            raise SamplingError(f"{DISAGREES}: the answer's token ids do not decode to its text")
        return answer

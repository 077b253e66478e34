"""The judge: any model that LiteLLM can call, behind one method.

LiteLLM is imported at the first call, in a thread: the import takes seconds, and a process without
a judge never needs it. LiteLLM's own retries, cache, telemetry and price-list download are off:
`ingest.ruler.judging` alone decides on retries and waits, and only the prompt leaves the machine.
A call asks a second time, at once, when the server turns out to take no JSON schema, or when the
judge turns out to think, for which the token limit of a reply is too low; later calls know it.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import structlog

from ingest.errors import (
    JudgeGarbledError,
    JudgeRefusalError,
    JudgeTooLongError,
    JudgeUnavailableError,
)
from ingest.ruler.judge_errors import explain, refuses_schema, sort_error, storable
from ingest.ruler.prompt import reply_tokens
from ingest.ruler.reply import MAX_REPLY_CHARACTERS
from sidecar.hiding import MIN_FREE_FORM, hidden_values, hide_values
from sidecar.settings import Judge as JudgeSettings
from sidecar.settings.no_proxy import ask_loopback_directly

MAX_COUNT = 2**31 - 1
"""Largest believable number of tokens in one call: it fits the integer column of every store."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""Parameters that limit the tokens of a reply; ours is the first."""
THINKS = ("reasoning_effort", "thinking")
"""Parameters that make a judge think before it answers."""
WINDOW = "num_ctx"
"""Parameter that sets the context of a model that Ollama runs; it cuts what is longer, silently."""
SCHEMA = "response_format"
"""Parameter that names the JSON schema of a reply."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """The reply to one call. `None` in a field: the provider did not report it."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    """Cost of the call in US dollars; None also for a model without a price in LiteLLM."""
    seconds: float = 0.0
    cut: bool = False
    """The reply ended at a limit of tokens."""


class Judge(Protocol):
    """A model that answers chat completions; safe to call from many tasks."""

    @property
    def model(self) -> str:
        """Model name that is recorded with the scores."""

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        """Answer a conversation with JSON of the schema, if the model supports schemas.

        schema: made by `reply_schema`; its ids also bound the length of the reply.

        Raises: JudgeUnavailableError or a subclass when there was no usable answer,
        JudgeRefusalError when there never will be one to this conversation.
        """


@runtime_checkable
class SizedJudge(Protocol):
    """A judge that may know how much it can read. To know it is optional."""

    async def context_tokens(self) -> int | None:
        """Return the most tokens of a prompt and its reply together; None: not known."""


async def context_tokens_of(judge: Judge) -> int | None:
    """Return what a judge knows of its context; None: nothing. For what stands before a judge."""
    return await judge.context_tokens() if isinstance(judge, SizedJudge) else None


class LiteLlmJudge:
    """A judge by its LiteLLM name (`openai/…`, `anthropic/…`, `hosted_vllm/…` with an api_base)."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        key = [settings.api_key.get_secret_value()] if settings.api_key is not None else []
        keys = [*key, *hidden_values(settings.params, free_form=False)]
        self._keys = [one for one in keys if len(one) >= MIN_FREE_FORM]
        """Keys that a reply must not quote. A short key (`EMPTY`) may be a word of the reply."""
        self._secrets = [*key, *hidden_values(settings.params)]
        """Values that an error's text must not quote."""
        self._litellm: Any = None  # Any: LiteLLM's package ships no types that hold under strict
        self._loading = asyncio.Lock()
        self._sends_schema = settings.json_schema != "off" and SCHEMA not in settings.params
        self._limits = not any(name in settings.params for name in (*LIMITS, *THINKS))
        self._known_context: int | None = None

    @property
    def model(self) -> str:
        return self._settings.model

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        """See `Judge.complete`."""
        litellm = await self._load()
        started = time.monotonic()
        try:
            # LiteLLM's own timeout is per read; a server that sends slowly would exceed it.
            async with asyncio.timeout(self._settings.timeout_s):
                response = await self._ask(litellm, self._request(messages, schema))
        except TimeoutError as error:
            raise JudgeUnavailableError(
                f"judge {self.model} did not answer in {self._settings.timeout_s:g} s; "
                "check whether it is overloaded, or raise judge.timeout_s"
            ) from error
        except litellm.exceptions.ContextWindowExceededError as error:
            # `from None`, here and below: LiteLLM's errors quote requests, and with them keys.
            raise JudgeTooLongError(self._explain(error), asked=True) from None
        except litellm.exceptions.ContentPolicyViolationError as error:
            raise JudgeRefusalError(self._explain(error)) from None
        except Exception as error:  # noqa: BLE001 - LiteLLM raises many kinds of errors
            raise sort_error(error, self._explain(error), now=time.time()) from None
        try:
            return self._reply(response, time.monotonic() - started)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise JudgeGarbledError(self._explain(error)) from None

    async def context_tokens(self) -> int | None:
        """See `SizedJudge.context_tokens`: as set, as given to Ollama, or as LiteLLM knows it."""
        if self._settings.context_tokens:
            return self._settings.context_tokens
        window = self._settings.params.get(WINDOW)
        if isinstance(window, int) and window > 0:
            return window
        await self._load()
        return self._known_context

    async def _ask(self, litellm: Any, request: dict[str, Any]) -> Any:
        """Send the request; again without its schema when the server takes none, again without our
        token limit when the judge thinks. Both are remembered."""
        refused = ""
        try:
            response = await litellm.acompletion(**request)
        except Exception as error:
            tries = self._settings.json_schema == "auto" and SCHEMA in request
            if not tries or SCHEMA in self._settings.params or not refuses_schema(error):
                raise
            refused = self._explain(error)
        if refused:  # not in the handler: the chain of causes decides what an error becomes
            del request[SCHEMA]
            response = await litellm.acompletion(**request)
            self._sends_schema = False  # only now: the schema was the cause
            log.info("judge_takes_no_schema", model=self.model, why=refused)
        ours = LIMITS[0] in request and LIMITS[0] not in self._settings.params
        if ours and _cut_in_thought(response):
            log.info("judge_thinks", model=self.model, cut_at_tokens=request.pop(LIMITS[0]))
            self._limits = False
            response = await litellm.acompletion(**request)
        return response

    async def aclose(self) -> None:
        """Close LiteLLM's connection pool. All judges share it: call this when the process ends."""
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()
            self._litellm.in_memory_llm_clients_cache.flush_cache()

    async def _load(self) -> Any:
        async with self._loading:
            if self._litellm is None:
                ask_loopback_directly(os.environ, *self._urls())
                self._litellm = await asyncio.to_thread(self._look_up)
        return self._litellm

    def _look_up(self) -> Any:
        """Import LiteLLM, and ask it what it knows of the model."""
        litellm = _import_litellm()
        prices = litellm.model_cost
        known = prices.get(self.model) or prices.get(self.model.partition("/")[2]) or {}
        if self._settings.json_schema == "auto" and known.get("supports_response_schema") is False:
            self._sends_schema = False
        most = known.get("max_input_tokens")
        self._known_context = most if isinstance(most, int) and most > 0 else None
        if litellm.supports_reasoning(self.model):
            self._limits = False
        return litellm

    def _urls(self) -> list[str]:
        """Return the URLs that LiteLLM is configured to call."""
        named = (self._settings.params.get(name) for name in ("api_base", "base_url"))
        return [url for url in (self._settings.api_base, *named) if isinstance(url, str)]

    def _request(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> dict[str, Any]:
        settings = self._settings
        request: dict[str, Any] = {
            **settings.params,
            "model": settings.model,
            "messages": [dict(message) for message in messages],
            "timeout": settings.timeout_s,
            "num_retries": 0,
            "caching": False,
        }
        if settings.api_base is not None:
            request["api_base"] = settings.api_base
        if settings.api_key is not None:
            request["api_key"] = settings.api_key.get_secret_value()
        if self._limits:
            request[LIMITS[0]] = reply_tokens(schema)
        if self._sends_schema:
            request[SCHEMA] = {
                "type": "json_schema",
                "json_schema": {"name": "scores", "strict": True, "schema": dict(schema)},
            }
        return request

    def _reply(self, response: Any, seconds: float) -> JudgeReply:  # Any: a LiteLLM ModelResponse
        choices = response.choices
        usage = getattr(response, "usage", None)
        cost = response._hidden_params.get("response_cost")
        text = (choices[0].message.content or "") if choices else ""
        return JudgeReply(
            # A reply without text is refused, retried and recorded like other unusable replies.
            # One character more than may be parsed, so that a longer one is still refused.
            text=storable(hide_values(text[: MAX_REPLY_CHARACTERS + 1], self._keys)),
            prompt_tokens=_count(getattr(usage, "prompt_tokens", None)),
            completion_tokens=_count(getattr(usage, "completion_tokens", None)),
            cost_usd=float(cost) if cost is not None and math.isfinite(cost) else None,
            seconds=seconds,
            cut=bool(choices) and choices[0].finish_reason == "length",
        )

    def _explain(self, error: Exception) -> str:
        return explain(error, model=self.model, secrets=self._secrets)


def _import_litellm() -> Any:
    # LiteLLM reads this at import: without it, the import downloads a price list.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    return litellm


def _cut_in_thought(response: Any) -> bool:  # Any: a LiteLLM ModelResponse
    """Tell whether a reply ended at its token limit because the judge thinks before it answers."""
    if not response.choices or response.choices[0].finish_reason != "length":
        return False
    message = response.choices[0].message
    text = message.content or ""
    thought = getattr(message, "reasoning_content", None)
    return bool(thought) or not text or text.lstrip().startswith("<think>")


def _count(value: Any) -> int | None:  # Any: what the provider wrote
    return value if isinstance(value, int) and 0 <= value <= MAX_COUNT else None

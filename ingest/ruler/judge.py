"""The judge: any model that LiteLLM can call, behind one method.

LiteLLM is imported at the first call, in a thread: the import takes seconds, and a process without
a judge never needs it. LiteLLM's own retries, cache, telemetry and price-list download are off:
`ingest.ruler.judging` alone decides on retries and waits, and only the prompt leaves the machine.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ingest.errors import JudgeGarbledError, JudgeRefusalError, JudgeUnavailableError
from ingest.ruler.judge_errors import explain, sort_error, storable
from ingest.ruler.reply import MAX_REPLY_CHARACTERS
from sidecar.hiding import MIN_FREE_FORM, hidden_values, hide_values
from sidecar.settings import Judge as JudgeSettings
from sidecar.settings.no_proxy import ask_loopback_directly

MAX_COUNT = 2**31 - 1
"""Largest believable number of tokens in one call: it fits the integer column of every store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """The reply to one call. `None` in a field: the provider did not report it."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    """Cost of the call in US dollars; None also for a model without a price in LiteLLM."""
    seconds: float = 0.0


class Judge(Protocol):
    """A model that answers chat completions; safe to call from many tasks."""

    @property
    def model(self) -> str:
        """Model name that is recorded with the scores."""

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        """Answer a conversation with JSON of the schema, if the model supports schemas.

        Raises: JudgeUnavailableError or a subclass when there was no usable answer,
        JudgeRefusalError when there never will be one to this conversation.
        """


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
        self._takes_schema = False

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
                response = await litellm.acompletion(**self._request(messages, schema))
        except TimeoutError as error:
            raise JudgeUnavailableError(
                f"judge {self.model} did not answer in {self._settings.timeout_s:g} s; "
                "check whether it is overloaded, or raise judge.timeout_s"
            ) from error
        except (
            litellm.exceptions.ContextWindowExceededError,
            litellm.exceptions.ContentPolicyViolationError,
        ) as error:
            # `from None`, here and below: LiteLLM's errors quote requests, and with them keys.
            raise JudgeRefusalError(self._explain(error)) from None
        except Exception as error:  # noqa: BLE001 - LiteLLM raises many kinds of errors
            raise sort_error(error, self._explain(error), now=time.time()) from None
        try:
            return self._reply(response, time.monotonic() - started)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise JudgeGarbledError(self._explain(error)) from None

    async def aclose(self) -> None:
        """Close LiteLLM's connection pool. All judges share it: call this when the process ends."""
        if self._litellm is not None:
            await self._litellm.close_litellm_async_clients()
            self._litellm.in_memory_llm_clients_cache.flush_cache()

    async def _load(self) -> Any:
        async with self._loading:
            if self._litellm is None:
                ask_loopback_directly(os.environ, *self._urls())
                litellm = await asyncio.to_thread(_import_litellm)
                self._takes_schema = bool(litellm.supports_response_schema(self.model))
                self._litellm = litellm
        return self._litellm

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
        if self._takes_schema:
            request["response_format"] = {
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


def _count(value: Any) -> int | None:  # Any: what the provider wrote
    return value if isinstance(value, int) and 0 <= value <= MAX_COUNT else None

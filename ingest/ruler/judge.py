"""The judge: any model that LiteLLM can call, its errors, and what it does not take.

LiteLLM is imported at the first call, in a thread: the import takes seconds, and a process without
a judge never needs it. LiteLLM's own retries, cache, telemetry and price-list download are off:
`ingest.ruler.judging` alone decides on retries and waits, and only the prompt leaves the machine.
A call asks again, at once, when the server turns out not to take a part of the request
(`ingest.ruler.judge`), or when the judge turns out to think, for which the token limit of a
reply is too low; later calls know it.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

import httpx
import structlog

from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeTooLongError,
    JudgeUnavailableError,
)
from ingest.ruler.bounded_replies import a_judge_is_asked, bound_replies
from ingest.ruler.prompt import MAX_REPLY_CHARACTERS, reply_tokens
from sidecar.backoff import retry_after_s
from sidecar.hiding import (
    HIDDEN,
    MIN_FREE_FORM,
    beginning,
    hidden_values,
    hide_in_text,
    hide_values,
)
from sidecar.processes import missing_packages
from sidecar.settings import Judge as JudgeSettings
from sidecar.settings.kinds import ask_loopback_directly

if TYPE_CHECKING:
    from ingest.judge_watch import JudgeSeen


# Translate LiteLLM's errors to ours, with messages that hold no secrets.

ERROR_CHARACTERS = 300
CHAIN_LENGTH = 16
"""Longest chain of causes that is examined, from the caught exception on."""
LIMITED = frozenset({429, 529})
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, ConnectionRefusedError)
"""Errors after which the provider has not seen the request."""
PAYMENT_REQUIRED = 402
TRY_AGAIN = frozenset({408, 409, 425})
_KEY_LIKE = re.compile(r"(?i)\b(?:sk-|bearer\s+|api[-_]key[=:]\s*)[^\s,'\"]+")
_NO_KEY = re.compile(
    r"(?i)missing credentials|missing .{0,200}\bapi[ _]key|api_key .{0,200}must be set"
)
"""What a provider's client says before it sends anything. The gaps are bounded: a text that repeats
a first word would take quadratic time."""
_NO_CREDIT = re.compile(r"(?i)insufficient[_ ](?:quota|balance|credits?|funds)|balance is too low")
"""What providers say when an account is used up. Not "exceeded your current quota" alone: with some
that is a limit a minute."""
_SSL = re.compile(r" ssl:(?:<[^<>]{0,200}>|default|None|True|False)")
"""What aiohttp says of its settings where nobody answers; it helps nobody."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters. A provider's error is shown on terminals and must not control them."""


def sort_error(error: BaseException, text: str, *, now: float) -> JudgeUnavailableError:
    """Translate one of LiteLLM's errors to ours.

    text: the message; see `explain`. now: Unix seconds, for a `Retry-After` that is a date.
    """
    chain = list(_chain(error))
    response = next((e.response for e in chain if isinstance(e, httpx.HTTPStatusError)), None)
    if response is not None:
        wait_s = retry_after_s(response.headers, now)
        return _by_status(response.status_code, text, wait_s, used_up=_is_used_up(chain))
    if any(isinstance(e, httpx.TransportError | OSError) for e in chain):
        unsent = any(isinstance(e, _UNSENT) for e in chain)
        return JudgeUnavailableError(text, maybe_paid=not unsent)
    # Neither an error status nor a broken connection: LiteLLM refused to send the request, or could
    # not read the reply, which it reports as 500 or 200.
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and status > 300 and status != 500:
        return _by_status(status, text, None, used_up=_is_used_up(chain))
    if any(_NO_KEY.search(beginning(str(e))) for e in chain):
        return JudgeRejectedError(
            f"{text} (nothing was sent: set the API key of the judge's provider in the environment)"
        )
    return JudgeGarbledError(
        f"{text} (the reply is no chat completion that LiteLLM can read)", maybe_paid=True
    )


def _is_used_up(chain: Sequence[BaseException]) -> bool:
    return any(_NO_CREDIT.search(beginning(str(one))) for one in chain)


def _by_status(
    status: int, text: str, wait_s: float | None, *, used_up: bool
) -> JudgeUnavailableError:
    if status == PAYMENT_REQUIRED or (used_up and status in (400, 403, 429)):
        return JudgeNoCreditError(text)
    if status in LIMITED or wait_s is not None:
        return JudgeBusyError(text, retry_after_s=wait_s or 0.0)
    if status in TRY_AGAIN or status >= 500:
        return JudgeUnavailableError(text)
    return JudgeRejectedError(text)


def explain(error: BaseException, *, model: str, secrets: Sequence[str]) -> str:
    """Describe an error in one storable line without keys: the judge and the provider's message.

    secrets: values to hide in the text; values that look like keys are hidden anyway.
    """
    # Secrets are hidden before and after the lines are joined: a key may span several lines.
    message = beginning(str(error)).split("Traceback (most recent call last)")[0]
    message = hide_values(_SSL.sub("", message), secrets)
    message = _CONTROL.sub("?", storable(" ".join(message.split()))) or type(error).__name__
    message = hide_in_text(_KEY_LIKE.sub(HIDDEN, hide_values(message, secrets)))
    cut = message if len(message) <= ERROR_CHARACTERS else f"{message[: ERROR_CHARACTERS - 1]}…"
    return f"judge {model}: {cut}"


def storable(text: str) -> str:
    """Remove what a store or a request cannot hold: lone surrogates and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(CHAIN_LENGTH):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


# What a judge does not take, learned by asking. Pure.

SCHEMA: Final = "response_format"
"""Parameter that names the JSON schema of a reply."""
LIMITS: Final = ("max_tokens", "max_completion_tokens")
"""Parameters that limit the tokens of a reply; ours is the first."""
SYSTEM: Final = "system"
"""The role of the judge's instructions."""
SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs",
    "presence_penalty", "frequency_penalty", "reasoning_effort", "thinking", "verbosity",
)  # fmt: skip
"""Parameters that an operator may give, without which scores are scores all the same."""
MOST_TRIES: Final = 8
"""Requests of one call that are repeated for what they carry."""
_REFUSED: Final = frozenset({400, 422, 501})
_NAMES: Final[Mapping[str, re.Pattern[str]]] = {
    SCHEMA: re.compile(r"(?i)response_?format|json_?schema|structured.?output|guided_"),
    LIMITS[0]: re.compile(r"(?i)max_(?:completion_)?tokens"),
    LIMITS[1]: re.compile(r"(?i)max_(?:completion_)?tokens"),
    SYSTEM: re.compile(
        r"(?i)system['\"` ]{1,3}(?:role|message|prompt|instruction)|developer instruction"
        r"|role['\"`: ]{1,4}system|roles must alternate"
    ),
    **{name: re.compile(rf"(?i)(?<!\w){name}(?!\w)") for name in SAMPLING},
}
_OF_ACCOUNT: Final = re.compile(r"(?i)\bkey\b|credential|unauthori[sz]ed|quota|balance|billing")
"""What a refusal of the account, and of no part of the request, says."""


def is_refusal(error: BaseException) -> bool:
    """Return True when the server, or LiteLLM in its place, refused what a request says."""
    return getattr(error, "status_code", None) in _REFUSED


def without(request: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    made = dict(request)
    for name in (SCHEMA, *SAMPLING):
        if name in left_out:
            made.pop(name, None)
    if LIMITS[0] in left_out and LIMITS[0] in made:
        made.setdefault(LIMITS[1], made.pop(LIMITS[0]))
    if LIMITS[1] in left_out:
        made.pop(LIMITS[1], None)
    if SYSTEM in left_out:
        made["messages"] = _as_user(made["messages"])
    return made


def next_forms(
    request: Mapping[str, Any],
    left_out: Collection[str],
    error: BaseException,
    *,
    needed: Iterable[str],
    search: bool,
) -> list[frozenset[str]]:
    """Return what to leave out next, in order; nothing when the refusal is not about a part.

    request: whole. left_out: what was left out when it was refused. needed: parts that stay.
    search: try one part after another when the refusal names none.
    """
    said, done = beginning(str(error)), frozenset(left_out)
    named = [name for name, pattern in _NAMES.items() if pattern.search(said)]
    sent = without(request, done)
    may = [name for name in _NAMES if name not in needed and _holds(sent, name)]
    if named:
        found = [name for name in named if name in may]
        return [done | {found[0]}] if found else []
    if not search or not may or _OF_ACCOUNT.search(said):
        return []
    every = done.union(may, [LIMITS[1]] if LIMITS[0] in may and LIMITS[1] not in needed else [])
    return list(dict.fromkeys([*(done | {name} for name in may), every]))


def _holds(request: Mapping[str, Any], name: str) -> bool:
    if name == SYSTEM:
        return any(one.get("role") == SYSTEM for one in request["messages"])
    return name in request


def _as_user(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put system messages before the text of the user's message that follows them."""
    made: list[dict[str, Any]] = []
    said: list[str] = []
    for one in messages:
        if one["role"] == SYSTEM:
            said.append(one["content"])
        elif said and one["role"] == "user":
            made.append({**one, "content": "\n\n".join([*said, one["content"]])})
            said = []
        else:
            made.append(dict(one))
    return [*made, *({"role": "user", "content": text} for text in said)]


MAX_COUNT = 2**31 - 1
"""Largest believable number of tokens in one call: it fits the integer column of every store."""
THINKS = ("reasoning_effort", "thinking")
"""Parameters that make a judge think before it answers."""
WINDOW = "num_ctx"
"""Parameter that sets the context of a model that Ollama runs; it cuts what is longer, silently."""
MILLION = 1_000_000
SEARCHES = 2
"""How often a judge that has answered nothing is asked without one part after another: it may be
down at first, and one that refuses all for another reason must not cost several requests a call."""

Found = TypeVar("Found")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one request to a provider used. `None` in a field: it is not known."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    """US dollars, by `judge.price` or LiteLLM's price; None also without either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """The reply to one call, and what all requests of the call used together.

    `None` in a field: the provider did not report it, for one of them at least.
    """

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost_usd: float | None = None
    """US dollars; None also for a model without a known price."""
    seconds: float = 0.0
    cut: bool = False
    """The reply ended at a limit of tokens."""
    cached: bool = False
    """It was paid for before and kept: it has no cost, and tells nothing of the judge's health."""


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


@runtime_checkable
class JudgePanel(Protocol):
    """Several judges, or one with limits of its own. It decides once for a whole judgement: scores
    of two judges do not compare, and a judgement that has been paid for in part is finished."""

    async def by_one(self, ask: Callable[[Judge], Awaitable[Found]]) -> Found:
        """Make one judgement with one judge; a whole new one with the next when that one is away.

        Raises: what `ask` raises; JudgeUnavailableError when no judge answers.
        """

    def seen(self) -> tuple[JudgeSeen, ...]:
        """Return what is known of each judge, in the order in which they are asked."""


_KEPT_FOR: ContextVar[str | None] = ContextVar("judge_replies_kept_for", default=None)


@contextmanager
def replies_kept_for(exchange_id: str | None) -> Iterator[None]:
    """Let a judge that keeps replies (`ingest.judges.replies`) keep those to the questions asked
    within, and give those that it has.

    exchange_id: whose content the questions hold, so that `sidecar forget` reaches the replies.
        None: the judge is asked anew, as it is outside of every such block. What measures the judge
        must ask it anew.
    """
    token = _KEPT_FOR.set(exchange_id)
    try:
        yield
    finally:
        _KEPT_FOR.reset(token)


def kept_for() -> str | None:
    """Return the exchange for which replies are kept now; None: the judge is asked anew."""
    return _KEPT_FOR.get()


class LiteLlmJudge:
    """A judge by its LiteLLM name (`openai/…`, `anthropic/…`, `hosted_vllm/…` with an api_base)."""

    def __init__(
        self,
        settings: JudgeSettings,
        *,
        on_again: Callable[[], None] = lambda: None,
        on_paid: Callable[[Usage], None] = lambda _: None,
        on_without: Callable[[tuple[str, ...]], None] = lambda _: None,
    ) -> None:
        """on_again: told of each request of a call but its first. on_paid: told of each request
        that the provider answered, at once. on_without: told what the judge turned out not to take,
        all of it."""
        self._settings = settings
        self._on_without = on_without
        self._left_out: frozenset[str] = frozenset()
        """Parts of requests that the judge does not take."""
        self._needed = [
            *([SCHEMA] if SCHEMA in settings.params else []),
            *(LIMITS[1:] if any(name in settings.params for name in LIMITS) else []),
        ]
        """Parts that stay as the operator set them."""
        self._searches = SEARCHES
        self._on_again, self._on_paid = on_again, on_paid
        key = [settings.api_key.get_secret_value()] if settings.api_key is not None else []
        keys = [*key, *hidden_values(settings.params, free_form=False)]
        self._keys = [one for one in keys if len(one) >= MIN_FREE_FORM]
        """Keys that a reply must not quote. A short key (`EMPTY`) may be a word of the reply."""
        self._secrets = [*key, *hidden_values(settings.params)]
        """Values that an error's text must not quote."""
        self._litellm: Any = None  # Any: LiteLLM's package ships no types that hold under strict
        self._loading = asyncio.Lock()
        self._sends_schema = SCHEMA not in settings.params
        self._limits = not any(name in settings.params for name in (*LIMITS, *THINKS))
        self._known_context: int | None = None

    @property
    def model(self) -> str:
        return self._settings.model

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        litellm = await self._load()
        started = time.monotonic()
        paid: list[Usage] = []
        try:
            # LiteLLM's own timeout is per read; a server that sends slowly would exceed it.
            async with asyncio.timeout(self._settings.timeout_s):
                response = await self._ask(litellm, self._request(messages, schema), paid)
        except TimeoutError as error:
            raise JudgeUnavailableError(
                f"judge {self.model} did not answer in {self._settings.timeout_s:g} s; "
                "check whether it is overloaded, or raise its timeout (judge.timeout_s)",
                maybe_paid=True,
            ) from error
        except litellm.exceptions.ContextWindowExceededError as error:
            # `from None`, here and below: LiteLLM's errors quote requests, and with them keys.
            raise JudgeTooLongError(self._explain(error), asked=True) from None
        except litellm.exceptions.ContentPolicyViolationError as error:
            raise JudgeRefusalError(self._explain(error)) from None
        except Exception as error:  # noqa: BLE001 - LiteLLM raises many kinds of errors
            raise sort_error(error, self._explain(error), now=time.time()) from None
        try:
            return self._reply(response, paid, time.monotonic() - started)
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

    async def _send(self, litellm: Any, request: dict[str, Any], paid: list[Usage]) -> Any:
        with a_judge_is_asked():
            response = await litellm.acompletion(**request)
        paid.append(self._usage(response))
        self._on_paid(paid[-1])
        return response

    async def _ask(self, litellm: Any, request: dict[str, Any], paid: list[Usage]) -> Any:
        """Send the request; again without what the judge refuses, and again without our token limit
        when it thinks. Both are remembered."""
        response = await self._send_fitting(litellm, request, paid)
        ours = LIMITS[0] in request and LIMITS[0] not in self._settings.params
        if ours and _cut_in_thought(response):
            log.info("judge_thinks", model=self.model, cut_at_tokens=request.pop(LIMITS[0]))
            self._limits = False
            self._on_again()
            response = await self._send(litellm, without(request, self._left_out), paid)
        return response

    async def _send_fitting(self, litellm: Any, request: dict[str, Any], paid: list[Usage]) -> Any:
        """Send the request without what the judge is known not to take, and find out more of it.

        Raises: the last refusal, when the judge takes no form of the request.
        """
        left_out, forms, first = self._left_out, list[frozenset[str]](), ""
        tries = 0
        while True:
            try:
                response = await self._send(litellm, without(request, left_out), paid)
            except Exception as error:
                if tries == MOST_TRIES or not is_refusal(error) or _is_of_question(litellm, error):
                    raise
                search = self._searches > 0 and not forms
                found = next_forms(request, left_out, error, needed=self._needed, search=search)
                self._searches -= len(found) > 1
                forms = found or forms
                if not forms:
                    raise
                first = first or self._explain(error)
            else:
                if left_out != self._left_out:
                    self._left_out |= left_out
                    log.info(
                        "judge_asked_without",
                        model=self.model,
                        without=sorted(self._left_out),
                        why=first,
                    )
                    self._on_without(tuple(sorted(self._left_out)))
                self._searches = 0
                return response
            # Not in the handler: the chain of causes decides what an error becomes.
            left_out = forms.pop(0)
            tries += 1
            self._on_again()

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
        litellm = import_litellm()
        prices = litellm.model_cost
        known = prices.get(self.model) or prices.get(self.model.partition("/")[2]) or {}
        if known.get("supports_response_schema") is False:
            self._sends_schema = False
        most = known.get("max_input_tokens")
        self._known_context = most if isinstance(most, int) and most > 0 else None
        if litellm.supports_reasoning(self.model):
            self._limits = False
        return litellm

    def _urls(self) -> list[str]:
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

    def _usage(self, response: Any) -> Usage:  # Any: a LiteLLM ModelResponse
        reported = getattr(response, "usage", None)
        prompt = _count(getattr(reported, "prompt_tokens", None))
        completion = _count(getattr(reported, "completion_tokens", None))
        if not prompt:  # LiteLLM's words for a provider that reports nothing: no prompt is empty
            return Usage()
        cost = (getattr(response, "_hidden_params", None) or {}).get("response_cost")
        if (price := self._settings.price) is not None:
            cost = None
            if completion is not None:
                cost = (prompt * price["input"] + completion * price["output"]) / MILLION
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cost_usd=float(cost) if isinstance(cost, int | float) and math.isfinite(cost) else None,
        )

    def _reply(self, response: Any, paid: Sequence[Usage], seconds: float) -> JudgeReply:
        choices = response.choices
        if not choices:
            raise ValueError("the reply has no choice")
        text = choices[0].message.content or ""
        return JudgeReply(
            # A reply without text is refused, retried and recorded like other unusable replies.
            # One character more than may be parsed, so that a longer one is still refused.
            text=storable(hide_values(text[: MAX_REPLY_CHARACTERS + 1], self._keys)),
            prompt_tokens=_count(_sum([one.prompt_tokens for one in paid])),
            completion_tokens=_count(_sum([one.completion_tokens for one in paid])),
            cost_usd=_sum([one.cost_usd for one in paid]),
            seconds=seconds,
            cut=choices[0].finish_reason == "length",
        )

    def _explain(self, error: Exception) -> str:
        return explain(error, model=self.model, secrets=self._secrets)


def import_litellm() -> Any:
    """Import LiteLLM, which takes seconds, so that it sends nothing but the judge's prompts.

    Raises: JudgeUnavailableError when it is not installed.
    """
    if lacks := missing_packages("judge"):
        raise JudgeUnavailableError(lacks)
    # LiteLLM reads this at import: without it, the import downloads a price list.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    bound_replies(AsyncHTTPHandler)
    return litellm


def _is_of_question(litellm: Any, error: Exception) -> bool:
    """Return True for a refusal of the conversation itself: it is too long, or a filter's."""
    kinds = litellm.exceptions
    return isinstance(error, kinds.ContextWindowExceededError | kinds.ContentPolicyViolationError)


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


def _sum(numbers: Sequence[Any]) -> Any:  # Any: int or float
    """Add up; None when one of them is not known, or there is none."""
    return sum(numbers) if numbers and None not in numbers else None

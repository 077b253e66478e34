"""Probe a vLLM with single-token requests for settings that no request shows.

**Sampling defaults.** A request with every sampling field is compared with the same request without
one field: if vLLM fills that field, other tokens are cut or the log-probabilities differ. The
result counts only if the same comparison detects an explicit `top_k` of 1; with `--logprobs-mode
raw_logprobs`, and on an engine that cannot report chosen tokens, it does not.

**Grammars.** `structured_outputs` allow one answer, `A`. With tools added, vLLM also allows a tool
call, but only when it constrains tool calls by itself. A bias makes `A` as unlikely as possible, so
it is the answer only when nothing else is allowed. A token that is forbidden although no field asks
for it reveals the other kind: parsers that always set a grammar.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import msgspec

from ingest.errors import EngineDownError, RequestRefusedError, SamplingError
from ingest.grouping.request import IMPOSSIBLE_LOGPROB, EngineFacts, Grammar
from ingest.vllm.sampler import CHAT_PATH, UNAVAILABLE

TOKENIZE_PATH = "/tokenize"
BUDGET_S = 120.0
"""Time for probing one vLLM. One that has just started on a busy CPU takes tens of seconds."""
TOLERANCE = 0.5
"""Least difference of log-probabilities that shows a default, in nats. Measured on a bf16 server: a
temperature of 0.95 changes a log-probability by 0.8, a repetition penalty of 1.02 by 0.6; rounding,
beyond the difference of repeated requests, by 0.2."""
PROBED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that are probed. Penalties on generated tokens show only from the second token on, so they
are read from the files alone."""
LEAST_LOGPROBS = 32
MOST_PROMPT_IDS = 28
LOW_IDS = 96
"""Token ids 0 to 95 are in every vocabulary. With the prompt's ids they are at most 124; vLLM
accepts 128 in a request."""
ANSWER = "A"
PLAIN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "! # % a b c 1 2 3"}],
    "max_completion_tokens": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "watermarking": False,
}
TOOLS: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look_up",
                "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
            },
        }
    ],
    "tool_choice": "auto",
}

Logprobs = Mapping[str, float]
"""Requested token -> log-probability in nats."""


Ask = Callable[[str, Mapping[str, Any]], Any]
"""Posts a JSON body to a path of vLLM. Returns: the reply's JSON. Raises: RequestRefusedError for a
400, else SamplingError."""


def probe(url: str, model: str, api_key: str | None, *, budget_s: float = BUDGET_S) -> EngineFacts:
    """Probe the vLLM at a base URL.

    Raises: EngineDownError when it is unreachable, SamplingError when it does not answer within
        `budget_s` or its replies are not those of a vLLM.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
        return find_out(_asker(client, time.monotonic() + budget_s), model)


def find_out(ask: Ask, model: str) -> EngineFacts:
    """Send the probing requests and evaluate them. Raises: as `ask`."""
    reply = ask(CHAT_PATH, {**PLAIN, "model": model, "return_token_ids": True})
    prompt_ids = list(dict.fromkeys(_prompt_ids(reply)))[:MOST_PROMPT_IDS]
    tokens = {
        "model": model,
        "logprobs": True,
        "return_tokens_as_token_ids": True,
        "logprob_token_ids": list(dict.fromkeys([*prompt_ids, *range(LOW_IDS)])),
    }
    explicit = {**PLAIN, **tokens}

    def logprobs_of(body: Mapping[str, Any]) -> Logprobs | None:
        """Return the log-probabilities; None when vLLM refuses the request."""
        try:
            return _logprobs(ask(CHAT_PATH, body))
        except RequestRefusedError:
            return None

    first, again = logprobs_of(explicit) or {}, logprobs_of(explicit) or {}
    defaults: frozenset[str] | None = None
    if differs(first, logprobs_of({**explicit, "top_k": 1}) or {}, 0.0):
        noise = _distance(first, again)
        # A greedy default changes no log-probability, but vLLM refuses two greedy answers.
        without = {name: {k: v for k, v in explicit.items() if k != name} for name in PROBED}
        without["temperature"]["n"] = 2
        defaults = frozenset(
            name
            for name, body in without.items()
            if (seen := logprobs_of(body)) is None or differs(again, seen, noise)
        )
    if not _all_possible(first):
        return EngineFacts(defaults=defaults, grammar="always")
    return EngineFacts(
        defaults=defaults, grammar=_grammar(ask, logprobs_of({**explicit, **TOOLS}), model)
    )


def differs(explicit: Logprobs, implicit: Logprobs, noise: float) -> bool:
    """Return True when two answers to one prompt were sampled from different distributions.

    noise: largest difference between two answers to one request, in nats.
    """
    both = explicit.keys() & implicit.keys()
    if len(both) < LEAST_LOGPROBS:
        return False
    if any(_possible(explicit[name]) != _possible(implicit[name]) for name in both):
        return True
    return _distance(explicit, implicit) > TOLERANCE + noise


def _grammar(ask: Ask, with_tools: Logprobs | None, model: str) -> Grammar | None:
    """Find out when vLLM sets a grammar; None when unknown.

    with_tools: log-probabilities of a request with tools and no constraint; None: refused.
    """
    if not _all_possible(with_tools or {}):
        return "with_tools"
    only = {
        **PLAIN,
        "model": model,
        "structured_outputs": {"choice": [ANSWER]},
        "include_reasoning": False,  # so that the grammar holds from the first token on
    }
    try:
        ids = ask(TOKENIZE_PATH, {"model": model, "prompt": ANSWER, "add_special_tokens": False})
        only["logit_bias"] = {str(number): -100 for number in _token_ids(ids)}
        if _content(ask(CHAT_PATH, only)) != ANSWER:
            return None  # vLLM ignores the constraint: no conclusion is possible
        held = _content(ask(CHAT_PATH, {**only, **TOOLS})) == ANSWER
    except RequestRefusedError:
        # A vLLM without a tool parser refuses such requests of agents too.
        return "as_asked" if with_tools is None else None
    return "as_asked" if held else "with_tools"


def _asker(client: httpx.Client, deadline: float) -> Ask:
    def ask(path: str, body: Mapping[str, Any]) -> Any:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise SamplingError(f"{client.base_url}: no answer to single tokens in time")
        try:
            response = client.post(path, json=body, timeout=left_s)
        except httpx.ConnectError as error:
            raise EngineDownError(f"{client.base_url}: cannot connect: {error}") from error
        except httpx.HTTPError as error:
            raise SamplingError(f"{client.base_url}: {type(error).__name__}: {error}") from error
        status = response.status_code
        if status in UNAVAILABLE:
            raise EngineDownError(f"{client.base_url}{path}: status {status}")
        if status in (400, 422):
            raise RequestRefusedError(f"{client.base_url}{path}: {response.text[:300]}")
        if status != 200:
            raise SamplingError(f"{client.base_url}{path}: status {status}: {response.text[:300]}")
        try:
            return msgspec.json.decode(response.content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise SamplingError(f"{client.base_url}{path}: not JSON: {error}") from error

    return ask


class _Token(msgspec.Struct):
    token: str
    logprob: float


class _Position(msgspec.Struct):
    top_logprobs: list[_Token] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def _read(reply: Any) -> _Reply:  # Any: JSON
    try:
        read = msgspec.convert(reply, _Reply)
    except msgspec.ValidationError as error:
        raise SamplingError(f"not a chat reply: {error}") from error
    if not read.choices:
        raise SamplingError("not a chat reply: no choices")
    return read


def _prompt_ids(reply: Any) -> list[int]:  # Any: JSON
    return _read(reply).prompt_token_ids or []


def _content(reply: Any) -> str:  # Any: JSON
    return _read(reply).choices[0].message.content or ""


def _logprobs(reply: Any) -> Logprobs:  # Any: JSON
    found = _read(reply).choices[0].logprobs
    positions = found.content if found is not None else None
    return {one.token: one.logprob for one in positions[0].top_logprobs} if positions else {}


def _token_ids(reply: Any) -> list[int]:  # Any: JSON
    try:
        return msgspec.convert(reply, _Tokenized).tokens
    except msgspec.ValidationError as error:
        raise SamplingError(f"not a reply of {TOKENIZE_PATH}: {error}") from error


def _possible(logprob: float) -> bool:
    return logprob > IMPOSSIBLE_LOGPROB


def _all_possible(logprobs: Logprobs) -> bool:
    return all(map(_possible, logprobs.values()))


def _distance(one: Logprobs, other: Logprobs) -> float:
    """Return the largest difference over the tokens that both allow, in nats."""
    both = [name for name in one.keys() & other.keys() if _possible(one[name])]
    return max(
        (abs(one[name] - other[name]) for name in both if _possible(other[name])), default=0.0
    )

"""Attributes of spans and OpenTelemetry metrics of a request: names, sizes, outcomes. Pure."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from sidecar.records import Exchange, RawCapture
from sidecar.tracing.genai_names import OPERATIONS

PROVIDER = "vllm"
"""`gen_ai.provider.name`; the conventions define no name for vLLM."""
Attribute = str | int | float | bool | tuple[str, ...]


def span_attributes(raw: RawCapture, exchange: Exchange | None) -> dict[str, Attribute]:
    """Return the attributes of a request's span. exchange: None when the request was not
    captured."""
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": OPERATIONS[raw.surface],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": raw.public_model,
        "gen_ai.request.stream": raw.streamed,
        "gen_ai.response.model": raw.route.upstream_model,
        "gen_ai.conversation.id": raw.session_key,
        "http.response.status_code": raw.status,
        "sidecar.exchange.id": raw.exchange_id,
        "sidecar.adapter": raw.route.adapter,
        "sidecar.arm": raw.route.arm,
        "sidecar.outcome": raw.outcome if exchange is None else exchange.outcome,
        "sidecar.overhead_s": raw.timings.overhead_s,
        **server_of(raw.replica),
    }
    if raw.timings.first_byte_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = raw.timings.first_byte_s
    error = error_type(raw, exchange)
    if error is not None:
        attributes["error.type"] = error
    if exchange is not None:
        attributes |= _of_exchange(exchange)
    return attributes


def _of_exchange(exchange: Exchange) -> dict[str, Attribute]:
    sampling = exchange.sampling
    asked = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
    }
    attributes: dict[str, Attribute] = {
        f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None
    }
    prompt, completion = token_counts(exchange)
    attributes["gen_ai.request.choice.count"] = len(exchange.choices)
    attributes["gen_ai.usage.input_tokens"] = prompt
    attributes["gen_ai.usage.output_tokens"] = completion
    reasons = tuple(choice.finish_reason or "" for choice in exchange.choices)
    if any(reasons):
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes


def token_counts(exchange: Exchange) -> tuple[int, int]:
    """Return the token counts of the prompt and of all answers; 0 where vLLM reported none."""
    ids = sum(len(choice.token_ids) for choice in exchange.choices)
    return len(exchange.prompt_token_ids), exchange.completion_tokens or ids


def error_type(raw: RawCapture, exchange: Exchange | None) -> str | None:
    """Return `error.type`: the status, or `broken_reply` when a reply with status 200 broke off.
    None when vLLM did not fail; a client that left is no error."""
    if raw.status >= 400:
        return str(raw.status)
    outcome = raw.outcome if exchange is None else exchange.outcome
    return "broken_reply" if outcome == "upstream_error" else None


@lru_cache(maxsize=256)
def server_of(replica: str) -> dict[str, str | int]:
    """`server.address` and `server.port` of a replica's base URL."""
    parts = urlsplit(replica)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return {"server.address": parts.hostname or "", "server.port": port}

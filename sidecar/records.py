"""The record that the data plane hands on: one `Exchange` per relayed request.

It holds what was *seen*: the request as the agent sent it, the reply as the agent got it, and what
vLLM said about the sampling. Nothing here is guessed: a value that was not reported is `None` or
empty, and `untrainable_reason` says why the exchange must not be learned from.
Records cross processes as msgpack (`encode_exchange` / `decode_exchange`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

BASE = "base"
"""The name that records and routing use for "no adapter": the base model answered."""

Arm = Literal["champion", "canary"]
Outcome = Literal["ok", "cut", "upstream_error"]
"""ok: the reply reached its end; cut: the client went away; upstream_error: vLLM failed in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How vLLM was asked to sample. `None`: not said, so the server's default held."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer of a reply."""

    index: int
    message: bytes
    """The assistant message as JSON (`role`, `content`, `tool_calls` merged by index)."""
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    """[S] sampled ids, the stop token included when vLLM sampled it; empty when not reported."""
    logprobs: tuple[float, ...] = ()
    """[S] nats, of the sampled ids under the adapter that answered; empty when not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """`started_at` is unix seconds; the rest are seconds since then on the monotonic clock."""

    started_at: float
    first_byte_s: float | None = None
    total_s: float = 0.0
    overhead_s: float = 0.0
    """Time spent in the relay and not in waiting for vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """capture -> group. One request, its reply, and what is known of how it was sampled."""

    exchange_id: str
    surface: Literal["chat"]
    public_model: str
    adapter: str
    """vLLM name of the LoRA that answered; "base" when none did."""
    arm: Arm
    propensity: float
    """Probability that this session had of getting this arm when it was assigned, 0..1."""
    replica: str
    """Base URL of the vLLM that answered."""
    session_key: str
    request: bytes
    """The request body as the agent sent it, JSON."""
    choices: tuple[Choice, ...]
    prompt_token_ids: tuple[int, ...] = ()
    """[P] ids of the rendered prompt; empty when not reported."""
    sampling: Sampling
    stream: bool
    status: int
    """HTTP status of vLLM's reply."""
    outcome: Outcome
    timings: Timings
    untrainable_reason: str | None = None
    """None when ids and log-probabilities are exact and the adapter is known."""
    completion_tokens: int | None = None
    """As vLLM's `usage` reports, over all choices; None when it was not reported."""
    trace_id: str = ""
    project: str = "default"
    user: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Exchange)


def encode_exchange(exchange: Exchange) -> bytes:
    """Pack a record for the bus."""
    return _encoder.encode(exchange)


def decode_exchange(data: bytes) -> Exchange:
    """Unpack a record from the bus. Raises msgspec.MsgspecError when it is not one."""
    return _decoder.decode(data)

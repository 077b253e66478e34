"""The record that the data plane hands on: one `Exchange` per relayed request.

It holds what was *seen*: the request as the agent sent it, the reply as the agent got it, and what
vLLM said about the sampling. Nothing here is guessed: a value that was not reported is `None` or
empty, and `untrainable_reason` says why the exchange must not be learned from.
Records cross processes as msgpack (`encode_exchange` / `decode_exchange`): a map by field name, in
which a field that has its default may be missing, so a reader takes the records of older writers.

They are msgspec Structs and not dataclasses because every request makes several of them: a frozen
dataclass of four fields takes 1.1 us to build, a Struct 0.1. `msgspec.structs.replace` changes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

BASE = "base"
"""The name that records and routing use for "no adapter": the base model answered."""

Arm = Literal["champion", "canary"]
Outcome = Literal["ok", "cut", "upstream_error"]
"""ok: the reply reached its end; cut: the client went away; upstream_error: vLLM failed in it."""
Surface = Literal["chat", "completions", "responses", "messages", "embeddings"]
"""The API that was spoken: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`,
`/v1/messages` (Anthropic's), `/v1/embeddings`."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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


class Choice(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One answer of a reply."""

    index: int
    message: bytes
    """The assistant message as JSON, as chat completions have it, whatever the surface: `role`,
    `content`, `reasoning`, `tool_calls` merged by index."""
    finish_reason: str | None = None
    """In the words of chat completions, whatever the surface: stop, length, tool_calls, ..."""
    token_ids: tuple[int, ...] = ()
    """[S] sampled ids, the stop token included when vLLM sampled it; empty when not reported."""
    logprobs: tuple[float, ...] = ()
    """[S] nats, of the sampled ids under the adapter that answered; empty when not reported."""


class Timings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`started_at` is unix seconds; the rest are seconds on the monotonic clock."""

    started_at: float
    queue_s: float | None = None
    """From the request's arrival until it was sent to vLLM; None when it never was."""
    first_byte_s: float | None = None
    """From the request's arrival to the first byte of the reply's body."""
    per_token_s: float | None = None
    """Mean time between two tokens of a stream, from its first byte to its end; None when there
    is no such thing: a whole reply, a single token, or no count of tokens."""
    total_s: float = 0.0
    """From the request's arrival to the reply's end."""
    overhead_s: float = 0.0
    """Time spent in the relay and not in waiting for vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one request got."""

    adapter: str
    arm: Arm
    propensity: float
    upstream_model: str
    """What to write into the request's `model`: the adapter's name, or the base model's."""


class RawCapture(msgspec.Struct, frozen=True, kw_only=True):
    """relay -> capture. One finished request, nothing of it parsed."""

    exchange_id: str
    public_model: str
    route: Assignment
    """The route that answered."""
    replica: str
    session_key: str
    user: str
    request: bytes
    reply: Sequence[bytes] | None
    """The reply's body as vLLM sent it, cut anywhere; None: only the span is wanted."""
    streamed: bool
    """The reply is a stream of events; a request for one may still be refused in one piece."""
    status: int
    """0 when the client left before vLLM's reply began."""
    outcome: Outcome
    timings: Timings
    traceparent: str = ""
    """As the client sent it."""
    own_traceparent: str = ""
    """As it was sent on to vLLM."""
    surface: Surface = "chat"
    project: str = "default"
    key_id: str = ""
    retry_count: int = 0
    """`x-stainless-retry-count`; 0 when it was not sent."""
    idempotency_key: str = ""
    """`Idempotency-Key`; empty when it was not sent."""
    fallback_from: str = ""
    """The adapter that was to answer and that vLLM did not know."""
    reply_bytes: int = -1
    """Length of the reply's body, if the relay has counted it (`ReplyBuffer.size`); -1: it has
    not."""
    returned_index: int = 0
    """As `Exchange.returned_index`."""

    @property
    def size(self) -> int:
        """Bytes that it holds in memory."""
        return len(self.request) + self.reply_size

    @property
    def reply_size(self) -> int:
        if self.reply_bytes >= 0:
            return self.reply_bytes
        return sum(map(len, self.reply or ()))


class Exchange(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """capture -> group. One request, its reply, and what is known of how it was sampled."""

    exchange_id: str
    surface: Surface
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
    returned_index: int = 0
    """Index of the choice that the client got, when best of N was asked for and it got only one."""
    trace_id: str = ""
    """W3C trace id, 32 hex digits; empty when the request was in no trace."""
    project: str = "default"
    key_id: str = ""
    """Which access key was used; never the key itself. Empty when none was needed."""
    user: str = ""
    turn_id: str = ""
    """The same for a request and its retries (`sidecar/capture/turns.py`); empty: a turn of its
    own."""
    retry_count: int = 0
    """How many times the client had sent this request before, as it says itself."""
    fallback_from: str = ""
    """The adapter that should have answered and that vLLM did not know; empty: none."""
    request_bytes: int = 0
    """Length of the request's body, as the agent sent it."""
    reply_bytes: int = 0
    """Length of the reply's body, as vLLM sent it to the sidecar."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Exchange)


def encode_exchange(exchange: Exchange) -> bytes:
    """Pack a record for the bus."""
    return _encoder.encode(exchange)


def decode_exchange(data: bytes) -> Exchange:
    """Unpack a record from the bus. Raises msgspec.MsgspecError when it is not one."""
    return _decoder.decode(data)

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
from typing import Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

BASE = "base"
"""The adapter name for "no adapter": the base model answered."""

Value = Raw | UnsetType  # JSON as the client wrote it; UNSET: absent
Arm = Literal["champion", "canary", "rehearsal", "imported"]
"""Why this adapter answers. `rehearsal`: an attempt at a recorded task is pinned to it. `imported`:
another system answered, and a group of the exchange samples this adapter."""
IMPORTED: Final = "imported"
"""`arm`, `origin` and `untrainable_reason` of an exchange that came from another log."""
Outcome = Literal["ok", "cut", "upstream_error"]
"""ok: the reply is complete; cut: the client left; upstream_error: vLLM failed during the reply."""
Surface = Literal["chat", "completions", "responses", "messages", "embeddings"]
"""The API of a request: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`
(Anthropic's), `/v1/embeddings`."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The sampling parameters of a request. None: not sent, so the server's default applied."""

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
    """One answer in a reply."""

    index: int
    message: bytes
    """The assistant message as JSON in the form of chat completions, on every surface, whole or
    streamed: `sidecar.replies.parts.canonical`."""
    finish_reason: str | None = None
    """In the words of chat completions, on every surface: stop, length, tool_calls, ..."""
    token_ids: tuple[int, ...] = ()
    """[S] sampled token ids, including a sampled stop token; empty when not reported."""
    logprobs: tuple[float, ...] = ()
    """[S] log-probabilities in nats of the sampled ids under the adapter that answered; empty when
    not reported."""


class Timings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`started_at` is in unix seconds; the others are seconds on the monotonic clock."""

    started_at: float
    queue_s: float | None = None
    """From the request's arrival until it was sent to vLLM; None when it was not sent."""
    first_byte_s: float | None = None
    """From the request's arrival to the first byte of the reply's body."""
    per_token_s: float | None = None
    """Mean time between two tokens of a stream, from its first byte to its end. None for a whole
    reply, a single token, or an unknown number of tokens."""
    total_s: float = 0.0
    """From the request's arrival to the reply's end."""
    overhead_s: float = 0.0
    """Time in the relay, without waiting for vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The adapter that a request was assigned to."""

    adapter: str
    arm: Arm
    propensity: float
    upstream_model: str
    """What to write into the request's `model`: the adapter's name, or the base model's."""


class SampledFields(msgspec.Struct, gc=False):
    """The members of a request's body that say how the answer is sampled, undecoded."""

    stream: Value = UNSET
    temperature: Value = UNSET
    top_p: Value = UNSET
    min_p: Value = UNSET
    top_k: Value = UNSET
    presence_penalty: Value = UNSET
    frequency_penalty: Value = UNSET
    repetition_penalty: Value = UNSET
    seed: Value = UNSET
    max_tokens: Value = UNSET
    max_completion_tokens: Value = UNSET
    max_output_tokens: Value = UNSET
    tools: Value = UNSET


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
    fields: SampledFields | None = None
    """Of the request, as routing read it; None: the capture reads it."""
    reply: Sequence[bytes] | None
    """The reply's body as vLLM sent it, cut anywhere. None: only a span is wanted."""
    streamed: bool
    """The reply is a stream of events. A request for a stream may still be refused in one piece."""
    status: int
    """0 when the client left before vLLM's reply began."""
    outcome: Outcome
    timings: Timings
    traceparent: str = ""
    """The header as the client sent it."""
    own_traceparent: str = ""
    """The header as it was sent to vLLM."""
    surface: Surface = "chat"
    project: str = "default"
    key_id: str = ""
    retry_count: int = 0
    """`x-stainless-retry-count`; 0 when not sent."""
    idempotency_key: str = ""
    """`Idempotency-Key`; empty when not sent."""
    fallback_from: str = ""
    """The adapter that was assigned and that vLLM did not know; empty when there was none."""
    reply_bytes: int = -1
    """Length of the reply's body in bytes, if the relay counted it; -1 if not."""
    returned_index: int = 0
    """See `Exchange.returned_index`."""
    fields_refused: bool = False
    """It was sent without ids and log-probabilities, which were wanted: this vLLM refuses them."""
    address_hash: str = ""
    """See `Exchange.address_hash`."""
    task: str = ""
    origin: str = "user"
    """See `Exchange.task` and `Exchange.origin`."""

    @property
    def size(self) -> int:
        """Bytes held in memory."""
        return len(self.request) + self.reply_size

    @property
    def reply_size(self) -> int:
        if self.reply_bytes >= 0:
            return self.reply_bytes
        return sum(map(len, self.reply or ()))


class Exchange(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """capture -> group. One request, its reply, and how the reply was sampled."""

    exchange_id: str
    surface: Surface
    public_model: str
    adapter: str
    """vLLM name of the LoRA that answered; "base" when none did."""
    arm: Arm
    propensity: float
    """Probability, 0..1, with which this session was assigned to this arm."""
    replica: str
    """Base URL of the vLLM that answered."""
    session_key: str
    request: bytes
    """The request body as the agent sent it, JSON."""
    choices: tuple[Choice, ...]
    prompt_token_ids: tuple[int, ...] = ()
    """[P] token ids of the rendered prompt; empty when not reported."""
    sampling: Sampling
    stream: bool
    status: int
    """HTTP status of vLLM's reply."""
    outcome: Outcome
    timings: Timings
    untrainable_reason: str | None = None
    """None when ids and log-probabilities are exact and the adapter is known."""
    completion_tokens: int | None = None
    """From vLLM's `usage`, over all choices; None when not reported."""
    returned_index: int = 0
    """Index of the choice that the client got, when best of N returned only one."""
    trace_id: str = ""
    """W3C trace id, 32 hex digits; empty when the request belonged to no trace."""
    project: str = "default"
    key_id: str = ""
    """Identifier of the API key, never the key itself. Empty when none was needed."""
    user: str = ""
    turn_id: str = ""
    """Equal for a request and its retries (`sidecar/capture/assemble.py`)."""
    retry_count: int = 0
    """How many times the client had sent this request before, by its own count."""
    fallback_from: str = ""
    """The adapter that was assigned and that vLLM did not know; empty when there was none."""
    request_bytes: int = 0
    """Length of the request's body in bytes, as the agent sent it."""
    reply_bytes: int = 0
    """Length of the reply's body in bytes, as vLLM sent it."""
    prompt_ids: bytes = b""
    """The prompt's token ids as vLLM wrote them, a JSON array, between the proxy and ingest;
    `read_prompt_ids` makes `prompt_token_ids` of it."""
    address_hash: str = ""
    """4 hex digits of the connection's address (`sidecar.routing.session_key.hash_of_address`);
    empty where the caller has a key, or no canary runs."""
    task: str = ""
    """`x-sidecar-task`: sessions with one name are attempts at one task; empty when not sent."""
    origin: str = "user"
    """user | rehearsal | imported: who asked, or another log (`ingest.importing`)."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Exchange)
_ids_decoder = msgspec.json.Decoder(tuple[int, ...])


def encode_exchange(exchange: Exchange) -> bytes:
    """Pack a record for the bus."""
    return _encoder.encode(exchange)


def decode_exchange(data: bytes) -> Exchange:
    """Unpack a record from the bus. Raises msgspec.MsgspecError when it is not one."""
    return _decoder.decode(data)


def ids_of(written: bytes) -> tuple[int, ...]:
    """Read token ids, a JSON array; none where nothing is written. Raises: msgspec.MsgspecError."""
    return _ids_decoder.decode(written) if written else ()


def read_prompt_ids(exchange: Exchange) -> Exchange:
    """Return the exchange with `prompt_token_ids` in place of `prompt_ids`: none, and untrainable,
    where these are no list of token ids."""
    if not exchange.prompt_ids:
        return exchange
    try:
        ids = ids_of(exchange.prompt_ids)
    except msgspec.MsgspecError:
        reason = exchange.untrainable_reason or "ids_missing"
        return msgspec.structs.replace(exchange, prompt_ids=b"", untrainable_reason=reason)
    return msgspec.structs.replace(exchange, prompt_ids=b"", prompt_token_ids=ids)

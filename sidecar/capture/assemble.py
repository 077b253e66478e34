"""Build an `Exchange` from a relayed request and its reply. Pure; runs off the request path.

An exchange that lacks what training needs, or contradicts itself, is still kept for sessions and
feedback. `untrainable_reason` says why it must not be trained on.
"""

from __future__ import annotations

import hashlib

import msgspec

from sidecar.errors import UNREADABLE_JSON
from sidecar.records import (
    Choice,
    Exchange,
    Outcome,
    RawCapture,
    Sampling,
    Surface,
    Timings,
)
from sidecar.replies.check import read_reply, untrainable, withheld
from sidecar.replies.parts import (
    WITHHELD,
    ReadChoice,
    ReadReply,
    UnreadableReplyError,
    message_json,
)

# Group exchanges into user turns: a request and its retries by the client's SDK are one turn.

REMEMBERED = 4096
"""Originals remembered, to recognise their retries. SDKs retry within seconds."""


class Turns:
    """Gives turns their names. Remembers the originals of this process. For one thread."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._names: dict[bytes, str] = {}

    def name(
        self,
        exchange_id: str,
        *,
        project: str,
        session_key: str,
        body: bytes,
        retry_count: int,
        idempotency_key: str,
        ended_well: bool,
    ) -> str:
        """Return the turn id of an exchange. Call it once an exchange, in the order of their ends.

        ended_well: the client received a complete, successful reply, as far as the relay knows.
        """
        if idempotency_key:
            return f"key-{_digest(project, idempotency_key, body).hex()}"
        digest = _digest(project, session_key, body)
        if retry_count <= 0 and ended_well:
            known = self._names.get(digest)
            # Keep the entry of a failed original whose retry has not come yet.
            if known is None or known != _shared(digest):
                self._remember(digest, exchange_id)
            return exchange_id
        shared = _shared(digest)
        if retry_count <= 0:
            self._remember(digest, shared)
            return shared
        name = self._names.get(digest, shared)
        if ended_well:
            self._names.pop(digest, None)
        return name

    def _remember(self, digest: bytes, name: str) -> None:
        self._names.pop(digest, None)
        self._names[digest] = name
        if len(self._names) > self._remembered:
            del self._names[next(iter(self._names))]


def _shared(digest: bytes) -> str:
    return f"try-{digest.hex()}"


def _digest(project: str, scope: str, body: bytes) -> bytes:
    digest = hashlib.blake2b(body, digest_size=12)
    digest.update(f"\x00{len(scope)}:{scope}\x00{project}".encode("utf-8", "surrogateescape"))
    return digest.digest()


def assemble(raw: RawCapture, turns: Turns | None = None) -> Exchange:
    """Build an exchange. Never raises for what a client or vLLM sent; `untrainable_reason` names
    it.

    raw: a capture that has a reply.
    turns: remembers the originals of retries. It is the only state used here.
    """
    request = _request(raw.request)
    sampling, sampling_known = _sampling(request, raw.surface)
    reply, choices, readable = _read(raw, tools=request.offers_tools)
    outcome: Outcome = "upstream_error" if reply.error is not None else raw.outcome
    reason: str | None
    if outcome != "ok":
        reason = outcome
    elif not readable:
        reason = "unreadable_reply"
    elif not sampling_known:
        reason = "unreadable_sampling"
    else:
        asked = raw.route.upstream_model
        reason = untrainable(reply, raw.surface, asked, tools=request.offers_tools)
        if raw.fields_refused and reason in ("ids_missing", "logprobs_missing"):
            reason = "fields_refused"
    turn_id = (turns or Turns(0)).name(
        raw.exchange_id,
        project=raw.project,
        session_key=raw.session_key,
        body=raw.request,
        retry_count=raw.retry_count,
        idempotency_key=raw.idempotency_key,
        ended_well=outcome == "ok" and raw.status == 200,
    )
    return Exchange(
        exchange_id=raw.exchange_id,
        surface=raw.surface,
        public_model=raw.public_model,
        adapter=raw.route.adapter,
        arm=raw.route.arm,
        propensity=raw.route.propensity,
        replica=raw.replica,
        session_key=raw.session_key,
        request=raw.request,
        choices=choices,
        prompt_token_ids=reply.prompt_token_ids,
        sampling=sampling,
        stream=raw.streamed or request.stream is True,
        status=raw.status,
        outcome=outcome,
        timings=_timings(raw, reply),
        untrainable_reason=reason,
        completion_tokens=reply.completion_tokens,
        trace_id=trace_id(raw.own_traceparent) or trace_id(raw.traceparent),
        project=raw.project,
        key_id=raw.key_id,
        returned_index=raw.returned_index,
        address_hash=raw.address_hash,
        user=raw.user,
        turn_id=turn_id,
        retry_count=raw.retry_count,
        fallback_from=raw.fallback_from,
        request_bytes=len(raw.request),
        reply_bytes=raw.reply_size,
    )


def _word(text: str | None) -> str | None:
    """Replace lone surrogates in a text of vLLM's; a record cannot hold them."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()


def trace_id(traceparent: str) -> str:
    """Return the trace id of a W3C `traceparent`, 32 hex digits; empty when it is invalid."""
    if len(traceparent) < 36 or not traceparent[2] == "-" == traceparent[35]:
        return ""
    found = traceparent[3:35]
    return "" if found == _NO_TRACE or found.strip(_HEX_DIGITS) else found


_HEX_DIGITS = "0123456789abcdef"
_NO_TRACE = "0" * 32


def _timings(raw: RawCapture, reply: ReadReply) -> Timings:
    """Return the timings with the mean time between tokens, where it can be computed.

    The answers of one stream grow side by side, so the longest one counts.
    """
    timings = raw.timings
    if not raw.streamed or timings.first_byte_s is None:
        return timings
    tokens = max((len(choice.token_ids) for choice in reply.choices.values()), default=0)
    if tokens == 0 and len(reply.choices) == 1:
        tokens = reply.completion_tokens or 0
    if tokens < 2:
        return timings
    return Timings(
        started_at=timings.started_at,
        queue_s=timings.queue_s,
        first_byte_s=timings.first_byte_s,
        per_token_s=max(0.0, timings.total_s - timings.first_byte_s) / (tokens - 1),
        total_s=timings.total_s,
        overhead_s=timings.overhead_s,
    )


def _read(raw: RawCapture, *, tools: bool) -> tuple[ReadReply, tuple[Choice, ...], bool]:
    """Return the reply, its choices, and whether the reply could be read.

    The readable part of a cut or failed reply is kept.
    """
    try:
        reply = read_reply(raw.surface, raw.reply or (), streamed=raw.streamed)
        choices = sorted(reply.choices.items())
        return reply, tuple(_choice(at, one, tools=tools) for at, one in choices), True
    except (UnreadableReplyError, RecursionError):  # RecursionError: nested too deeply
        return ReadReply(), (), False


def _choice(index: int, choice: ReadChoice, *, tools: bool) -> Choice:
    kept_back = withheld(choice) if tools else ""
    return Choice(
        index=index,
        message=message_json({**choice.message, WITHHELD: kept_back}),
        finish_reason=_word(choice.finish_reason),
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
    )


class _Request(msgspec.Struct, gc=False):
    """The sampling parameters of a request. `_sampling` checks the type of each."""

    stream: object = None
    temperature: object = None
    top_p: object = None
    min_p: object = None
    top_k: object = None
    presence_penalty: object = None
    frequency_penalty: object = None
    repetition_penalty: object = None
    seed: object = None
    max_tokens: object = None
    max_completion_tokens: object = None
    max_output_tokens: object = None
    tools: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def offers_tools(self) -> bool:
        return bytes(self.tools) not in (b"null", b"[]")


_REQUEST = msgspec.json.Decoder(_Request)
_TOO_LARGE = 2**63
"""MessagePack and the stores hold no such integer."""
_UNREADABLE = _Request(temperature="unreadable")
"""Stands for JSON that msgspec refuses and Python's json accepts, such as NaN."""


def _request(body: bytes) -> _Request:
    try:
        return _REQUEST.decode(body)
    except UNREADABLE_JSON:
        return _UNREADABLE


def _sampling(request: _Request, surface: Surface) -> tuple[Sampling, bool]:
    """Return the sampling parameters, and whether all of them could be read.

    vLLM accepts some values in other types too ("0.7"). Those count as unreadable.
    """
    known = True

    def count(value: object) -> int | None:
        nonlocal known
        if value is None or (type(value) is int and abs(value) < _TOO_LARGE):
            return value
        known = False
        return None

    def number(value: object) -> float | None:
        return value if type(value) is float else count(value)

    limit = request.max_tokens
    if surface == "responses":
        limit = request.max_output_tokens
    elif request.max_completion_tokens is not None:  # as in vLLM, the newer name wins
        limit = request.max_completion_tokens
    sampling = Sampling(
        temperature=number(request.temperature),
        top_p=number(request.top_p),
        top_k=count(request.top_k),
        min_p=number(request.min_p),
        presence_penalty=number(request.presence_penalty),
        frequency_penalty=number(request.frequency_penalty),
        repetition_penalty=number(request.repetition_penalty),
        seed=count(request.seed),
        max_tokens=count(limit),
    )
    return sampling, known

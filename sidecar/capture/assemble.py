"""Build an `Exchange` from a relayed request and its reply. Pure; runs off the request path.

An exchange that lacks what training needs, or contradicts itself, is still kept for sessions and
feedback. `untrainable_reason` says why it must not be trained on.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import UNSET

from sidecar.errors import UNREADABLE_JSON
from sidecar.records import (
    Choice,
    Exchange,
    Outcome,
    RawCapture,
    SampledFields,
    Sampling,
    Surface,
    Timings,
    Value,
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
        self._names: dict[_Same, str] = {}
        """What a retry shares with its original -> the name of their turn."""

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
        ended_well: the client received a complete, successful reply, as far as the relay knows."""
        if idempotency_key:
            return f"key-{_digest(project, idempotency_key, body)}"
        same = (hash(body), len(body), session_key, project)
        if retry_count <= 0 and ended_well:
            # Keep the entry of a failed original whose retry has not come yet.
            if not self._names.get(same, "").startswith(_SHARED):
                self._remember(same, exchange_id)
            return exchange_id
        # Digested for these few only: it takes as long as to relay a long body.
        shared = _SHARED + _digest(project, session_key, body)
        if retry_count <= 0:
            self._remember(same, shared)
            return shared
        name = self._names.get(same, shared)
        if ended_well:
            self._names.pop(same, None)
        return name

    def _remember(self, same: _Same, name: str) -> None:
        self._names.pop(same, None)
        self._names[same] = name
        if len(self._names) > self._remembered:
            del self._names[next(iter(self._names))]


_Same = tuple[int, int, str, str]  # hash and length of the body, session key, project
_SHARED = "try-"  # begins a name that all processes give alike


def _digest(project: str, scope: str, body: bytes) -> str:
    digest = hashlib.blake2b(body, digest_size=12)
    digest.update(f"\x00{len(scope)}:{scope}\x00{project}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def assemble(raw: RawCapture, turns: Turns | None = None) -> Exchange:
    """Build an exchange. Never raises for what a client or vLLM sent; `untrainable_reason` names
    it. raw: a capture that has a reply. turns: remembers the originals of retries, the only state
    used here."""
    try:
        fields = raw.fields or _FIELDS.decode(raw.request)
    except UNREADABLE_JSON:
        fields = _UNREADABLE
    tools = _json(fields.tools) not in (b"null", b"[]")
    sampling, sampling_known = _sampling(fields, raw.surface)
    reply, choices, readable = _read(raw, tools=tools)
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
        reason = untrainable(reply, raw.surface, asked, tools=tools)
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
        prompt_ids=reply.prompt_ids,
        sampling=sampling,
        stream=raw.streamed or _json(fields.stream) == b"true",
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
        task=raw.task,
        origin=raw.origin,
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
    """Return the timings with the mean time between tokens, where it can be computed. The answers
    of one stream grow side by side, so the longest one counts."""
    timings = raw.timings
    if not raw.streamed or timings.first_byte_s is None:
        return timings
    tokens = max((len(choice.token_ids) for choice in reply.choices.values()), default=0)
    if tokens == 0 and len(reply.choices) == 1:
        tokens = reply.completion_tokens or 0
    if tokens < 2:
        return timings
    per_token_s = max(0.0, timings.total_s - timings.first_byte_s) / (tokens - 1)
    return msgspec.structs.replace(timings, per_token_s=per_token_s)


def _read(raw: RawCapture, *, tools: bool) -> tuple[ReadReply, tuple[Choice, ...], bool]:
    """Return the reply, its choices, and whether the reply could be read. The readable part of a
    cut or failed reply is kept."""
    try:
        reply = read_reply(raw.surface, raw.reply or (), streamed=raw.streamed)
        choices = sorted(reply.choices.items())
        return reply, tuple(_choice(at, one, tools=tools) for at, one in choices), True
    except (UnreadableReplyError, RecursionError):  # RecursionError: nested too deeply
        return ReadReply(), (), False


def _choice(index: int, choice: ReadChoice, *, tools: bool) -> Choice:
    message = choice.message
    if tools and (kept_back := withheld(choice)):
        message = {**message, WITHHELD: kept_back}
    return Choice(
        index=index,
        message=message_json(message),
        finish_reason=_word(choice.finish_reason),
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
    )


_FIELDS = msgspec.json.Decoder(SampledFields)
_VALUE = msgspec.json.Decoder()
_TOO_LARGE = 2**63
"""MessagePack and the stores hold no such integer."""
_UNREADABLE = SampledFields(temperature=msgspec.Raw(b'"unreadable"'))
"""Stands for JSON that msgspec refuses and Python's json accepts, such as NaN."""


def _json(value: Value) -> bytes:
    return b"null" if value is UNSET else bytes(value)


def _sampling(fields: SampledFields, surface: Surface) -> tuple[Sampling, bool]:
    """Return the sampling parameters, and whether all of them could be read. vLLM accepts some
    values in other types too ("0.7"). Those count as unreadable."""
    known = True

    def number(value: Value, kinds: tuple[type, ...] = (int, float)) -> Any:
        nonlocal known
        try:
            read = None if value is UNSET else _VALUE.decode(value)
        except UNREADABLE_JSON:
            read = ""
        if read is None or (
            type(read) in kinds and (type(read) is float or abs(read) < _TOO_LARGE)
        ):
            return read
        known = False
        return None

    limit = fields.max_tokens
    if surface == "responses":
        limit = fields.max_output_tokens
    elif _json(fields.max_completion_tokens) != b"null":  # as in vLLM, the newer name wins
        limit = fields.max_completion_tokens
    sampling = Sampling(
        temperature=number(fields.temperature),
        top_p=number(fields.top_p),
        top_k=number(fields.top_k, (int,)),
        min_p=number(fields.min_p),
        presence_penalty=number(fields.presence_penalty),
        frequency_penalty=number(fields.frequency_penalty),
        repetition_penalty=number(fields.repetition_penalty),
        seed=number(fields.seed, (int,)),
        max_tokens=number(limit, (int,)),
    )
    return sampling, known

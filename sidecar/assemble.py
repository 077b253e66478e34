"""Turn what the relay saw of a request into an `Exchange`. Pure; runs off the path.

An exchange from which anything needed for learning is missing or contradicts itself is still kept:
it serves sessions and feedback. `untrainable_reason` says why it must not be learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sidecar.records import Choice, Exchange, Outcome, Sampling, Timings
from sidecar.reply_reading import (
    ReadReply,
    UnreadableReplyError,
    message_json,
    read_stream,
    read_whole,
)
from sidecar.routing import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class RawCapture:
    """relay -> capture. One finished chat request, nothing of it parsed."""

    exchange_id: str
    public_model: str
    route: Assignment
    """The route that answered."""
    replica: str
    session_key: str
    user: str
    request: bytes
    reply: tuple[bytes, ...] | None
    """The reply's body as vLLM sent it, cut anywhere; None: only the span is wanted."""
    streamed: bool
    """The reply is a stream of events; a request for one may still be refused in one piece."""
    status: int
    """0 when the client left before vLLM's reply began."""
    outcome: Outcome
    timings: Timings
    traceparent: str = ""

    @property
    def size(self) -> int:
        """Bytes that it holds in memory."""
        return len(self.request) + sum(map(len, self.reply or ()))


def assemble(raw: RawCapture) -> Exchange:
    """Read a capture. Never raises for what a client or vLLM sent: it says what is wrong instead.

    raw: with a reply.
    """
    request = _request(raw.request)
    sampling, sampling_known = _sampling(request)
    reply, readable = _read(raw)
    choices = tuple(
        Choice(
            index=index,
            message=message_json(choice.message),
            finish_reason=choice.finish_reason,
            token_ids=tuple(choice.token_ids),
            logprobs=tuple(choice.logprobs),
        )
        for index, choice in sorted(reply.choices.items())
    )
    outcome: Outcome = "upstream_error" if reply.error is not None else raw.outcome
    reason: str | None
    if outcome != "ok":
        reason = outcome
    elif not readable:
        reason = "unreadable_reply"
    elif not sampling_known:
        reason = "unreadable_sampling"
    else:
        reason = _wrong(reply, choices, raw.route.upstream_model)
    return Exchange(
        exchange_id=raw.exchange_id,
        surface="chat",
        public_model=raw.public_model,
        adapter=raw.route.adapter,
        arm=raw.route.arm,
        propensity=raw.route.propensity,
        replica=raw.replica,
        session_key=raw.session_key,
        request=raw.request,
        choices=choices,
        prompt_token_ids=tuple(reply.prompt_token_ids),
        sampling=sampling,
        stream=raw.streamed or request.get("stream") is True,
        status=raw.status,
        outcome=outcome,
        timings=raw.timings,
        untrainable_reason=reason,
        completion_tokens=reply.completion_tokens,
        user=raw.user,
    )


def _wrong(reply: ReadReply, choices: tuple[Choice, ...], asked: str) -> str | None:
    """Why a reply that reached its end cannot be learned from, or None."""
    if not choices:
        return "no_choices"
    if not reply.ended:
        return "stream_incomplete"
    if reply.models != {asked}:
        return "model_mismatch"
    if not reply.prompt_token_ids or not all(choice.token_ids for choice in choices):
        return "ids_missing"
    if not all(choice.logprobs for choice in choices):
        return "logprobs_missing"
    sampled = sum(len(choice.token_ids) for choice in choices)
    paired = all(len(choice.token_ids) == len(choice.logprobs) for choice in choices)
    if not paired or reply.completion_tokens not in (None, sampled):
        return "count_mismatch"
    return None


def _read(raw: RawCapture) -> tuple[ReadReply, bool]:
    """The reply and whether it could be read. What a cut or failed reply had is kept if it can."""
    chunks = raw.reply or ()
    try:
        return (read_stream(chunks) if raw.streamed else read_whole(b"".join(chunks))), True
    except UnreadableReplyError:
        return ReadReply(), False


def _request(body: bytes) -> Mapping[str, Any]:
    try:
        request = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {"temperature": "unreadable"}  # NaN and the like, which only Python's json takes
    return request if isinstance(request, dict) else {}


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_COUNTS = ("top_k", "seed")


def _sampling(request: Mapping[str, Any]) -> tuple[Sampling, bool]:
    """How vLLM was asked to sample, and whether all of it is known.

    vLLM takes some values in other types too ("0.7"); what was meant by those is not guessed.
    """
    values: dict[str, Any] = {name: request.get(name) for name in (*_NUMBERS, *_COUNTS)}
    # vLLM's own order: the newer name wins.
    newer = request.get("max_completion_tokens")
    values["max_tokens"] = newer if newer is not None else request.get("max_tokens")
    known = True
    for name, value in values.items():
        wanted = (int, float) if name in _NUMBERS else (int,)
        if value is not None and (isinstance(value, bool) or not isinstance(value, wanted)):
            values[name], known = None, False
    return Sampling(**values), known

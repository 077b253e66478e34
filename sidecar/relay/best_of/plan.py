"""Best of N, the request: is it allowed, is it useful, and what vLLM is asked. Pure.

vLLM is asked once, for N choices and not for a stream: one prompt, prefilled once. As in every
request, the body is never re-encoded; values are replaced at their place.
A request whose N answers would be equal, or that asks for something that needs exactly one answer,
is relayed unchanged, and the reason is counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from sidecar.errors import UNREADABLE_JSON
from sidecar.records import Surface
from sidecar.relay.payload.peek import RequestPeek
from sidecar.relay.payload.reply_edit import Strip
from sidecar.relay.payload.request_edit import (
    LOGPROBS,
    MODEL,
    STREAM_OPTIONS,
    TOKEN_IDS,
    edit_request,
)
from sidecar.relay.surface.refusals import Refusal, surface_error

BEST_OF_HEADER = b"x-sidecar-best-of"
LEAST, MOST = 2, 8
GREEDY_BELOW = 1e-5
"""vLLM's `_SAMPLING_EPS`: a lower temperature means greedy, and then it refuses `n` above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfPlan:
    """How vLLM is asked for N answers, and what the client sees of it."""

    n: int
    stream: bool
    """The client asked for a stream."""
    include_usage: bool
    continuous_usage: bool
    strip: Strip
    """What only the sidecar asks for."""
    peek: RequestPeek
    says_stream_options: bool

    def body_for(self, upstream_model: str) -> bytes:
        """The body to send to vLLM."""
        wanted = {
            MODEL: json.dumps(upstream_model).encode(),
            "n": b"%d" % self.n,
            "stream": b"false",
        }
        if self.says_stream_options:
            wanted[STREAM_OPTIONS] = b"null"
        if self.strip.token_ids:
            wanted[TOKEN_IDS] = b"true"
        if self.strip.logprobs:
            wanted[LOGPROBS] = b"true"
        return edit_request(self.peek.body, wanted)


class _Fields(msgspec.Struct):
    """Any: whatever JSON the client sent."""

    n: Any = None
    seed: Any = None
    temperature: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    stream: Any = None
    stream_options: Any = None


_FIELDS = msgspec.json.Decoder(_Fields)


def wanted_answers(header: str, *, limit: int) -> int | Refusal:
    """Read the request header. Returns: 2..8, or 1 when best of N is not asked for.

    header: its value; empty when it was not sent.
    limit: the most that this caller may ask for; 1 when best of N is off.
    """
    if header in ("", "1"):
        return 1
    n = int(header) if header.isascii() and header.isdigit() and len(header) < 4 else 0
    if not LEAST <= n <= MOST:
        return _refused(f"x-sidecar-best-of must be a whole number from {LEAST} to {MOST}.")
    if limit < LEAST:
        return _refused(
            "x-sidecar-best-of was sent, and best of N is off here. Leave the header out, or have "
            "it turned on ([best_of] enabled = true, and a limit above 1 for this key)."
        )
    if n > limit:
        return _refused(f"x-sidecar-best-of is {n}; at most {limit} is allowed here.")
    return n


def refuse_surface(header: str, target: bytes, surface: Surface) -> Refusal | None:
    """Refuse best of N on a path without it; None when the request does not ask for it."""
    if header in ("", "1"):
        return None
    path = target.partition(b"?")[0].decode("utf-8", "replace")
    return _refused(
        f"x-sidecar-best-of is not available on {path}, only on /v1/chat/completions. "
        "Leave the header out.",
        surface,
    )


def plan_best_of(peek: RequestPeek, n: int, *, captured: bool) -> BestOfPlan | str:
    """Plan a request, or say why it is relayed unchanged.

    captured: the exchange is recorded. Otherwise log-probabilities are not needed, and token ids
    only to count the returned answer's tokens.
    """
    if not peek.model_is_text:
        return "not_valid"
    try:
        fields = _FIELDS.decode(peek.body)
    except UNREADABLE_JSON:
        return "not_valid"  # NaN and the like: left to vLLM to refuse
    reason = _why_not(fields)
    if reason is not None:
        return reason
    options = fields.stream_options or {}
    include_usage = bool(options.get("include_usage"))
    return BestOfPlan(
        n=n,
        stream=fields.stream is True,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        strip=Strip(
            token_ids=peek.may_ask_token_ids("chat"),
            logprobs=captured and peek.may_ask_logprobs("chat"),
        ),
        peek=peek,
        says_stream_options=fields.stream_options is not None,
    )


def _why_not(fields: _Fields) -> str | None:
    if fields.n is not None and (isinstance(fields.n, bool) or fields.n != 1):
        return "n"
    if fields.seed is not None:
        return "seed"  # the client wants the same answer each time; a judge may choose another
    temperature = fields.temperature
    if isinstance(temperature, int | float) and temperature < GREEDY_BELOW:
        return "temperature_zero"
    if fields.use_beam_search:
        return "beam_search"  # there `n` is the width of the beam
    if fields.prompt_logprobs is not None:
        return "prompt_logprobs"
    # vLLM refuses what follows, and its own error must reach the client.
    if not isinstance(fields.stream, bool | None):
        return "not_valid"
    options = fields.stream_options
    if options is not None and (not isinstance(options, dict) or (options and not fields.stream)):
        return "not_valid"
    return None


def _refused(message: str, surface: Surface = "chat") -> Refusal:
    return surface_error(surface, 400, message, kind="BadRequestError", param="x-sidecar-best-of")

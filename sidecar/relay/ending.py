"""The accounts of a finished request: counters, the allowance, the hand-over to the capture."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

from sidecar.access import Admission
from sidecar.assemble import RawCapture
from sidecar.capture import Tee
from sidecar.records import Outcome, Timings
from sidecar.relay.client_request import ClientRequest
from sidecar.relay.context import RelayContext
from sidecar.relay.heads import IDEMPOTENCY_KEY, RETRY_COUNT, TRACEPARENT
from sidecar.relay.plan import Plan
from sidecar.relay.replicas import Replica
from sidecar.relay.reply_parser import ReplyHead
from sidecar.relay.usage import estimated_tokens, usage_tokens
from sidecar.routing import Assignment

CLIENT_LEFT = "499"
"""nginx's number for it; no such status is ever sent."""
LONGEST_KEY = 256
"""Of an `Idempotency-Key`; a longer one is cut."""


class Flown(Protocol):
    """A flight at its end. The four times without `_at` are on the monotonic clock, in seconds."""

    request: ClientRequest
    admission: Admission
    plan: Plan | None
    routes: tuple[Assignment, ...]
    """The first one answered."""
    replica: Replica | None
    head: ReplyHead | None
    tee: Tee | None
    exchange_id: str
    fallback_from: str
    """Adapter that vLLM did not know, when another answered for it."""
    returned_index: int
    """Which of vLLM's choices the client got."""
    own_traceparent: bytes
    started_at: float
    """Unix seconds."""
    began: float
    sent: float
    """0: it was never sent to vLLM."""
    first_byte: float
    """0: none came."""
    overhead_s: float
    metered_tail: bytes | None
    pieces: int
    """Reads in which the reply came."""


def settle(context: RelayContext, flown: Flown, outcome: Outcome, status: int) -> None:
    """Count a request and hand it to the capture. Cheap; never blocks or raises.

    status: vLLM's, or ours when vLLM gave none; 0 when the client left before.
    """
    metrics, head, plan = context.metrics, flown.head, flown.plan
    metrics.in_flight.dec()
    metrics.requests.inc((CLIENT_LEFT if outcome == "cut" else str(status),))
    streamed = head is not None and head.headers.streams
    if streamed:
        metrics.streams_open.dec()
    if plan is None:
        return
    if flown.metered_tail is not None:
        _charge(context, flown, status)
    ended, route, tee = perf_counter(), flown.routes[0], flown.tee
    metrics.duration.observe(ended - flown.began)
    metrics.overhead.observe(flown.overhead_s)
    if flown.first_byte and status == 200:
        metrics.ttft.observe(flown.first_byte - flown.began)
    metrics.exchanges.inc((outcome,))
    metrics.adapter_replies.inc((route.adapter, route.arm))
    reply, reply_bytes = None, 0
    if tee is None:
        metrics.captures_skipped.inc((plan.skip_reason or "",))
    else:
        reply_bytes = tee.size
        reply = _kept_reply(context, tee, status)
    if reply is None and not context.capture.traced:
        return
    headers = flown.request.headers
    context.capture.offer(
        RawCapture(
            exchange_id=flown.exchange_id,
            public_model=plan.public_model,
            route=route,
            replica=flown.replica.url if flown.replica is not None else "",
            session_key=plan.session_key,
            user=plan.user,
            request=plan.peek.body,
            reply=reply,
            streamed=streamed,
            status=status,
            outcome=outcome,
            timings=Timings(
                started_at=flown.started_at,
                queue_s=flown.sent - flown.began if flown.sent else None,
                first_byte_s=flown.first_byte - flown.began if flown.first_byte else None,
                total_s=ended - flown.began,
                overhead_s=flown.overhead_s,
            ),
            traceparent=headers.text(TRACEPARENT),
            own_traceparent=flown.own_traceparent.decode(),
            surface=plan.rule.surface,
            project=flown.admission.project,
            key_id=flown.admission.key_id,
            retry_count=_count(headers.text(RETRY_COUNT)),
            idempotency_key=headers.text(IDEMPOTENCY_KEY)[:LONGEST_KEY],
            fallback_from=flown.fallback_from,
            reply_bytes=reply_bytes,
            returned_index=flown.returned_index,
        )
    )


def _count(text: str) -> int:
    """A retry count as the client sent it; 0 when it is no small number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0


def _kept_reply(context: RelayContext, tee: Tee, status: int) -> tuple[bytes, ...] | None:
    """The chunks to record, or None when nothing is to be: then that is counted here."""
    if status not in (0, 200) and status < 500:
        tee.clear()
        context.metrics.captures_skipped.inc(("not_200",))
        return None
    if tee.lost_reason is not None:
        context.capture.lose(tee.lost_reason, 1)
        return None
    return tee.take()


def _charge(context: RelayContext, flown: Flown, status: int) -> None:
    tokens = usage_tokens(flown.metered_tail or b"")
    if tokens is None and status == 200:
        tokens = estimated_tokens(len(flown.request.body), flown.pieces)
    if tokens:
        context.access.charge(flown.admission, tokens, context.clock())

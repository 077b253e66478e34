"""Settle a finished request: counters, the key's allowance, the breaker, and the capture."""

from __future__ import annotations

from typing import Final

from sidecar.capture.reply_buffer import ReplyBuffer
from sidecar.records import Outcome, RawCapture, Timings
from sidecar.relay.flight.context import RelayContext
from sidecar.relay.flight.plan import Plan
from sidecar.relay.flight.record import FlightRecord
from sidecar.relay.http1.heads import IDEMPOTENCY_KEY, RETRY_COUNT, TRACEPARENT
from sidecar.relay.payload.reply_signs import ReplySigns
from sidecar.relay.payload.usage import UsageMeter
from sidecar.relay.upstream.own_fields import CAPTURE
from sidecar.routing.breaker import CUT, EMPTY, ERROR, SHORT, SLOW

LONGEST_KEY: Final = 256
"""Length in characters at which an `Idempotency-Key` is cut."""


def settle(
    context: RelayContext, record: FlightRecord, outcome: Outcome, status: int, ended: float
) -> None:
    """Count a request and hand it to the capture. Cheap; never blocks or raises.

    status: vLLM's, or the sidecar's when vLLM gave none; 0 when the client left before.
    ended: by `time.perf_counter()`.
    """
    accounts, plan = context.accounts, record.plan
    accounts.in_flight.dec()
    accounts.request(0 if outcome == "cut" else status)
    streamed = record.streamed
    if streamed:
        accounts.streams_open.dec()
    if plan is None:
        return
    if record.meter is not None:
        _charge(context, record, record.meter, outcome, status)
    route, reply_buffer = record.routes[0], record.reply_buffer
    accounts.duration.observe(ended - record.began)
    accounts.overhead.observe(record.overhead_s)
    if record.first_byte and status == 200:
        accounts.ttft.observe(record.first_byte - record.began)
    accounts.exchange(outcome, route)
    if record.signs is not None:
        _tell_breaker(context, record, plan, record.signs, outcome, status, ended)
    reply, reply_bytes = None, 0
    if reply_buffer is None:
        accounts.skipped(plan.skip_reason or "")
    else:
        reply_bytes = reply_buffer.size
        reply = _kept_reply(context, reply_buffer, status)
    if reply is None and not context.traced:
        return
    headers = record.request.head.headers
    context.capture.offer(
        RawCapture(
            exchange_id=record.exchange_id,
            public_model=plan.public_model,
            route=route,
            replica=record.replica.url if record.replica is not None else "",
            session_key=plan.session_key,
            user=plan.user,
            request=plan.peek.body,
            reply=reply,
            streamed=streamed,
            status=status,
            outcome=outcome,
            timings=Timings(
                started_at=record.started_at,
                queue_s=record.sent - record.began if record.sent else None,
                first_byte_s=record.first_byte - record.began if record.first_byte else None,
                total_s=ended - record.began,
                overhead_s=record.overhead_s,
            ),
            traceparent=headers.text(TRACEPARENT),
            own_traceparent=record.own_traceparent.decode(),
            surface=plan.rule.surface,
            project=record.admission.project,
            key_id=record.admission.key_id,
            retry_count=_count(headers.text(RETRY_COUNT)),
            idempotency_key=headers.text(IDEMPOTENCY_KEY)[:LONGEST_KEY],
            fallback_from=record.fallback_from,
            reply_bytes=reply_bytes,
            returned_index=record.returned_index,
            fields_refused=plan.kinds & CAPTURE != 0 and not record.added & CAPTURE,
        )
    )


def _count(text: str) -> int:
    """Read a client's retry count; 0 when it is not a small number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0


def _kept_reply(
    context: RelayContext, reply_buffer: ReplyBuffer, status: int
) -> tuple[bytes, ...] | None:
    """The chunks to record. None: nothing is recorded, and the reason is counted here."""
    if status not in (0, 200) and status < 500:
        reply_buffer.clear()
        context.accounts.skipped("not_200")
        return None
    if reply_buffer.lost_reason is not None:
        context.capture.lose(reply_buffer.lost_reason, 1)
        return None
    return reply_buffer.take()


def _tell_breaker(
    context: RelayContext,
    record: FlightRecord,
    plan: Plan,
    signs: ReplySigns,
    outcome: Outcome,
    status: int,
    ended: float,
) -> None:
    """Tell the breaker how well the session's arm answered.

    Left out, because they say nothing about the adapter: requests that reached no vLLM, those
    whose adapter vLLM did not know (control sees them), those that vLLM refused as the client's
    fault, and those that failed on both arms.
    """
    guard, session = context.guard_of(record.admission.project), plan.session_key
    if record.fell_back:
        if outcome != "upstream_error":
            guard.reply(plan.canary_tag, "canary", session, ERROR)
        return
    if not record.sent or record.fallback_from or 400 <= status < 500:
        return
    bad = 0
    if outcome == "upstream_error" or signs.failed:
        bad = ERROR
    elif outcome == "cut":
        bad = CUT
    elif record.looked_through and not signs.says_something:
        bad = EMPTY
    if signs.cut_short:
        bad |= SHORT
    if not signs.slow and (record.first_byte or ended) - record.sent > context.slow_first_byte_s:
        bad |= SLOW
    if bad or not signs.slow:
        guard.reply(plan.canary_tag, record.routes[0].arm, session, bad, counted=signs.slow)


def _charge(
    context: RelayContext, record: FlightRecord, meter: UsageMeter, outcome: Outcome, status: int
) -> None:
    """Charge the key for the tokens that vLLM reported, or for a lower bound of them.

    A client that leaves before vLLM's head has still had its prompt read. A request that vLLM
    refused, or that failed before vLLM's head, costs nothing.
    """
    tokens = meter.told if outcome == "ok" else None
    if tokens is None and (status == 200 or (status == 0 and record.sent)):
        tokens = meter.at_least(len(record.request.body), record.pieces)
    if tokens:
        context.access.charge(record.admission, tokens, context.clock())

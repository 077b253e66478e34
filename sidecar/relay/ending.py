"""The accounts of a finished chat request: metrics, and the hand-over to the capture."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.assemble import RawCapture
from sidecar.capture import Tee
from sidecar.records import Outcome, Timings
from sidecar.relay.context import RelayContext
from sidecar.relay.heads import Header, text_header
from sidecar.relay.plan import ChatPlan
from sidecar.routing import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a chat request ended."""

    exchange_id: str
    plan: ChatPlan
    route: Assignment
    replica: str
    status: int
    """vLLM's, or ours when vLLM gave none; 0 when the client left before."""
    outcome: Outcome
    timings: Timings
    streamed: bool
    request_headers: tuple[Header, ...]
    tee: Tee | None


def settle(context: RelayContext, ending: Ending) -> None:
    """Count the request and hand it to the capture. Cheap; never blocks or raises."""
    metrics, timings, route = context.metrics, ending.timings, ending.route
    metrics.duration.observe(timings.total_s)
    metrics.overhead.observe(timings.overhead_s)
    if timings.first_byte_s is not None and ending.status == 200:
        metrics.ttft.observe(timings.first_byte_s)
    metrics.exchanges.labels(ending.outcome).inc()
    metrics.adapter_replies.labels(route.adapter, route.arm).inc()
    context.capture.offer(
        RawCapture(
            exchange_id=ending.exchange_id,
            public_model=ending.plan.public_model,
            route=route,
            replica=ending.replica,
            session_key=ending.plan.session_key,
            user=ending.plan.user,
            request=ending.plan.view.body,
            reply=_kept_reply(context, ending),
            streamed=ending.streamed,
            status=ending.status,
            outcome=ending.outcome,
            timings=timings,
            traceparent=text_header(ending.request_headers, b"traceparent"),
        )
    )


def _kept_reply(context: RelayContext, ending: Ending) -> tuple[bytes, ...] | None:
    """The chunks to record, or None when nothing is to be: then that is counted here."""
    tee = ending.tee
    if tee is None:
        context.metrics.captures_skipped.labels(ending.plan.skip_reason or "").inc()
        return None
    if ending.status not in (0, 200) and ending.status < 500:
        tee.clear()
        context.metrics.captures_skipped.labels("not_200").inc()
        return None
    if tee.lost_reason is not None:
        context.capture.lose(tee.lost_reason, 1)
        return None
    return tee.take()

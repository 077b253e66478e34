"""Turn a received request into a flight, or refuse it.

Access control, sampling, routing and best of N meet here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sidecar.access.admission import ADAPTER, Admission
from sidecar.access.denials import Denial
from sidecar.records import Assignment, Surface
from sidecar.relay.best_of.exchange import BestOf
from sidecar.relay.best_of.plan import (
    BEST_OF_HEADER,
    plan_best_of,
    refuse_surface,
    wanted_answers,
)
from sidecar.relay.flight.client_request import ClientRequest, RequestHead
from sidecar.relay.flight.context import RelayContext
from sidecar.relay.flight.flight import Flight
from sidecar.relay.flight.plan import Circumstances, Plan, plan_request
from sidecar.relay.flight.record import FlightRecord
from sidecar.relay.ports import ClientSide
from sidecar.relay.surface.paths import Destination
from sidecar.relay.surface.refusals import (
    Refusal,
    bodies_full,
    denied,
    feedback_too_large,
    no_such_path,
    takes_no_body,
    too_busy,
    unknown_adapter,
    with_limits,
)
from sidecar.relay.surface.surfaces import SurfaceRule
from sidecar.routing.assignment import CompiledRouting, pinned_assignment

CAPTURE_HEADER: Final = b"x-sidecar-capture"
OWN_PATHS: Final = b"/sidecar/"
"""Where the paths of the sidecar's own API begin that need a key."""
NOBODY: Final = Admission()
"""For the sidecar's own application, which needs no key."""


def admit(context: RelayContext, head: RequestHead) -> Admission | Refusal:
    """Check the caller's key and count the request against its limits, once per request.

    Called when the head is complete, so that a slowly sent body counts too."""
    if head.where is Destination.NOWHERE:
        return no_such_path(head.target)
    if not _asks_for_key(head):
        return NOBODY
    answer = context.access.admit(head.credentials, context.clock())
    return denied(answer, _surface(head.where)) if isinstance(answer, Denial) else answer


def reject(head: RequestHead, admitted: Admission | Refusal, *, long: bool) -> Refusal | None:
    """Refuse a request before its body is complete. None: the body may go on.

    long: the body is longer than a request without a prompt needs.
    """
    if isinstance(admitted, Refusal):
        return replace(admitted, close=True)
    if head.where is not Destination.APP or not long:
        return None
    return feedback_too_large() if head.target.startswith(OWN_PATHS) else takes_no_body()


def no_room(context: RelayContext, head: RequestHead, reason: str, *, close: bool) -> Refusal:
    """Refuse a body for which the worker has no memory. reason: label of the metric."""
    limit = context.bodies.limit
    context.metrics.bodies_refused.inc((reason,))
    context.rate_limited_log.warning("bodies_full", limit_bytes=limit, reason=reason)
    return replace(bodies_full(limit, _surface(head.where)), close=close)


def receive(
    context: RelayContext,
    client: ClientSide,
    request: ClientRequest,
    *,
    admitted: Admission | Refusal | None,
    keep_alive: bool,
    began: float,
) -> Flight | Refusal:
    """Create the flight of a complete request, or refuse it.

    admitted: what `admit` returned when the body came later than the head; None: not asked yet.
    began: when the last byte was here and no earlier request was in the way, by
    `time.perf_counter()`.
    """
    head = request.head
    where = head.where
    if isinstance(admitted, Refusal):
        return admitted
    if where is Destination.NOWHERE:
        return no_such_path(head.target)
    if where is not Destination.APP and context.busy:
        return too_busy(context.proxy.max_in_flight, _surface(where))
    if admitted is None:
        admitted = admit(context, head)
    elif _asks_for_key(head):
        # The key may have been revoked or have expired while the body came in.
        denial = context.access.reject(head.credentials, context.clock())
        if denial is not None:
            return denied(denial, _surface(where))
    if isinstance(admitted, Refusal):
        return admitted
    admission = admitted
    if not isinstance(where, SurfaceRule):
        replica = context.app
        if where is Destination.VLLM:
            replica = context.replicas.least_loaded(context.monotonic())
        record = FlightRecord(
            context, request, plan=None, admission=admission, began=began, replica=replica
        )
        return Flight(context, client, record, keep_alive=keep_alive)
    return _receive_model_request(context, client, request, where, admission, keep_alive, began)


def _asks_for_key(head: RequestHead) -> bool:
    return head.where is not Destination.APP or head.target.startswith((b"/v1/", OWN_PATHS))


def _surface(where: Destination | SurfaceRule) -> Surface:
    """The surface whose error format a refusal uses."""
    return where.surface if isinstance(where, SurfaceRule) else "chat"


def _receive_model_request(
    context: RelayContext,
    client: ClientSide,
    request: ClientRequest,
    rule: SurfaceRule,
    admission: Admission,
    keep_alive: bool,
    began: float,
) -> Flight | Refusal:
    head = request.head
    headers = head.headers
    routing = context.compiled_routing(admission.project)
    pinned = None
    if ADAPTER in headers.aside:  # a caller without that right was rejected
        named = _named_adapter(context, routing, headers.text(ADAPTER), rule.surface)
        if isinstance(named, Refusal):
            return named
        pinned = named
    skip_reason = context.sampling.skip_reason(
        surface=rule.surface,
        project=admission.project,
        header=headers.text(CAPTURE_HEADER),
    )
    allowance = admission.allowance
    plan = plan_request(
        rule,
        request.body,
        headers,
        Circumstances(
            routing,
            skip_reason,
            admission.project,
            admission.key_id,
            allowance is not None and allowance.tokens_per_day is not None,
            context.replicas.many or context.traced,
            pinned,
            known=context.sessions,
        ),
    )
    if isinstance(plan, Refusal):
        if plan.reason:
            context.metrics.bodies_unreadable.inc((plan.reason,))
            context.rate_limited_log.warning(
                "body_unreadable", reason=plan.reason, surface=rule.surface
            )
        else:
            context.metrics.models_unknown.inc()
        return with_limits(plan, admission.headers)
    n = 1
    if BEST_OF_HEADER in headers.aside:
        wanted = _wanted(context, admission, headers.text(BEST_OF_HEADER), rule, head.target)
        if isinstance(wanted, Refusal):
            return with_limits(wanted, admission.headers)
        n = wanted
    record = FlightRecord(context, request, plan=plan, admission=admission, began=began)
    best_of = _best_of(context, plan, n, record) if n > 1 else None
    return Flight(context, client, record, keep_alive=keep_alive, best_of=best_of)


def _best_of(context: RelayContext, plan: Plan, n: int, record: FlightRecord) -> BestOf | None:
    """Have the judge pick one of `n` answers. None: this process has no judge."""
    if context.picker is None:
        return None
    captured = plan.skip_reason is None
    return BestOf(
        plan_best_of(plan.peek, n, captured=captured),
        context.picker,
        context.metrics,
        exchange_id=record.exchange_id,
        request=plan.peek.body,
        keep=captured,
        project=record.admission.project,
        timeout_s=context.best_of.timeout_s,
    )


def _wanted(
    context: RelayContext, admission: Admission, header: str, rule: SurfaceRule, target: bytes
) -> int | Refusal:
    """How many answers to sample; the best one is returned."""
    if rule.surface != "chat":
        return refuse_surface(header, target, rule.surface) or 1
    limit = min(context.best_of.max_n, admission.best_of_max) if context.best_of.enabled else 1
    return wanted_answers(header, limit=limit)


def _named_adapter(
    context: RelayContext, routing: CompiledRouting, name: str, surface: Surface
) -> Assignment | Refusal:
    """The adapter that an operator asks for by name, version (`v12`) or role."""
    loaded = frozenset().union(*(replica.models or () for replica in context.replicas.all))
    pinned = pinned_assignment(routing.table, name, loaded)
    return pinned if pinned is not None else unknown_adapter(name, surface)

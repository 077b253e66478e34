"""Settle a finished request: counters, the key's allowance, the breaker, and the capture."""

from __future__ import annotations

from typing import Final

from sidecar.access.admission import Admission
from sidecar.capture.reply_buffer import ReplyBuffer
from sidecar.records import Assignment, Outcome, RawCapture, Timings
from sidecar.relay.context import ClientRequest, RelayContext
from sidecar.relay.heads import IDEMPOTENCY_KEY, RETRY_COUNT, TRACEPARENT
from sidecar.relay.plan import TASK_HEADER, Plan
from sidecar.relay.replicas import Replica
from sidecar.relay.reply_edit import STRIP_NOTHING, ReplySigns, Strip
from sidecar.relay.reply_parser import ReplyHead
from sidecar.relay.upstream import CAPTURE
from sidecar.relay.usage import UsageMeter
from sidecar.routing.breaker import CUT, EMPTY, ERROR, NO_CANARY, SHORT, SLOW

# The facts of one proxied request.


class FlightRecord:
    """Times are on the clock of `time.perf_counter()`, except `started_at`."""

    def __init__(
        self,
        context: RelayContext,
        request: ClientRequest,
        *,
        plan: Plan | None,
        admission: Admission,
        began: float,
        replica: Replica | None = None,
    ) -> None:
        """plan: None for a request that is passed on unchanged, to `replica`.
        began: when the request's last byte was here."""
        self.request = request
        self.plan = plan
        self.admission = admission
        self.began = began
        self.started_at = context.clock()
        """Unix seconds."""
        self.replica = replica
        """The one that is asked; None while the next one is chosen."""
        self.exchange_id = ""
        self.routes: tuple[Assignment, ...] = ()
        """The first one is asked; at the end it is the one that answered."""
        self.fallback_from = ""
        """Adapter that vLLM did not know, when another one answers for it."""
        self.fell_back = False
        """The canary failed before the first byte; the champion answers in its place."""
        self.added = 0
        """Kinds of additions that were sent (`OwnFields`)."""
        self.strip: Strip = STRIP_NOTHING
        """The reply fields that were asked for on the sidecar's account."""
        self.plainly = False
        """It is sent as the client sent it: it failed with additions."""
        self.refused = 0
        """The additions with which it failed, until the reply without them comes."""
        self.sent = 0.0
        """When the request was last sent; 0: never."""
        self.overhead_s = 0.0
        self.own_traceparent = b""
        self.returned_index = 0
        """Which of vLLM's choices the client gets."""
        self.signs: ReplySigns | None = None
        self.meter: UsageMeter | None = None
        """None: the key has no allowance of tokens."""
        self.reply_buffer: ReplyBuffer | None = None
        """None: the exchange is not captured."""
        if plan is not None:
            self.exchange_id = context.ids.new(self.started_at)
            self.routes = plan.routes
            if plan.canary_tag != NO_CANARY:
                self.signs = ReplySigns()
            if plan.skip_reason is None:
                self.reply_buffer = context.capture.reply_buffer()
            if plan.metered:
                self.meter = UsageMeter()
        self._await_reply()

    def _await_reply(self) -> None:
        self.head: ReplyHead | None = None
        self.streamed = False
        """vLLM's reply is a stream of events."""
        self.pieces = 0
        """Reads in which the reply's body came."""
        self.first_byte = 0.0
        """When the first byte of the reply's body came; 0: none came."""

    def forget_reply(self) -> None:
        """The reply that came is not the client's: another one will come."""
        if self.reply_buffer is not None:
            self.reply_buffer.clear()
        if self.signs is not None:
            self.signs = ReplySigns()
        if self.meter is not None:
            self.meter = UsageMeter()
        self._await_reply()

    @property
    def keeps(self) -> bool:
        return self.reply_buffer is not None or self.meter is not None

    def keep(self, data: bytes) -> None:
        """Take part of the reply's body, for the capture and for the key's allowance."""
        if self.reply_buffer is not None:
            self.reply_buffer.add(data)
        if self.meter is not None:
            self.meter.feed(data)


LONGEST_KEY: Final = 256
"""Length in characters at which an `Idempotency-Key` is cut."""


def settle(
    context: RelayContext, record: FlightRecord, outcome: Outcome, status: int, ended: float
) -> None:
    """Count a request and hand it to the capture. Cheap; never blocks or raises. status: vLLM's, or
    the sidecar's when vLLM gave none; 0 when the client left before. ended: by
    `time.perf_counter()`."""
    accounts, plan = context.accounts, record.plan
    accounts.in_flight.dec()
    streamed = record.streamed
    if streamed:
        accounts.streams_open.dec()
    rehearsed = record.admission.rehearsed_by != ""
    if not rehearsed:
        accounts.request(0 if outcome == "cut" else status)
    if plan is None:
        return
    route, reply_buffer = record.routes[0], record.reply_buffer
    if rehearsed:  # no user's: nothing that is measured of users counts it
        context.metrics.rehearsal_requests.inc((outcome,))
    else:
        if record.meter is not None:
            _charge(context, record, record.meter, outcome, status)
        accounts.duration.observe(ended - record.began)
        accounts.overhead.observe(record.overhead_s)
        if record.first_byte and status == 200:
            accounts.ttft.observe(record.first_byte - record.began)
        accounts.exchange(outcome, route)
        if record.signs is not None:
            _tell_breaker(context, record, plan, record.signs, outcome, status, ended)
    reply: tuple[bytes, ...] | None = None
    reply_bytes = 0
    if reply_buffer is None:
        accounts.skipped(plan.skip_reason or "")
    else:
        reply_bytes = reply_buffer.size
        if status not in (0, 200) and status < 500:
            reply_buffer.clear()
            accounts.skipped("not_200")
        elif reply_buffer.lost_reason is not None:
            context.capture.lose(reply_buffer.lost_reason, 1)
        else:
            reply = reply_buffer.take()
    if reply is None and not context.traced:
        return
    headers = record.request.head.headers
    retries = headers.text(RETRY_COUNT)
    is_count = retries.isascii() and retries.isdigit() and len(retries) < 5
    context.capture.offer(
        RawCapture(
            exchange_id=record.exchange_id,
            public_model=plan.public_model,
            route=route,
            replica=record.replica.url if record.replica is not None else "",
            session_key=plan.session_key,
            user=plan.user,
            request=plan.peek.body,
            fields=plan.peek.fields,
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
            retry_count=int(retries) if is_count else 0,
            idempotency_key=headers.text(IDEMPOTENCY_KEY)[:LONGEST_KEY],
            fallback_from=record.fallback_from,
            reply_bytes=reply_bytes,
            returned_index=record.returned_index,
            fields_refused=plan.kinds & CAPTURE != 0 and not record.added & CAPTURE,
            address_hash=plan.address_hash,
            task=headers.text(TASK_HEADER),
            origin="rehearsal" if rehearsed else "user",
        )
    )


def _tell_breaker(
    context: RelayContext,
    record: FlightRecord,
    plan: Plan,
    signs: ReplySigns,
    outcome: Outcome,
    status: int,
    ended: float,
) -> None:
    """Tell the breaker how well the session's arm answered. Left out, because they say nothing of
    the adapter: requests that reached no vLLM, or whose adapter it did not know (control sees
    them), those that it refused as the client's fault, and those that failed on both arms."""
    guard, session = context.guard_of(record.admission.project), plan.session_key
    caller = record.admission.key_id or plan.address_hash
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
    elif record.head is not None and not record.head.headers.encoded and not signs.says_something:
        bad = EMPTY
    if signs.cut_short:
        bad |= SHORT
    if not signs.slow and (record.first_byte or ended) - record.sent > context.slow_first_byte_s:
        bad |= SLOW
    if bad or not signs.slow:
        arm = record.routes[0].arm
        guard.reply(plan.canary_tag, arm, session, bad, caller=caller, counted=signs.slow)


def _charge(
    context: RelayContext, record: FlightRecord, meter: UsageMeter, outcome: Outcome, status: int
) -> None:
    """Charge the key for the tokens that vLLM reported, or for a lower bound of them. A client that
    leaves before vLLM's head has still had its prompt read. A request that vLLM refused, or that
    failed before vLLM's head, costs nothing."""
    tokens = meter.told if outcome == "ok" else None
    if tokens is None and (status == 200 or (status == 0 and record.sent)):
        tokens = meter.at_least(len(record.request.body), record.pieces)
    if tokens:
        context.access.charge(record.admission, tokens, context.clock())

"""The facts of one proxied request.

`Flight` and `UpstreamAttempt` fill them in; `settle` reads them when the request is over.
"""

from __future__ import annotations

from sidecar.access.admission import Admission
from sidecar.capture.reply_buffer import ReplyBuffer
from sidecar.records import Assignment
from sidecar.relay.flight.client_request import ClientRequest
from sidecar.relay.flight.context import RelayContext
from sidecar.relay.flight.plan import Plan
from sidecar.relay.http1.reply_parser import ReplyHead
from sidecar.relay.payload.reply_edit import STRIP_NOTHING, Strip
from sidecar.relay.payload.reply_signs import ReplySigns
from sidecar.relay.payload.usage import UsageMeter
from sidecar.relay.upstream.replicas import Replica
from sidecar.routing.breaker import NO_CANARY


class FlightRecord:
    """Times are on the clock of `time.perf_counter()`, except `started_at`."""

    __slots__ = (
        "added",
        "admission",
        "began",
        "exchange_id",
        "fallback_from",
        "fell_back",
        "first_byte",
        "head",
        "meter",
        "overhead_s",
        "own_traceparent",
        "pieces",
        "plainly",
        "plan",
        "refused",
        "replica",
        "reply_buffer",
        "request",
        "returned_index",
        "routes",
        "sent",
        "signs",
        "started_at",
        "streamed",
        "strip",
    )

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
        """Kinds of additions that were sent (`own_fields`)."""
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
        """`keep` wants to see the reply's body."""
        return self.reply_buffer is not None or self.meter is not None

    def keep(self, data: bytes) -> None:
        """Take part of the reply's body, for the capture and for the key's allowance."""
        if self.reply_buffer is not None:
            self.reply_buffer.add(data)
        if self.meter is not None:
            self.meter.feed(data)

    @property
    def looked_through(self) -> bool:
        """The reply's text could be read as it passed."""
        return self.head is not None and not self.head.headers.encoded

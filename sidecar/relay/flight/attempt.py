"""The outward half of a flight: who is asked, over which connection, and with what.

What may be tried again here was never sent: a replica that cannot be reached. Everything that has
to do with a reply is `flight.py`'s.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from sidecar.access.admission import Admission, Keep
from sidecar.errors import UpstreamError
from sidecar.records import Assignment
from sidecar.relay.flight.client_request import ClientRequest, SentHead
from sidecar.relay.flight.context import RelayContext
from sidecar.relay.flight.plan import Plan
from sidecar.relay.http1.heads import TRACEPARENT, lines_on_demand, request_lines
from sidecar.relay.http1.reply_parser import ReplyReader
from sidecar.relay.payload.reply_edit import STRIP_NOTHING
from sidecar.relay.payload.request_edit import PiecedBody
from sidecar.relay.upstream.connection import SendingConnection
from sidecar.relay.upstream.replicas import Replica

_now: Final = perf_counter


class Outbound(ReplyReader):
    """A request that is to be sent, and sent again. `Flight` is what it becomes."""

    __slots__ = (
        "_connecting",
        "_connection",
        "_context",
        "_done",
        "_retried",
        "_strip",
        "_tried",
        "_without",
        "_working_since",
        "admission",
        "began",
        "exchange_id",
        "fallback_from",
        "overhead_s",
        "own_traceparent",
        "plan",
        "replica",
        "request",
        "routes",
        "sent",
        "started_at",
    )

    def __init__(
        self,
        context: RelayContext,
        request: ClientRequest,
        *,
        plan: Plan | None,
        admission: Admission,
        replica: Replica | None,
        began: float,
    ) -> None:
        """plan: None for what is passed on as it came. replica: who answers; None: one of all that
        can. began: when its last byte was here, by `time.perf_counter()`."""
        self._context = context
        self.request = request
        self.plan = plan
        self.admission = admission
        self.replica = replica
        self._connection: SendingConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retried = self._done = False
        self._tried: list[Replica] = []
        self._without: tuple[Replica, ...] = ()
        """Those of them that do not know the adapter."""
        self.overhead_s = 0.0
        self.sent = 0.0
        """On the monotonic clock; 0: it was never sent."""
        self.fallback_from = ""
        """Adapter that vLLM did not know, when another answers for it."""
        self.own_traceparent = b""
        self.began = self._working_since = began
        self.started_at = context.clock()
        """Unix seconds."""
        self.exchange_id = ""
        self.routes: tuple[Assignment, ...] = ()
        """The first one is asked; it answered when all is over."""
        self._strip = STRIP_NOTHING
        if plan is not None:
            self.exchange_id = context.ids.new(self.started_at)
            self.routes = plan.routes
            self._strip = plan.strip

    def start(self) -> None:
        self._context.accounts.in_flight.inc()
        if self.replica is not None:
            self.replica.in_flight += 1
            self._send(self.replica, reuse=True)
        else:
            self._send_to_a_replica()

    def _send_to_a_replica(self) -> None:
        """Choose who answers, and send. Nobody is left only when somebody was tried."""
        plan, context = self.plan, self._context
        assert plan is not None, "only planned requests have a choice of replicas"
        replicas = context.replicas
        now = context.monotonic() if replicas.many else 0.0
        replica = replicas.choose(self.routes[0].upstream_model, plan.session_key, self._tried, now)
        if replica is None:
            self._give_up("no other replica is left")
            return
        self.replica = replica
        replica.in_flight += 1
        self._send(replica, reuse=True)

    def _send(self, replica: Replica, *, reuse: bool) -> None:
        connection = replica.pool.take_idle() if reuse else None
        if connection is not None:
            self._send_on(connection, replica)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(replica))

    async def _connect(self, replica: Replica) -> None:
        try:
            connection = await replica.pool.connect()
        except UpstreamError as error:
            if not self._done:
                self._unreachable(replica, str(error))
            return
        if self._done:  # the client left meanwhile; the next one will be glad of it
            replica.pool.give_back(connection)
        elif connection.usable:
            self._send_on(connection, replica)
        else:
            self._unreachable(replica, "the connection was closed as soon as it was open")

    def _unreachable(self, replica: Replica, why: str) -> None:
        """Nothing was sent, so somebody else may be asked."""
        self._count_failure(replica, why)
        context = self._context
        if self.plan is not None and len(self._tried) + 1 < len(context.replicas.all):
            self._tried.append(replica)
            replica.in_flight -= 1
            self.replica = None
            context.metrics.upstream_failovers.inc()
            self._send_to_a_replica()
        elif self._without:
            # Who has the adapter cannot be reached; who can be has another one.
            replica.in_flight -= 1
            self.replica = None
            self._next_adapter(reachable=self._without)
            self._send_to_a_replica()
        else:
            self._give_up(why)

    def _next_adapter(self, *, reachable: Sequence[Replica] = ()) -> None:
        """Nobody can answer with the first one. reachable: no others are asked for the next."""
        self.fallback_from = self.fallback_from or self.routes[0].adapter
        self.routes = self.routes[1:]
        everybody = self._context.replicas.all if reachable else ()
        self._tried = [replica for replica in everybody if replica not in reachable]
        self._without = ()

    def _count_failure(self, replica: Replica, why: str) -> None:
        context = self._context
        if replica.failed(context.monotonic()):
            context.metrics.replica_ejections.inc((replica.url,))
            context.rate_limited_log.warning("replica_ejected", url=replica.url, why=why)

    def _send_on(self, connection: SendingConnection, replica: Replica) -> None:
        body = self._body_to_send()
        length = len(body) if isinstance(body, bytes) else body.length
        head = self._head_to_send(replica, length)
        self._connection = connection
        connection.send(self, head, body, head_only=self.request.head.head_only)
        self.sent = now = _now()
        self.overhead_s += now - self._working_since

    def _body_to_send(self) -> bytes | PiecedBody:
        return self.request.body if self.plan is None else self.plan.body_for(self.routes[0])

    def _may_compress(self) -> bool:
        """A compressed reply could not be edited, nor its usage be read: then none is asked for."""
        return self._strip.nothing and (self.plan is None or not self.plan.metered)

    def _head_to_send(self, replica: Replica, length: int) -> bytes:
        """The head for a body of `length`. Made once for a head that comes again and again: only
        a trace's name differs between two of them."""
        context, head = self._context, self.request.head
        instead, encoding = self.admission.replace_authorization, self._may_compress()
        if length == 0 and head.method != b"POST":
            return b"%b\r\n\r\n" % self._head_lines(replica, instead, encoding, None)
        if self.plan is not None and context.outgoing_trace is not None:
            came = head.headers.aside.get(TRACEPARENT)
            own = self.own_traceparent = context.outgoing_trace(came)
            lines = self._head_lines(replica, instead, encoding, own)
            return b"%b\r\nContent-Length: %d\r\n\r\n" % (lines, length)
        sent = head.sent
        if sent is None or not sent.serves(replica, instead, encoding):
            lines = self._head_lines(replica, instead, encoding, None)
            sent = head.sent = SentHead(replica, instead, encoding, lines + b"\r\nContent-Length: ")
        return b"%b%d\r\n\r\n" % (sent.up_to_length, length)

    def _head_lines(
        self, replica: Replica, instead: bytes | Keep | None, encoding: bool, own: bytes | None
    ) -> bytes:
        head, where = self.request.head, replica.pool.endpoint
        authorization = None if isinstance(instead, Keep) else instead or b""
        aside = head.headers.aside
        return request_lines(
            head.method,
            where.prefix + head.target if where.prefix else head.target,
            head.headers.lines,
            host=where.authority,
            sent_on_demand=lines_on_demand(
                aside, authorization, encoding=encoding, traceparent=own
            ),
        )

    @abstractmethod
    def _give_up(self, why: str, status: int = 502) -> None:
        """Nobody will answer."""

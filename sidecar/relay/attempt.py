"""The upstream side of a proxied request: which replica is asked, on which connection, with what.

This module retries by itself only what was never sent: a replica that cannot be reached. `Flight`
decides about everything that has to do with a reply, and says here what to try next.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Final

from sidecar.access.admission import Keep
from sidecar.access.denials import AUTHORIZATION, OWN_KEY_ID, OWN_PROJECT, OWN_USER, X_API_KEY
from sidecar.errors import OutOfFilesError, UpstreamError
from sidecar.relay.best_of import BestOf, BestOfConnection
from sidecar.relay.context import RelayContext, SentHead
from sidecar.relay.ending import FlightRecord
from sidecar.relay.heads import ACCEPT_ENCODING, TRACEPARENT, request_lines
from sidecar.relay.replicas import Replica
from sidecar.relay.reply_edit import STRIP_NOTHING
from sidecar.relay.reply_parser import ReplyReader
from sidecar.relay.request_edit import PiecedBody
from sidecar.relay.upstream import CAPTURE, KINDS, TRACE, USAGE, SendingConnection

_now: Final = perf_counter


class Asker(ReplyReader):
    """Reads the reply, or is told by `give_up` that none will come."""

    @abstractmethod
    def give_up(self, why: str, status: int = 502) -> None: ...


class UpstreamAttempt:
    """`start` it once, `end` it once."""

    def __init__(
        self, context: RelayContext, record: FlightRecord, asker: Asker, best_of: BestOf | None
    ) -> None:
        self._context = context
        self._record = record
        self._asker: Asker | None = asker
        """None: the request is over. (Reference counts alone free a request then.)"""
        self._best_of = best_of
        self._connection: SendingConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retried = False
        self._tried: list[Replica] = []
        self._without: tuple[Replica, ...] = ()
        """Those of them that do not know the adapter."""
        self._working_since = record.began

    @property
    def over(self) -> bool:
        return self._asker is None

    @property
    def last_replica(self) -> Replica:
        return self._record.replica or self._tried[-1]

    def start(self) -> None:
        replica = self._record.replica
        if replica is not None:
            replica.in_flight += 1
            self._send(replica, reuse=True)
        else:
            self._send_to_a_replica()

    def end(self) -> None:
        self._asker = self._connection = self._connecting = None
        if self._record.replica is not None:
            self._record.replica.in_flight -= 1

    # -- the connection that the reply comes on

    @property
    def awaits_reply(self) -> bool:
        """The request was sent, and its reply has not ended."""
        return self._connection is not None

    def reply_ended(self) -> None:
        self._connection = None  # it may carry another request now

    def abort(self) -> None:
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    # -- what to try next; since: when that became known

    def lost(self, *, may_be_stale: bool) -> bool:
        """The connection is gone. Returns: True when the request was sent once more. may_be_stale:
        nothing came, and the server may have closed the connection before."""
        self._connection = None
        if may_be_stale and not self._retried:
            self._retried = True
            self._context.metrics.upstream_retries.inc()
            self._working_since = _now()
            self._send(self._asked(), reuse=False)
            return True
        return False

    def broke_off(self, why: str) -> None:
        """The connection is gone, and the request is not sent to this replica again."""
        self._count_failure(self._asked(), why)

    def ask_again(self, since: float) -> None:
        self._working_since = since
        self._retried = False  # a reply came since
        self._send(self._asked(), reuse=True)

    def ask_where_loaded(self, since: float) -> None:
        """The replica does not know the adapter: another one that has it answers, or the next
        adapter does."""
        context, record, replica = self._context, self._record, self._asked()
        route = record.routes[0]
        context.metrics.adapter_missing.inc((route.adapter,))
        context.rate_limited_log.warning("adapter_missing", adapter=route.adapter, url=replica.url)
        replica.lacks(route.upstream_model)
        context.models_changed()
        self._leave(replica)
        self._tried.append(replica)
        self._without += (replica,)
        if not context.replicas.another_serves(route.upstream_model, self._tried):
            self._next_adapter()
        self._working_since = since
        self._send_to_a_replica()

    def ask_next_adapter(self, since: float) -> None:
        """The first adapter failed: the next one answers."""
        if self._record.replica is not None:
            self._leave(self._record.replica)
        self._retried = False
        self._next_adapter()
        self._working_since = since
        self._send_to_a_replica()

    # -- which of our own additions the replica takes

    def may_ask_plainly(self, status: int) -> bool:
        """The request failed. True if it had additions and is to be sent again without them."""
        context, record, replica = self._context, self._record, self._asked()
        if record.plainly:
            replica.fields.failed_plainly(status, context.monotonic())
        if not record.added:
            return False
        may = replica.fields.may_ask_plainly(status, context.monotonic())
        if not may:
            context.metrics.own_fields.inc((replica.url, "busy"))
        return may

    def ask_plainly(self, since: float, *, evidence: bool) -> None:
        """Send the request once more, as the client sent it. evidence: a success now tells against
        the additions; not where more than they was left out."""
        record = self._record
        record.refused = record.added if evidence else 0
        record.plainly = True
        self._context.metrics.own_fields.inc((self._asked().url, "asked_again"))
        self.ask_again(since)

    def note_reply(self, *, well: bool) -> None:
        """A reply ended. well: with no error in its status or its first event."""
        context, record, replica = self._context, self._record, self._record.replica
        if replica is None:
            return
        replica.answered()
        refused, record.refused = record.refused, 0
        if not well:
            return
        fields = replica.fields
        if record.added & fields.unproven and fields.took(record.added):
            context.rate_limited_log.warning("own_fields_taken", url=replica.url)
        if refused:
            context.metrics.own_fields.inc((replica.url, "refused"))
            left_out = fields.refuses(refused, context.monotonic())
            if left_out:
                context.rate_limited_log.warning(
                    "own_fields_refused", url=replica.url, fields=KINDS[left_out]
                )

    def _asked(self) -> Replica:
        replica = self._record.replica
        assert replica is not None, "it was asked"
        return replica

    def _leave(self, replica: Replica) -> None:
        replica.in_flight -= 1
        self._record.replica = None
        # What comes now is of another replica, or of another adapter.
        self._record.refused, self._record.plainly = 0, False

    def _send_to_a_replica(self) -> None:
        record, context = self._record, self._context
        plan, replicas = record.plan, context.replicas
        assert plan is not None, "only planned requests have a choice of replicas"
        now = context.monotonic() if replicas.many else 0.0
        model = record.routes[0].upstream_model
        replica = replicas.choose(model, plan.session_key, self._tried, now)
        if replica is None:
            self._give_up("no other replica is left")
            return
        record.replica = replica
        replica.in_flight += 1
        self._send(replica, reuse=True)

    def _give_up(self, why: str, status: int = 502) -> None:
        assert self._asker is not None, "the request is not over"
        self._asker.give_up(why, status)

    def _unreachable(self, replica: Replica, why: str) -> None:
        """Nothing was sent, so another replica may be asked."""
        self._count_failure(replica, why)
        context = self._context
        if self._record.plan is not None and len(self._tried) + 1 < len(context.replicas.all):
            self._tried.append(replica)
            self._leave(replica)
            context.metrics.upstream_failovers.inc()
            self._send_to_a_replica()
        elif self._without:
            # Replicas with this adapter are unreachable; use the next adapter on a reachable one.
            self._leave(replica)
            self._next_adapter(reachable=self._without)
            self._send_to_a_replica()
        else:
            self._give_up(why)

    def _next_adapter(self, *, reachable: Sequence[Replica] = ()) -> None:
        """reachable: only these are asked for the next adapter; empty: all are."""
        record = self._record
        record.fallback_from = record.fallback_from or record.routes[0].adapter
        record.routes = record.routes[1:]
        everybody = self._context.replicas.all if reachable else ()
        self._tried = [replica for replica in everybody if replica not in reachable]
        self._without = ()

    def _count_failure(self, replica: Replica, why: str) -> None:
        context = self._context
        if replica.failed(context.monotonic()):
            context.metrics.replica_ejections.inc((replica.url,))
            context.rate_limited_log.warning("replica_ejected", url=replica.url, why=why)

    # -- sending

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
            if not self.over and isinstance(error, OutOfFilesError):
                self._give_up(str(error), 503)
            elif not self.over:
                self._unreachable(replica, str(error))
            return
        if self.over:  # the client left meanwhile: keep the connection for the next request
            replica.pool.give_back(connection)
        elif connection.usable:
            self._send_on(connection, replica)
        else:
            self._unreachable(replica, "the connection was closed as soon as it was open")

    def _send_on(self, connection: SendingConnection, replica: Replica) -> None:
        record, best_of, asker = self._record, self._best_of, self._asker
        assert asker is not None, "the request is not over"
        plan, encoding = record.plan, True
        body: bytes | PiecedBody = record.request.body
        if best_of is not None and best_of.plan is not None:
            several = best_of.plan
            kinds = self._kinds_to_add(replica, 0 if several.strip.nothing else CAPTURE)
            if not kinds & CAPTURE:
                several = replace(several, strip=STRIP_NOTHING)
            body, encoding = several.body_for(record.routes[0].upstream_model), False
            connection = BestOfConnection(connection, best_of, several, record.keep)
        elif plan is not None:
            kinds = self._kinds_to_add(replica, plan.kinds)
            record.strip = plan.strip_with(kinds)
            body = plan.body_for(record.routes[0], record.strip)
            # A compressed reply could not be edited, nor its usage be read: ask for none.
            encoding = not kinds & (CAPTURE | USAGE) and not (plan.hides_arm and plan.rule.adapted)
        length = len(body) if isinstance(body, bytes) else body.length
        head = self._head_to_send(replica, length, encoding)
        self._connection = connection
        connection.send(asker, head, body, head_only=record.request.head.head_only)
        record.sent = now = _now()
        record.overhead_s += now - self._working_since

    def _kinds_to_add(self, replica: Replica, kinds: int) -> int:
        """Which additions the request gets, of those that are wanted."""
        record, context, fields = self._record, self._context, replica.fields
        if record.plainly:
            kinds = 0
        else:
            if context.outgoing_trace is not None:
                kinds |= TRACE
            if kinds & fields.refused:
                wanted = kinds
                kinds = fields.to_send(wanted, context.monotonic())
                if kinds != wanted:
                    context.metrics.own_fields.inc((replica.url, "left_out"))
        record.added = kinds
        return kinds

    def _head_to_send(self, replica: Replica, length: int, encoding: bool) -> bytes:
        """The head for a body of `length` bytes. encoding: the reply may be compressed. Made once
        for a client head that comes again and again, unless it carries a trace context."""
        context, record = self._context, self._record
        head, instead = record.request.head, record.admission.replace_authorization
        if length == 0 and head.method != b"POST":
            return b"%b\r\n\r\n" % self._head_lines(replica, instead, encoding, None)
        if replica is context.app:
            lines = self._head_lines(replica, instead, encoding, None) + self._sender_lines()
            return b"%b\r\nContent-Length: %d\r\n\r\n" % (lines, length)
        if record.plan is not None and context.outgoing_trace is not None:
            came = head.headers.aside.get(TRACEPARENT)
            record.own_traceparent = context.outgoing_trace(came)
            own = record.own_traceparent if record.added & TRACE else None
            lines = self._head_lines(replica, instead, encoding, own)
            return b"%b\r\nContent-Length: %d\r\n\r\n" % (lines, length)
        sent = head.sent
        if sent is None or not sent.serves(replica, instead, encoding):
            lines = self._head_lines(replica, instead, encoding, None)
            sent = head.sent = SentHead(replica, instead, encoding, lines + b"\r\nContent-Length: ")
        return b"%b%d\r\n\r\n" % (sent.up_to_length, length)

    def _sender_lines(self) -> bytes:
        """The lines that tell the sidecar's own application who sends the request."""
        admission = self._record.admission
        lines = b"\r\n%b: %b\r\n%b: %b" % (
            OWN_PROJECT,
            admission.project.encode(),
            OWN_KEY_ID,
            admission.key_id.encode(),
        )
        user = self._record.request.head.headers.aside.get(OWN_USER)
        return lines if user is None else lines + b"\r\n%b: %b" % (OWN_USER, user)

    def _head_lines(
        self, replica: Replica, instead: bytes | Keep | None, encoding: bool, own: bytes | None
    ) -> bytes:
        """The head without Content-Length. instead: of the caller's credentials, which `Keep`
        passes on; encoding: the reply may be compressed; own: instead of the caller's trace."""
        head, where = self._record.request.head, replica.pool.endpoint
        lines, aside = list(head.headers.lines), head.headers.aside
        if isinstance(instead, Keep):
            if AUTHORIZATION in aside:
                lines.append(b"Authorization: " + aside[AUTHORIZATION])
            if X_API_KEY in aside:
                lines.append(b"X-Api-Key: " + aside[X_API_KEY])
        elif instead:
            lines.append(b"Authorization: " + instead)
        if encoding and ACCEPT_ENCODING in aside:
            lines.append(b"Accept-Encoding: " + aside[ACCEPT_ENCODING])
        traceparent = aside.get(TRACEPARENT) if own is None else own
        if traceparent is not None:
            lines.append(b"traceparent: " + traceparent)
        target = where.prefix + head.target if where.prefix else head.target
        return request_lines(head.method, target, lines, host=where.authority)

"""One request on its way: to an upstream and back, with everything that may happen in between.

The flight owns the decisions (send again? another replica? another adapter? give up?), the upstream
connection owns the reply's framing, `ClientReply` the client's. Rules:
- A request is sent again only when nothing of its reply came on a connection that was used before.
- A replica that cannot be reached was sent nothing, so another one is asked (`outbound.py`).
- An adapter that vLLM does not know is answered for by another replica that has it, else by the
  champion, else by the base.
- Once a byte went to the client nothing is tried again: a stream ends as vLLM's own failure would
  end it, anything else by the close of the connection.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

from sidecar.access.admission import Admission
from sidecar.capture.reply_buffer import ReplyBuffer
from sidecar.records import Outcome
from sidecar.relay.flight.attempt import Outbound
from sidecar.relay.flight.client_reply import ClientReply
from sidecar.relay.flight.client_request import ClientRequest
from sidecar.relay.flight.context import RelayContext
from sidecar.relay.flight.ending import settle
from sidecar.relay.flight.plan import Plan
from sidecar.relay.flight.reply_body import PASSED, HeldBody, ReplyBody, reply_body
from sidecar.relay.http1.heads import header_lines
from sidecar.relay.http1.reply_parser import ReplyHead
from sidecar.relay.payload.reply_edit import STRIP_NOTHING
from sidecar.relay.payload.reply_signs import ReplySigns
from sidecar.relay.payload.usage import UsageMeter
from sidecar.relay.ports import ClientSide
from sidecar.relay.surface.refusals import (
    names_unknown_model,
    refusal_reply,
    stream_failure,
    upstream_failed,
)
from sidecar.relay.upstream.replicas import Replica
from sidecar.routing.breaker import NO_CANARY, SLOW

STREAM_ENDS: Final = (b"data: [DONE]\n\n", b'"type":"message_stop"}\n\n')
"""What the last event of a surface ends with; clients close when they have it."""
RESPONSE_COMPLETED: Final = b"event: response.completed\n"

_now: Final = perf_counter


class Flight(Outbound):
    """`start` it once; it ends by `reply_done` or `reply_broken`, or by `client_left`."""

    __slots__ = (
        "_body",
        "_client",
        "_framed",
        "_last",
        "_out",
        "_reply",
        "_touched",
        "fell_back",
        "first_byte",
        "head",
        "meter",
        "pieces",
        "reply_buffer",
        "returned_index",
        "signs",
        "streamed",
    )

    def __init__(
        self,
        context: RelayContext,
        client: ClientSide,
        request: ClientRequest,
        *,
        plan: Plan | None,
        admission: Admission,
        began: float,
        replica: Replica | None = None,
        keep_alive: bool = True,
    ) -> None:
        """plan: None for what is passed on as it came, to `replica`. keep_alive: False closes the
        client's connection after the reply, whatever the client wants."""
        super().__init__(
            context, request, plan=plan, admission=admission, replica=replica, began=began
        )
        self._client = client
        self._touched = 0.0
        self.returned_index = 0
        """Which of vLLM's choices the client gets."""
        self.reply_buffer: ReplyBuffer | None = None
        self.fell_back = False
        """The canary failed before the first byte; the champion answers in its place."""
        self.signs: ReplySigns | None = None
        self.meter: UsageMeter | None = None
        """None: the key has no allowance of tokens."""
        if plan is not None:
            if plan.canary_tag != NO_CANARY:
                self.signs = ReplySigns()
            if plan.skip_reason is None:
                self.reply_buffer = context.capture.reply_buffer()
            if plan.metered:
                self.meter = UsageMeter()
        self._await_reply(keep_alive=keep_alive and request.head.keep_alive)

    def _await_reply(self, *, keep_alive: bool) -> None:
        self.head: ReplyHead | None = None
        self._body: ReplyBody = PASSED
        self._out: list[bytes] = []
        self._last = b""
        self._framed = False
        """`_last` is whole chunks, not the body in them."""
        self.streamed = False
        """vLLM's reply is a stream of events."""
        self.pieces = 0
        """Reads in which the reply's body came."""
        self.first_byte = 0.0
        """Of the body, on the monotonic clock; 0: none came."""
        self._reply = ClientReply(self._client, self.request, keep_alive=keep_alive)

    # -- from the upstream (ReplyReader)

    def reply_head(self, head: ReplyHead) -> None:
        self.head = head
        if (head.status == 404 and len(self.routes) > 1) or (
            head.status >= 500 and self._may_fall_back
        ):
            self._body = HeldBody(STRIP_NOTHING)
        elif not self._strip.nothing:
            headers = head.headers
            self._body = reply_body(
                status=head.status,
                content_type=headers.content_type,
                encoded=headers.encoded,
                strip=self._strip,
            )
        if head.headers.streams:
            self.streamed = True
            self._context.accounts.streams_open.inc()

    def reply_body(self, data: bytes) -> None:
        if self.reply_buffer is not None or self.meter is not None:
            self._keep(data)
        self._pass_on(data)

    def _keep(self, data: bytes) -> None:
        """For the record, and for the key's allowance."""
        if self.reply_buffer is not None:
            self.reply_buffer.add(data)
        if self.meter is not None:
            self.meter.feed(data)

    def _pass_on(self, data: bytes) -> None:
        self._last = data
        self._framed = False
        self.pieces += 1
        if self.signs is not None:
            self.signs.feed(data)
        self._out.append(data if self._body is PASSED else self._body.feed(data))

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        keeps = self.reply_buffer is not None or self.meter is not None
        if keeps or self._body is not PASSED or not self._reply.in_chunks:
            return False
        self._last = framed
        self._framed = True
        self.pieces += 1
        if self.signs is not None:
            self.signs.feed(framed)
        self._touched = received_at
        if not self.first_byte:
            self.first_byte = received_at
        self._client.write(framed)
        self.overhead_s += _now() - received_at
        return True

    @property
    def _last_body(self) -> bytes:
        """What came last of the reply's body."""
        return self._last[:-2] if self._framed else self._last

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        head, out_pieces = self.head, self._out
        if head is None:  # part of a head, or an interim reply
            return
        if head.status >= 500 and self._may_fall_back:
            if not complete and self._connection is not None:
                self._connection.abort()  # nobody needs the rest, which may never come
            self._connection = None
            self._fall_back(received_at, f"vLLM answered {head.status}")
            return
        self._touched = received_at
        if not self.first_byte and self.pieces:
            self.first_byte = received_at
        if complete:
            self._connection = None
            if self._body is not PASSED:
                out_pieces.append(self._body.end())
        out = out_pieces[0] if len(out_pieces) == 1 else b"".join(out_pieces)
        out_pieces.clear()
        if complete and head.status == 404 and self._answers_for_unknown_model(out):
            self._answer_without(received_at)
            return
        if complete or not self._body.holds:
            own = () if self._reply.begun else self._own_lines()
            self._reply.write(head, self._body, out, own, complete=complete)
        now = _now()
        self.overhead_s += now - received_at
        if complete:
            if self.replica is not None:
                self.replica.answered()
            self._finish("upstream_error" if head.status >= 500 else "ok", head.status, now)
            self._client.reply_done(keep_alive=self._reply.keep_alive, at=now)

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        self._connection = None
        replica = self.replica
        assert replica is not None, "it was asked"
        if nothing_came and reused and not self._retried:
            self._retried = True
            self._context.metrics.upstream_retries.inc()
            self._working_since = _now()
            self._send(replica, reuse=False)
            return
        self._count_failure(replica, why)
        self._give_up(why)

    def _give_up(self, why: str, status: int = 502) -> None:
        if self.sent and self._may_fall_back:
            self._fall_back(_now(), why)
            return
        context, replica = self._context, self.replica or self._tried[-1]
        context.rate_limited_log.warning("upstream_failed", url=replica.url, why=why)
        if self._reply.begun:
            self._break_off(why)
            return
        surface = self.plan.rule.surface if self.plan is not None else "chat"
        refusal = upstream_failed(replica.url, why, status, surface)
        own = self._own_lines()
        keep_alive = self._reply.keep_alive
        head_only = self.request.head.head_only
        now = _now()
        self._finish("upstream_error", refusal.status, now)
        self._client.write(
            refusal_reply(refusal, own=own, close=not keep_alive, head_only=head_only)
        )
        self._client.reply_done(keep_alive=keep_alive, at=now)

    def _break_off(self, why: str) -> None:
        """The client has part of the reply: end it as vLLM ends a stream that fails, if it is one
        and stands between two events; else let the connection break."""
        head, plan = self.head, self.plan
        assert head is not None, "a reply was begun"
        told = b""
        if plan is not None and head.headers.streams and self._body.rest_dropped(self._last_body):
            told = stream_failure(why, plan.rule.failure)
        if told:
            self._reply.write(head, PASSED, told, (), complete=True)
        now = _now()
        self._finish("upstream_error", head.status, now)
        if told:
            self._client.reply_done(keep_alive=self._reply.keep_alive, at=now)
        else:
            self._client.reply_broken()

    # -- adapters that vLLM has lost

    def _answers_for_unknown_model(self, body: bytes) -> bool:
        return len(self.routes) > 1 and not self._reply.begun and names_unknown_model(body)

    def _answer_without(self, received_at: float) -> None:
        """This replica does not know the adapter: another one that has it answers, or the next
        adapter does."""
        route, context, replica = self.routes[0], self._context, self.replica
        assert replica is not None, "it was asked"
        context.metrics.adapter_missing.inc((route.adapter,))
        context.rate_limited_log.warning("adapter_missing", adapter=route.adapter, url=replica.url)
        replica.in_flight -= 1
        replica.lacks(route.upstream_model)
        context.models_changed()
        self.replica = None
        self._tried.append(replica)
        self._without += (replica,)
        if not context.replicas.another_serves(route.upstream_model, self._tried):
            self._next_adapter()
        self._begin_again(received_at)
        self._send_to_a_replica()

    # -- a canary that fails

    @property
    def _may_fall_back(self) -> bool:
        """The canary was asked, nothing of a reply went out, and the champion was not asked yet."""
        return (
            self.signs is not None
            and not self.fell_back
            and not self._reply.begun
            and len(self.routes) > 1
            and self.routes[0].arm == "canary"
        )

    def _fall_back(self, now: float, why: str) -> None:
        """The canary failed and its user has not a byte yet: the champion answers."""
        context, replica = self._context, self.replica
        context.metrics.canary_fallbacks.inc()
        context.rate_limited_log.warning("canary_failed", adapter=self.routes[0].adapter, why=why)
        if replica is not None:
            replica.in_flight -= 1
            self.replica = None
        self.fell_back = True
        self._retried = False
        self._next_adapter()
        self._begin_again(now)
        self._send_to_a_replica()

    def _begin_again(self, received_at: float) -> None:
        """The reply that came is not the client's: forget it, and wait for another."""
        if self.reply_buffer is not None:
            self.reply_buffer.clear()
        if self.signs is not None:
            self.signs = ReplySigns()
        if self.meter is not None:
            self.meter = UsageMeter()
        self._await_reply(keep_alive=self._reply.keep_alive)
        self._working_since = received_at

    # -- from the client

    def client_left(self) -> None:
        """The client's connection is gone: stop vLLM's work for it."""
        if self._done:
            return
        if self._connection is not None:
            self._connection.abort()
        # Clients close at the last event; they do not wait for the end of the chunked body.
        last = self._last_body
        ended = last.endswith(STREAM_ENDS) or RESPONSE_COMPLETED in last
        self._finish(
            "ok" if ended else "cut", self.head.status if self.head is not None else 0, _now()
        )

    def pause(self) -> None:
        """The client reads slower than vLLM writes."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def tick(self, now: float) -> None:
        """Called now and then. now: `time.perf_counter()`."""
        signs = self.signs
        if signs is not None and not (signs.slow or self.fell_back):
            self._count_slow(signs, now)
        limit_s = self._context.proxy.upstream_timeout_s
        if self._connection is None or now - max(self._touched, self.sent) <= limit_s:
            return
        self._connection.abort()
        self._connection = None
        self._give_up(f"it was silent for {limit_s:g} s", status=504)

    def _count_slow(self, signs: ReplySigns, now: float) -> None:
        """Tell the breaker of a long silence while it lasts: a client may wait for ever."""
        plan, context = self.plan, self._context
        silent_s = now - max(self._touched, self.sent)
        if plan is not None and self.sent and silent_s > context.slow_first_byte_s:
            signs.slow = True
            context.guard.reply(plan.canary_tag, self.routes[0].arm, plan.session_key, SLOW)

    # -- the end

    @property
    def looked_through(self) -> bool:
        """The reply's text could be read as it passed."""
        return self.head is not None and not self.head.headers.encoded

    def _own_lines(self) -> tuple[bytes, ...]:
        if self.plan is None:
            return ()
        own = (
            b"x-sidecar-exchange-id: " + self.exchange_id.encode(),
            b"x-sidecar-adapter: " + self.routes[0].adapter.encode(),
        )
        limits = self.admission.headers
        return own if not limits else (*own, *header_lines(limits))

    def _finish(self, outcome: Outcome, status: int, at: float) -> None:
        """It is over. at: now, `time.perf_counter()`."""
        self._done = True
        self._connection = self._connecting = None
        if self.replica is not None:
            self.replica.in_flight -= 1
        settle(self._context, self, outcome, status, at)

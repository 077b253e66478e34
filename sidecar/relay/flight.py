"""One request on its way: to an upstream and back, with everything that may happen in between.

The flight owns the decisions (send again? another adapter? give up?), the upstream connection owns
the reply's framing, `ClientReply` the client's. Rules:
- A request is sent again only when nothing of its reply came on a connection that was used before.
- An adapter that vLLM does not know is answered for by the champion, else by the base.
- Once a byte went to the client, a failure closes the client's connection without a clean end.
"""

from __future__ import annotations

import asyncio
import time

from sidecar.capture import Tee
from sidecar.errors import UpstreamError
from sidecar.exchange_id import RANDOM_BYTES, exchange_id
from sidecar.records import Outcome, Timings
from sidecar.relay.client_reply import ClientReply, ClientSide
from sidecar.relay.client_request import ClientRequest
from sidecar.relay.context import RelayContext
from sidecar.relay.ending import Ending, settle
from sidecar.relay.heads import Header, request_head, text_header
from sidecar.relay.plan import ChatPlan
from sidecar.relay.refusals import names_unknown_model, refusal_reply, upstream_failed
from sidecar.relay.reply_body import HeldBody, PassedBody, ReplyBody, reply_body
from sidecar.relay.reply_edit import STRIP_NOTHING
from sidecar.relay.reply_parser import ReplyHead
from sidecar.relay.upstream import UpstreamConnection, UpstreamPool
from sidecar.routing import Assignment

STREAM_END = b"data: [DONE]\n\n"
CLIENT_LEFT = "499"
"""nginx's number for it; no such status is ever sent."""


class Flight:
    """`start` it once; it ends by `reply_done` or `reply_broken` of the client, or `client_left`.

    plan: None for what is passed on as it came.
    """

    def __init__(
        self,
        context: RelayContext,
        client: ClientSide,
        request: ClientRequest,
        *,
        upstream: UpstreamPool,
        plan: ChatPlan | None,
    ) -> None:
        self._context = context
        self._client = client
        self._request = request
        self._upstream = upstream
        self._plan = plan
        self._routes = list(plan.routes) if plan is not None else []
        self._strip = plan.strip if plan is not None else STRIP_NOTHING
        captured = plan is not None and plan.skip_reason is None
        self._tee: Tee | None = context.capture.tee() if captured else None
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retried = self._done = False
        self._started_at = context.clock()
        self._exchange_id = exchange_id(self._started_at, context.randomness(RANDOM_BYTES))
        self._began = self._working_since = time.perf_counter()
        self._overhead_s = 0.0
        self._await_reply()

    def _await_reply(self) -> None:
        self._head: ReplyHead | None = None
        self._body: ReplyBody = PassedBody()
        self._out: list[bytes] = []
        self._tail = b""
        self._first_byte_s: float | None = None
        self._reply = ClientReply(self._client, self._request)

    @property
    def _route(self) -> Assignment | None:
        """The one that answers, unless vLLM does not know it; the next ones stand behind it."""
        return self._routes[0] if self._routes else None

    # -- to the upstream

    def start(self) -> None:
        self._context.metrics.in_flight.inc()
        self._send(reuse=True)

    def _send(self, *, reuse: bool) -> None:
        connection = self._upstream.take_idle() if reuse else None
        if connection is not None:
            self._send_on(connection)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            connection = await self._upstream.connect()
        except UpstreamError as error:
            if not self._done:
                self._give_up(str(error))
            return
        if self._done:  # the client left meanwhile; the next one will be glad of it
            self._upstream.give_back(connection)
        elif connection.usable:
            self._send_on(connection)
        else:
            self._give_up("the connection was closed as soon as it was open")

    def _send_on(self, connection: UpstreamConnection) -> None:
        request, where = self._request, self._upstream.endpoint
        body = request.body
        if self._plan is not None:
            body = self._plan.body_for(self._routes[0])
        head = request_head(
            request.method,
            where.prefix + request.target,
            request.headers,
            host=where.authority,
            content_length=len(body) if body or request.method == b"POST" else None,
            accept_plain_only=not self._strip.nothing,
        )
        self._connection = connection
        connection.send(self, head, body, head_only=request.method == b"HEAD")
        self._overhead_s += time.perf_counter() - self._working_since

    # -- from the upstream (ReplyReader)

    def reply_head(self, head: ReplyHead) -> None:
        self._head = head
        if self._may_be_missing_adapter(head):
            self._body = HeldBody(STRIP_NOTHING)
            return
        self._body = reply_body(
            status=head.status,
            content_type=text_header(head.headers, b"content-type"),
            encoded=text_header(head.headers, b"content-encoding") not in ("", "identity"),
            strip=self._strip,
        )

    def reply_body(self, data: bytes) -> None:
        if self._first_byte_s is None:
            self._first_byte_s = time.perf_counter() - self._began
        if self._tee is not None:
            self._tee.add(data)
        self._tail = (self._tail + data)[-len(STREAM_END) :]
        self._out.append(self._body.feed(data))

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        head = self._head
        if head is None:  # part of a head, or an interim reply
            return
        if complete:
            self._connection = None
            self._out.append(self._body.end())
        out = b"".join(self._out)
        self._out.clear()
        if complete and self._may_be_missing_adapter(head) and names_unknown_model(out):
            self._answer_by_next_route(received_at)
            return
        if complete or not self._body.holds:
            self._reply.write(head, self._body, out, self._own_headers(), complete=complete)
        self._overhead_s += time.perf_counter() - received_at
        if complete:
            self._finish("upstream_error" if head.status >= 500 else "ok", head.status)
            self._client.reply_done(keep_alive=self._reply.keep_alive)

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        self._connection = None
        if nothing_came and reused and not self._retried:
            self._retried = True
            self._context.metrics.upstream_retries.inc()
            self._working_since = time.perf_counter()
            self._send(reuse=False)
            return
        self._give_up(why)

    def _give_up(self, why: str) -> None:
        url = self._upstream.endpoint.url
        self._context.rare_log.warning("upstream_failed", url=url, why=why)
        if self._reply.begun:
            self._finish("upstream_error", self._head.status if self._head is not None else 0)
            self._client.reply_broken()
            return
        refusal = upstream_failed(url, why)
        keep_alive = self._request.keep_alive
        head_only = self._request.method == b"HEAD"
        self._finish("upstream_error", refusal.status)
        own = self._own_headers()
        self._client.write(
            refusal_reply(refusal, own=own, close=not keep_alive, head_only=head_only)
        )
        self._client.reply_done(keep_alive=keep_alive)

    # -- adapters that vLLM has lost

    def _may_be_missing_adapter(self, head: ReplyHead) -> bool:
        return head.status == 404 and len(self._routes) > 1

    def _answer_by_next_route(self, received_at: float) -> None:
        missing = self._routes.pop(0).adapter
        self._context.metrics.adapter_missing.labels(missing).inc()
        self._context.rare_log.warning("adapter_missing", adapter=missing)
        if self._tee is not None:
            self._tee.clear()
        self._await_reply()
        self._working_since = received_at
        self._send(reuse=True)

    # -- from the client

    def client_left(self) -> None:
        """The client's connection is gone: stop vLLM's work for it."""
        if self._done:
            return
        if self._connection is not None:
            self._connection.abort()
        # Clients close at `[DONE]`, and do not wait for the end of the chunked body behind it.
        outcome: Outcome = "ok" if self._tail == STREAM_END else "cut"
        self._finish(outcome, self._head.status if self._head is not None else 0)

    def pause(self) -> None:
        """The client reads slower than vLLM writes."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    # -- the end

    def _own_headers(self) -> tuple[Header, ...]:
        if self._route is None:
            return ()
        return (
            (b"x-sidecar-exchange-id", self._exchange_id.encode()),
            (b"x-sidecar-adapter", self._route.adapter.encode()),
        )

    def _finish(self, outcome: Outcome, status: int) -> None:
        self._done = True
        metrics = self._context.metrics
        metrics.in_flight.dec()
        metrics.requests.labels(CLIENT_LEFT if outcome == "cut" else str(status)).inc()
        if self._plan is None:
            return
        content_type = text_header(self._head.headers if self._head else (), b"content-type")
        ending = Ending(
            exchange_id=self._exchange_id,
            plan=self._plan,
            route=self._routes[0],
            replica=self._upstream.endpoint.url,
            status=status,
            outcome=outcome,
            timings=Timings(
                started_at=self._started_at,
                first_byte_s=self._first_byte_s,
                total_s=time.perf_counter() - self._began,
                overhead_s=self._overhead_s,
            ),
            streamed=content_type.startswith("text/event-stream"),
            request_headers=self._request.headers,
            tee=self._tee,
        )
        settle(self._context, ending)

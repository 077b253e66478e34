"""One proxied request: to an upstream and back, with everything that may happen in between.

`Flight` decides (send again? another replica? another adapter? give up?). `UpstreamAttempt` sends,
the upstream connection owns the reply's framing, and `ClientReply` owns the client's. Rules:
- A request is sent again only when nothing of its reply came on a connection that was used before.
- A replica that cannot be reached was sent nothing, so another one is asked (`attempt.py`).
- An adapter that vLLM does not know is replaced by the same one on another replica, else by the
  champion, else by the base.
- A request with additions of the sidecar's (`OwnFields`) that vLLM answers with 400 or more, or
  with an error where the answer should begin, or that it breaks off before a byte went to the
  client, is sent again as the client sent it. The client gets that reply, whatever it is. A failed
  request has no effect that the second could repeat.
- Once a byte went to the client nothing is tried again: a stream ends as vLLM's own failure would
  end it, anything else by the close of the connection.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

from sidecar.records import Outcome
from sidecar.relay.attempt import Asker, UpstreamAttempt
from sidecar.relay.best_of import BestOf
from sidecar.relay.context import RelayContext
from sidecar.relay.ending import FlightRecord, settle
from sidecar.relay.heads import header_lines
from sidecar.relay.refusals import (
    names_unknown_model,
    refusal_reply,
    stream_failure,
    upstream_failed,
)
from sidecar.relay.reply import (
    PASSED,
    ClientReply,
    ClientSide,
    HeldBody,
    ReplyBody,
    StreamOpening,
    is_error,
    reply_body,
)
from sidecar.relay.reply_edit import STRIP_NOTHING, ReplySigns
from sidecar.relay.reply_parser import ReplyHead
from sidecar.routing.breaker import SLOW

STREAM_ENDS: Final = (b"data: [DONE]\n\n", b'"type":"message_stop"}\n\n')
"""What the last event of a surface ends with; clients close when they have it."""
RESPONSE_COMPLETED: Final = b"event: response.completed\n"
LOST: Final = 502
"""The status that stands for a reply which broke off."""
OPENING_S: Final = 0.02
"""How long a stream's role is held for the event behind it. vLLM 0.32 writes both in one turn of
its loop (`chat_completion_stream_generator`), so this holds back no answer of it."""

_now: Final = perf_counter


class Flight(Asker):
    """`start` it once; it ends by `reply_done` or `reply_broken`, or by `client_left`."""

    def __init__(
        self,
        context: RelayContext,
        client: ClientSide,
        record: FlightRecord,
        *,
        keep_alive: bool = True,
        best_of: BestOf | None = None,
    ) -> None:
        """keep_alive: False closes the client's connection after the reply, whatever the client
        wants. best_of: samples several answers; the client gets the one that the judge picks."""
        self._context = context
        self._client = client
        self._record = record
        self._best_of = best_of
        self._attempt = UpstreamAttempt(context, record, self, best_of)
        self._touched = 0.0
        self._await_reply(keep_alive=keep_alive and record.request.head.keep_alive)

    def _await_reply(self, *, keep_alive: bool) -> None:
        self._body: ReplyBody = PASSED
        self._out: list[bytes] = []
        self._last = b""
        self._framed = False
        """`_last` is whole chunks, not the body in them."""
        self._failed = False
        """The reply is an error, by its status or by what it begins with."""
        self._refused = False
        """The reply is not the client's: without our additions the request is sent once more."""
        self._opening: StreamOpening | None = None
        """Holds the beginning of a stream that may be an error."""
        self._reply = ClientReply(self._client, self._record.request, keep_alive=keep_alive)

    def start(self) -> None:
        self._context.accounts.in_flight.inc()
        self._attempt.start()

    @property
    def _is_judged(self) -> bool:
        """The reply was put together for this client from several answers. vLLM's own bytes are in
        the record already."""
        return self._best_of is not None and self._best_of.plan is not None

    # -- from the upstream (ReplyReader)

    def reply_head(self, head: ReplyHead) -> None:
        record = self._record
        record.head = head
        headers = head.headers
        plan = record.plan
        names = None if plan is None else plan.canary_as
        if head.status >= 400:
            self._failed = True
            self._refused = self._attempt.may_ask_plainly(head.status)
            if (
                self._refused
                or (head.status == 404 and len(record.routes) > 1)
                or (head.status >= 500 and self._may_fall_back)
            ):
                self._body = HeldBody(STRIP_NOTHING)
                names = None
        strip = STRIP_NOTHING if self._failed or self._is_judged else record.strip
        if names is not None or not strip.nothing:
            self._body = reply_body(
                status=head.status,
                content_type=headers.content_type,
                encoded=headers.encoded,
                strip=strip,
                names=names,
            )
        edited = bool(record.added or record.refused) and not self._failed and not self._is_judged
        if edited and headers.streams and not headers.encoded:
            self._opening = StreamOpening(self._body)
            self._body = self._opening
        if headers.streams:
            record.streamed = True
            self._context.accounts.streams_open.inc()

    def reply_body(self, data: bytes) -> None:
        record = self._record
        if record.keeps and not self._is_judged:
            record.keep(data)
        self._last = data
        self._framed = False
        record.pieces += 1
        self._goes_out(data if self._body is PASSED else self._body.feed(data))

    def _goes_out(self, data: bytes) -> None:
        """Add to what the client gets. The signs of a reply are looked for in that: without token
        ids and log-probabilities there is a sixth to search."""
        self._out.append(data)
        signs = self._record.signs
        if signs is not None and data:
            signs.feed(data)

    def pass_chunks(self, framed: bytes, received_at: float) -> bool:
        record = self._record
        if record.keeps or self._body is not PASSED or not self._reply.in_chunks:
            return False
        self._last = framed
        self._framed = True
        record.pieces += 1
        if record.signs is not None:
            record.signs.feed(framed)
        self._touched = received_at
        if not record.first_byte:
            record.first_byte = received_at
        self._client.write(framed)
        record.overhead_s += _now() - received_at
        return True

    @property
    def _last_body(self) -> bytes:
        """The last piece of the reply's body, without its chunk's end."""
        return self._last[:-2] if self._framed else self._last

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        record, out_pieces, best_of = self._record, self._out, self._best_of
        head = record.head
        if head is None:  # part of a head, or an interim reply
            return
        if best_of is not None and complete and best_of.plain_instead(head.status):
            self._begin_again()
            self._attempt.ask_again(received_at)
            return
        if head.status >= 500 and self._may_fall_back and not self._refused:
            if complete:
                self._attempt.reply_ended()
            else:
                self._attempt.abort()  # nobody needs the rest, which may never come
            self._fall_back(received_at, f"vLLM answered {head.status}")
            return
        self._touched = received_at
        if not record.first_byte and record.pieces:
            record.first_byte = received_at
        if complete:
            self._attempt.reply_ended()
            if self._body is not PASSED:
                self._goes_out(self._body.end())
        opening = self._opening
        if opening is not None:
            self._look_at_opening(opening)
        out = out_pieces[0] if len(out_pieces) == 1 else b"".join(out_pieces)
        out_pieces.clear()
        if complete and head.status == 404 and self._answers_for_unknown_model(out):
            self._begin_again()
            self._attempt.ask_where_loaded(received_at)
            return
        if not self._failed and complete and record.added | record.refused and is_error(out):
            self._fail()
        known = complete or opening is not None or head.status >= 500
        if self._refused and known and not self._reply.begun:
            if not complete:
                self._attempt.abort()  # nobody needs the rest, which may never come
            self._ask_plainly(received_at)
            return
        if complete or not self._body.holds:
            own = () if self._reply.begun else self._own_lines()
            self._reply.write(head, self._body, out, own, complete=complete)
        now = _now()
        record.overhead_s += now - received_at
        if complete:
            self._attempt.note_reply(well=not self._failed)
            self._finish("upstream_error" if head.status >= 500 else "ok", head.status, now)
            self._client.reply_done(keep_alive=self._reply.keep_alive, at=now)

    def upstream_lost(self, why: str, *, nothing_came: bool, reused: bool) -> None:
        attempt = self._attempt
        if attempt.lost(may_be_stale=nothing_came and reused):
            return
        if not self._reply.begun and (self._refused or attempt.may_ask_plainly(LOST)):
            self._ask_plainly(_now())
        else:
            attempt.broke_off(why)
            self.give_up(why)

    def give_up(self, why: str, status: int = 502) -> None:
        record = self._record
        if record.sent and self._may_fall_back:
            self._fall_back(_now(), why)
            return
        url = self._attempt.last_replica.url
        self._context.rate_limited_log.warning("upstream_failed", url=url, why=why)
        if self._reply.begun:
            self._break_off(why)
            return
        surface = record.plan.rule.surface if record.plan is not None else "chat"
        refusal = upstream_failed(url, why, status, surface)
        own = self._own_lines()
        keep_alive = self._reply.keep_alive
        head_only = record.request.head.head_only
        now = _now()
        self._finish("upstream_error", refusal.status, now)
        self._client.write(
            refusal_reply(refusal, own=own, close=not keep_alive, head_only=head_only)
        )
        self._client.reply_done(keep_alive=keep_alive, at=now)

    def _break_off(self, why: str) -> None:
        """The client has part of the reply: end it as vLLM ends a stream that fails, if it is one
        and stands between two events; else let the connection break."""
        head, plan = self._record.head, self._record.plan
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

    # -- another try

    def _fail(self) -> None:
        self._failed = True
        self._refused = self._record.added != 0

    def _look_at_opening(self, opening: StreamOpening) -> None:
        """Let the beginning of a stream go, unless it is an error or says nothing yet."""
        if opening.failed:
            self._fail()
            if opening.holds and not self._refused:  # without our additions it fails too
                self._goes_out(opening.let_go())
        elif opening.waits:
            asyncio.get_running_loop().call_later(OPENING_S, self._opening_waited, opening)
        if not opening.holds:
            self._body, self._opening = opening.inner, None

    def _opening_waited(self, opening: StreamOpening) -> None:
        """The role came some time ago, and nothing else: it goes out alone."""
        head = self._record.head
        if self._opening is not opening or self._attempt.over or head is None:
            return
        self._goes_out(opening.let_go())
        self._body, self._opening = opening.inner, None
        out = b"".join(self._out)
        self._out.clear()
        self._reply.write(head, self._body, out, self._own_lines(), complete=False)

    def _ask_plainly(self, now: float) -> None:
        """The request failed with our additions: send it as the client sent it."""
        best_of = self._best_of
        several = best_of is not None and best_of.plan is not None
        if best_of is not None and several:
            best_of.send_plainly()
        self._begin_again()
        self._attempt.ask_plainly(now, evidence=not several)

    def _answers_for_unknown_model(self, body: bytes) -> bool:
        several = len(self._record.routes) > 1
        return several and not self._reply.begun and names_unknown_model(body)

    @property
    def _may_fall_back(self) -> bool:
        """The canary was asked, nothing of a reply went out, and the champion was not asked yet."""
        record = self._record
        return (
            record.signs is not None
            and not record.fell_back
            and not self._reply.begun
            and len(record.routes) > 1
            and record.routes[0].arm == "canary"
        )

    def _fall_back(self, now: float, why: str) -> None:
        """The canary failed before its user got a byte: the champion answers."""
        context, record = self._context, self._record
        context.metrics.canary_fallbacks.inc()
        adapter = record.routes[0].adapter
        context.rate_limited_log.warning("canary_failed", adapter=adapter, why=why)
        record.fell_back = True
        self._begin_again()
        self._attempt.ask_next_adapter(now)

    def _begin_again(self) -> None:
        """Discard a reply that the client does not get, and wait for another one."""
        self._forget_stream()
        self._record.forget_reply()
        self._await_reply(keep_alive=self._reply.keep_alive)

    def _forget_stream(self) -> None:
        """Count the stream of vLLM as ended: it is neither passed on nor recorded as a stream."""
        if self._record.streamed:
            self._record.streamed = False
            self._context.accounts.streams_open.dec()

    # -- from the client

    def client_left(self) -> None:
        if self._attempt.over:
            return
        self._attempt.abort()
        # Clients close at the last event; they do not wait for the end of the chunked body.
        last, head = self._last_body, self._record.head
        ended = last.endswith(STREAM_ENDS) or RESPONSE_COMPLETED in last
        self._finish("ok" if ended else "cut", head.status if head is not None else 0, _now())

    def pause(self) -> None:
        """The client reads slower than vLLM writes."""
        self._attempt.pause()

    def resume(self) -> None:
        self._touched = _now()  # it was the client that was silent, not vLLM
        self._attempt.resume()

    def tick(self, now: float) -> None:
        record = self._record
        silent_s = now - max(self._touched, record.sent)
        signs = record.signs
        if signs is not None and not (signs.slow or record.fell_back):
            self._count_slow(signs, silent_s)
        limit_s = self._context.proxy.upstream_timeout_s
        if self._attempt.awaits_reply and silent_s > limit_s:
            self._attempt.abort()
            self.give_up(f"it was silent for {limit_s:g} s", status=504)

    def _count_slow(self, signs: ReplySigns, silent_s: float) -> None:
        """Tell the breaker of a long silence while it lasts: a client may wait for ever."""
        record, context = self._record, self._context
        plan = record.plan
        if plan is not None and record.sent and silent_s > context.slow_first_byte_s:
            signs.slow = True
            guard = context.guard_of(record.admission.project)
            arm, caller = record.routes[0].arm, record.admission.key_id or plan.address_hash
            guard.reply(plan.canary_tag, arm, plan.session_key, SLOW, caller=caller)

    # -- the end

    def _own_lines(self) -> tuple[bytes, ...]:
        record = self._record
        if record.plan is None:
            return ()
        own: tuple[bytes, ...] = (b"x-sidecar-exchange-id: " + record.exchange_id.encode(),)
        if not record.plan.hides_arm:
            own = (*own, b"x-sidecar-adapter: " + record.routes[0].adapter.encode())
        if record.admission.headers:
            own = (*own, *header_lines(record.admission.headers))
        return own if self._best_of is None else (*own, *self._best_of.own_lines)

    def _finish(self, outcome: Outcome, status: int, at: float) -> None:
        record, best_of = self._record, self._best_of
        if best_of is not None:
            if best_of.plan is not None:
                # What vLLM sent, and the record has, is no stream, whatever the client got.
                self._forget_stream()
            record.returned_index = best_of.returned_index
            best_of.close()
        self._attempt.end()
        settle(self._context, record, outcome, status, at)

"""A flight whose answer is the best of N: the places where best of N meets the ordinary flight.

`Flight` itself knows nothing of it, so that other requests pay nothing for it.
"""

from __future__ import annotations

from sidecar.access.admission import Admission
from sidecar.records import Outcome
from sidecar.relay.best_of.exchange import BestOf, BestOfConnection
from sidecar.relay.best_of.plan import plan_best_of
from sidecar.relay.flight.client_request import ClientRequest
from sidecar.relay.flight.context import RelayContext
from sidecar.relay.flight.flight import Flight
from sidecar.relay.flight.plan import Plan
from sidecar.relay.http1.reply_parser import ReplyHead
from sidecar.relay.payload.reply_edit import STRIP_NOTHING
from sidecar.relay.payload.request_edit import PiecedBody
from sidecar.relay.ports import ClientSide
from sidecar.relay.upstream.connection import SendingConnection
from sidecar.relay.upstream.replicas import Replica
from sidecar.scoring.client import Picker


class JudgedFlight(Flight):
    """As a flight; N answers are sampled, and the client gets the one that the judge picks."""

    __slots__ = ("_best_of",)

    def __init__(
        self,
        context: RelayContext,
        client: ClientSide,
        request: ClientRequest,
        *,
        plan: Plan,
        admission: Admission,
        keep_alive: bool,
        began: float,
        n: int,
        picker: Picker,
        timeout_s: float,
    ) -> None:
        super().__init__(
            context,
            client,
            request,
            plan=plan,
            admission=admission,
            keep_alive=keep_alive,
            began=began,
        )
        captured = plan.skip_reason is None
        self._best_of = BestOf(
            plan_best_of(plan.peek, n, captured=captured),
            picker,
            context.metrics,
            exchange_id=self.exchange_id,
            request=plan.peek.body,
            keep=captured,
            timeout_s=timeout_s,
        )

    def _may_compress(self) -> bool:
        return self._best_of.plan is None and super()._may_compress()

    def _body_to_send(self) -> bytes | PiecedBody:
        many = self._best_of.plan
        if many is None:
            return super()._body_to_send()
        return many.body_for(self.routes[0].upstream_model)

    def _send_on(self, connection: SendingConnection, replica: Replica) -> None:
        many = self._best_of.plan
        if many is None:
            super()._send_on(connection, replica)
        else:
            super()._send_on(BestOfConnection(connection, self._best_of, many, self._keep), replica)

    def reply_head(self, head: ReplyHead) -> None:
        if self._best_of.plan is not None and head.status != 404:
            # The reply was made for this client: there is nothing of ours in it.
            kept, self._strip = self._strip, STRIP_NOTHING
            super().reply_head(head)
            self._strip = kept
        else:
            super().reply_head(head)

    def reply_body(self, data: bytes) -> None:
        if self._best_of.plan is None:
            super().reply_body(data)
        else:  # vLLM's own bytes were kept as they came
            self._pass_on(data)

    def batch_end(self, *, complete: bool, received_at: float) -> None:
        head, replica = self.head, self.replica
        if complete and head is not None and self._best_of.plain_instead(head.status):
            assert replica is not None, "it answered"
            self._begin_again(received_at)
            self._send(replica, reuse=True)
            return
        super().batch_end(complete=complete, received_at=received_at)

    def _own_lines(self) -> tuple[bytes, ...]:
        return (*super()._own_lines(), *self._best_of.own_lines)

    def _finish(self, outcome: Outcome, status: int, at: float) -> None:
        head = self.head
        if head is not None and head.headers.streams and self._best_of.recorded_whole:
            # What vLLM sent, and the record has, is no stream, whatever the client got.
            self._context.metrics.streams_open.dec()
            self.streamed = False
        self.returned_index = self._best_of.returned_index
        self._best_of.close()
        super()._finish(outcome, status, at)

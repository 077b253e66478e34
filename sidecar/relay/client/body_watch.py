"""Decide whether the body that a connection brings may go on coming. No IO.

Four things end it: its sender is not let in, it comes too slowly, the worker has no memory for it,
or nobody sends a long body there. Who is let in has paid for a request when the head is here,
whatever becomes of the body.
"""

from __future__ import annotations

from typing import Final

from sidecar.access.admission import Admission
from sidecar.relay.client.reception import admit, no_room, reject
from sidecar.relay.client.request_parser import RequestParser
from sidecar.relay.flight.client_request import RequestHead
from sidecar.relay.flight.context import RelayContext
from sidecar.relay.flight.held_bodies import FREE_BYTES
from sidecar.relay.surface.refusals import Refusal

MAX_UNAUTHENTICATED_BYTES: Final = 64 * 1024
"""Of a body that come before its sender is refused. Under it nobody sees a difference: the
refusal comes when the body is whole, and the connection stays."""
MIN_BODY_BYTES_PER_S: Final = 1024
"""A body that comes slower than this is not waited for. See `moved`."""


class BodyWatch:
    """What is known of the body that one connection brings, and what it holds of the budget."""

    __slots__ = ("_admitted", "_context", "_due", "_held_bytes", "_may_be_long", "_seen")

    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._admitted: Admission | Refusal | None = None
        """What `admit` said; None: nobody asked."""
        self._may_be_long = False
        """Over `MAX_UNAUTHENTICATED_BYTES`: its sender was looked at."""
        self._held_bytes = 0
        """Taken of the worker's budget, for the body coming in or in flight."""
        self._due = 0.0
        """When the body is late, by `time.perf_counter()`; 0: none is coming."""
        self._seen = 0
        """Bytes of it that `_due` knows of."""

    def look(self, parser: RequestParser, head: RequestHead, at: float) -> Refusal | None:
        """Look at the body that is coming into the parser. Returns: why it may not go on.

        at: when its last bytes came. A client that waits for `100 Continue` may be told to go on
        when this returns None.
        """
        came = parser.body_bytes
        self.moved(came, at)
        admitted = self._admitted
        if admitted is None:
            admitted = self._admitted = admit(self._context, head)
            if not isinstance(admitted, Refusal) and not self._fits(parser.announced):
                return no_room(self._context, head, "announced", close=True)
        if came <= MAX_UNAUTHENTICATED_BYTES and not parser.wants_continue:
            return None
        if not self._may_be_long:
            self._may_be_long = True
            # Who waits for 100 is judged by what he announces: nobody looks again when it is here.
            refusal = reject(
                head,
                admitted,
                long=parser.may_bring_more_than(MAX_UNAUTHENTICATED_BYTES)
                or came > MAX_UNAUTHENTICATED_BYTES,
            )
            if refusal is not None:
                return refusal
        return self._hold(came, head, "coming")

    def is_late(self, now: float) -> bool:
        return 0.0 < self._due < now

    def whole(self, head: RequestHead, length: int) -> Refusal | None:
        """The body is here. Returns: why it may not be kept until its reply is."""
        return self._hold(length, head, "whole")

    def admitted(self) -> Admission | Refusal | None:
        """What `admit` said to this request; the next one is not known then."""
        admitted, self._admitted = self._admitted, None
        self._may_be_long = False
        self._due, self._seen = 0.0, 0
        return admitted

    def give_back(self) -> None:
        """No body is held any more."""
        if self._held_bytes:
            self._context.bodies.give_back(self._held_bytes)
            self._held_bytes = 0

    def moved(self, came: int, at: float) -> None:
        """Put off the moment when the body is late by the time that its new bytes may take. It is
        never further away than `proxy.body_timeout_s`: a body that came fast at first may not drip
        for hours."""
        latest = at + self._context.proxy.body_timeout_s
        earned = self._due + (came - self._seen) / MIN_BODY_BYTES_PER_S
        self._due = min(latest, earned) if self._due else latest
        self._seen = came

    def _fits(self, length: int) -> bool:
        held = self._held_bytes
        return length <= FREE_BYTES or self._context.bodies.fits(length - held, held)

    def _hold(self, count: int, head: RequestHead, reason: str) -> Refusal | None:
        """Take as much of the worker's budget as a body of so many bytes needs."""
        held = self._held_bytes
        if count <= FREE_BYTES or count <= held:
            return None
        if not self._context.bodies.take(count - held, held):
            return no_room(self._context, head, reason, close=reason != "whole")
        self._held_bytes = count
        return None

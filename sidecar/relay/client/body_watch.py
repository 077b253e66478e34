"""Decide whether an incoming request body may go on. No IO.

A body is refused for four reasons: its sender is not authorised, it comes too slowly, the worker
has no memory for it, or its path takes no long body. An authorised request counts against its key
from the head on, whatever becomes of the body.
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
"""Body bytes accepted before an unauthorised sender is refused. A shorter body is refused when it
is complete, and the connection stays open."""
MIN_BODY_BYTES_PER_S: Final = 1024
"""A body that comes more slowly than this is refused. See `moved`."""


class BodyWatch:
    """The incoming body of one connection, and its share of the memory budget."""

    __slots__ = ("_admitted", "_context", "_due", "_held_bytes", "_may_be_long", "_seen")

    def __init__(self, context: RelayContext) -> None:
        self._context = context
        self._admitted: Admission | Refusal | None = None
        """What `admit` returned; None: not called yet."""
        self._may_be_long = False
        """The sender was checked, so the body may exceed `MAX_UNAUTHENTICATED_BYTES`."""
        self._held_bytes = 0
        """Bytes of the worker's budget that the body holds, incoming or in flight."""
        self._due = 0.0
        """When the body is late, by `time.perf_counter()`; 0: none is coming."""
        self._seen = 0
        """Body bytes already counted in `_due`."""

    def check(self, parser: RequestParser, head: RequestHead, at: float) -> Refusal | None:
        """Check the body that is coming into the parser. Returns: why it may not go on.

        at: when its last bytes came. When this returns None, a client that waits for
        `100 Continue` may be told to send its body.
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
            # A client that waits for 100 is judged by the announced length: no later check follows.
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
        """The body is complete. Returns: why it may not be kept until the reply is sent."""
        return self._hold(length, head, "whole")

    def admitted(self) -> Admission | Refusal | None:
        """Take what `admit` returned for this request, and reset for the next one."""
        admitted, self._admitted = self._admitted, None
        self._may_be_long = False
        self._due, self._seen = 0.0, 0
        return admitted

    def give_back(self) -> None:
        """Return the body's share of the memory budget."""
        if self._held_bytes:
            self._context.bodies.give_back(self._held_bytes)
            self._held_bytes = 0

    def moved(self, came: int, at: float) -> None:
        """Extend the deadline by the time that the new bytes may take. The deadline is never
        further away than `proxy.body_timeout_s`: a body that began fast may not drip for hours.
        """
        latest = at + self._context.proxy.body_timeout_s
        earned = self._due + (came - self._seen) / MIN_BODY_BYTES_PER_S
        self._due = min(latest, earned) if self._due else latest
        self._seen = came

    def _fits(self, length: int) -> bool:
        held = self._held_bytes
        return length <= FREE_BYTES or self._context.bodies.fits(length - held, held)

    def _hold(self, count: int, head: RequestHead, reason: str) -> Refusal | None:
        """Reserve `count` bytes of the worker's budget for the body."""
        held = self._held_bytes
        if count <= FREE_BYTES or count <= held:
            return None
        if not self._context.bodies.take(count - held, held):
            return no_room(self._context, head, reason, close=reason != "whole")
        self._held_bytes = count
        return None

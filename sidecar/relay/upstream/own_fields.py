"""Which of the sidecar's own additions to a request one vLLM takes. Pure.

The relay adds what no client asked for: token ids and log-probabilities, the usage of a stream, a
`traceparent`. An engine that refuses one of them must answer as it would have answered the client
(`Flight`). Only a request that succeeds right after the same one with additions failed tells
against an addition: a client's own mistake fails both times. After `REFUSALS` of them in a row the
addition is left out, and tried again by one request when a wait is over.
"""

from __future__ import annotations

from typing import Final

from sidecar.backoff import Backoff

CAPTURE: Final = 1
"""`return_token_ids`, `logprobs`, and no `Accept-Encoding`: a compressed reply cannot be edited."""
USAGE: Final = 2
"""For a key with an allowance of tokens: `stream_options.include_usage`, no `Accept-Encoding`."""
TRACE: Final = 4
"""A `traceparent` of the sidecar's."""
KINDS: Final = {CAPTURE: "capture", USAGE: "usage", TRACE: "trace"}
"""Kinds of additions, bits of a set, and their names in metrics and logs."""
EVERY: Final = CAPTURE | USAGE | TRACE
REFUSALS: Final = 3
"""Refusals in a row until a kind is left out, as failures until a vLLM is (`FAILURES_TO_EJECT`). An
engine that refuses some requests only, such as those with tools, goes on being asked."""
AGAIN: Final = Backoff(first_s=30.0, last_s=600.0)
"""Waits until a kind that is left out is tried again: each try may cost one user a second wait."""
BUSY: Final = frozenset({429, 502, 503, 504, 529})
"""Statuses by which a server says that it has too much to do."""
BUSY_PAUSE_S: Final = 1.0
"""For this time after a request without additions failed with one of them too, a busy vLLM is not
asked again: asking each again would double the load of an outage."""


class OwnFields:
    """The state of one vLLM, in one process. Sets of kinds are sums of their bits."""

    __slots__ = ("_again_at", "_busy_until", "_refusals", "refused", "unproven")

    def __init__(self) -> None:
        self.refused = 0
        """Kinds that are left out."""
        self.unproven = EVERY
        """Kinds with which no request has succeeded since the start, or since the last refusal."""
        self._refusals = dict.fromkeys(KINDS, 0)
        self._again_at = dict.fromkeys(KINDS, 0.0)
        self._busy_until = 0.0

    def to_send(self, kinds: int, now: float) -> int:
        """Return those of `kinds` to send now. now: seconds on the monotonic clock."""
        for kind in KINDS:
            if kinds & kind & self.refused:
                if now < self._again_at[kind]:
                    kinds &= ~kind
                else:
                    self._wait(kind, now)  # the others go on without it while this one tries
        return kinds

    def may_ask_plainly(self, status: int, now: float) -> bool:
        """True if a request with additions that failed with `status` is sent again without them."""
        return status not in BUSY or now >= self._busy_until

    def failed_plainly(self, status: int, now: float) -> None:
        """Note that a request failed with `status` when it was sent again without additions."""
        if status in BUSY:
            self._busy_until = now + BUSY_PAUSE_S

    def took(self, kinds: int) -> int:
        """Note that a request with `kinds` succeeded. Returns: those that were left out before."""
        back = self.refused & kinds
        self.unproven &= ~kinds
        self.refused &= ~kinds
        for kind in KINDS:
            if kinds & kind:
                self._refusals[kind] = 0
        return back

    def refuses(self, kinds: int, now: float) -> int:
        """Note that a request with `kinds` failed, and that it succeeded without them.

        Returns: the kind that is left out from now on; 0: none is. One kind is blamed: the first
        that is not proven, else the first. A wrongly blamed one proves itself at the next try.
        """
        suspects = kinds & self.unproven or kinds
        kind = suspects & -suspects
        self.unproven |= kind
        self._refusals[kind] += 1
        if self._refusals[kind] < REFUSALS:
            return 0
        found = kind & ~self.refused
        self.refused |= kind
        self._wait(kind, now)
        return found

    def _wait(self, kind: int, now: float) -> None:
        self._again_at[kind] = now + AGAIN.wait_s(max(1, self._refusals[kind] - REFUSALS + 1))

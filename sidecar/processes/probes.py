"""What load balancers and orchestrators are told of a process, and whether any asks."""

from __future__ import annotations

import time
from collections.abc import Callable

WATCHED_S = 100.0
"""Two probes within so long are those of a load balancer, or of an orchestrator: they ask every 1
to 30 s by default. Whoever waits for a start asks no more once it has been told."""
TELL_S = 10.0
"""How often the parent of the workers is told, at most, that somebody asks."""


class Readiness:
    """What probes are told of this process, and whether there are any."""

    def __init__(
        self,
        watched: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """watched: called now and then while probes come."""
        self.leaving = False
        """The process ends soon, so it is not ready for new requests."""
        self._watched = watched
        self._clock = clock
        self._answered_at = self._told_at = -WATCHED_S

    def status(self, *, works: bool) -> int:
        """Return the status for a probe. works: requests can be answered."""
        if not works or self.leaving:
            return 503
        now = self._clock()
        if now - self._answered_at < WATCHED_S and now - self._told_at >= TELL_S:
            self._told_at = now
            self._watched()
        self._answered_at = now
        return 200

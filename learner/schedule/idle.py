"""How many requests users make, as the proxies count them in the store. Pure."""

from __future__ import annotations

from collections import deque


class UserRate:
    """Requests of users over the last seconds, from a counter that only grows.

    Candidates do not count: they go to vLLM without a proxy. The proxies tell their counts every
    five seconds, so the rate is that much behind.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, now: float, total: int) -> None:
        """Take the counter's value. A smaller one, or an earlier time, begins anew."""
        if self._seen and (now < self._seen[-1][0] or total < self._seen[-1][1]):
            self._seen.clear()
        self._seen.append((now, total))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()

    @property
    def per_minute(self) -> float | None:
        """Requests a minute; None until the counter was watched for the whole window."""
        if not self._seen:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return 60 * (last - first) / (now - began) if now - began >= self._window_s else None

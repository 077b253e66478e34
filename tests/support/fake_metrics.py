"""A source of metrics that answers what a test puts into it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from deploy.outside.http import Names, OutsideError
from sidecar.settings import Metric


@dataclass
class FakeMetrics:
    """See `deploy.outside.http.MetricSource`."""

    values: dict[str, float | OutsideError | None] = field(default_factory=dict)
    """By the metric's URL: a value, None for no data, or the error to raise."""
    hangs: dict[str, asyncio.Event] = field(default_factory=dict)
    """By URL, until when it gives no answer."""
    asked: list[tuple[str, Names]] = field(default_factory=list)

    async def read(self, metric: Metric, names: Names) -> float | None:
        self.asked.append((metric.url, names))
        if metric.url in self.hangs:
            await self.hangs[metric.url].wait()
        found = self.values[metric.url]
        if isinstance(found, OutsideError):
            raise found
        return found

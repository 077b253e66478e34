"""Decide whether a request is captured. Called once a request.

The probability is the product of `capture.sample_rate`, the project's rate and the surface's rate.
No random number is drawn for a probability of 0 or 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

OFF = "off"
"""The value of `x-sidecar-capture` that turns capture off, in any letter case."""


class SamplingRule:
    """The sampling rates of one proxy."""

    def __init__(
        self,
        rate: float,
        *,
        projects: Mapping[str, float] | None = None,
        surfaces: Mapping[str, float] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """All rates are probabilities, 0..1. surfaces: rate by surface; 1 for those not listed.
        Embeddings are never captured, because nothing can be learned from them. chance: returns
        uniform random numbers in 0..1."""
        self._rate = rate
        self._chance = chance
        self._projects = dict(projects or {})
        self._by_surface: dict[str, float] = {**(surfaces or {}), "embeddings": 0.0}
        self._everything = rate >= 1.0 and not projects and not surfaces

    def skip_reason(self, *, surface: str, project: str, header: str) -> str | None:
        """Return why a request is not captured, or None when it is. header: the value of
        `x-sidecar-capture`; empty when the client sent none."""
        if header and header.strip().lower() == OFF:
            return "header"
        if self._everything and surface != "embeddings":
            return None
        by_surface = self._by_surface.get(surface, 1.0)
        by_project = self._projects.get(project, 1.0)
        if by_surface <= 0.0:
            return "surface"
        if by_project <= 0.0:
            return "project"
        rate = self._rate * by_surface * by_project
        if rate >= 1.0 or self._chance() < rate:
            return None
        return "not_sampled"

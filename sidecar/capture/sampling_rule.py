"""Whether a request is captured, and if not, why. Asked once for each request.

`capture.sample_rate` holds for everything; a project or a surface may have a rate of its own, which
it is multiplied with. With rates of 0 or 1 no chance is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

OFF = "off"
"""`x-sidecar-capture: off`, in any letter case."""


class SamplingRule:
    """The rates of one proxy, joined once."""

    __slots__ = ("_by_surface", "_chance", "_everything", "_projects", "_rate")

    def __init__(
        self,
        rate: float,
        *,
        projects: Mapping[str, float] | None = None,
        surfaces: Mapping[str, float] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Rates are shares, 0..1. surfaces: those that are not named have the rate 1, except
        embeddings, which have nothing to learn from and are never captured.
        chance: uniform in 0..1."""
        self._rate = rate
        self._chance = chance
        self._projects = dict(projects or {})
        self._by_surface: dict[str, float] = {**(surfaces or {}), "embeddings": 0.0}
        self._everything = rate >= 1.0 and not projects and not surfaces

    def skip_reason(self, *, surface: str, project: str, header: str) -> str | None:
        """Why a request is not captured; None when it is.

        header: `x-sidecar-capture` as it came; empty when it did not.
        """
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

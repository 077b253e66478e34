"""Tell whether a judge has changed from one window of groups to the next. Pure.

A provider may put another model behind one name. Then the noise or the position bias of a window
differs from the window before, or from the reference (the first whole window that agrees with
itself, or the one that an operator accepted); and groups that were scored before the change and
again after it show a shift of the mean score, or more noise than either model has. Before there is
a reference, the second half of a window is compared with its first.

All tests of one window together raise a false alarm with `FALSE_ALARMS` (docs/log.md has the
measured rate): each of n tests has 1/n of it (Bonferroni). A difference too small to matter raises
none, however certain it is.
"""

from __future__ import annotations

import math

from ingest.noise.estimate import Estimate
from ingest.noise.figures import two_sided_t

FALSE_ALARMS = 0.01
"""Share of windows of an unchanged judge that may raise an alarm."""
SD_FLOOR = 0.01
"""Added to both deviations, in squares, before they are compared: noise below this is far under any
spread that teaches something."""
LEAST_RATIO = 1.1
"""Smallest ratio of two deviations, with the floor added, that raises an alarm."""
LEAST = 0.02
"""Smallest change of the slope, and smallest shift, that raises an alarm, in score units."""


def drifts(
    window: Estimate, *, before: Estimate | None = None, reference: Estimate | None = None
) -> tuple[str, ...]:
    """Return what changed, in words; empty when nothing did.

    before: the window before this one. reference: the window that all are compared with; None when
        it is the one before.
    """
    others = [(one, name) for one, name in ((before, "the window before"),) if one is not None]
    if reference is not None:
        others.append((reference, "the reference window"))
    alpha = FALSE_ALARMS / (1 + 2 * len(others))
    found = _shifted(window, alpha)
    for other, name in others:
        found += _unlike(window, other, "", name, alpha)
    return tuple(found)


def changes_within(
    window: Estimate, first: Estimate | None, second: Estimate | None
) -> tuple[str, ...]:
    """Return what changed within a window, in words; empty when nothing did.

    first, second: its halves, in the order in which the groups were scored again; None: too few
        groups.
    """
    if first is None or second is None:
        return tuple(_shifted(window, FALSE_ALARMS))
    alpha = FALSE_ALARMS / 3
    halves = ("in the second half of the window ", "in the first half")
    return (*_shifted(window, alpha), *_unlike(second, first, *halves, alpha))


def _shifted(window: Estimate, alpha: float) -> list[str]:
    limit = two_sided_t(alpha, window.groups - 1)
    shift = window.shift
    if abs(shift.value) < LEAST or abs(shift.value) <= limit * shift.error:
        return []
    return [f"the second scoring gives {shift.value:+.3f} on average, where one judge gives 0"]


def _unlike(now: Estimate, other: Estimate, where: str, name: str, alpha: float) -> list[str]:
    """Compare noise and slope. where, name: what `now` and `other` are called."""
    found = []
    limit = two_sided_t(alpha, min(now.groups, other.groups) - 1)
    if _apart(now, other) > limit:
        found.append(f"{where}noise sd {now.sd.value:.3f}, {name} {other.sd.value:.3f}")
    change = now.slope.value - other.slope.value
    error = math.hypot(now.slope.error, other.slope.error)
    if abs(change) >= LEAST and abs(change) > limit * error:
        found.append(
            f"{where}position slope {now.slope.value:+.3f}, {name} {other.slope.value:+.3f}"
        )
    return found


def _apart(a: Estimate, b: Estimate) -> float:
    """Return how many standard errors the logarithms of two variances are apart."""
    logs, errors = [], []
    for one in (a, b):
        square = one.sd.value**2 + SD_FLOOR**2
        logs.append(math.log(square))
        errors.append(2 * one.sd.value * one.sd.error / square)
    apart, error = abs(logs[0] - logs[1]), math.hypot(*errors)
    return apart / error if error and apart > 2 * math.log(LEAST_RATIO) else 0.0

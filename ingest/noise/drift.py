"""Tell whether a judge has changed from one window of groups to the next. Pure.

A provider may put another model behind one name. Then the noise or the position bias of a window
differs from the window before, or from the reference (the first whole window, or the one that an
operator accepted); and groups that were scored before the change and again after it show a shift
of the mean score, or more noise than either model has.

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
    found = []
    limit = two_sided_t(alpha, window.groups - 1)
    shift = window.shift
    if abs(shift.value) >= LEAST and abs(shift.value) > limit * shift.error:
        found.append(
            f"the second scoring gives {shift.value:+.3f} on average, where one judge gives 0"
        )
    for other, name in others:
        limit = two_sided_t(alpha, min(window.groups, other.groups) - 1)
        if _apart(window, other) > limit:
            found.append(f"noise sd {window.sd.value:.3f}, {name} {other.sd.value:.3f}")
        change = window.slope.value - other.slope.value
        error = math.hypot(window.slope.error, other.slope.error)
        if abs(change) >= LEAST and abs(change) > limit * error:
            found.append(
                f"position slope {window.slope.value:+.3f}, {name} {other.slope.value:+.3f}"
            )
    return tuple(found)


def _apart(a: Estimate, b: Estimate) -> float:
    """Return how many standard errors the logarithms of two variances are apart."""
    logs, errors = [], []
    for one in (a, b):
        square = one.sd.value**2 + SD_FLOOR**2
        logs.append(math.log(square))
        errors.append(2 * one.sd.value * one.sd.error / square)
    apart, error = abs(logs[0] - logs[1]), math.hypot(*errors)
    return apart / error if error and apart > 2 * math.log(LEAST_RATIO) else 0.0

"""Decide when a canary is so much worse than the champion that it must be taken out. Pure.

The breaker looks for gross failures only, from replies that every worker counts; `deploy.canary`
judges smaller differences later, from what was recorded. Each kind of bad reply has its own
one-sided CUSUM test (Page, Biometrika 1954): every canary reply adds the log-likelihood ratio of
"bad at the raised rate" against "bad at the champion's rate", and the sum starts again at zero
whenever it falls below. So a canary that fails after a million good replies is noticed as soon as
one that fails from its first reply.

The champion's rate is the highest of three: `LEAST_RATE`, its rate since the canary began (one
standard error up, because few replies tell little), and its rate since the sum last was zero. The
last one compares both arms over the same span of time: in an outage of both, the canary is not
worse than the champion.

Limits. A difference below about twice `LEAST_RATE` is left to the controller. Where the champion
answers less than a fifth of the sessions, it may have no reply at all during a short outage, and
an outage that breaks replies after their first byte can then take an innocent canary out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("error", "cut", "empty", "short", "slow")
"""What can be wrong with a reply: vLLM failed; the client left before the end; nothing was said;
the token limit ended it; the first byte came late."""
REPLIES = 0
"""Position of the number of replies in an arm's tally; the kinds follow, as in `KINDS`."""
TALLY = 1 + len(KINDS)

LEAST_RATE = 0.1
"""No champion is taken to be better than this: eight bad replies in a row then end a canary."""
ODDS = 500_000.0
"""Likelihood ratio at which the canary is taken out. A CUSUM stays below it for `ODDS` replies on
average when both arms are equal, so 5,000 canary replies end an equal canary in 1% of ramps, for
each kind (tests/sidecar/test_breaker_rule.py simulates 1,000 ramps)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """Why a canary is taken out: counts of both arms over the same span of time."""

    kind: str
    canary_bad: int
    canary_replies: int
    champion_bad: int
    champion_replies: int

    @property
    def reason(self) -> str:
        return (
            f"{self.canary_bad} of the canary's last {self.canary_replies} replies were bad "
            f"({self.kind}), {self.champion_bad} of the champion's {self.champion_replies} "
            "in the same time"
        )


class ExcessTest:
    """The five tests of one canary. Feed it growing totals; it keeps where each sum was zero."""

    def __init__(self) -> None:
        nothing = (0.0, 0.0, 0.0, 0.0)
        self._since = [nothing] * len(KINDS)
        """For each kind: bad and all replies of the canary, bad and all of the champion."""

    def look(self, canary: Sequence[float], champion: Sequence[float]) -> Excess | None:
        """canary, champion: [TALLY] totals since the canary began. Returns: why the canary is to
        be taken out, or None."""
        for kind in range(len(KINDS)):
            now = (canary[1 + kind], canary[REPLIES], champion[1 + kind], champion[REPLIES])
            bad, replies, champion_bad, champion_replies = (
                total - before for total, before in zip(now, self._since[kind], strict=True)
            )
            if not bad:
                self._since[kind] = now
                continue
            rate = max(
                LEAST_RATE, _upper_rate(now[2], now[3]), _rate(champion_bad, champion_replies)
            )
            evidence = _log_likelihood_ratio(bad, replies, rate)
            if evidence <= 0.0:
                self._since[kind] = now
            elif evidence >= math.log(ODDS):
                return Excess(
                    kind=KINDS[kind],
                    canary_bad=int(bad),
                    canary_replies=int(replies),
                    champion_bad=int(champion_bad),
                    champion_replies=int(champion_replies),
                )
        return None


def _rate(bad: float, replies: float) -> float:
    """Share of bad replies, drawn to 1/8 while there are few; always below 1."""
    return (min(bad, replies) + 0.5) / (replies + 4.0)


def _upper_rate(bad: float, replies: float) -> float:
    rate = _rate(bad, replies)
    return rate + math.sqrt(rate * (1.0 - rate) / (replies + 10.0))


def _log_likelihood_ratio(bad: float, replies: float, rate: float) -> float:
    """In nats, of a bad rate half-way between `rate` and 1 against `rate`."""
    raised = (1.0 + rate) / 2.0
    # (1 - raised) / (1 - rate) is 1/2 whatever the rate.
    return bad * math.log(raised / rate) - max(0.0, replies - bad) * math.log(2.0)

"""Decide when a canary is so much worse than the champion that it must be taken out. Pure.

The breaker finds gross failures only, from replies that every worker counts;
`deploy.registry.canary_rule` judges smaller differences later, from what was recorded. Each kind of
bad reply has its own one-sided CUSUM test (Page, Biometrika 1954): every canary reply adds the
log-likelihood ratio of "bad at the raised rate" against "bad at the champion's rate", and the sum
starts again at zero whenever it falls below. So a canary that fails after a million good replies is
noticed as soon as one that fails from its first reply.

The champion's rate is the highest of three, the two measured ones taken one standard error up
because few replies tell little: `LEAST_RATE`, its rate since the canary began, and its rate since
the sum last was zero. For the kinds that also come with a change of load or of work (`SHARED`),
both arms must differ in that last span of time by themselves: a likelihood-ratio test of two rates
against one.

Limits. A difference below about twice `LEAST_RATE` is left to the controller. At weights over 50%
the champion has few replies in a short span: a change that is bad for both arms can take an
innocent canary out, and for the kinds in `SHARED` a bad canary may need up to 50 bad replies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("error", "cut", "empty", "short", "slow")
"""Kinds of bad replies: vLLM failed; the client left before the end; the reply was empty; the token
limit ended it; the first byte came late."""
REPLIES = 0
"""Index of the number of replies in an arm's tally; the kinds follow, in the order of `KINDS`."""
TALLY = 1 + len(KINDS)

LEAST_RATE = 0.1
"""Lowest bad rate assumed for a champion: eight bad replies in a row then end a canary."""
ODDS = 500_000.0
"""Likelihood ratio at which the canary is taken out. A CUSUM stays below it for `ODDS` replies on
average when both arms are equal, so 5,000 canary replies end an equal canary in 1% of ramps, for
each kind (tests/sidecar/routing/test_breaker_rule.py simulates 1,000 ramps)."""
SHARED = frozenset({"cut", "short", "slow"})
"""Kinds that both arms show together when users send other work or vLLM is slow. Errors need no
second test: where it can, the champion answers the same request (`sidecar.relay.flight`)."""
PAIR_ODDS = 5_000.0
"""Likelihood ratio, for two rates instead of one, that both arms must show over the same span. In
1,000 simulated ramps at a weight of 50%, both arms' bad rate rising from 1% to 30%, it kept 96.7%
of the equal canaries (78% without it), and cost a canary that fails always one user more."""
HIGH_WEIGHT = 0.85
"""From this share of all replies up, the champion has too few replies in a short span to compare
with."""
SEVERAL = 5
"""Callers whose first bad replies a trip must rest on to say something of the adapter, and half of
its bad replies must be such, except for errors, which no client causes. Of 20 simulated canaries
each that one client ended with 40 to 70% of all replies, up to 5% of the others being bad, the
trips rested on 1 to 9 callers, and on five or more in 4; none had half of its bad replies first."""
FEW_CALLERS = "; too few callers to blame the adapter"
"""How the reason of such a trip ends: control then gives no verdict."""
FEW = 2
"""Champion replies in a span that suffice for a comparison at any weight."""


def few_callers(first: int, bad: int) -> bool:
    """Tell whether so few callers stand behind bad replies, or sessions, that they may be their
    doing. first: callers whose first bad one is among them."""
    return first < SEVERAL or 2 * first < bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """Why a canary is taken out: the counts of both arms over the same span of time."""

    kind: str
    canary_bad: int
    canary_replies: int
    champion_bad: int
    champion_replies: int
    callers: int | None = None
    """Callers whose first bad reply is among the canary's; None: they do not matter."""

    @property
    def reason(self) -> str:
        told = (
            f"{self.canary_bad} of the canary's last {self.canary_replies} replies were bad "
            f"({self.kind}), {self.champion_bad} of the champion's {self.champion_replies} "
            "in the same time"
        )
        if self.callers is None:
            return told
        told += f"; first ones of {self.callers} caller" + "s" * (self.callers != 1)
        return told + FEW_CALLERS if few_callers(self.callers, self.canary_bad) else told


class ExcessTest:
    """The five tests of one canary. It is given growing totals and remembers where each sum was
    zero."""

    def __init__(self) -> None:
        nothing = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._since = [nothing] * len(KINDS)
        """For each kind: the canary's bad and all replies, the champion's bad and all replies, and
        the callers whose first bad reply was the canary's."""

    def check(
        self,
        canary: Sequence[float],
        champion: Sequence[float],
        callers: Sequence[float] | None = None,
    ) -> Excess | None:
        """Returns: why the canary is to be taken out, or None. canary, champion: [TALLY] totals
        since the canary began. callers: whose first bad reply was the canary's, by kind; None:
        nobody counts them."""
        for kind in range(len(KINDS)):
            spoke = 0.0 if callers is None else callers[kind]
            now = (canary[1 + kind], canary[REPLIES], champion[1 + kind], champion[REPLIES], spoke)
            before = self._since[kind]
            bad = now[0] - before[0]
            if not bad:
                self._since[kind] = now
                continue
            replies = now[1] - before[1]
            champion_bad, champion_replies = now[2] - before[2], now[3] - before[3]
            rate = max(
                LEAST_RATE,
                _upper_rate(now[2], now[3]),
                _upper_rate(champion_bad, champion_replies),
            )
            evidence = _log_likelihood_ratio(bad, replies, rate)
            if evidence <= 0.0:
                self._since[kind] = now
            elif evidence >= math.log(ODDS) and (
                KINDS[kind] not in SHARED
                or _differ(
                    (bad, replies),
                    (champion_bad, champion_replies),
                    weight=now[1] / (now[1] + now[3]),
                )
            ):
                return Excess(
                    kind=KINDS[kind],
                    canary_bad=int(bad),
                    canary_replies=int(replies),
                    champion_bad=int(champion_bad),
                    champion_replies=int(champion_replies),
                    callers=None if callers is None or not kind else int(spoke - before[4]),
                )
        return None


def _upper_rate(bad: float, replies: float) -> float:
    """Return the share of bad replies, pulled towards 1/8 while there are few, and one standard
    error up."""
    rate = (min(bad, replies) + 0.5) / (replies + 4.0)  # always below 1
    return rate + math.sqrt(rate * (1.0 - rate) / (replies + 10.0))


def _log_likelihood_ratio(bad: float, replies: float, rate: float) -> float:
    """Return the log-likelihood ratio, in nats, of a bad rate half-way between `rate` and 1 against
    `rate`."""
    raised = (1.0 + rate) / 2.0
    # (1 - raised) / (1 - rate) is 1/2 whatever the rate.
    return bad * math.log(raised / rate) - max(0.0, replies - bad) * math.log(2.0)


def _differ(canary: tuple[float, float], champion: tuple[float, float], *, weight: float) -> bool:
    """Return True if the canary's bad rate exceeds the champion's in one span by `PAIR_ODDS`.
    canary, champion: bad and all replies in it. weight: the canary's share of all replies."""
    if weight >= HIGH_WEIGHT and champion[1] < FEW:
        return True
    both = (canary[0] + champion[0], canary[1] + champion[1])
    if not champion[1] or canary[0] / canary[1] <= champion[0] / champion[1]:
        return False
    gain = _best_log_likelihood(*canary) + _best_log_likelihood(*champion)
    return gain - _best_log_likelihood(*both) >= math.log(PAIR_ODDS)


def _best_log_likelihood(bad: float, replies: float) -> float:
    """Return the log-likelihood, in nats, of these replies (> 0) at their own bad rate."""
    good = max(0.0, replies - bad)
    return sum(part * math.log(part / replies) for part in (bad, good) if part)

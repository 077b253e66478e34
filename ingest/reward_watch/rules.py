"""Say from the profiles of some adapters whether the reward is earned without better answers. Pure.

Three checks, each with intervals, because noise must not stop learning:

- `length`: within groups the longer answer gets the higher reward, and the answers served have
  grown from the base to the champion, and have not shrunk with the last version.
- a kind of answer (`refusal`, `clarifying`, `invalid_call`, `repetition`, `empty`, `cut`) is more
  frequent than under the base, or than under the version that the champion continues.
- `judge_alone`: over the last versions the gate's judge sees a gain, and users do not.

All are about the champion, from which the next run continues.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

from ingest.reward_watch.traits import KINDS, Kind, MeanOf, Profile, RateOf
from sidecar.visible import counted

# Intervals for rates, lengths and correlations of answers that come in sessions. Pure.

UNSEEN_LIKENESS = 0.2
"""Correlation within a session that is taken where a rate of 0 or 1 shows none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Sums of one group's centred scores and lengths."""

    xx: float
    yy: float
    xy: float


def z_of(tail: float) -> float:
    """Return the standard normal value that is exceeded with this probability, 0 < tail < 1."""
    return NormalDist().inv_cdf(1.0 - tail)


def t_of(tail: float, freedom: int) -> float:
    """Return the value that Student's t exceeds with this probability.

    tail: above 0, under 0.5. freedom: degrees of freedom; infinite below 1, where nothing is known.
    Found by bisection of the distribution function, to 1e-9 of the value.
    """
    return math.inf if freedom < 1 else _t_of(tail, freedom)


@lru_cache(maxsize=4_096)
def _t_of(tail: float, freedom: int) -> float:
    low, high = 0.0, 1.0
    while _t_above(high, freedom) > tail:
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _t_above(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_above(t: float, freedom: int) -> float:
    """Return the probability that Student's t exceeds `t` >= 0.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """
    if freedom > MOST_FREEDOM:
        return 1.0 - NormalDist().cdf(t)
    angle = math.atan2(t, math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(odd + 2, freedom + 1, 2):
        total += term
        term *= square * (number - 1) / number
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1.0 - within) / 2


MOST_FREEDOM = 2_000
"""Degrees of freedom from which on the normal distribution is taken: at a tail of 0.0005 its value
is smaller by under 0.2%."""


def rate_of(sessions: Iterable[tuple[int, int]]) -> RateOf:
    """Estimate a rate. sessions: (answers, hits) of each session."""
    pairs = [(n, hits) for n, hits in sessions if n > 0]
    n, hits = sum(n for n, _ in pairs), sum(hits for _, hits in pairs)
    if not n:
        return NO_RATE
    share, count = hits / n, len(pairs)
    spread = share * (1.0 - share) / n
    size = sum(one * one for one, _ in pairs) / n
    effect = 1.0 + (size - 1.0) * UNSEEN_LIKENESS
    if spread > 0.0 and count > 1:
        squares = sum((hits - share * one) ** 2 for one, hits in pairs)
        seen = count / (count - 1) * squares / (n * n) / spread
        # A few hits in sessions of their own show no likeness: it is not known to be less.
        effect = max(1.0, seen) if hits >= MANY and n - hits >= MANY else max(effect, seen)
    return RateOf(n=n, hits=hits, weight=n / effect, sessions=count)


NO_RATE = RateOf(n=0, hits=0, weight=0.0)
MANY = 20
"""Hits from which on their likeness within sessions is taken as it is seen."""


def wilson(rate: RateOf, tail: float) -> Interval:
    """Return Wilson's score interval of a rate, with its weight as the number of answers.

    tail: chance of each limit to be passed.
    """
    t = t_of(tail, rate.sessions - 1)
    if rate.weight <= 0.0 or not math.isfinite(t):
        return Interval(value=rate.share, low=0.0, high=1.0)
    share, n = rate.share, rate.weight
    centre = (share + t * t / (2 * n)) / (1 + t * t / n)
    half = t / (1 + t * t / n) * math.sqrt(share * (1 - share) / n + t * t / (4 * n * n))
    return Interval(value=share, low=max(0.0, centre - half), high=min(1.0, centre + half))


def rise(now: RateOf, before: RateOf, tail: float) -> Interval:
    """Return the difference of two rates, `now` minus `before`.

    Source: Newcombe 1998, "Interval estimation for the difference between independent
    proportions", method 10, with Wilson's intervals.
    """
    mine, theirs = wilson(now, tail), wilson(before, tail)
    value = now.share - before.share
    return Interval(
        value=value,
        low=value - math.hypot(now.share - mine.low, theirs.high - before.share),
        high=value + math.hypot(mine.high - now.share, before.share - theirs.low),
    )


def mean_of(sessions: Iterable[tuple[int, float]]) -> MeanOf | None:
    """Estimate a mean over answers. sessions: (answers, sum) of each. None: under two sessions."""
    pairs = [(n, total) for n, total in sessions if n > 0]
    n = sum(n for n, _ in pairs)
    if len(pairs) < 2:
        return None
    mean = sum(total for _, total in pairs) / n
    squares = sum((total - mean * one) ** 2 for one, total in pairs)
    error = math.sqrt(len(pairs) / (len(pairs) - 1) * squares) / n
    return MeanOf(n=n, mean=mean, error=error, sessions=len(pairs))


def difference(now: MeanOf, before: MeanOf, tail: float) -> Interval:
    """Return the difference of two means, `now` minus `before`.

    Each error has the t of its own sessions, as each rate has in `rise`.
    """
    half = math.hypot(
        *(t_of(tail, one.sessions - 1) * one.error if one.error else 0.0 for one in (now, before))
    )
    value = now.mean - before.mean
    return Interval(value=value, low=value - half, high=value + half)


def moments(lengths_G: Sequence[int], scores_G: Sequence[float]) -> Moments:
    """Centre one group. lengths_G: [G] tokens, taken as log(1 + tokens). scores_G: [G]."""
    logs = [math.log1p(length) for length in lengths_G]
    x_mean, y_mean = sum(logs) / len(logs), sum(scores_G) / len(scores_G)
    xs, ys = [x - x_mean for x in logs], [y - y_mean for y in scores_G]
    return Moments(
        xx=sum(x * x for x in xs),
        yy=sum(y * y for y in ys),
        xy=sum(x * y for x, y in zip(xs, ys, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlation:
    """A correlation within groups, pooled over them."""

    groups: int
    """Groups in which both lengths and scores differ."""
    r: float
    error: float
    """Standard error of Fisher's z of `r`."""

    def interval(self, tail: float) -> Interval:
        """tail: chance of each limit to be passed."""
        middle, reach = math.atanh(self.r), t_of(tail, self.groups - 1) * self.error
        return Interval(value=self.r, low=math.tanh(middle - reach), high=math.tanh(middle + reach))


LIMIT = 0.999
"""Largest correlation; at 1 Fisher's z is infinite."""


def pooled_correlation(groups: Iterable[Moments]) -> Correlation | None:
    """Pool centred groups into one correlation; None: under three groups tell something.

    The error is that of the first-order expansion of r in the groups' sums, on Fisher's scale.
    """
    told = [one for one in groups if one.xx > 0.0 and one.yy > 0.0]
    if len(told) < 3:
        return None
    xx, yy = sum(one.xx for one in told), sum(one.yy for one in told)
    scale = math.sqrt(xx * yy)
    r = sum(one.xy for one in told) / scale
    squares = sum((one.xy / scale - r / 2 * (one.xx / xx + one.yy / yy)) ** 2 for one in told)
    r = max(-LIMIT, min(LIMIT, r))
    error = math.sqrt(len(told) / (len(told) - 1) * squares) / (1.0 - r * r)
    return Correlation(groups=len(told), r=r, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Figures of the checks; docs/reward-watch.md has the share of false holds that they have."""

    window: int = 2_000
    """Newest served answers of an adapter that are looked at."""
    min_answers: int = 200
    """Answers of an adapter from which on it is compared: a rise from 2% to 12% is then seen in
    about two of three checks."""
    min_groups: int = 30
    """Scored groups of the champion, and answers with feedback, from which on they count."""
    max_rise: float = 0.02
    """A kind of answer may become more frequent by this share of the answers."""
    max_length_correlation: float = 0.3
    """Correlation of score and length within groups that is taken for a taste for length, together
    with answers that grow: a medium effect (Cohen 1988, 3.2)."""
    max_length_growth: float = 1.25
    """Answers may become so many times as long as those of the base, by their geometric mean."""
    judge_gain: float = 0.05
    """Gain in the judge's scores over the last versions from which on users should gain too."""
    users_gain: float = 0.02
    """Smallest gain of users that counts: a fall of corrections and repeated questions by this
    share of the answers, or a rise of feedback by twice as much."""
    versions: int = 3
    """Promotions over which the judge's gains are summed up."""
    false_holds: float = 0.01
    """Chance that one check finds something where nothing has changed; the kinds of answers share
    it (Bonferroni)."""


LIMITS = Limits()

Check = Literal[Kind, "length", "judge_alone"]
CHECKS: tuple[Check, ...] = (*KINDS, "length", "judge_alone")
MOST_ALONE = 0.5
"""Share of answers of a kind that is a breach even where nothing is known to compare with."""
ROOM = 2.0
"""A share of signals can fall by `users_gain` only where it is this many times as large; below,
the series says nothing of users."""
LEAST_SESSIONS = 10
"""Sessions of an adapter from which on its answers are compared, however many those are. Of fewer
the variance between sessions is hardly known: with ten, Student's t already asks for 1.4 times the
standard errors of the normal distribution (4.42 and 3.14 at the tail of one kind)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What the gate measured of one version against the one that it continues, in score units."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The champion and what it is compared with."""

    champion: str
    profiles: Mapping[str, Profile]
    """Adapter -> profile; one that is missing is not known."""
    parent: str | None = None
    """The version that the champion continues; None: the champion is the base."""
    base: str = "base"
    earlier: str | None = None
    """Where the gains begin: the version so many promotions before the champion."""
    gains: Sequence[Gain] = ()
    """Gain of each promotion from `earlier` to the champion; empty: one of them is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One breach, with the figures that show it."""

    check: Check
    reference: str
    """The adapter that the champion is compared with; empty: none."""
    text: str
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of all checks."""

    champion: str
    findings: tuple[Finding, ...] = ()
    unknown: Mapping[Check, str] = field(default_factory=dict)
    """Check -> why it could not be made."""

    @property
    def checks(self) -> frozenset[str]:
        return frozenset(one.check for one in self.findings)

    @property
    def reason(self) -> str:
        return "; ".join(one.text for one in self.findings)


def assess(line: Line, limits: Limits) -> Verdict:
    """Make every check that the profiles allow."""
    if line.parent is None:
        why = "the champion is the base: nothing has been learned"
        return Verdict(champion=line.champion, unknown=dict.fromkeys(CHECKS, why))
    findings: list[Finding] = []
    unknown: dict[Check, str] = {}
    for part in (_rates(line, limits), _length(line, limits), _judge_alone(line, limits)):
        for one in part:
            if isinstance(one, Finding):
                findings.append(one)
            else:
                unknown[one[0]] = one[1]
    return Verdict(champion=line.champion, findings=tuple(findings), unknown=unknown)


Result = Finding | tuple[Check, str]


def _references(line: Line) -> list[str]:
    return list(dict.fromkeys(name for name in (line.parent, line.base) if name is not None))


def _known(line: Line, name: str, limits: Limits) -> Profile | None:
    profile = line.profiles.get(name)
    if profile is None or profile.answers < limits.min_answers:
        return None
    return profile if profile.sessions >= LEAST_SESSIONS else None


def _few(line: Line, name: str, limits: Limits) -> str:
    profile = line.profiles.get(name)
    answers = profile.answers if profile is not None else 0
    if profile is not None and answers >= limits.min_answers:
        sessions = counted(profile.sessions, "session")
        return (
            f"the {answers} known answers of {name} are of {sessions}, at least "
            f"{LEAST_SESSIONS} are needed: the answers of one session resemble each other"
        )
    known = counted(answers, "known answer")
    return f"{name} has {known}, at least {limits.min_answers} are needed"


def _rates(line: Line, limits: Limits) -> Iterator[Result]:
    mine = _known(line, line.champion, limits)
    if mine is None:
        yield from ((kind, _few(line, line.champion, limits)) for kind in KINDS)
        return
    known = {
        name: found
        for name in _references(line)
        if (found := _known(line, name, limits)) is not None
    }
    tail = limits.false_holds / (len(KINDS) * max(1, len(known)))
    for kind in KINDS:
        now = mine.rates.get(kind, NO_RATE)
        if not known:
            low = wilson(now, tail).low
            if low > MOST_ALONE:
                yield Finding(
                    check=kind,
                    reference="",
                    text=f"{_percent(now.share)} of the champion's answers are {NAMES[kind]}, over "
                    f"{_percent(MOST_ALONE)} for sure, and there is nothing to compare with",
                    figures={"share": now.share, "low": low, "answers": now.n},
                )
            else:
                yield kind, "; ".join(_few(line, name, limits) for name in _references(line))
        for name, theirs in known.items():
            before = theirs.rates.get(kind, NO_RATE)
            risen = rise(now, before, tail)
            if risen.low > limits.max_rise:
                yield Finding(
                    check=kind,
                    reference=name,
                    text=f"{_percent(now.share)} of the champion's answers are {NAMES[kind]}, "
                    f"{_percent(before.share)} of those of {name}: at least "
                    f"{100 * risen.low:.1f} points more, the limit is "
                    f"{100 * limits.max_rise:g} points",
                    figures={
                        "share": now.share,
                        "before": before.share,
                        "low": risen.low,
                        "high": risen.high,
                        "limit": limits.max_rise,
                        "answers": now.n,
                        "answers_before": before.n,
                    },
                )
                break


def _length(line: Line, limits: Limits) -> Iterator[Result]:
    mine, base = (_known(line, name, limits) for name in (line.champion, line.base))
    if mine is None or mine.log_tokens is None:
        yield "length", _few(line, line.champion, limits)
        return
    if base is None or base.log_tokens is None:
        yield "length", _few(line, line.base, limits)
        return
    if mine.correlation is None or mine.groups < limits.min_groups:
        yield (
            "length",
            f"{mine.groups} scored groups of {line.champion} tell of length, the limit is "
            f"{limits.min_groups}",
        )
        return
    tail = limits.false_holds
    related = Correlation(
        groups=mine.groups, r=mine.correlation, error=mine.correlation_error
    ).interval(tail)
    grown = difference(mine.log_tokens, base.log_tokens, tail)
    last = _known(line, line.parent or line.base, limits)
    shrank = (
        last is not None
        and last.log_tokens is not None
        and mine.log_tokens.mean < last.log_tokens.mean
    )
    if related.low <= limits.max_length_correlation or shrank:
        return
    if math.exp(grown.low) <= limits.max_length_growth:
        return
    yield Finding(
        check="length",
        reference=line.base,
        text=f"longer answers get the higher reward (correlation within {mine.groups} groups "
        f"{related.value:.2f}, at least {related.low:.2f}, the limit is "
        f"{limits.max_length_correlation:g}), and they are {math.exp(grown.value):.2f} times as "
        f"long as those of {line.base}, at least {math.exp(grown.low):.2f} times, "
        f"the limit is {limits.max_length_growth:g}",
        figures={
            "correlation": related.value,
            "correlation_low": related.low,
            "correlation_limit": limits.max_length_correlation,
            "groups": mine.groups,
            "growth": math.exp(grown.value),
            "growth_low": math.exp(grown.low),
            "growth_limit": limits.max_length_growth,
        },
    )


def _judge_alone(line: Line, limits: Limits) -> Iterator[Result]:
    if line.earlier is None or not line.gains:
        yield "judge_alone", "the gate has measured too few promotions"
        return
    mine, before = (_known(line, name, limits) for name in (line.champion, line.earlier))
    if mine is None or before is None:
        few = line.champion if mine is None else line.earlier
        yield "judge_alone", _few(line, few, limits)
        return
    gain = sum(one.mean for one in line.gains)
    error = math.sqrt(sum(one.error**2 for one in line.gains))
    gain_low = gain - z_of(limits.false_holds) * error
    # The same chance for both: a gain of users as large as the least that counts is no hold either.
    tail = limits.false_holds
    users: dict[str, float] = {}
    changes: list[tuple[Interval, float]] = []
    """Gain of users in a series, and the least that counts."""
    words: list[str] = []
    now, then = mine.signals, before.signals
    # Each answer's signals are looked at, so their number is that of the answers.
    if now is not None and then is not None and then.share >= ROOM * limits.users_gain:
        fell = rise(then, now, tail)
        users |= {"signals": now.share, "signals_before": then.share}
        changes.append((fell, limits.users_gain))
        words.append(
            f"corrections and repeated questions went from {_percent(then.share)} to "
            f"{_percent(now.share)} of the answers"
        )
    told, told_then = mine.feedback, before.feedback
    if told is not None and told_then is not None and _enough(told, told_then, limits):
        better = difference(told, told_then, tail)
        users |= {"feedback": told.mean, "feedback_before": told_then.mean}
        # Feedback is -1..1, twice as wide as a share.
        changes.append((better, 2 * limits.users_gain))
        words.append(f"feedback from {told_then.mean:+.2f} to {told.mean:+.2f}")
    # One series shows that users gain nothing, and none looks as if they did.
    flat = any(one.high < least for one, least in changes)
    flat = flat and all(one.value < least for one, least in changes)
    if not changes:
        yield "judge_alone", "neither feedback nor signals tell of users"
    elif gain > limits.judge_gain and gain_low > 0.0 and flat:
        yield Finding(
            check="judge_alone",
            reference=line.earlier,
            text=f"the judge saw a gain of {gain:+.3f} over {len(line.gains)} promotions, at least "
            f"{gain_low:+.3f} (the limit is {limits.judge_gain:g}), and users none: "
            f"{', '.join(words)}",
            figures={"gain": gain, "gain_low": gain_low, "limit": limits.judge_gain, **users},
        )


def _enough(told: MeanOf, then: MeanOf, limits: Limits) -> bool:
    return all(
        one.n >= limits.min_groups and one.sessions >= LEAST_SESSIONS for one in (told, then)
    )


NAMES: Mapping[Kind, str] = {
    "refusal": "refusals",
    "clarifying": "questions in place of answers",
    "invalid_call": "invalid tool calls",
    "repetition": "loops",
    "empty": "empty",
    "cut": "cut by the token limit",
}


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"

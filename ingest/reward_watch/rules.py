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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ingest.reward_watch.profile import MeanOf, Profile, RateOf
from ingest.reward_watch.statistics import (
    Correlation,
    Interval,
    Mean,
    Rate,
    difference,
    rise,
    wilson,
    z_of,
)
from ingest.reward_watch.traits import KINDS, Kind
from sidecar.plurals import counted
from sidecar.settings import Watch

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


def assess(line: Line, limits: Watch) -> Verdict:
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


def _known(line: Line, name: str, limits: Watch) -> Profile | None:
    profile = line.profiles.get(name)
    if profile is None or profile.answers < limits.min_answers:
        return None
    return profile if profile.sessions >= LEAST_SESSIONS else None


def _few(line: Line, name: str, limits: Watch) -> str:
    profile = line.profiles.get(name)
    if profile is not None and profile.lost:
        return f"what was known of {name} was damaged, and its answers are deleted"
    answers = profile.answers if profile is not None else 0
    if profile is not None and answers >= limits.min_answers:
        sessions = counted(profile.sessions, "session")
        return (
            f"the {answers} known answers of {name} are of {sessions}, at least "
            f"{LEAST_SESSIONS} are needed: the answers of one session resemble each other"
        )
    known = counted(answers, "known answer")
    return f"{name} has {known}, watch.min_answers is {limits.min_answers}"


def _rates(line: Line, limits: Watch) -> Iterator[Result]:
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
        now = _rate(mine.rates.get(kind))
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
            before = _rate(theirs.rates.get(kind))
            risen = rise(now, before, tail)
            if risen.low > limits.max_rise:
                yield Finding(
                    check=kind,
                    reference=name,
                    text=f"{_percent(now.share)} of the champion's answers are {NAMES[kind]}, "
                    f"{_percent(before.share)} of those of {name}: at least "
                    f"{100 * risen.low:.1f} points more, watch.max_rise is "
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


def _length(line: Line, limits: Watch) -> Iterator[Result]:
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
            f"{mine.groups} scored groups of {line.champion} tell of length, watch.min_groups is "
            f"{limits.min_groups}",
        )
        return
    tail = limits.false_holds
    related = Correlation(
        groups=mine.groups, r=mine.correlation, error=mine.correlation_error
    ).interval(tail)
    grown = difference(_mean(mine.log_tokens), _mean(base.log_tokens), tail)
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
        f"{related.value:.2f}, at least {related.low:.2f}, watch.max_length_correlation is "
        f"{limits.max_length_correlation:g}), and they are {math.exp(grown.value):.2f} times as "
        f"long as those of {line.base}, at least {math.exp(grown.low):.2f} times, "
        f"watch.max_length_growth is {limits.max_length_growth:g}",
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


def _judge_alone(line: Line, limits: Watch) -> Iterator[Result]:
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
    if now is not None and then is not None and then.hits / then.n >= ROOM * limits.users_gain:
        fell = rise(_rate(then), _rate(now), tail)
        users |= {"signals": now.hits / now.n, "signals_before": then.hits / then.n}
        changes.append((fell, limits.users_gain))
        words.append(
            f"corrections and repeated questions went from {_percent(then.hits / then.n)} to "
            f"{_percent(now.hits / now.n)} of the answers"
        )
    told, told_then = mine.feedback, before.feedback
    if told is not None and told_then is not None and _enough(told, told_then, limits):
        better = difference(_mean(told), _mean(told_then), tail)
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
            f"{gain_low:+.3f} (watch.judge_gain is {limits.judge_gain:g}), and users none: "
            f"{', '.join(words)}",
            figures={"gain": gain, "gain_low": gain_low, "limit": limits.judge_gain, **users},
        )


def _enough(told: MeanOf, then: MeanOf, limits: Watch) -> bool:
    """Return whether there is feedback on enough answers, in enough sessions."""
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


def _rate(stored: RateOf | None) -> Rate:
    if stored is None:
        return Rate(n=0, hits=0, weight=0.0, sessions=0)
    return Rate(n=stored.n, hits=stored.hits, weight=stored.weight, sessions=stored.sessions)


def _mean(stored: MeanOf) -> Mean:
    return Mean(n=stored.n, mean=stored.mean, error=stored.error, sessions=stored.sessions)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"

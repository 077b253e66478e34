"""What the evidence of a canary proves, by the levels of the settings. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from deploy.evidence.betting import threshold
from deploy.evidence.live import GUARDS, ClientReportState, GuardState
from deploy.evidence.progress import difference_words, estimate
from deploy.evidence.quality import CHART_LEVEL, Limits, Quality, bounds
from deploy.records import Canary
from sidecar.routing.breaker_rule import few_callers
from sidecar.settings import Canary as CanarySettings
from sidecar.visible import counted

__all__ = [
    "CLAIMS",
    "anchor_after",
    "client_guard_words",
    "describe",
    "flaw_suspicion",
    "gained",
    "gate_doubt",
    "gate_prompts",
    "guard_doubt",
    "guard_harm",
    "harm",
    "has_anchor",
    "is_proven",
    "lacking",
    "least_proven",
    "limits_of",
    "odds",
    "proven",
    "ratios_of",
    "suspicion",
    "threshold",
    "too_many_missing",
    "tries_of",
]

RAISES = ("over_anchor", "champion_over_anchor")
"""Claims that move the anchor (`anchor_after`)."""
CLAIMS = ("no_worse", "anchored", "better", *RAISES)
"""What groups may prove in favour of a candidate or its champion (`deploy.evidence.quality`)."""
SEVERAL = 3
"""Callers whose sessions of the canary were bad that evidence by callers needs, for what clients
can cause. Where each session has a caller of its own, fewer are never over the limit at a weight of
1% or more."""
LAG = 5.0
"""How many times below the limit evidence by callers may be where evidence by sessions is over it.
However bad one caller is, 5 times the level bounds the bans; at 10 it got a candidate banned in two
of 320 simulated canaries."""
SUSPICIOUS = 5.0
"""Evidence against a candidate over which its promotion waits."""
DOUBTED = 3
"""The gate judges this many times `gate_prompts` prompts while a candidate is suspicious. Weights
of noise had evidence of 8 and 17 against them after 20 prompts, and met users; after 30 they were
rejected (docs/log.md)."""
_WANTED = {"no_worse": ("no_worse", "anchored"), "better": ("better", "anchored"), "quick": ()}
_CLAIMED = {
    "no_worse": "no worse than the champion",
    "anchored": "no worse than the anchor",
    "better": "better than the champion",
}
_HAPPENED = {
    "failed": "failed",
    "cut": "were cut by the client",
    "short": "had a reply that was cut short or empty",
    "invalid": "had a tool call or JSON that does not fit the request",
    "evasive": "had a refusal or a loop",
}
_FLAWED = {
    "short": "cut short or empty",
    "invalid": "invalid tool calls or JSON",
    "evasive": "refusals or loops",
    "narrow": "answers that are nearly certain",
    "long": "answers of twice the length",
}
_MOST_NATS = 700.0
"""exp of more does not fit into a float."""
_ERROR = 1e-9
"""Larger than the error of exp and log: evidence of just 20 is shown as 20."""


MAX_INVALID_EXCESS = 0.02
"""Share by which the candidate's tool calls and JSON that do not fit their request may exceed the
champion's, on the same prompts."""
MAX_EVASIVE_EXCESS = 0.05
"""The same for refusals and loops."""
MAX_NARROW_EXCESS = 0.25
"""Share of prompts on which the candidate's answers may be nearly certain (under 0.1 nats a token)
and half as uncertain as the champion's, over the share in which the champion's are."""
MAX_TRUNCATED_EXCESS = 0.05
"""Share by which the candidate's answers that are cut short or empty may exceed the champion's."""
MAX_LONG_EXCESS = 0.5
"""Share of prompts on which the candidate's answers may be more than twice as long as the
champion's, over the share in which the champion's are."""
MAX_MISSING = 0.5
"""Share of groups that the judge cannot score, through nobody's fault, over which the others prove
nothing."""
GUARD_RATIO = 1.5
"""Bad sessions that a guard accepts, as a multiple of the champion's."""
PROMOTE_LEVEL = 0.05
"""Chance of promoting a candidate that is worse than a margin allows."""
HARM_LEVEL = 0.05
"""Chance that judged groups roll back a candidate that is no worse than the champion."""
GUARD_LEVEL = 0.01
"""Chance that one of the five guards of replies rolls back a candidate that is no worse by it."""
SPLIT_LEVEL = 0.001
"""Chance of holding a canary for a wrong split of traffic that is right."""


def limits_of(rules: CanarySettings) -> Limits:
    """Return what counts as worse in judged groups."""
    return Limits(
        margin=rules.margin,
        anchor_margin=rules.margin,
        flaws={
            "short": _under_one(MAX_TRUNCATED_EXCESS),
            "invalid": _under_one(MAX_INVALID_EXCESS),
            "evasive": _under_one(MAX_EVASIVE_EXCESS),
            "narrow": _under_one(MAX_NARROW_EXCESS),
            "long": _under_one(MAX_LONG_EXCESS),
        },
    )


def has_anchor(canary: Canary, rules: CanarySettings) -> bool:
    """Return True when the anchor is an adapter of its own, and is asked."""
    return rules.promote_on != "quick" and canary.anchor != canary.champion


def tries_of(canary: Canary, rules: CanarySettings) -> tuple[str, ...]:
    """Return the earlier canaries whose groups count: none for `quick`, a mean over its own."""
    return () if rules.promote_on == "quick" else canary.tries


def ratios_of() -> Mapping[str, float]:
    """Return how many times the champion's bad sessions each guard accepts."""
    return dict.fromkeys(GUARDS, GUARD_RATIO)


def level_of(kind: str) -> float:
    """Return the level of a claim of judged groups, or of one guard: half where groups and sessions
    share it, as both see the kind, and of narrow and long answers, outcomes and feedback."""
    if kind in CLAIMS or kind == "harm":
        return HARM_LEVEL if kind == "harm" else PROMOTE_LEVEL
    return GUARD_LEVEL if kind in ("failed", "cut") else GUARD_LEVEL / 2.0


def guard_harm(guards: Mapping[str, GuardState]) -> str | None:
    """Return in words what users' sessions prove against the candidate, or None.

    One caller that tells the arms apart, by its own means, could make most of them up. So each
    caller counts once, and `SEVERAL` are needed; or half of the bad sessions are from different
    callers, and evidence by callers is not far behind.
    """
    for kind, state in guards.items():
        limit, log_e = threshold(level_of(kind)), state.by_caller.peak
        proven = log_e >= limit and (state.callers >= SEVERAL or kind == "failed")
        supported = log_e >= limit - math.log(LAG)
        if not proven and supported and not few_callers(state.callers, state.canary):
            log_e = state.bets.peak
            proven = log_e >= limit
        if proven:
            return f"{_bad_sessions(kind, state)}: {_evidence(state, log_e, limit)}"
    return None


def guard_doubt(guards: Mapping[str, GuardState]) -> str | None:
    """Return in words which guard ends the canary without a verdict on the candidate, or None: its
    sessions would prove harm, but too few callers stand behind them."""
    for kind, state in guards.items():
        limit = threshold(level_of(kind))
        if state.bets.peak >= limit:
            return (
                f"{_bad_sessions(kind, state)}: {_evidence(state, state.bets.peak, limit)}; it is "
                f"{odds(state.by_caller.peak)} where each caller counts once, so it may be their "
                "doing"
            )
    return None


def _bad_sessions(kind: str, state: GuardState) -> str:
    if isinstance(state, ClientReportState):
        return client_guard_words(kind, state)
    return (
        f"{state.canary} of the canary's sessions and {state.champion} of the champion's "
        f"{_HAPPENED[kind]}"
    )


def client_guard_words(kind: str, state: ClientReportState) -> str:
    """Say what clients told of both arms."""
    means = {arm: state.mean(canary=arm) for arm in (True, False)}
    shown = {arm: "none" if mean is None else f"{mean:.2f}" for arm, mean in means.items()}
    return (
        f"mean {kind} (0 bad, 1 good) {shown[True]} in {counted(state.units[True], 'session')} of "
        f"the canary and {shown[False]} in {state.units[False]} of the champion"
    )


def _evidence(state: GuardState, log_e: float, limit: float) -> str:
    callers = counted(state.callers, "caller")
    return f"evidence from {callers}: {odds(log_e)}, the limit is {odds(limit)}"


def suspicion(
    guards: Mapping[str, GuardState], quality: Quality, rules: CanarySettings
) -> str | None:
    """Return in words which guard is not quiet, or None: nobody is promoted over it.

    It proves nothing and ends nothing, so it needs no level: more sessions or groups settle it.
    """
    for kind, state in guards.items():
        if state.bets.log_e > threshold(1.0 / SUSPICIOUS):
            return (
                f"more sessions: {_bad_sessions(kind, state)}, evidence {odds(state.bets.log_e)} "
                f"from {counted(state.callers, 'caller')}"
            )
    return flaw_suspicion(quality, rules)


def flaw_suspicion(quality: Quality, rules: CanarySettings) -> str | None:
    """Return in words which guard the judged groups do not leave quiet, or None."""
    found = _suspicious_flaw(quality, rules)
    return None if found is None else f"more groups: {found}"


def _suspicious_flaw(quality: Quality, rules: CanarySettings) -> str | None:
    if rules.promote_on == "quick":  # it judges no group after the gate: nothing would settle it
        return None
    for kind, bets in quality.flaws.items():
        if bets.log_e > threshold(1.0 / SUSPICIOUS):
            return f"more {_FLAWED[kind]} than the champion, evidence {odds(bets.log_e)}"
    return None


def gate_doubt(quality: Quality, rules: CanarySettings) -> str | None:
    """Return in words what speaks against a candidate at the gate without proving harm, or None."""
    if rules.promote_on != "quick" and quality.harm.log_e > threshold(1.0 / SUSPICIOUS):
        return f"worse than the champion, evidence {odds(quality.harm.log_e)}"
    return _suspicious_flaw(quality, rules)


def gate_prompts(quality: Quality, rules: CanarySettings) -> int:
    """Return how many held-out prompts the gate judges: more while it doubts the candidate."""
    return rules.gate_prompts * (1 if gate_doubt(quality, rules) is None else DOUBTED)


def harm(quality: Quality) -> str | None:
    """Return in words what judged groups prove against the candidate, or None."""
    if quality.harm.peak >= threshold(HARM_LEVEL):
        return (
            f"worse than the champion in {counted(quality.harm.peak_at, 'group')}: evidence "
            f"{odds(quality.harm.peak)}, the limit is {odds(threshold(HARM_LEVEL))}"
        )
    for kind, bets in quality.flaws.items():
        level = level_of(kind)
        if bets.peak >= threshold(level):
            return (
                f"more {_FLAWED[kind]} than the champion in {counted(bets.peak_at, 'group')}: "
                f"evidence {odds(bets.peak)}, the limit is {odds(threshold(level))}"
            )
    return None


def proven(quality: Quality, rules: CanarySettings) -> frozenset[str]:
    """Return the claims that the groups prove. `quick` asks no anchor."""
    limit = threshold(PROMOTE_LEVEL)
    claims = CLAIMS if rules.promote_on != "quick" else set(CLAIMS).difference(RAISES)
    return frozenset(claim for claim in claims if getattr(quality, claim).peak >= limit)


def anchor_after(canary: Canary, *, promoted: bool) -> str:
    """Return the anchor after a canary: the best of anchor, champion and candidate, as far as that
    is proven. A candidate must be proven better than what would be the anchor without it.
    """
    anchor, beats = canary.anchor, "over_anchor"
    if canary.anchor != canary.champion and "champion_over_anchor" in canary.proven:
        anchor, beats = canary.champion, "better"
    return canary.candidate if promoted and beats in canary.proven else anchor


def is_proven(claims: frozenset[str], rules: CanarySettings) -> bool:
    """Return True when these claims are all that a promotion asks for."""
    return claims.issuperset(_WANTED[rules.promote_on])


def lacking(quality: Quality, before: frozenset[str], rules: CanarySettings) -> str | None:
    """Return in words what a promotion lacks, or None.

    before: claims that were proven by an earlier look; a proof stands.
    """
    known = before | proven(quality, rules)
    for claim in _WANTED[rules.promote_on]:
        if claim not in known:
            return (
                f"proof that it is {_CLAIMED[claim]}: evidence "
                f"{odds(getattr(quality, claim).peak)} of {1 / PROMOTE_LEVEL:g}"
            )
    if rules.promote_on != "quick" and quality.unknown_share > MAX_MISSING:
        return f"groups that the judge can score: {too_many_missing(quality)}"
    return None


def least_proven(
    evidence: Mapping[str, object], before: frozenset[str], rules: CanarySettings
) -> tuple[float, float] | None:
    """Return the e-value of the claim that a promotion lacks most and the one that it needs; None
    when it waits for no proof. evidence: `quality` of a canary's row; before: as of `lacking`."""
    found = []
    for claim in _WANTED[rules.promote_on]:
        told = evidence.get(claim)
        nats = told.get("nats") if isinstance(told, dict) else 0.0
        if claim not in before and isinstance(nats, int | float):
            found.append(math.exp(min(nats, _MOST_NATS)))
    return (min(found), 1.0 / PROMOTE_LEVEL) if found else None


def too_many_missing(quality: Quality) -> str:
    """Say that too many groups could not be scored."""
    return (
        f"{quality.unknown} of {counted(quality.unknown + quality.groups, 'group')} could not be "
        "scored, so the others prove nothing"
    )


def describe(quality: Quality) -> str:
    """Say how the candidate compares, with the interval that holds at every look.

    The groups are those that the interval rests on, the ones that the champion lost among them.
    """
    low, high = bounds(quality.chart, CHART_LEVEL)
    return (
        f"difference to the champion {2 * low - 1:+.3f} to {2 * high - 1:+.3f} by "
        f"{counted(quality.chart.observations, 'group')}"
    )


def gained(quality: Quality) -> str:
    """Say how much better the candidate is, as `sidecar progress` does; "" where nobody judged."""
    found = estimate(quality.differences)
    return "" if found is None else f"; it {difference_words(found, 'the champion')}"


def odds(log_e: float) -> str:
    """Return the evidence as a number of three digits. log_e: in nats.

    It is rounded down: evidence below a limit must not look as if it had reached it.
    """
    value = math.exp(min(log_e, _MOST_NATS)) * (1.0 + _ERROR)
    unit = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0.0 else 1.0
    return f"{math.floor(value / unit) * unit:.3g}"


def _under_one(excess: float) -> float:
    """A share of 1 accepts everything; the mean under the null hypothesis must be below 1."""
    return min(excess, 0.999)

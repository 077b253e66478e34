"""The evidence of a canary as JSON, as the store keeps it and people read it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from deploy.evidence.betting import Bets
from deploy.evidence.interval import Sequence, bounds
from deploy.evidence.live import GuardState, Live
from deploy.evidence.quality import CHART_LEVEL, Quality
from deploy.records import Canary
from deploy.registry.canary_rule import RampEvidence
from deploy.registry.proof_rule import CLAIMS, guard_level, proven
from sidecar.settings import Canary as CanarySettings

Facts = dict[str, Any]  # Any: JSON
_COUNTS = ("candidate", "champion", "champion_before")


def step_facts(canary: Canary, evidence: RampEvidence) -> Facts:
    """Return the progress of a step."""
    return {
        "weight_bp": canary.weight_bp,
        **{name: asdict(getattr(evidence, name)) for name in _COUNTS},
        "seen": evidence.seen,
        "sessions": evidence.sessions,
        "missing_in_a_row": evidence.missing_in_a_row,
    }


def guard_facts(live: Live, behind: bool, rules: CanarySettings) -> Facts:
    """Return what users' sessions say, by guard."""
    return {
        "sessions": {"canary": live.canary_units, "champion": live.champion_units},
        "behind": behind,
        "forgotten": live.forgotten,
        "late": dict(live.late),
        "split": _claim(live.split, rules.split_level),
        **{kind: _guard(kind, state, rules) for kind, state in live.guards.items()},
    }


def quality_facts(quality: Quality, before: frozenset[str], rules: CanarySettings) -> Facts:
    """Return what judged groups say. before: claims that were proven by an earlier look."""
    low, high = _interval(quality.chart)
    levels = dict.fromkeys(CLAIMS, rules.promote_level) | {"harm": rules.harm_level}
    flaws: Mapping[str, Bets] = quality.flaws
    return {
        "groups": quality.groups,
        "lost": quality.lost,
        "unknown": quality.unknown,
        "champion_lost": quality.champion_lost,
        "low": low,
        "high": high,
        "to_anchor": {
            "candidate": _interval(quality.to_anchor),
            "champion": _interval(quality.champion_to_anchor),
        },
        "proven": sorted(before | proven(quality, rules)),
        **{name: _claim(getattr(quality, name), level) for name, level in levels.items()},
        "flaws": {kind: _claim(bets, guard_level(kind, rules)) for kind, bets in flaws.items()},
    }


def _interval(chart: Sequence) -> tuple[float, float]:
    """Return the bounds of a difference, -1..1, which hold at all looks together."""
    low, high = bounds(chart, CHART_LEVEL)
    return 2.0 * low - 1.0, 2.0 * high - 1.0


def _guard(kind: str, state: GuardState, rules: CanarySettings) -> Facts:
    counts = {"canary": state.canary, "champion": state.champion}
    return counts | _claim(state.bets, guard_level(kind, rules))


def _claim(bets: Bets, level: float) -> Facts:
    """Return an e-process: `nats`, the logarithm of its largest evidence so far, which decides, and
    the evidence that is the `threshold`."""
    return {
        "nats": bets.peak,
        "nats_now": bets.log_e,
        "reached_at": bets.peak_at,
        "observations": bets.observations,
        "threshold": 1.0 / level,
    }

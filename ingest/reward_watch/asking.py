"""Ask the watch about the champion: gather what the checks compare, and what is waived."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.reward_watch.profile import Profile
from ingest.reward_watch.rules import Finding, Gain, Line, Verdict, assess
from ingest.reward_watch.store import current_profile, damaged_profiles
from sidecar.lines import flag_of
from sidecar.records import BASE
from sidecar.settings import Watch
from sidecar.store.database import get_flag, set_flag
from sidecar.store.models import AdapterRow, AliasRow, CanaryRow

OVERRIDE = "watch_override"
"""Flag row: what an operator accepted, as JSON of `Override`."""
WIDTH_95 = 2 * 1.959964
"""Width of a 95% interval in standard errors; the gate stores such intervals."""

log = structlog.get_logger()


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's word: while this version is champion, these checks do not hold the learner."""

    champion: str
    checks: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the watch says of the champion."""

    verdict: Verdict
    holding: tuple[Finding, ...]
    """Findings that nobody waived; with any of them the learner is held."""
    profiles: dict[str, Profile]
    damaged: tuple[str, ...] = ()
    """Adapters whose stored profile cannot be read."""

    @property
    def reason(self) -> str:
        return "; ".join(one.text for one in self.holding)


def ask(session: Session, model: str, settings: Watch) -> Answer:
    """Check the champion of a line. Reads a bounded number of small rows.

    model: name of the line of adapters.
    """
    line = line_of(session, model, settings)
    verdict = assess(line, settings)
    waived = read_override(session, model)
    accepted: frozenset[str] = frozenset()
    if waived is not None and waived.champion == verdict.champion:
        accepted = frozenset(waived.checks)
    holding = tuple(one for one in verdict.findings if one.check not in accepted)
    if not settings.hold:
        holding = ()
    return Answer(
        verdict=verdict,
        holding=holding,
        profiles=dict(line.profiles),
        damaged=damaged_profiles(session, model, line.profiles),
    )


def line_of(session: Session, model: str, settings: Watch) -> Line:
    """Gather the champion, the versions before it, and what is known of them."""
    alias = session.get(AliasRow, (model, "champion"))
    champion = BASE if alias is None else alias.adapter
    names = [champion, *_ancestors(session, model, champion, settings.versions)]
    line = Line(champion=champion, profiles={}, parent=names[1] if len(names) > 1 else None)
    if line.parent is None:
        profiles = {champion: current_profile(session, model, champion, settings)}
        return replace(line, profiles=profiles)
    gains = [_gain(session, name) for name in names[:-1]]
    known = [one for one in gains if one is not None]
    wanted = dict.fromkeys((champion, line.parent, BASE, names[-1]))
    return replace(
        line,
        profiles={name: current_profile(session, model, name, settings) for name in wanted},
        earlier=names[-1],
        # Without all of them nobody knows what the judge saw in sum.
        gains=tuple(known) if len(known) == len(gains) else (),
    )


def _ancestors(session: Session, model: str, champion: str, most: int) -> Iterator[str]:
    name = champion
    for _ in range(most):
        if name == BASE:
            return
        parent = session.scalar(
            select(AdapterRow.parent).where(AdapterRow.model == model, AdapterRow.name == name)
        )
        if not isinstance(parent, str):
            return
        yield parent
        name = parent


def _gain(session: Session, candidate: str) -> Gain | None:
    """Return what the gate measured of a version; None: it was not measured, or the row is
    damaged."""
    of_candidate = select(CanaryRow.evidence).where(CanaryRow.candidate == candidate)
    evidence = session.scalar(of_candidate.order_by(CanaryRow.created_at.desc()).limit(1))
    gate = evidence.get("gate") if isinstance(evidence, dict) else None
    if not isinstance(gate, dict):
        return None
    numbers = [gate.get(name) for name in ("mean_difference", "low", "high")]
    mean, low, high = (_number(one) for one in numbers)
    if not (low <= mean <= high):
        return None
    return Gain(mean=mean, error=(high - low) / WIDTH_95)


def _number(value: object) -> float:
    """Return a finite number; NaN for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and math.isfinite(value) else math.nan  # type: ignore[arg-type]


def read_override(session: Session, model: str) -> Override | None:
    """Return what an operator accepted in a line; None: nothing, or the row is damaged: then
    nothing is waived."""
    text = get_flag(session, flag_of(OVERRIDE, model))
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Override)
    except (msgspec.MsgspecError, UnicodeError):
        log.error("watch_override_unreadable")
        return None


def write_override(session: Session, model: str, override: Override) -> None:
    """Accept what the watch found in a line, in the caller's write transaction."""
    set_flag(
        session, flag_of(OVERRIDE, model), msgspec.json.encode(override).decode(), now=override.at
    )

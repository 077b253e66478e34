"""What numbers from outside say of a canary: each check, and what some in a row mean. Pure.

Failure, error and no data are three things. A check **fails** when the value is beyond its limits;
it is an **error** when the provider could not be asked or answered something else than a number;
it has **no data** when the provider answered that there is none. Failures in a row roll back or
hold, by the mode of the metric; errors in a row hold and never roll back; no data neither adds to a
row of failures nor ends it. A limit of an operator's is no test: it has no level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from sidecar.plurals import counted

Outcome = Literal["ok", "failing", "no_data", "error"]
Mode = Literal["dry_run", "signal", "guardrail"]
KEPT = 20
"""Newest checks of a metric that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One answer to a metric's question."""

    at: float
    """Unix seconds."""
    outcome: Outcome
    value: float | None = None
    why: str = ""
    """What is wrong and what to do, of an error; why there is no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricState:
    """What is known of one metric."""

    mode: Mode = "dry_run"
    min: float | None = None
    max: float | None = None
    """Limits of a good value, when it was checked last."""
    fails_at: int = 1
    """Failing checks in a row that mean something."""
    errs_at: int = 1
    """Errors in a row that mean something."""
    failures: int = 0
    """Failing checks in a row; checks without data between them do not count."""
    errors: int = 0
    """Errors in a row."""
    known_at: float = 0.0
    """When a check last gave a value, Unix seconds; 0: none did."""
    history: tuple[Check, ...] = field(default=())
    """The newest checks, the oldest first; at most `KEPT`."""

    @property
    def last(self) -> Check | None:
        return self.history[-1] if self.history else None

    @property
    def fails(self) -> bool:
        return self.failures >= self.fails_at

    @property
    def is_away(self) -> bool:
        return self.errors >= self.errs_at


def outcome_of(value: float | None, low: float | None, high: float | None) -> Outcome:
    """Return what a value means. low, high: limits of a good value; None: there is none.

    None and NaN are no data: a query that divides nothing by nothing gives NaN.
    """
    if value is None or value != value:
        return "no_data"
    beyond = (low is not None and value < low) or (high is not None and value > high)
    return "failing" if beyond else "ok"


def add_check(state: MetricState, check: Check) -> MetricState:
    """Return the state after one more check."""
    failures = {"ok": 0, "failing": state.failures + 1}.get(check.outcome, state.failures)
    return replace(
        state,
        failures=failures,
        errors=state.errors + 1 if check.outcome == "error" else 0,
        known_at=check.at if check.outcome in ("ok", "failing") else state.known_at,
        history=(*state.history, check)[-KEPT:],
    )


def broken_guardrail(metrics: Mapping[str, MetricState], *, since: float = 0.0) -> str | None:
    """Return in words which guardrail failed often enough to roll back, or None.

    since: Unix seconds; a guardrail whose newest value is older says nothing of what serves now.
    """
    for name, state in metrics.items():
        if state.mode == "guardrail" and state.fails and state.known_at >= since:
            return f"guardrail {name}: {_beyond(state)}"
    return None


def standing(metrics: Mapping[str, MetricState]) -> str | None:
    """Return in words which signal holds the ramp, or None. It goes on when the signal recovers."""
    for name, state in metrics.items():
        if state.mode == "signal" and state.fails:
            return f"signal {name}: {_beyond(state)}"
    return None


def away(metrics: Mapping[str, MetricState]) -> str | None:
    """Return in words which metric cannot be asked, or None. It holds, and proves nothing."""
    for name, state in metrics.items():
        if state.mode != "dry_run" and state.is_away and state.last is not None:
            tries = counted(state.errors, "time")
            return f"metric {name} gave no answer {tries} in a row: {state.last.why}"
    return None


def unseen(
    metrics: Mapping[str, MetricState], wanted: Iterable[str], *, since: float
) -> str | None:
    """Return in words which metric has no value of the present step yet, or None.

    wanted: metrics that may hold or roll back. since: Unix seconds at which the step began.
    """
    for name in wanted:
        state = metrics.get(name)
        if state is None or state.known_at < since:
            return f"metric {name}, which has no value yet"
    return None


def _beyond(state: MetricState) -> str:
    values = [one.value for one in state.history if one.outcome == "failing"][-state.failures :]
    shown = ", ".join(f"{value:g}" for value in values[-3:] if value is not None)
    limits = [
        f"{word} {limit:g}"
        for word, limit in (("below", state.min), ("above", state.max))
        if limit is not None
    ]
    are = "is" if len(values) == 1 else "are"
    return f"{shown} {are} {' or '.join(limits)} in {counted(state.failures, 'check')} in a row"

"""The rules of a canary: from its phase and the evidence, its next transition. Pure.

In plain words:

1. **loading** A new adapter is validated on disk, loaded into vLLM under its own name and probed.
   It passes when replies carry its name and its log-probabilities on a fixed prompt differ from
   the base's. An invalid adapter, or one without effect, is rejected. While vLLM is unreachable
   the canary waits.
2. **gating** Candidate and champion answer the same held-out prompts; a judge scores both blind in
   one group. With `gate_prompts` of them scored (or all there are, `gate_min_prompts` at least)
   the candidate passes when its mean difference is above `-gate_margin` and its share of truncated
   or empty answers exceeds the champion's by at most `max_truncated_excess`; else it is rejected.
   With too few prompts, or the judge or vLLM unreachable, it waits and its clock stops. When the
   clock reaches `gate_timeout_s`, the prompts scored by then decide; with fewer than
   `gate_min_prompts` the canary is inconclusive.
3. **ramping** The candidate answers a share of the sessions, which grows step by step. Three guards
   compare it with the champion: the share of failed replies, of replies that the client cut, and
   of truncated or empty replies. The candidate is rolled back as soon as one of its shares exceeds
   the champion's by more than the guard's limit. A guard applies once the candidate has
   `step_min_exchanges` replies or `BREAKER_FAILURES` bad ones. Both arms are compared over the same
   span of time, and the candidate must be worse both in that span and when the champion's earlier
   replies are added. A request counts as failed when the candidate failed it or vLLM did not know
   the adapter, also if another adapter then answered it; while the newest `BREAKER_FAILURES`
   requests all met an unknown adapter, the step does not end. Otherwise a step ends after
   `step_min_s` and `step_min_exchanges`, and after the last step the candidate is promoted.
   A step that reaches `step_max_s` first is inconclusive.

When the proxy's breaker (`sidecar.routing.breaker`) takes a candidate out, the canary is rolled
back at once. A paused canary instead stays paused, without traffic, until an operator resumes or
aborts it; a paused canary makes no other transition. Inconclusive keeps the champion and retires
the candidate. An ended canary never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deploy.records import AdapterState, Canary, Phase
from deploy.registry.gate_rule import GateVerdict
from sidecar.backoff import Backoff
from sidecar.settings import Canary as CanarySettings

BREAKER_FAILURES = 5
"""Bad replies after which the guards apply, although the step lacks its minimum of exchanges."""
MAX_LOAD_FAILURES = 8
"""Failed loads (vLLM is up and answers with a server error) after which an adapter is rejected."""
LOAD_WAITS = Backoff(first_s=2.0)
"""Wait after the first failed load; it doubles with each failure. Eight failures span four minutes,
longer than a traffic peak keeps vLLM out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Stay in this phase or step, for the reason given."""

    reason: str
    stops_clock: bool = False
    """True when the candidate is not the cause of the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Change to phase `to`."""

    to: Phase
    candidate_state: AdapterState
    reason: str
    step: int = 0


Decision = Hold | Move


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEvidence:
    """Evidence of the loading phase. At most one of the three reasons is set."""

    live: bool = False
    invalid: str | None = None
    """Reason why the folder cannot be served or the loaded adapter has no effect."""
    away: str | None = None
    """Reason why vLLM could not be reached."""
    load_failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateEvidence:
    """Evidence of the gating phase."""

    prompts: int
    """Held-out prompts available, compared or not; at most `gate_prompts`."""
    pending: int
    """Held-out prompts not compared yet; part of `prompts`."""
    verdict: GateVerdict
    """The verdict if the gate ended now."""
    away: str | None = None
    """Reason why the judge or vLLM could not be reached."""
    judge_gives_reward: bool = False
    """True when the gate's judge also scores what the candidate learned from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCounts:
    """Counts of the users' turns that one arm answered in a span of time."""

    replies: int
    errors: int
    """Turns in which vLLM failed or did not know the adapter."""
    short: int
    """Turns whose reply hit the token limit or is empty; among `looked_at`."""
    cuts: int = 0
    """Turns in which the client disconnected before the end of the reply."""
    looked_at: int | None = None
    """Number of the newest turns whose reply text was read; None: all."""

    @property
    def error_share(self) -> float:
        return self.errors / self.replies if self.replies else 0.0

    @property
    def short_share(self) -> float:
        looked_at = self.replies if self.looked_at is None else self.looked_at
        return self.short / looked_at if looked_at else 0.0

    @property
    def cut_share(self) -> float:
        return self.cuts / self.replies if self.replies else 0.0

    def __add__(self, other: ArmCounts) -> ArmCounts:
        mine, its = self.looked_at, other.looked_at
        return ArmCounts(
            replies=self.replies + other.replies,
            errors=self.errors + other.errors,
            short=self.short + other.short,
            cuts=self.cuts + other.cuts,
            looked_at=(self.replies if mine is None else mine)
            + (other.replies if its is None else its),
        )


NOTHING = ArmCounts(replies=0, errors=0, short=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RampEvidence:
    candidate: ArmCounts
    champion: ArmCounts
    """The champion's turns in the same span of time as `candidate`."""
    champion_before: ArmCounts = NOTHING
    """The champion's newest turns before that span, added while the span holds few."""
    seen: int | None = None
    """Number of the candidate's turns in the whole step; None: as in `candidate`."""
    missing_in_a_row: int = 0
    """Consecutive newest requests of the candidate for which vLLM did not know the adapter."""


Evidence = LoadEvidence | GateEvidence | RampEvidence


def load_wait_s(failures: int) -> float:
    """Return the seconds from a failed load to the next attempt.

    failures: failed loads so far, at least 1.
    """
    return LOAD_WAITS.wait_s(failures)


def elapsed_s(canary: Canary, now: float) -> float:
    """Return the seconds since the phase or step began, without those in which its clock stopped.

    now: Unix seconds.
    """
    until = canary.stopped_at if canary.stopped_at is not None else now
    return max(0.0, until - canary.step_started_at - canary.stopped_s)


def decide(canary: Canary, evidence: Evidence, rules: CanarySettings, now: float) -> Decision:
    """Return the next transition of a canary, or the reason to hold. now: Unix seconds."""
    if not canary.active:
        return Hold(reason=canary.reason or "ended")
    if not canary.readable:
        state: AdapterState = "rolled_back" if canary.phase == "ramping" else "rejected"
        reason = "the store's record of its ramp (`evidence.steps`) cannot be read"
        return Move(to="rolled_back", candidate_state=state, reason=reason)
    if canary.paused:
        return Hold(reason=canary.reason or "paused", stops_clock=True)
    if canary.phase == "loading" and isinstance(evidence, LoadEvidence):
        return _after_loading(evidence)
    if canary.phase == "gating" and isinstance(evidence, GateEvidence):
        return _after_gating(canary, evidence, rules, now)
    if canary.phase == "ramping" and isinstance(evidence, RampEvidence):
        return _after_ramping(canary, evidence, rules, now)
    raise TypeError(f"{type(evidence).__name__} is not the evidence of {canary.phase}")


def _after_loading(evidence: LoadEvidence) -> Decision:
    if evidence.invalid is not None:
        return _reject(evidence.invalid)
    if evidence.load_failures >= MAX_LOAD_FAILURES:
        return _reject(f"vLLM failed to load it {evidence.load_failures} times: {evidence.away}")
    if evidence.live:
        return Move(to="gating", candidate_state="gating", reason="loaded and live")
    return Hold(reason=f"waiting for vLLM: {evidence.away}", stops_clock=True)


def _after_gating(
    canary: Canary, evidence: GateEvidence, rules: CanarySettings, now: float
) -> Decision:
    verdict, wanted = evidence.verdict, min(rules.gate_prompts, evidence.prompts)
    enough = verdict.scored >= rules.gate_min_prompts
    timed_out = elapsed_s(canary, now) >= rules.gate_timeout_s
    if evidence.away is not None:
        return Hold(reason=f"gate waits: {evidence.away}", stops_clock=True)
    if enough and (verdict.scored >= wanted or evidence.pending == 0 or timed_out):
        if not verdict.passed:
            return _reject(verdict.reason)
        return Move(to="ramping", candidate_state="ramping", reason=verdict.reason)
    if evidence.prompts < rules.gate_min_prompts:
        return Hold(
            reason=f"gate waits for held-out prompts: {evidence.prompts} of the "
            f"{rules.gate_min_prompts} it needs",
            stops_clock=True,
        )
    if timed_out:
        return _inconclusive(
            f"gate: {verdict.scored} comparisons scored, {verdict.set_aside} set aside in "
            f"{rules.gate_timeout_s:g} s; it needs {rules.gate_min_prompts}"
        )
    return Hold(reason=f"gate: {verdict.scored} of {wanted} prompts judged")


def _after_ramping(
    canary: Canary, evidence: RampEvidence, rules: CanarySettings, now: float
) -> Decision:
    tripped = _tripped_guard(evidence, rules)
    if tripped is not None:
        return Move(to="rolled_back", candidate_state="rolled_back", reason=tripped)
    seen = evidence.candidate.replies if evidence.seen is None else evidence.seen
    spent_s = elapsed_s(canary, now)
    missing = evidence.missing_in_a_row >= BREAKER_FAILURES
    if seen >= rules.step_min_exchanges and spent_s >= rules.step_min_s and not missing:
        return _next_step(canary, seen)
    if spent_s >= rules.step_max_s:
        return _inconclusive(
            f"step {canary.step + 1}: {seen} of {rules.step_min_exchanges} exchanges in "
            f"{rules.step_max_s:g} s"
        )
    if missing:
        # Good replies from before must not end the step while vLLM does not know the adapter.
        return Hold(
            reason=f"step {canary.step + 1} stands: vLLM did not know the adapter for its last "
            f"{evidence.missing_in_a_row} requests"
        )
    return Hold(
        reason=f"step {canary.step + 1} of {len(canary.steps)} at {canary.weight_bp / 100:g}%: "
        f"{seen} of {rules.step_min_exchanges} exchanges"
    )


def _next_step(canary: Canary, seen: int) -> Move:
    following = canary.step + 1
    if following == len(canary.steps):
        return Move(
            to="promoted",
            candidate_state="champion",
            reason=f"passed all {following} steps of the ramp",
        )
    return Move(
        to="ramping",
        candidate_state="ramping",
        step=following,
        reason=f"step {following} of {len(canary.steps)} passed with {seen} exchanges",
    )


def _tripped_guard(evidence: RampEvidence, rules: CanarySettings) -> str | None:
    candidate, champion = evidence.candidate, evidence.champion
    longer = champion + evidence.champion_before
    guards: tuple[tuple[str, int, Callable[[ArmCounts], float], float], ...] = (
        ("failed", candidate.errors, lambda arm: arm.error_share, rules.max_error_excess),
        ("were cut by the client", candidate.cuts, lambda arm: arm.cut_share, rules.max_cut_excess),
        (
            "were cut short or empty",
            candidate.short,
            lambda arm: arm.short_share,
            rules.max_truncated_excess,
        ),
    )
    for what, bad, share_of, limit in guards:
        looked_at = candidate.replies >= rules.step_min_exchanges or bad >= BREAKER_FAILURES
        share = share_of(candidate)
        base = champion if share_of(champion) > share_of(longer) else longer
        if looked_at and share - share_of(base) > limit:
            return (
                f"{share:.0%} of the canary's {candidate.replies} replies {what}, "
                f"{share_of(base):.0%} of the champion's {base.replies}: "
                f"over by more than {limit:.0%}"
            )
    return None


def _reject(reason: str) -> Move:
    return Move(to="rolled_back", candidate_state="rejected", reason=reason)


def _inconclusive(reason: str) -> Move:
    return Move(to="inconclusive", candidate_state="retired", reason=reason)

"""The rules of a canary: from its phase and the evidence, its next transition. Pure.

In plain words:

1. **loading** A new adapter is validated on disk, loaded into vLLM under its own name and probed.
   It passes when replies carry its name and its log-probabilities on a fixed prompt differ from
   the base's. An invalid adapter, or one without effect, is rejected. While vLLM is unreachable
   the canary waits. A load that fails is tried again, and is inconclusive in the end.
2. **gating** Candidate, champion and anchor answer the same held-out prompts; a judge scores all
   blind in one group (`deploy.evidence.quality`). The gate refuses the clearly bad: a candidate
   that is proven worse, or whose answers are flawed more often. After `gate_prompts` of them (or
   all there are, `gate_min_prompts` at least; three times as many while something speaks against
   it) the candidate goes on, and the groups count in the ramp. With too few prompts, or the judge
   or vLLM unreachable, it waits and its clock stops. When the clock reaches `GATE_TIMEOUT_S`, the
   groups so far decide; with fewer than `gate_min_prompts` the canary is inconclusive.
3. **ramping** The candidate answers a share of the sessions, which grows step by step, and further
   groups are judged beside it. It is rolled back as soon as a guard (`deploy.evidence.live`) or the
   groups prove harm, or a guardrail from outside (`deploy.evidence.live`) fails some checks in a
   row. A guard whose sessions come from too few callers ends the canary as inconclusive instead: a
   client may have caused them. The canary is held while users' sessions are not split by the
   weight, more than `MOST_IN_BOTH_ARMS` of the conversations met both arms, a signal fails, or a
   metric cannot be asked. A step ends after `step_min_s` and `turn_wait_s`, `step_min_exchanges`
   and `step_min_sessions`, not while the newest `BREAKER_FAILURES` requests all met an unknown
   adapter. One that reaches `step_max_s` first is inconclusive, unless its sessions only come
   slowly (`step_limit_s`); when the groups have proven the candidate by then, the next step begins.
   An operator may waive what a step must last and see (`skip-step`), and nothing else. After the
   last step the candidate is promoted, if the groups prove what `promote_on` asks for and no guard
   is suspicious. Until then it waits, up to `max_groups` or `EVIDENCE_MAX_S`; then the canary is
   inconclusive.

The levels are settings, and docs/canary.md states what they add up to. With `promote_on = "quick"`
the mean difference over the gate's prompts decides, and nothing must be proven. The guards hold.

When the proxy's breaker (`sidecar.routing.breaker`) takes a candidate out, the canary is rolled
back at once, or inconclusive where too few callers may have caused it. A paused canary instead
stays paused, without traffic, until an operator resumes or aborts it; a paused canary makes no
other transition. Inconclusive keeps the champion and retires the candidate. An ended canary never
changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from deploy.evidence import live
from deploy.evidence.live import GuardState, MetricState
from deploy.evidence.quality import Fault, Group, Limits, Quality, add_group
from deploy.records import AdapterState, Canary, Phase
from deploy.registry import proof_rule
from sidecar.backoff import Backoff
from sidecar.routing.table import is_adapter_name
from sidecar.settings import Canary as CanarySettings
from sidecar.visible import counted

# Arithmetic of comparisons: what one is, and the quick rule of the gate. Pure.

RESAMPLES = 2_000
LEVEL = 0.95
_MOST_DIGITS = 18
"""Behind the point; two floats near 0.01 differ in the first 18."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of one held-out prompt."""

    difference: float | None
    """Mean score of the candidate minus the champion's, -1..1; None: no usable score."""
    anchor_difference: float | None = None
    """The same for the anchor; None: no usable score, or no anchor was asked."""
    fault: Fault | None = None
    """Whose answers kept the judge from scoring it; None when it is scored."""
    flaws: Mapping[str, float] = field(default_factory=dict)
    """Kind of flaw -> the candidate's share of such answers minus the champion's, -1..1."""
    place: int = 0
    """Its number in the order in which the canary's prompts were drawn."""
    candidate_answers: int = 0
    candidate_short: int = 0
    """Number of the candidate's answers that hit the token limit or are empty."""
    champion_answers: int = 0
    champion_short: int = 0
    judge: str = ""
    """Who scored it, as `judge_name`; empty: not known, or nobody was asked."""
    disagreement: float | None = None
    """Mean absolute difference between two passes' scores, over the answers; None after one."""
    flipped: float | None = None
    """Share of the pairs of answers that two passes put in opposite order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """Sums over the comparisons, and whether the candidate passes."""

    passed: bool
    reason: str
    scored: int
    set_aside: int
    mean_difference: float | None
    low: float | None
    high: float | None
    """Bounds of the 95% bootstrap interval of the mean difference."""
    candidate_short_share: float
    champion_short_share: float
    judges: tuple[str, ...] = ()
    """Who scored the comparisons, as `judge_name`; more than one when the settings changed."""
    disagreement: float | None = None
    """How far the judge's passes differ, mean over the comparisons with two passes or more."""
    flipped_pairs: float | None = None
    """Share of the pairs of answers that two passes put in opposite order, mean over the same."""


def judge_name(model: str, rubric_hash: str) -> str:
    """Return how evidence and lineage name a judge with its rubric."""
    return f"{model} rubric {rubric_hash}"


def mean_difference(candidate: Sequence[float], champion: Sequence[float]) -> float:
    """Return the mean of `candidate` minus the mean of `champion`; each holds a score or more."""
    return sum(candidate) / len(candidate) - sum(champion) / len(champion)


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the 95% percentile interval of the mean, by resampling `values` with replacement.

    values: at least one. Deterministic for given values and seed.
    """
    rng = random.Random(seed)
    count = len(values)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - LEVEL) / 2)
    return means[tail], means[RESAMPLES - 1 - tail]


def quality_of(
    comparisons: Iterable[Comparison],
    limits: Limits,
    *,
    anchored: bool,
    start: Quality | None = None,
) -> Quality:
    """Return what comparisons say, read in the order given.

    anchored: the canary's anchor is an adapter of its own. If not, the champion is the anchor; if
    so, a comparison without a score of the anchor says nothing of it. start: what earlier ones
    said.
    """
    quality = Quality() if start is None else start
    for one in comparisons:
        group = Group(
            champion=one.difference,
            anchor=one.anchor_difference if anchored else one.difference,
            fault=one.fault or (None if one.difference is not None else "unknown"),
            flaws=one.flaws,
        )
        quality = add_group(quality, group, limits)
    return quality


def judge_gate(
    comparisons: Sequence[Comparison], rules: CanarySettings, *, seed: int
) -> GateVerdict:
    """Judge by the comparisons made so far. The caller decides whether they are enough."""
    differences = [c.difference for c in comparisons if c.difference is not None]
    candidate_short = _share(
        sum(c.candidate_short for c in comparisons), sum(c.candidate_answers for c in comparisons)
    )
    champion_short = _share(
        sum(c.champion_short for c in comparisons), sum(c.champion_answers for c in comparisons)
    )
    scored = [c for c in comparisons if c.difference is not None]
    mean = sum(differences) / len(differences) if differences else None
    low, high = bootstrap_interval(differences, seed=seed) if differences else (None, None)
    passed, reason = _rule(mean, len(differences), rules)
    return GateVerdict(
        passed=passed,
        reason=reason,
        scored=len(differences),
        set_aside=len(comparisons) - len(differences),
        mean_difference=mean,
        low=low,
        high=high,
        candidate_short_share=candidate_short,
        champion_short_share=champion_short,
        judges=tuple(sorted({one.judge for one in scored if one.judge})),
        disagreement=_mean([one.disagreement for one in scored]),
        flipped_pairs=_mean([one.flipped for one in scored]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _rule(mean: float | None, prompts: int, rules: CanarySettings) -> tuple[bool, str]:
    if mean is None:
        return False, "gate: no prompt is scored yet"
    mean_words, margin = _apart(mean, -rules.margin)
    prompts_words = counted(prompts, "held-out prompt")
    result = f"gate: scored {mean_words} against the champion on {prompts_words}"
    if mean > -rules.margin:
        return True, f"{result}, above the margin of {margin}"
    return False, f"{result}, not above the margin of {margin}"


def _apart(one: float, other: float) -> tuple[str, str]:
    """Return both with three digits, or with as many as it takes to see that they differ."""
    texts = f"{one:+.3f}", f"{other:+.3f}"
    digits = 4
    while one != other and texts[0] == texts[1] and digits < _MOST_DIGITS:
        texts = f"{one:+.{digits}f}", f"{other:+.{digits}f}"
        digits += 1
    return texts


BREAKER_FAILURES = 5
"""Newest requests that all met an unknown adapter: the step does not end then."""
MAX_LOAD_FAILURES = 8
"""Failed loads, where no replica proved the adapter, after which the canary is inconclusive."""
MAX_PARTLY_LOADED = 34
"""The same where one did: an hour to mend the other vLLM (docs/canary.md)."""
SLOWEST = 28
"""A step may take so many times `step_max_s` where its sessions come slowly: four weeks of a day
each, in which a site of 5 sessions a day gives a canary of 20% its 20 sessions."""
GATE_TIMEOUT_S = 3_600.0
"""After this the gate's scores so far decide; time without judge, vLLM or prompts does not
count."""
EVIDENCE_MAX_S = 604_800.0
"""The last step ends inconclusive when the proof is still missing after a week."""
FEW_SEEN = 3
"""Sessions by which a count may fall short of its mean: 0 where 3 are expected is seen in 5% (rule
of three)."""
MANY_GROUPS = 350
"""Groups that prove an equal candidate in the median (docs/canary.md): with fewer `EVIDENCE_MAX_S`
is no limit yet where the judge waits for prompts."""
SLOWEST_PROOF = 4
"""And so many times `EVIDENCE_MAX_S` is."""
MOST_IN_BOTH_ARMS = 0.01
"""Share of the conversations whose turns may have met both arms: their users compare two models in
one task, and no comparison of the arms holds. A single one never holds a step."""
NOT_LOADED = "vLLM failed to load it"
LOAD_WAITS = Backoff(first_s=2.0, last_s=128.0)
"""Wait after the first failed load; it doubles with each failure. Eight failures span four minutes,
longer than a traffic peak keeps vLLM out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Stay in this phase or step, for the reason given."""

    reason: str
    stops_clock: bool = False
    """True when the candidate is not the cause of the wait."""
    needs: Literal["ok", "look", "act"] = field(default="ok", compare=False)
    """State of the canary's condition: whether a person should know, or has to act."""
    brief: str | None = field(default=None, compare=False)
    """The reason in a headline's words; None: as it is; empty: nothing but time."""
    metric: str = field(default="", compare=False)
    """The metric that is the reason, because it gives no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Change to phase `to`."""

    to: Phase
    candidate_state: AdapterState
    reason: str
    step: int = 0
    bans: bool = True
    """False: it says nothing of the registered files, so a rejection does not ban their digest."""


Decision = Hold | Move


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEvidence:
    """Evidence of the loading phase. At most one of the two reasons is set."""

    live: bool = False
    invalid: str | None = None
    """Reason why the folder cannot be served or the loaded adapter has no effect."""
    altered: bool = False
    """The folder lacks files, or holds others than were registered: `invalid` is about that."""
    away: str | None = None
    """Reason why vLLM could not be reached, or what it said instead of loading it."""
    load_failures: int = 0
    partly: bool = False
    """Some replica proved it live, now or at an earlier try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateEvidence:
    """Evidence of the gating phase."""

    prompts: int
    """Held-out prompts available, compared or not."""
    pending: int
    """Held-out prompts not compared yet; part of `prompts`."""
    verdict: GateVerdict
    """The verdict of `quick` if the gate ended now."""
    quality: Quality = field(default_factory=Quality)
    """What the groups say so far."""
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
    sessions: int = 0
    """Number of the candidate's sessions in the step."""
    guards: Mapping[str, GuardState] = field(default_factory=dict)
    """What the whole ramp's sessions say, by guard."""
    conversations: int = 0
    """Conversations among the newest exchanges of the ramp."""
    in_both_arms: int = 0
    """Those of them whose turns met both arms."""
    mismatch: float = 0.0
    """Evidence in nats that sessions are not split by the weight."""
    behind: bool = False
    """True while exchanges of the ramp wait to be read: then nothing is concluded from their
    absence."""
    quality: Quality = field(default_factory=Quality)
    """What the judged groups say, the gate's and those of earlier tries among them."""
    carried: int = 0
    """Groups of earlier tries; part of `quality`."""
    proven: frozenset[str] = frozenset()
    """Claims that were proven by an earlier look (`proof_rule.CLAIMS`)."""
    away: str | None = None
    """Reason why no further group can be judged now."""
    metrics: Mapping[str, MetricState] = field(default_factory=dict)
    """What numbers from outside say, by the metric's name."""


Evidence = LoadEvidence | GateEvidence | RampEvidence


def load_wait_s(failures: int) -> float:
    """Return the seconds from a failed load to the next attempt.

    failures: failed loads so far, at least 1.
    """
    return LOAD_WAITS.wait_s(failures)


def step_least_s(rules: CanarySettings) -> float:
    """Return how long a step lasts at least, in seconds.

    The guards see a request `turn_wait_s` after it began, and must have seen `step_min_s` of the
    step.
    """
    return rules.step_min_s + rules.turn_wait_s


def step_limit_s(evidence: RampEvidence, rules: CanarySettings, spent_s: float) -> float:
    """Return how long a step may take that has not seen enough after `spent_s` seconds.

    It is `step_max_s`, and longer while what the step wants may still come, at the most traffic
    that its counts allow, within `SLOWEST` times that.
    """
    seen = evidence.candidate.replies if evidence.seen is None else evidence.seen
    counts = ((seen, rules.step_min_exchanges), (evidence.sessions, rules.step_min_sessions))
    needs_s = max(spent_s * wanted / (count + FEW_SEEN) for count, wanted in counts)
    longest_s = SLOWEST * rules.step_max_s
    return longest_s if needs_s <= longest_s else rules.step_max_s


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
        what = "its ramp (`evidence.steps`)" if is_adapter_name(canary.candidate) else "its name"
        reason = f"the store's record of {what} cannot be read"
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
        return _reject(evidence.invalid, bans=not evidence.altered)
    if evidence.live:
        return Move(to="gating", candidate_state="gating", reason="loaded and live")
    if evidence.load_failures >= (MAX_PARTLY_LOADED if evidence.partly else MAX_LOAD_FAILURES):
        times = counted(evidence.load_failures, "time")
        return _inconclusive(f"{NOT_LOADED} {times}: {evidence.away}")
    return Hold(reason=f"waiting for vLLM: {evidence.away}", stops_clock=True)


def _after_gating(
    canary: Canary, evidence: GateEvidence, rules: CanarySettings, now: float
) -> Decision:
    verdict, quality = evidence.verdict, evidence.quality
    wanted = min(proof_rule.gate_prompts(quality, rules), evidence.prompts)
    timed_out = elapsed_s(canary, now) >= GATE_TIMEOUT_S
    if rules.promote_on != "quick" and (harm := proof_rule.harm(quality)) is not None:
        return _reject(f"gate: {harm}")
    if evidence.away is not None:
        return Hold(
            reason=f"gate waits: {evidence.away}",
            stops_clock=True,
            brief=f"the gate waits: {evidence.away}",
        )
    judged = verdict.scored if rules.promote_on == "quick" else quality.groups
    enough = judged >= rules.gate_min_prompts
    if enough and (judged >= wanted or evidence.pending == 0 or timed_out):
        return _leave_gate(evidence, rules)
    if evidence.prompts < rules.gate_min_prompts:
        return Hold(
            reason=f"gate waits for held-out prompts: {evidence.prompts} of the "
            f"{rules.gate_min_prompts} it needs",
            stops_clock=True,
            brief="the gate waits for held-out prompts",
        )
    if timed_out:
        return _inconclusive(
            f"gate: {_gate_counts(evidence, rules)} in {GATE_TIMEOUT_S:g} s; "
            f"it needs {rules.gate_min_prompts}"
        )
    more = proof_rule.gate_doubt(quality, rules) if judged >= rules.gate_prompts else None
    why = "" if more is None else f"; more than usual: {more}"
    progress = f"{judged} of {counted(wanted, 'prompt')} compared"
    return Hold(reason=f"gate: {progress}{why}", brief=progress)


def _gate_counts(evidence: GateEvidence, rules: CanarySettings) -> str:
    """Say what the gate has of what it asks for, by the counts that decide."""
    verdict, quality = evidence.verdict, evidence.quality
    if rules.promote_on == "quick":
        return f"{counted(verdict.scored, 'comparison')} scored, {verdict.set_aside} set aside"
    groups = counted(quality.groups, "group")
    return f"{groups} compared ({quality.lost} lost by the candidate), {quality.unknown} set aside"


def _leave_gate(evidence: GateEvidence, rules: CanarySettings) -> Decision:
    """Decide when the gate has the groups that it asks for."""
    verdict, quality = evidence.verdict, evidence.quality
    if rules.promote_on == "quick" and not verdict.passed:
        return _reject(verdict.reason)
    if quality.unknown_share > proof_rule.MAX_MISSING:
        return _inconclusive(f"gate: {proof_rule.too_many_missing(quality)}")
    reason = verdict.reason
    if rules.promote_on != "quick":
        prompts = counted(quality.groups, "prompt")
        reason = f"gate: no harm shown on {prompts}; {proof_rule.describe(quality)}"
    return Move(to="ramping", candidate_state="ramping", reason=reason)


def _after_ramping(
    canary: Canary, evidence: RampEvidence, rules: CanarySettings, now: float
) -> Decision:
    harm = proof_rule.guard_harm(evidence.guards) or (
        None if rules.promote_on == "quick" else proof_rule.harm(evidence.quality)
    )
    harm = harm or live.broken_guardrail(evidence.metrics, since=canary.ramp_began_at)
    if harm is not None:
        return Move(to="rolled_back", candidate_state="rolled_back", reason=harm)
    if (doubt := proof_rule.guard_doubt(evidence.guards)) is not None:
        return _inconclusive(doubt)
    seen = evidence.candidate.replies if evidence.seen is None else evidence.seen
    spent_s = elapsed_s(canary, now)
    step = f"step {canary.step + 1}"
    if evidence.mismatch >= proof_rule.threshold(proof_rule.SPLIT_LEVEL):
        split = f"{step} stands: sessions are not split by the weight"
        if spent_s >= rules.step_max_s:
            return _inconclusive(split)
        why = f"{split}; look for a proxy that routes by another table"
        return Hold(reason=why, needs="act", brief=split)
    if evidence.in_both_arms > max(1, MOST_IN_BOTH_ARMS * evidence.conversations):
        both = (
            f"{step} stands: {evidence.in_both_arms} of "
            f"{counted(evidence.conversations, 'conversation')} met both arms"
        )
        if spent_s >= rules.step_max_s:
            return _inconclusive(both)
        why = f"{both}; send x-sidecar-session (docs/sessions.md)"
        return Hold(reason=why, needs="act", brief=both)
    if (unasked := live.away(evidence.metrics)) is not None:
        metric, words = unasked
        return Hold(reason=f"{step} stands: {words}", stops_clock=True, needs="act", metric=metric)
    if (signal := live.holding_signal(evidence.metrics)) is not None:
        if spent_s >= rules.step_max_s:
            return _inconclusive(f"{step}: {signal}")
        return Hold(reason=f"{step} stands until it recovers: {signal}", needs="act")
    missing = evidence.missing_in_a_row >= BREAKER_FAILURES
    enough = (
        seen >= rules.step_min_exchanges
        and evidence.sessions >= rules.step_min_sessions
        and spent_s >= step_least_s(rules)
    ) or _proven_early(canary, evidence, rules, spent_s)
    if (enough or canary.step_waived) and not missing and not evidence.behind:
        counts = [name for name, one in rules.metrics.items() if one.mode != "dry_run"]
        unseen = live.unseen(evidence.metrics, counts, since=canary.step_started_at)
        if unseen is None:
            return _after_step(canary, evidence, rules, seen=seen, spent_s=spent_s)
        if spent_s < rules.step_max_s:
            return Hold(reason=f"{step} waits for {unseen}")
        return _inconclusive(f"{step} waited for {unseen}")
    if spent_s >= (rules.step_max_s if missing else step_limit_s(evidence, rules, spent_s)):
        return _inconclusive(
            f"{step}: {_seen(evidence, rules, ' and ', seen=seen)} in {spent_s:.0f} s"
        )
    if missing:
        # Good replies from before must not end the step while vLLM does not know the adapter.
        return Hold(
            reason=f"{step} stands: vLLM did not know the adapter for its last "
            f"{counted(evidence.missing_in_a_row, 'request')}",
            needs="act",
        )
    left = "" if canary.step_waived else _left(evidence, rules, seen)
    return Hold(
        reason=f"{step} of {len(canary.steps)} at {canary.weight_bp / 100:g}%: "
        f"{_seen(evidence, rules, ', ', seen=seen)}",
        brief=f"waits for {left}" if left else "",
    )


def _left(evidence: RampEvidence, rules: CanarySettings, seen: int) -> str:
    """Say what the step has not seen yet of what it asks for."""
    sessions = rules.step_min_sessions - evidence.sessions
    replies = rules.step_min_exchanges - seen
    found = [counted(sessions, "session")] if sessions > 0 else []
    return " and ".join([*found, *([counted(replies, "reply", "replies")] if replies > 0 else [])])


def _proven_early(
    canary: Canary, evidence: RampEvidence, rules: CanarySettings, spent_s: float
) -> bool:
    """Return True when the groups have proven the candidate and its step's sessions come slowly.

    What more exposure may show is then left to the last step, which brings the sessions sooner.
    """
    return (
        rules.promote_on != "quick"
        and canary.step + 1 < len(canary.steps)
        and spent_s >= rules.step_max_s
        and evidence.sessions > 0
        and proof_rule.lacking(evidence.quality, evidence.proven, rules) is None
        and proof_rule.suspicion(evidence.guards, evidence.quality, rules) is None
    )


def _seen(evidence: RampEvidence, rules: CanarySettings, between: str, *, seen: int) -> str:
    """Say what the step has seen of what it asks for. between: what joins the two."""
    exchanges = _of(seen, rules.step_min_exchanges, "exchange")
    return f"{exchanges}{between}{_of(evidence.sessions, rules.step_min_sessions, 'session')}"


def _of(number: int, wanted: int, word: str) -> str:
    if number > wanted:
        return f"{counted(number, word)} ({wanted} needed)"
    return f"{number} of {counted(wanted, word)}"


def _after_step(
    canary: Canary, evidence: RampEvidence, rules: CanarySettings, *, seen: int, spent_s: float
) -> Decision:
    """Decide when a step has lasted long enough and seen enough."""
    following = canary.step + 1
    if following < len(canary.steps):
        return Move(
            to="ramping",
            candidate_state="ramping",
            step=following,
            reason=f"step {following} of {len(canary.steps)} passed with "
            f"{counted(seen, 'exchange')}",
        )
    quality = evidence.quality
    steps = "the one step" if following == 1 else f"all {following} steps"
    lacking = proof_rule.lacking(quality, evidence.proven, rules)
    lacking = lacking or proof_rule.suspicion(evidence.guards, quality, rules)
    if lacking is None:
        passed = f"passed {steps} of the ramp{proof_rule.gained(quality)}"
        return Move(to="promoted", candidate_state="champion", reason=passed)
    waits = f"{lacking}; {proof_rule.describe(quality)}"
    judged = quality.groups + quality.unknown - evidence.carried
    slow = judged < min(MANY_GROUPS, rules.max_groups)
    proof_s = EVIDENCE_MAX_S * (SLOWEST_PROOF if slow else 1)
    if judged >= rules.max_groups or spent_s >= proof_s:
        return _inconclusive(f"the proof is still missing: {waits}")
    if evidence.away is not None:
        return Hold(reason=f"the evidence waits: {evidence.away}", stops_clock=True)
    return Hold(
        reason=f"{steps} passed; waits for {waits}", brief=f"{steps} passed, waits for {lacking}"
    )


def _reject(reason: str, *, bans: bool = True) -> Move:
    return Move(to="rolled_back", candidate_state="rejected", reason=reason, bans=bans)


def _inconclusive(reason: str) -> Move:
    return Move(to="inconclusive", candidate_state="retired", reason=reason)

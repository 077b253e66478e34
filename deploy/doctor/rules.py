"""Say at which stages records stop, and why. Pure.

Each rule looks at one stage. What a check finds now comes before what the counts of the past say;
of two causes in one stage the first is the likelier. The first diagnosis is the one to repair
first: nothing reaches the later stages before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final

from deploy.doctor.facts import Diagnosis, Facts, StoreFacts
from deploy.doctor.lines import of_lines
from deploy.doctor.remedies import ENDS, MASKS, OF_CHECKS, OF_SETTINGS, REFUSED, SELECTIONS
from deploy.doctor.verifiers import failing_verifiers
from deploy.funnel.pile_up import PileUp, said, to_do
from deploy.funnel.stages import STAGES, Name, Stage
from deploy.preflight.verifiers import CAUSE as VERIFIER
from ingest.judge_watch.advice import advice_on
from sidecar.plurals import counted

FEW = 3
"""Records that must share a fate before it is called a rule."""
MOST = 0.5
"""Share of the newest records that end for one reason, from which on it stops the stage."""
NEARLY_ALL = 0.9
"""Share of the served answers that are masked for one reason, from which on it is named."""
SKEW_S = 30.0
"""Clocks may differ by less: a lease of a training run lasts so long."""
LATE_S = 60.0
"""A report of ingest that is older was not followed by the next six."""
FAR_S = 8 * 86_400.0
"""A schedule that is due later than a week from now is taken for a mistake."""
JUDGE_FAILS: Final[Mapping[str, str]] = {
    "away": "judge_away",
    "rejected": "judge_rejects",
    "no_credit": "judge_no_credit",
}
"""State of the judge, as score saw it, in which no group is scored -> cause of the diagnosis."""
NORMAL = ("new", "chosen", "held_out", "backlog", "rate", "session_cap", "retried_turn")
"""Selections that are no fault: others of the same traffic are chosen."""


def diagnose(facts: Facts) -> list[Diagnosis]:
    """Return every place at which records stop, the first stage first."""
    found = [
        *_of_checks(facts),
        *failing_verifiers(facts),
        *_clocks(facts),
        *(_of_store(facts, facts.store) if facts.store is not None else ()),
        *_schedule(facts),
    ]
    found += _pile_up(facts, {one.stage for one in found})
    first: dict[tuple[str, str, str | None], Diagnosis] = {}
    for one in found:
        first.setdefault((one.stage, one.cause, one.project), one)
    return sorted(first.values(), key=lambda one: STAGES.index(one.stage))


def waits_for(facts: Facts) -> str:
    """Say what a system without a fault waits for; empty when records reach an adapter."""
    if (pile := _planned(facts)) is not None and facts.next_run_at is not None:
        at = datetime.fromtimestamp(facts.next_run_at, UTC)
        return f"the run at {at:%Y-%m-%d %H:%M} UTC, which makes room: {said(pile)}"
    if facts.store is None or not facts.store.funnel.stage("bus").passed:
        if "proxy" not in facts.answering:
            return "the proxy: start it with `sidecar up`"
        return "the first request of an agent to the proxy's /v1/chat/completions"
    stages = {stage.name: stage for stage in facts.store.funnel.stages}
    learner = facts.settings.learner
    if not stages["selection"].passed:
        new = stages["selection"].waiting.get("new", 0)
        return (
            f"an exchange that is suitable; {counted(new, 'is', 'are')} decided "
            f"{facts.settings.groups.settle_s:g} s after being stored (groups.settle_s)"
        )
    if not stages["sampling"].passed:
        return "the further answers of the first groups"
    if not stages["judging"].passed:
        return "the scores of the first groups"
    if not stages["learning"].passed:
        scored = sum(stages["learning"].waiting.values())
        wait = counted(scored, "waits", "wait")
        return (
            f"{counted(learner.min_groups, 'scored group')} for a run (learner.min_groups); {wait}"
        )
    return ""


def _of_checks(facts: Facts) -> Iterator[Diagnosis]:
    for finding in facts.findings:
        if finding.cause == VERIFIER:
            continue  # `deploy.doctor.verifiers` names all of them together
        if finding.level != "error" and finding.cause != "no_judge":
            continue  # it runs, with less: `sidecar config check --online` tells
        section = finding.setting.partition(".")[0]
        stage, cause = (
            OF_CHECKS.get(finding.cause)
            or OF_SETTINGS.get(finding.setting)
            or OF_SETTINGS.get(section, ("requests", "settings"))
        )
        what, _, to_do = finding.text.rpartition("; ")
        yield Diagnosis(
            stage=stage,
            cause=cause,
            text=f"{finding.setting}: {what or finding.text}",
            to_do=to_do if what else f"correct {finding.setting}",
        )


def _clocks(facts: Facts) -> Iterator[Diagnosis]:
    ahead = dict(facts.ahead_s)
    store = facts.store
    if store is not None and store.bus is not None and store.bus.at > facts.now:
        ahead["ingest"] = store.bus.at - facts.now
    if store is not None:
        ahead["the proxy (against ingest)"] = store.recent.started_ahead_s
    for who, seconds in ahead.items():
        if abs(seconds) > SKEW_S:
            yield Diagnosis(
                stage="bus",
                cause="clock_skew",
                text=f"the clock of {who} is {abs(seconds):.0f} s "
                f"{'ahead' if seconds > 0 else 'behind'}; leases, ramps and the age of records go "
                "by the clock, so records wait for a time that does not come, or count for the "
                "wrong one",
                to_do="have NTP set the clocks of all machines, then restart the processes there",
            )


def _of_store(facts: Facts, store: StoreFacts) -> Iterator[Diagnosis]:
    stages = {stage.name: stage for stage in store.funnel.stages}
    yield from _captures(stages["requests"])
    yield from _bus(facts, store, stages["bus"])
    yield from _most_end("selection", store.recent.selections, SELECTIONS, NORMAL)
    yield from _budget(store, stages["sampling"])
    yield from _judge(facts, store)
    yield from _judge_drift(store)
    yield from _masks(store.recent.served)
    yield from _groups(facts, store)
    yield from of_lines(store.lines, facts.loads_refused, facts.settings.canary)


def _pile_up(facts: Facts, stopped: Collection[str]) -> Iterator[Diagnosis]:
    """Yield that no new group begins, unless what the waiting groups wait for is named already."""
    pile = facts.store.pile_up if facts.store is not None else None
    if pile is not None and pile.where not in stopped and _planned(facts) is None:
        yield Diagnosis(
            stage="selection", cause="pile_up", text=said(pile), to_do=to_do(pile.where)
        )


def _planned(facts: Facts) -> PileUp | None:
    """Return the pile-up that the schedule's next run ends. No fault: the groups of a night wait.

    None also when no learner runs here, when no run is due within days, and when the groups wait
    for something else.
    """
    pile = facts.store.pile_up if facts.store is not None else None
    due = facts.next_run_at is not None and 0.0 <= facts.next_run_at - facts.now <= FAR_S
    learns = due and "learn" in facts.running
    return pile if pile is not None and pile.where == "learning" and learns else None


def _captures(stage: Stage) -> Iterator[Diagnosis]:
    if not stage.ended or sum(stage.ended.values()) < FEW:
        return
    reason, number = max(stage.ended.items(), key=lambda one: one[1])
    if not stage.passed and number >= MOST * stage.entered:
        yield Diagnosis(
            stage="requests",
            cause=reason,
            text=f"none of {stage.entered} requests was captured, {number} of them: {reason}",
            to_do=REFUSED.get(reason)
            or "see `Capture losses` in docs/runbook.md, and docs/data-dictionary.md for a "
            "reason that begins with skipped_ (the [capture] settings)",
        )


def _bus(facts: Facts, store: StoreFacts, stage: Stage) -> Iterator[Diagnosis]:
    bus = store.bus
    if bus is not None and bus.error:
        yield Diagnosis(
            stage="bus",
            cause="bus_away",
            text=f"ingest cannot read the bus: {bus.error}",
            to_do="start the brokers or make the file readable; records wait and are not lost",
        )
    late = bus is None or facts.now - bus.at > LATE_S
    waiting = sum(stage.waiting.values())
    if late and waiting and "ingest" not in facts.running:
        held = counted(waiting, "captured exchange waits", "captured exchanges wait")
        yield Diagnosis(
            stage="bus",
            cause="ingest_down",
            text=f"{held}, and ingest does not run on this machine",
            to_do="start `sidecar ingest`, or `sidecar up`; its log says why it ended",
        )


def _budget(store: StoreFacts, stage: Stage) -> Iterator[Diagnosis]:
    spent = store.spent
    if spent is not None:
        waiting = counted(sum(stage.waiting.values()), "group waits", "groups wait")
        end = f"{spent.until:%Y-%m-%d %H:%M} UTC" if spent.until else "users are served more"
        yield Diagnosis(
            stage="sampling",
            cause="budget_spent",
            text=f"{spent.why}; {waiting} until {end}",
            to_do=f"wait, or raise {spent.setting} and restart score",
        )


def _judge(facts: Facts, store: StoreFacts) -> Iterator[Diagnosis]:
    """Yield what score saw of the judge, unless the judge was asked just now."""
    judge = store.judge
    asked = any(one.cause in ("judge", "judge_key") for one in facts.findings)
    if judge is not None and judge.state == "spent":
        yield Diagnosis(
            stage="judging",
            cause="judge_spent",
            text=f"the judge is not asked: {judge.error}",
            to_do="wait, or raise judge.budget and its likes, and restart score and control",
        )
    if asked or judge is None or judge.state not in JUDGE_FAILS:
        return
    passes = judge.state == "away"
    until = ""
    if judge.until is not None and judge.until > facts.now:
        until = f"; it is asked again at {datetime.fromtimestamp(judge.until, UTC):%H:%M:%S} UTC"
    yield Diagnosis(
        stage="judging",
        cause=JUDGE_FAILS[judge.state],
        text=f"the judge gives no scores: {judge.error}{until}",
        to_do=f"{advice_on(judge.error)}; "
        + ("score asks it again and again" if passes else "no candidates are sampled meanwhile"),
    )


def _judge_drift(store: StoreFacts) -> Iterator[Diagnosis]:
    """Yield that the judge is not the one it was. Records go on, by scores of another meaning."""
    noise = store.noise
    if noise is not None and noise.drift:
        command = f"sidecar judge noise{f' --project {noise.project}' if noise.project else ''}"
        yield Diagnosis(
            stage="judging",
            cause="judge_drift",
            text=f"the judge {noise.judge_model} is not as it was: {noise.drift}",
            to_do="ask its provider whether another model answers to this name, or name a dated "
            f"model; `{command}` has the figures, and `{command} --accept` "
            "takes the judge as it is now",
        )


def _masks(served: Mapping[str, int]) -> Iterator[Diagnosis]:
    answers = sum(served.values())
    masked = {why: number for why, number in served.items() if why != "trainable"}
    if answers < FEW or not masked:
        return
    reason, number = max(masked.items(), key=lambda one: one[1])
    if number >= NEARLY_ALL * answers:
        yield Diagnosis(
            stage="sampling",
            cause=reason,
            text=f"{number} of the newest {answers} served answers are left out of the gradient: "
            f"{reason}; groups are learned from by their sampled answers alone",
            to_do=MASKS.get(reason, "see `answer.untrainable_reason` in docs/data-dictionary.md"),
        )


def _groups(facts: Facts, store: StoreFacts) -> Iterator[Diagnosis]:
    ended = {why: n for why, n in store.recent.ends.items() if why in ENDS}
    trained = sum(ended.values(), start=store.recent.ends.get("trained", 0))
    scored = store.recent.ends.get("scored", 0)
    for reason, number in sorted(ended.items(), key=lambda one: -one[1]):
        stage, cause, to_do = ENDS[reason]
        # A scored group passed sampling and judging; what the learner says of it is to come.
        done = trained if stage == "learning" else trained + scored
        if number < FEW or number < MOST * done:
            continue
        verb = "ended" if stage == "learning" else "ended or were scored"
        words = f" ({store.recent.detail})" if store.recent.detail else ""
        yield Diagnosis(
            stage=stage,
            cause=cause,
            text=f"{number} of the newest {done} groups that {verb}: {reason}{words}",
            to_do=to_do,
        )


def _most_end(
    stage: Name, counts: Mapping[str, int], to_do: Mapping[str, str], normal: tuple[str, ...]
) -> Iterator[Diagnosis]:
    """Yield the reason for which most of the newest exchanges are not chosen."""
    odd = {why: number for why, number in counts.items() if why not in normal}
    decided = sum(odd.values()) + counts.get("chosen", 0) + counts.get("backlog", 0)
    if not odd:
        return
    reason, number = max(odd.items(), key=lambda one: one[1])
    if number >= FEW and number > MOST * decided:
        cause = "no_token_ids" if reason in IDS_MISSING else reason
        yield Diagnosis(
            stage=stage,
            cause=cause,
            text=f"{number} of the newest {decided} decided exchanges are not suitable: {reason}",
            to_do=to_do.get(reason, "see `exchange.selection` in docs/data-dictionary.md"),
        )


IDS_MISSING = ("untrainable:ids_missing", "untrainable:no_prompt_token_ids")


def _schedule(facts: Facts) -> Iterator[Diagnosis]:
    learner = facts.settings.learner
    why = facts.schedule_error
    if learner.schedule == "manual":
        why = 'learner.schedule is "manual", so a run starts only when a person asks for one'
    elif facts.next_run_at is not None and facts.next_run_at - facts.now > FAR_S:
        days = (facts.next_run_at - facts.now) / 86_400.0
        why = f"the schedule ({learner.schedule}) is due in {days:,.0f} days"
    if why:
        yield Diagnosis(
            stage="learning",
            cause="schedule_never_due",
            text=why,
            to_do="set learner.schedule, learner.cron or learner.interval_s and restart learn; "
            "`sidecar learn --once` trains now",
        )

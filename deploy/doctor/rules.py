"""Say at which stages records stop, why, and what to do, for the host and for each line. Pure.

Each rule looks at one stage. What a check finds now comes before what the counts of the past say;
of two causes in one stage the first is the likelier. The first diagnosis is the one to repair
first: nothing reaches the later stages before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from deploy.conditions import words_of
from deploy.doctor.collect import Diagnosis, Facts, LineFacts, Recent, StoreFacts
from deploy.funnel import STAGES, Name, Stage
from deploy.preflight.peers import CAUSE as VERIFIER
from deploy.registry.canary_rule import NOT_LOADED, SLOWEST
from deploy.registry.candidates import DAY_S, steps_days
from ingest.grouping.selection import HELD_OUT, NEAR_CAP, SESSION_CAP
from ingest.judge_watch import advice
from sidecar.conditions import Condition
from sidecar.lines import line_of_adapter, project_of
from sidecar.settings import Canary as CanarySettings
from sidecar.store.quarantine import STAGE
from sidecar.visible import counted

# Which stage a fault stops, and what to do about it: tables that the rules look up.

OF_CHECKS: Final[Mapping[str, tuple[Name, str]]] = {
    "vllm_away": ("requests", "vllm_away"),
    "vllm_key": ("requests", "vllm_key"),
    "vllm_model": ("requests", "vllm_model"),
    "kafka_away": ("bus", "kafka_away"),
    "no_token_ids": ("selection", "no_token_ids"),
    "fields_refused": ("selection", "fields_refused"),
    "no_load": ("sampling", "vllm_load_unknown"),
    "sampling_away": ("sampling", "sampling_vllm_away"),
    "no_judge": ("sampling", "no_judge"),
    "judge_key": ("judging", "judge_key"),
    "judge": ("judging", "judge_away"),
    VERIFIER: ("judging", "verifier_fails"),
    "gate_judge_key": ("serving", "gate_judge_key"),
    "gate_judge": ("serving", "gate_judge_away"),
    "no_lora": ("serving", "no_lora"),
}
"""Cause of a preflight's finding -> the stage that it stops, and its name there."""
OF_SETTINGS: Final[Mapping[str, tuple[Name, str]]] = {
    "serving.base_model_path": ("learning", "base_model"),
    "serving": ("requests", "vllm"),
    "bus": ("bus", "bus_away"),
    "kafka": ("bus", "kafka_topics"),
    "store": ("bus", "store_away"),
    "judge": ("judging", "judge_away"),
    "gate_judge": ("serving", "gate_judge_away"),
    "learner": ("learning", "learner_not_ready"),
}
"""Setting, or section, of a finding without such a cause."""
OF_CONDITIONS: Final[Mapping[str, Name]] = {
    "bus": "bus",
    "selection": "selection",
    "fields": "selection",
    "sampling": "sampling",
    "judge": "judging",
    "drift": "judging",
    "verifier": "judging",
    "learner": "learning",
    "run": "learning",
}
"""First word of a condition's kind -> the stage that it stops."""
PILE_UP = "pile_up"
OF_SCORE = ("judge_spent", "score_down")
"""What the judge's condition says that asking the judge now does not."""
"""Codes of conditions that have a rule of their own."""
REFUSED: Final[Mapping[str, str]] = {
    "refused_unknown_model": "have agents name `serving.model` as their `model`",
}
"""Why no request was captured -> what to do, where it is no loss and no setting of [capture]."""
SELECTIONS: Final[Mapping[str, str]] = {
    "untrainable:ids_missing": "use vLLM 0.32, which obeys return_token_ids, and no gateway before "
    "it that drops the field",
    "untrainable:no_prompt_token_ids": "use vLLM 0.32, which obeys return_token_ids",
    "untrainable:logprobs_missing": "start vLLM with --max-logprobs of at least 1",
    "untrainable:fields_refused": "use a vLLM that gives both (vLLM 0.32 does); `curl` it with "
    "`logprobs` and `return_token_ids` to see what it says",
    "untrainable:text_only": "have agents ask /v1/chat/completions: other surfaces give no ids",
    "untrainable:masking_unknown": "state serving.grammar; `engine_not_known` in ingest's log "
    "says why it is not found out",
    "untrainable:masked_by_server": "start vLLM without --tool-strict-level, or with another "
    "tool parser",
    "surface": "have agents ask /v1/chat/completions, the one surface that is learned from",
    "outcome": "vLLM fails or agents leave before the end: look at sidecar_exchanges_total of the "
    "proxy and at vLLM's log",
    "stale_adapter": "nothing, after a promotion; else look at what serves: `sidecar status`",
}
"""Selection -> what to do when most exchanges end with it."""
_ONE_SESSION: Final = (
    "where conversations that have nothing to do with each other share one (`placed_by` in "
    "docs/sessions.md says why), have agents send x-sidecar-session, another for each conversation"
)
KEPT_OUT_TO_DO: Final[Mapping[str, str]] = {
    "held_out": f"look at exchange.session_id: {_ONE_SESSION}; else lower groups.held_out_rate",
    "capped": f"look at exchange.session_id: {_ONE_SESSION}; else raise the limit: "
    "groups.max_groups_per_session or max_groups_per_near_prompt",
}
"""What keeps most exchanges from training -> what to do."""
MASKS: Final[Mapping[str, str]] = {
    "temperature_zero": "have agents ask at a temperature above 0 (1 is best); greedy answers are "
    "all alike and teach nothing",
    "temperature_raised": "have agents ask at a temperature of at least 0.01",
    "temperature_differs": "start vLLM with --logprobs-mode processed_logprobs",
    "defaults_unknown": "state serving.sampling_defaults, or name serving.base_model_path",
}
"""Mask of served answers -> what to do when nearly all have it."""
ENDS: Final[Mapping[Name, Mapping[str, str]]] = {
    "sampling": {
        "adapter_gone": "see why vLLM lost it: `sidecar status`",
        "prompt_mismatch": "vLLM renders prompts differently than it did: restart it with the chat "
        "template of before",
        "private": "the candidates hold what privacy.flag names: leave out the kind that is no "
        "secret here, or learn from other prompts",
        "request_refused": "vLLM refuses (400) to sample again what it has answered: "
        "`candidate_dropped` in score's log has its words; its options, or the chat template, may "
        "have changed",
        "sampling_failed": "`candidate_dropped` in score's log says why candidates fail",
    },
    "judging": {
        "identical_answers": "all answers to a prompt are the same: raise the agents' temperature, "
        "or give harder tasks",
        "judge_refused": "a judge without a content filter",
        "judge_too_long": "a judge with a longer context, or judge.context_tokens if the set one "
        "is too small",
        **{
            f"judge_{why}": advice(f"judge_{why}")
            for why in ("rejected", "no_credit", "rubbish", "garbled", "unavailable", "busy")
        },
    },
    "learning": {
        "no_spread": "the judge sees no difference: make judge.rubric say what is better, or raise "
        "the agents' temperature",
        "within_noise": "the scores differ by no more than the judge's noise (`sidecar judge "
        "noise`): more judge.passes, a steadier judge, or a rubric that tells answers further "
        "apart",
        "stale": "raise learner.max_age_versions, or run less often",
        "too_few_trainable": "most answers are masked: `answer_masked_...` in the counters of "
        "stage learn",
        "too_long": "raise learner.pack_tokens",
        "drift": "see `DriftError` among the symptoms in docs/incident.md",
        "drift_unchecked": "keep the folders of the last versions",
        "failed_runs": "see why runs fail: `sidecar status`",
        "out_of_memory": "lower learner.pack_tokens",
    },
}
"""Stage -> reason of a group's end -> what to do when most groups end so."""
STAGE_OF: Final[Mapping[str, Name]] = {why: stage for stage in ENDS for why in ENDS[stage]}
CAUSES_OF_ENDS: Final[Mapping[str, str]] = {
    "identical_answers": "tied",
    "no_spread": "tied",
    "judge_rejected": "judge_key",
    "judge_unavailable": "judge_away",
    "drift_unchecked": "drift",
}
"""Reason of a group's end -> cause of the diagnosis, where it has another name."""


# Say where the records of a line of adapters stop: at its learner, or before it serves. Pure.


def of_lines(
    lines: Sequence[LineFacts], loads_refused: Mapping[str, str], rules: CanarySettings
) -> Iterator[Diagnosis]:
    """Yield what stops the records of each line. The text names a line that is not the default one.

    loads_refused: adapter -> why a vLLM refuses to load it; one whose name is of no line counts as
        the first line's.
    """
    names = {one.line.name for one in lines}
    for at, facts in enumerate(lines):
        refused = {
            adapter: why
            for adapter, why in loads_refused.items()
            if line_of_adapter(adapter) == facts.line.name
            or (at == 0 and line_of_adapter(adapter) not in names)
        }
        yield from _serving(facts, refused)
        yield from _slow(facts, rules)


def _not_loaded(facts: LineFacts) -> Iterator[tuple[str, str]]:
    """Yield the newest adapter, and why, when some vLLM cannot load it: its canary waits for that
    vLLM, or has ended inconclusive."""
    if facts.adapter is None:
        return
    name, state, reason = facts.adapter
    if state == "retired" and reason.startswith(NOT_LOADED):
        yield name, reason
    elif any(said in facts.canary for said in ("vLLM refused", "failed to load")):
        yield name, facts.canary


def _serving(facts: LineFacts, refused: Mapping[str, str]) -> Iterator[Diagnosis]:
    project = facts.line.project
    found = dict(refused)
    if facts.adapter is not None and facts.adapter[1] == "rejected":
        found.setdefault(facts.adapter[0], facts.adapter[2])
    not_loaded = dict(_not_loaded(facts))
    found = not_loaded | found
    _, option = words_of(project)
    for name, reason in found.items():
        rank = "rank" in reason
        yield Diagnosis(
            stage="serving",
            cause="rank_too_high" if rank else "adapter_refused",
            text=f"{name} is not served: {reason}",
            to_do=_to_serve(name, option, rank=rank, not_loaded=name in not_loaded),
            project=project,
        )


def _slow(facts: LineFacts, rules: CanarySettings) -> Iterator[Diagnosis]:
    """Yield that a canary takes days, when one runs or the newest adapter had one in vain."""
    tried = bool(facts.canary) or (facts.adapter is not None and facts.adapter[1] == "retired")
    a_day, of = facts.sessions_a_day, words_of(facts.line.project)[0]
    days = steps_days(rules.ramp, rules, a_day)
    limit = rules.step_max_s / DAY_S
    if not tried or a_day <= 0.0 or max(days) <= limit:
        return
    never = max(days) > SLOWEST * limit
    steps = ", ".join(f"{one / 100:g}%" for one in rules.ramp)
    yield Diagnosis(
        stage="serving",
        cause="little_traffic",
        text=f"a canary{of} wants {rules.step_min_sessions} sessions in each step ({steps}): about "
        f"{sum(days):.0f} days at today's {a_day:.0f} sessions a day"
        + (f", and a step ends after {SLOWEST * limit:g} at the latest" if never else ""),
        to_do="lower canary.step_min_sessions or raise canary.steps"
        + ("" if never else ", or wait: `sidecar status` says how long"),
        project=facts.line.project,
    )


def _to_serve(name: str, option: str, *, rank: bool, not_loaded: bool) -> str:
    if rank:
        return (
            "start vLLM with a --max-lora-rank of at least learner.rank and state it in "
            "serving.max_lora_rank, or lower learner.rank"
        )
    if not_loaded:
        return (
            "mend that vLLM (memory, --enable-lora, learner.adapters_dir at the same path), "
            f"then `sidecar canary start{option} {name}` where its canary has ended"
        )
    return (
        f"`sidecar adapters show{option}` and `sidecar canary get{option}` have the evidence; the "
        "next run starts from the champion"
    )


FEW = 3
"""Records that must share a fate before it is called a rule."""
MOST = 0.5
"""Share of the newest records that end for one reason, from which on it stops the stage."""
KEPT_OUT = 0.6
"""Share of the newest exchanges that are held out, or capped, from which on it is named: their
sessions are then few, and larger than conversations are."""
NEARLY_ALL = 0.9
"""Share of the served answers that are masked for one reason, from which on it is named."""
SKEW_S = 30.0
"""Clocks may differ by less: a lease of a training run lasts so long."""
FAR_S = 8 * 86_400.0
"""A schedule that is due later than a week from now is taken for a mistake."""
CAPS: Final = (SESSION_CAP, NEAR_CAP)
NORMAL = ("new", "chosen", "held_out", "backlog", "rate", "retried_turn", *CAPS)
"""Selections that are no fault while they are few: others of the same traffic are chosen."""


def diagnose(facts: Facts) -> list[Diagnosis]:
    """Return every place at which records stop, the first stage first."""
    found = [
        *_of_checks(facts),
        *_clocks(facts),
        *(_of_store(facts, facts.store) if facts.store is not None else ()),
        *_schedule(facts),
    ]
    stopped = {one.stage for one in found if one.cause != PILE_UP}
    first: dict[tuple[str, str, str | None, str], Diagnosis] = {}
    for one in found:
        if one.cause == PILE_UP and (pile := _pile_up(facts)) and pile.data["where"] in stopped:
            continue  # what the waiting groups wait for is named already
        several = one.text if one.cause in (VERIFIER, "verifier_fails", FIELDS_REFUSED) else ""
        first.setdefault((one.stage, one.cause, one.project, several), one)
    return sorted(first.values(), key=lambda one: STAGES.index(one.stage))


def waits_for(facts: Facts) -> str:
    """Say what a system without a fault waits for; empty when records reach an adapter."""
    if (pile := _planned(facts)) is not None and facts.next_run_at is not None:
        at = datetime.fromtimestamp(facts.next_run_at, UTC)
        return f"the run at {at:%Y-%m-%d %H:%M} UTC, which makes room: {pile.message}"
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
        if finding.level != "error" and finding.cause not in ("no_judge", VERIFIER):
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
    bus = next((one for one in _every(facts) if one.kind == "bus"), None)
    if bus is not None and bus.at > facts.now:
        ahead["ingest"] = bus.at - facts.now
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
    yield from _conditions(facts, store, stages)
    yield from _quarantine(store)
    yield from _most_end("selection", store.recent.selections, SELECTIONS, NORMAL)
    yield from _kept_out(store.recent)
    yield from _masks(store.recent.served)
    yield from _groups(facts, store)
    yield from of_lines(store.lines, facts.loads_refused, facts.settings.canary)


def of_tasks(facts: Facts) -> str:
    """Say what learning from whole tasks lacks; empty where it lacks nothing."""
    tasks, recent = facts.settings.tasks, facts.store.recent if facts.store else Recent()
    seen = (
        f"of the newest {counted(recent.sessions, 'session')} {recent.in_tasks} name a task "
        f"(x-sidecar-task) and {recent.with_outcome} have an outcome"
    )
    if tasks.learn == "off":
        do = 'set tasks.learn = "outcome"' if recent.in_tasks and recent.with_outcome else TASKS
        return f"they are not learned from; {seen}; {do}"
    own = facts.settings.rehearsals
    if bool(own.runner) != (own.tokens_per_day > 0):
        has, lacks = ("runner", "tokens_per_day") if own.runner else ("tokens_per_day", "runner")
        return f"nothing is rehearsed: rehearsals.{has} is set, and rehearsals.{lacks} is not"
    if own.are_on or not recent.sessions:
        return ""
    lacks_task = tasks.key == "header" and not recent.in_tasks
    lacks_outcome = tasks.learn != "ruler" and not recent.with_outcome
    return f"nothing to learn from: {seen}; {TASKS}" if lacks_task or lacks_outcome else ""


TASKS: Final = "send both, or have a runner attempt recorded tasks (docs/tasks.md)"


def _pile_up(facts: Facts) -> Condition | None:
    return next((one for one in _every(facts) if one.code == PILE_UP), None)


def _planned(facts: Facts) -> Condition | None:
    """Return the pile-up that the schedule's next run ends. No fault: the groups of a night wait.

    None also when no learner runs here, when no run is due within days, and when the groups wait
    for something else.
    """
    pile = _pile_up(facts)
    due = facts.next_run_at is not None and 0.0 <= facts.next_run_at - facts.now <= FAR_S
    learns = due and "learn" in facts.running
    return pile if pile is not None and pile.data["where"] == "learning" and learns else None


def _every(facts: Facts) -> tuple[Condition, ...]:
    return facts.store.conditions if facts.store is not None else ()


def _conditions(
    facts: Facts, store: StoreFacts, stages: Mapping[Name, Stage]
) -> Iterator[Diagnosis]:
    """Yield the conditions that stop records, but for what was asked just now."""
    asked, model = {one.cause for one in facts.findings}, facts.settings.judge.model
    ingest_lacks = "ingest" not in facts.running and sum(stages["bus"].waiting.values()) > 0
    for one in store.conditions:
        kind = one.kind.partition(" ")[0]
        stage = OF_CONDITIONS.get(kind)
        judge_asked = not model or asked & {"judge", "judge_key"}
        if (
            stage is None
            or one.state == "ok"
            or (kind == "judge" and (" " in one.kind or (judge_asked and one.code not in OF_SCORE)))
            or one.data.get("judge_model", model) != model
            or (kind == "verifier" and facts.verifiers_tried)
            or (kind == "fields" and one.data["exchanges"] < FEW)
            or (one.code == PILE_UP and _planned(facts) is not None)
            or (one.code == "ingest_down" and not ingest_lacks)
        ):
            continue
        until = ""
        if one.until is not None and one.until > facts.now:
            until = f"; again at {datetime.fromtimestamp(one.until, UTC):%Y-%m-%d %H:%M} UTC"
        project = project_of(one.line)
        yield Diagnosis(stage, one.code, one.message + until, one.to_do, project)


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
            or "see `Capture losses` in docs/incident.md, and docs/data-dictionary.md for a "
            "reason that begins with skipped_ (the [capture] settings)",
        )


def _quarantine(store: StoreFacts) -> Iterator[Diagnosis]:
    if number := sum(store.funnel.counters.get(STAGE, {}).values()):
        yield Diagnosis(
            stage="bus",
            cause="rows_damaged",
            text=f"{counted(number, 'row')} of the store held damaged values and went into "
            "quarantine",
            to_do="look whether the disk of the store is failing; its table `quarantine` names the "
            "rows, which a backup has",
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
    ended = {why: n for why, n in store.recent.ends.items() if why in STAGE_OF}
    trained = sum(ended.values(), start=store.recent.ends.get("trained", 0))
    scored = store.recent.ends.get("scored", 0)
    for reason, number in sorted(ended.items(), key=lambda one: -one[1]):
        stage = STAGE_OF[reason]
        # A scored group passed sampling and judging; what the learner says of it is to come.
        done = trained if stage == "learning" else trained + scored
        if number < FEW or number < MOST * done:
            continue
        verb = "ended" if stage == "learning" else "ended or were scored"
        words = f" ({store.recent.detail})" if store.recent.detail else ""
        yield Diagnosis(
            stage=stage,
            cause=CAUSES_OF_ENDS.get(reason, reason),
            text=f"{number} of the newest {done} groups that {verb}: {reason}{words}",
            to_do=ENDS[stage][reason],
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
        yield Diagnosis(
            stage=stage,
            cause=CAUSES.get(reason, reason),
            text=f"{number} of the newest {decided} decided exchanges are not suitable: {reason}",
            to_do=to_do.get(
                reason,
                "see `exchange.selection` in data-dictionary.md (`sidecar docs` prints its folder)",
            ),
        )


def _kept_out(recent: Recent) -> Iterator[Diagnosis]:
    """Yield that most of the newest exchanges are held out, or capped. A few of both are normal."""
    counts = recent.selections
    decided = sum(counts.values()) - counts.get("new", 0)
    for cause, reasons in (("held_out", (HELD_OUT,)), ("capped", CAPS)):
        found = {why: counts[why] for why in reasons if counts.get(why)}
        number = sum(found.values())
        if number >= FEW and number > KEPT_OUT * decided:
            names = counted(recent.sessions, "session")
            yield Diagnosis(
                stage="selection",
                cause=cause,
                text=f"{number} of the newest {decided} decided exchanges do not teach: "
                f"{', '.join(f'{count} {why}' for why, count in found.items())}; "
                f"the newest {sum(counts.values())} exchanges are of {names}",
                to_do=KEPT_OUT_TO_DO[cause],
            )


FIELDS_REFUSED: Final = "fields_refused"
CAUSES: Final[Mapping[str, str]] = {
    "untrainable:ids_missing": "no_token_ids",
    "untrainable:no_prompt_token_ids": "no_token_ids",
    "untrainable:fields_refused": FIELDS_REFUSED,
}
"""Selection -> cause of the diagnosis, where it has another name; checks find the same causes."""


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

"""All conditions of this moment: the stored ones, and those that rows or control's memory say.

A pause, a failed run or a full queue is told by the rows that make it so; their conditions are made
here at each reading, and nothing can disagree with them. The page, `sidecar status`, the doctor,
`/readyz` and the metrics take their states from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.engine.reconcile import NOT_ASKED, EngineView
from deploy.examiner import TO_DO, Examiner
from deploy.funnel import Funnel, groups_by_status, pile_words, read_pile_up, to_do
from deploy.outside.telling import read_states
from deploy.records import LEARNER_AWAY_S, Canary, nobody_has, short
from deploy.registry import canaries, flags, tallies
from deploy.supervise import LoopView
from ingest.intake.bus import KIND as BUS
from ingest.intake.consume import POISON, STAGE as CONSUMED
from ingest.judge_noise import read_noise_state
from ingest.judge_watch import JUDGE, NANO, advice_on, newest_scored
from ingest.judges.spending import read_spending
from ingest.reward_watch.store import ask
from ingest.store.groups import PENDING, SAMPLED
from ingest.tasks.grouping import STAGE as TASKS, WITHOUT_OUTCOME
from ingest.verifiers.state import KIND as VERIFIER, held_groups, waiting_for
from learner.schedule.loop import SCHEDULE
from sidecar.conditions import Condition, read_all
from sidecar.hiding import hide_in_url
from sidecar.lines import Line, learner_of
from sidecar.settings import Watch
from sidecar.store.models import AuditRow, CanaryRow, RunRow
from sidecar.visible import counted

TASKS_SEEN = 100
"""Exchanges, or finished sessions, from which what whole tasks lack is said."""
SCORE_AWAY_S = 180.0
"""Score tells of its judge every 30 s, and may wait for the store meanwhile."""
LATE_S = 60.0
"""Ingest looks at the bus every 10 s: a report that is older has no ingest behind it."""


def read_conditions(
    session: Session,
    lines: Sequence[Line],
    funnel: Funnel,
    *,
    watch: Watch,
    most_pending: int,
    now: float,
) -> list[Condition]:
    """Return the conditions that the store tells of, those that stop something first.

    most_pending: `learner.max_groups`. now: Unix seconds.
    """
    stored = read_all(session)
    found = [
        *_stored(session, stored, funnel, now),
        *(one for line in lines for one in _of_line(session, line, stored, watch, now)),
        *_of_records(session, lines, funnel, most_pending),
    ]
    return in_order(found)


def in_order(found: Sequence[Condition]) -> list[Condition]:
    """Sort by what needs a person most."""
    return sorted(found, key=lambda one: ("act", "look", "ok").index(one.state))


def words_of(project: str | None) -> tuple[str, str]:
    """Return whose line it is in words, and the option of commands; empty for the default line."""
    return ("", "") if project is None else (f" of {project}", f" --project {project}")


def _stored(
    session: Session, stored: Sequence[Condition], funnel: Funnel, now: float
) -> Iterator[Condition]:
    """Yield what processes have written of all lines, with what is known by now."""
    known = {one.kind: one for one in stored if not one.line}
    judge = known.get(JUDGE)
    verifiers = waiting_for(session) if any(kind.startswith(VERIFIER) for kind in known) else {}
    for one in known.values():
        if one.kind == JUDGE and now - one.at > SCORE_AWAY_S and _any_waits(funnel):
            yield _silent(one, "score_down", "score", "score", "groups")
        elif one.kind == JUDGE:
            yield _judge(session, one, funnel, now)
        elif one.kind == BUS and now - one.at > LATE_S:
            yield _silent(one, "ingest_down", "ingest", "ingest", "records")
        elif one.kind.startswith(VERIFIER):
            yield _waiting(one, verifiers.get(one.kind.removeprefix(VERIFIER), 0))
        elif one.kind != "sampling" or not _is_over(one, judge, now):
            yield one
    if BUS not in known and funnel.stage("bus").entered:
        missing = Condition(kind=BUS, code="ingest_down")
        yield _silent(missing, "ingest_down", "ingest", "ingest", "records")


def _any_waits(funnel: Funnel) -> bool:
    """Return True where groups wait for score: for answers, or for scores."""
    found = groups_by_status(funnel.stages)
    return any(found.get(status) for status in PENDING)


def _silent(one: Condition, code: str, who: str, command: str, waiting: str) -> Condition:
    """Return the condition of a process that has not been heard of since the one at hand."""
    return replace(
        one,
        state="act",
        code=code,
        message=f"{who} has not been heard of" + ("" if one.at else " yet"),
        to_do=f"start `sidecar {command}`, or `sidecar up`; its log says why it ended; "
        f"{waiting} wait and are not lost",
        since=one.at,
    )


def _is_over(sampling: Condition, judge: Condition | None, now: float) -> bool:
    """Return True where sampling's own reason has ended, or is the judge's, who has a condition."""
    ended = sampling.until is not None and sampling.until <= now
    of_judge = sampling.code.startswith("judge_")
    return ended or (of_judge and judge is not None)


def _waiting(one: Condition, groups: int) -> Condition:
    data = {**one.data, "waiting": groups}
    waits = f"; {counted(groups, 'group waits', 'groups wait')} for it" if groups else ""
    return replace(one, message=f"{one.message}{waits}", data=data)


def _judge(session: Session, one: Condition, funnel: Funnel, now: float) -> Condition:
    complete = groups_by_status(funnel.stages).get(SAMPLED, 0)
    waiting = max(0, complete - held_groups(session))  # the others wait for a verifier
    times = (one.data.get("good_at"), (newest_scored(session) or (None, None))[1])
    good_at = max((at for at in times if isinstance(at, float)), default=None)
    spending = read_spending(session, now=now)
    data = {
        **one.data,
        "good_at": good_at,
        "spent_usd_today": spending.nano_usd_today / NANO,
        "tokens_today": spending.tokens_today,
    }
    error, error_at = str(one.data.get("error", "")), one.data.get("error_at")
    if one.code == "judge_works" and (error_at or 0.0) > (good_at or 0.0):
        message = f"the judge answers, but gave the newest group no scores: {error}"
        one = replace(one, message=message, to_do=advice_on(error))
    elif one.state == "ok":
        one = replace(one, to_do="")
    return _waiting(replace(one, data=data), waiting)


def _of_line(
    session: Session, line: Line, stored: Sequence[Condition], watch: Watch, now: float
) -> Iterator[Condition]:
    """Yield the conditions of one line of adapters."""
    known = {one.kind: one for one in stored if one.line == line.name}
    newest = select(RunRow).where(RunRow.model == line.name).order_by(RunRow.started_at.desc())
    run = session.scalars(newest.limit(1)).first()
    yield from _canary(session, line, known.get("canary"))
    yield from (one for kind, one in known.items() if kind not in ("canary", SCHEDULE))
    yield from _paused(session, line)
    if run is not None:
        yield from _run(line, run)
    if run is None or run.status != "held":
        yield from _would_hold(session, line, watch)
    if (schedule := known.get(SCHEDULE)) is not None:
        beat = run.heartbeat_at if run is not None and run.ended_at is None else 0.0
        if now - max(schedule.at, beat) <= LEARNER_AWAY_S:
            yield schedule
        else:
            of = words_of(line.project)[0]
            yield _silent(schedule, "learner_away", f"the learner{of}", "learn", "groups")


def _paused(session: Session, line: Line) -> Iterator[Condition]:
    if not flags.read(session, line.name).paused:
        return
    of, option = words_of(line.project)
    newest = (
        select(AuditRow)
        .where(AuditRow.subject == learner_of(line.name), AuditRow.action == "learner.pause")
        .order_by(AuditRow.seq.desc())
    )
    row = session.scalars(newest.limit(1)).first()
    why = "" if row is None else f", by {row.actor}: {row.reason}"
    yield Condition(
        kind="learner",
        line=line.name,
        state="look",
        code="paused",
        message=f"the learner{of} is paused, so no run starts{why}",
        to_do=f"`sidecar learner resume{option}` when its next run should start",
        since=0.0 if row is None else row.at,
    )


def _run(line: Line, run: RunRow) -> Iterator[Condition]:
    of, option = words_of(line.project)
    if run.status == "held":
        yield Condition(
            kind="run",
            line=line.name,
            state="act",
            code="held",
            message=f"the reward watch holds the learner{of}: {run.reason or ''}",
            to_do=f"`sidecar learner watch{option}` has the figures; roll back, mend the judge's "
            f"rubric, or `sidecar learner override{option} --reason TEXT`; its groups wait",
            since=run.started_at,
            data={"run_id": run.run_id},
        )
    elif run.status == "failed":
        yield Condition(
            kind="run",
            line=line.name,
            state="act",
            code="run_failed",
            message=f"the newest training run{of} failed: {run.reason or ''}",
            to_do="see the error's class among the symptoms in docs/incident.md; its groups wait",
            since=run.started_at,
            data={"run_id": run.run_id},
        )


def _would_hold(session: Session, line: Line, watch: Watch) -> Iterator[Condition]:
    """Yield that a run would be held, before one is tried."""
    if why := ask(session, line.name, watch).reason:
        of, option = words_of(line.project)
        yield Condition(
            kind="watch",
            line=line.name,
            state="look",
            code="would_hold",
            message=f"the reward watch would hold a run{of} that began now: {why}",
            to_do=f"`sidecar learner watch{option}` has the figures, `sidecar learner "
            f"override{option}` lets it go on",
        )


def _canary(session: Session, line: Line, hold: Condition | None) -> Iterator[Condition]:
    canary = canaries.active(session, line.name)
    if canary is not None:
        yield from _active(line, canary, hold)
        return
    newest = (
        select(CanaryRow.canary_id, CanaryRow.state, CanaryRow.candidate, CanaryRow.reason)
        .where(CanaryRow.model == line.name, CanaryRow.state.not_in(("queued", "withdrawn")))
        .order_by(CanaryRow.created_at.desc())
    )
    row = session.execute(newest.limit(1)).first()
    if row is not None and row.state == "inconclusive":
        yield Condition(
            kind="canary",
            line=line.name,
            state="look",
            code="canary_inconclusive",
            message=f"the trial of {short(row.candidate)}{words_of(line.project)[0]} ended "
            f"without a result: {row.reason or ''}",
            to_do="the champion stayed; more traffic or more held-out prompts would tell",
            data={"canary_id": row.canary_id},
        )


def _active(line: Line, canary: Canary, hold: Condition | None) -> Iterator[Condition]:
    of, option = words_of(line.project)
    name, data = short(canary.candidate), {"canary_id": canary.canary_id}
    if canary.paused:
        yield Condition(
            kind="canary",
            line=line.name,
            state="act",
            code="canary_paused",
            message=f"the trial of {name}{of} is paused at {canary.weight_bp / 100:g}%: "
            f"{canary.reason or ''}",
            to_do=f"`sidecar canary resume{option}` or `abort`: it decides nothing by itself",
            data=data,
        )
        return
    if hold is not None and hold.data["canary_id"] != canary.canary_id:
        hold = None
    if hold is not None:
        yield hold
    for metric, state in canary.metrics.items():
        last = state.last
        named = hold is not None and metric == hold.data["metric"]
        if last is None or last.outcome != "error" or named:
            continue
        yield Condition(
            kind=f"metric {metric}",
            line=line.name,
            state="look" if state.mode == "dry_run" else "act",
            code="metric_away",
            message=f"the metric {metric} gives no answer: {last.why}",
            to_do="it is asked again; an error rolls nothing back",
            data=data,
        )


def _of_records(
    session: Session, lines: Sequence[Line], funnel: Funnel, most_pending: int
) -> Iterator[Condition]:
    names = [line.name for line in lines]
    pile = read_pile_up(session, names, funnel, most=most_pending)
    if pile is not None:
        yield Condition(
            kind="selection",
            state="look",
            code="pile_up",
            message=pile_words(pile),
            to_do=to_do(pile.where),
            data={"where": pile.where},
        )
    for url, number in tallies.fields_refused(session).items():
        of = counted(number, "of the newest 200 exchanges has", "of the newest 200 exchanges have")
        yield Condition(
            kind=f"fields {url}",
            state="look",
            code="fields_refused",
            message=f"vLLM at {hide_in_url(url)} fails when it is asked for token ids and "
            f"log-probabilities, so users are served without; {of} none and cannot be learned from",
            to_do="use a vLLM that gives both (vLLM 0.32 does); `curl` it with `logprobs` and "
            "`return_token_ids` to see what it says",
            data={"exchanges": number},
        )
    yield from _tasks(funnel.counters.get(TASKS, {}))
    noise = read_noise_state(session)
    if noise is not None and noise.drift:
        yield Condition(
            kind="drift",
            state="look",
            code="judge_drift",
            message=f"the judge {noise.judge_model} is not as it was: {noise.drift}",
            to_do="ask its provider whether another model answers to this name, or name a dated "
            "model; `sidecar judge noise` has the figures, and with `--accept` takes the judge as "
            "it is now",
            since=noise.drift_at or 0.0,
            data={"judge_model": noise.judge_model},
        )
    if lost := funnel.counters.get(CONSUMED, {}).get(POISON, 0):
        yield Condition(
            kind="dead_letters",
            state="look",
            code="dead_letters",
            message=f"{counted(lost, 'record')} could not be stored, and are kept whole as dead "
            "letters",
            to_do="see the runbook",
            data={"records": lost},
        )


def control_conditions(
    session: Session,
    *,
    engine: EngineView,
    loops: Mapping[str, LoopView],
    lease: tuple[bool, str],
    examiner: Examiner | None,
    hooks: Sequence[str],
    champion: str,
) -> Iterator[Condition]:
    """Yield what control knows: of vLLM, of its own loops, of the gate's judge and the web hooks.

    champion: the adapter that users should get.
    """
    yield from _engine(engine, champion)
    for name, loop in loops.items():
        if loop.failures:
            times = counted(loop.failures, "time")
            yield Condition(
                kind=f"loop {name}",
                state="act",
                code="loop_fails",
                message=f"control's loop {name} failed {times} in a row: {loop.error or ''}",
                to_do="it is tried again",
            )
    acts, other = lease
    if not acts:
        yield Condition(
            kind="lease",
            code="stands_by",
            message=f"this control waits; {other or 'nobody yet'} steers canaries and adapters",
        )
    if examiner is not None and examiner.warning:
        yield Condition(
            kind="gate_judge",
            state="look",
            code="gate_judge",
            message=examiner.warning.removesuffix(f"; {TO_DO}"),
            to_do=TO_DO,
        )
    for name, state in read_states(session, hooks).items():
        if state.tries:
            yield Condition(
                kind=f"hook {name}",
                state="look",
                code="hook_fails",
                message=f"the web hook {name} does not take events "
                f"({counted(state.tries, 'time')} in a row): {state.error}",
                to_do="it is tried again; `sidecar hooks test` tries it now",
                until=state.next_at or None,
            )


def _engine(engine: EngineView, champion: str) -> Iterator[Condition]:
    replicas = engine.replicas
    missing = nobody_has(champion, (None if one.away else one.loaded for one in replicas.values()))
    for url, replica in replicas.items():
        shown = hide_in_url(url)
        if replica.away not in (None, NOT_ASKED):
            others = len(replicas) > 1 and engine.away is None
            yield Condition(
                kind=f"vllm {url}",
                state="act",
                code="vllm_away",
                message=f"vLLM at {shown} does not answer: "
                f"{str(replica.away).removeprefix(f'vLLM at {shown} ')}",
                to_do="start it again; the other replicas answer its users"
                if others
                else "start vLLM again, or wait while it loads: no replica answers; a rollback "
                "works all the same",
            )
        for name, why in replica.refused.items():
            yield Condition(
                kind=f"adapter {name} at {url}",
                state="act",
                code="adapter_refused",
                message=f"vLLM at {shown} does not serve {short(name)}: {why}",
                to_do="correct vLLM's flags or the adapter, or roll back: users get the base model"
                if name == champion and missing
                else "correct vLLM's flags or the adapter; another version answers meanwhile",
                data={"adapter": name},
            )


def _tasks(counts: Mapping[str, int]) -> Iterator[Condition]:
    """Yield what keeps whole sessions from being learned from, where that is turned on."""
    if counts.get("seen", 0) < TASKS_SEEN:
        return
    over, silent = counts.get("over", 0), counts.get(WITHOUT_OUTCOME, 0)
    code = why = do = ""
    if not any(name.startswith("enrolled_") for name in counts):
        code, why = "no_task_key", "no session has a task name"
        do = (
            "have agents send x-sidecar-task, or let an equal prompt or a template count: tasks.key"
        )
    elif silent > over:
        code, why = (
            "few_outcomes",
            f"{over / (over + silent):.0%} of finished sessions have an outcome",
        )
        do = "have the application POST /sidecar/v1/outcomes when a task ends; else none counts"
    elif over >= TASKS_SEEN and not counts.get("drawn", 0):
        code, why = "no_task_group", f"of {counted(over, 'finished session')} none makes a group"
        do = "tasks.size sessions of one task, adapter and day are needed, each of another user"
    if code:
        yield Condition(kind="tasks", state="look", code=code, message=why, to_do=do)

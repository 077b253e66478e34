"""`sidecar status` in sentences: what serves, what is on canary, and what needs attention. Pure.

The admin API's JSON is read into the records below, which name the fields that the sentences use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from deploy.admin.text import killed_words, progress_words, resumed_words
from deploy.cli.hooks import HookTold, hook_lines
from deploy.cli.judge import GateJudge, JudgeNoise, JudgeState, gate_judge_lines, judge_lines
from deploy.cli.learner import (
    Budget,
    OneLine,
    Verifier,
    budget_lines,
    name_of,
    other_lines,
    percent,
    verifier_lines,
)
from deploy.records import LEARNER_AWAY_S, comes_next, nobody_has
from deploy.text import shown_age, shown_time
from learner.resume import was_stopped
from sidecar.visible import counted


class Routing(msgspec.Struct):
    champion: str
    canary: str | None
    canary_weight_bp: int


class Canary(msgspec.Struct):
    canary_id: str
    candidate: str
    champion: str
    state: str
    paused: bool
    reason: str | None
    step: int
    steps: list[int]
    weight_bp: int
    step_started_at: float
    next_step_earliest_at: float | None


class Run(msgspec.Struct):
    run_id: str
    status: str
    reason: str | None
    started_at: float
    ended_at: float | None
    adapter: str | None
    progress: dict[str, Any] | None = None
    deaths: list[Any] | None = None
    heartbeat_at: float | None = None


class Schedule(msgspec.Struct):
    kind: str
    why: str
    at: float
    again_at: float | None = None


class Learner(msgspec.Struct):
    paused: bool
    run_requested: bool
    last_run: Run | None
    next_run_at: float | None = None
    schedule: Schedule | None = None
    lacks: list[str] = []


class Replica(msgspec.Struct):
    away: str | None
    loaded: list[str]
    refused: dict[str, str]


class Engine(msgspec.Struct):
    replicas: dict[str, Replica]


class Loop(msgspec.Struct):
    failures: int
    error: str | None


class Bus(msgspec.Struct):
    lag: int | None
    error: str
    at: float


class Retention(msgspec.Struct):
    at: float
    used_bytes: int
    free_bytes: int
    max_bytes: int
    oldest_at: float | None


class Trouble(msgspec.Struct):
    since: float
    why: str
    until: float | None


class PileUp(msgspec.Struct):
    why: str
    to_do: str


class Status(msgspec.Struct, kw_only=True):
    """`GET /admin/v1/status`, as far as the sentences need it."""

    model: str
    project: str | None = None
    lines: list[OneLine] = []
    champion: str
    previous: str
    routing: Routing | None
    canary: Canary | None
    queued: Canary | None = None
    pace: str = ""
    best: str = ""
    learner: Learner
    watch_holds: str | None = None
    engine: Engine
    fields_refused: dict[str, int] = {}
    control: dict[str, Loop]
    acts: bool = True
    acts_instead: str = ""
    adapters: dict[str, int]
    groups: dict[str, int]
    exchanges: int
    bus: Bus | None
    judge: JudgeState | None = None
    gate_judge: GateJudge | None = None
    judge_noise: JudgeNoise | None = None
    verifiers: list[Verifier] = []
    hooks: list[HookTold] = []
    sampling: Trouble | None = None
    pile_up: PileUp | None = None
    budgets: list[Budget] = []
    dead_letters: int = 0
    token_check: str
    feedback: dict[str, int] = {}
    signals: dict[str, int] = {}
    retention: Retention | None = None


def status_lines(
    found: Any,  # JSON of the admin API
    now: float,
    *,
    schedule: str = "",
    times: str = "",
) -> list[str] | None:
    """The sentences, one for each line. now: Unix seconds. schedule: `learner.schedule`. times: of
    `learner.cron`, as `shown_cron` has them.

    Returns None when `found` is not as this version knows it: the caller prints it as it is.
    """
    try:
        status = msgspec.convert(found, Status)
    except msgspec.ValidationError:
        return None
    return [
        *_serving(status),
        *other_lines(status.lines, status.project),
        *([status.best] if status.best else []),
        *_canary(status.canary, now),
        *([f"  {status.pace}"] if status.pace else []),
        *_queued(status.queued, now),
        *_learner(status, now, schedule, times),
        *_engine(status.engine),
        *_fields(status.fields_refused),
        *_control(status.control),
        *_lease(status),
        f"Adapters: {_tally(status.adapters)}.",
        f"Recorded: {counted(status.exchanges, 'exchange')}. Groups: {_tally(status.groups)}.",
        *_told(status.feedback, status.signals),
        *_bus(status.bus, now),
        *_dead_letters(status.dead_letters),
        *_pile_up(status.pile_up),
        *_sampling(status.sampling, now),
        *budget_lines(status.budgets),
        *judge_lines(status.judge, status.judge_noise, now),
        *gate_judge_lines(status.gate_judge),
        *verifier_lines(status.verifiers, now),
        *hook_lines(status.hooks, now),
        *_retention(status.retention, now),
        *([f"Token check: {status.token_check}"] if status.token_check != "on" else []),
    ]


def _serving(status: Status) -> Iterator[str]:
    champion, canary_bp = status.champion, 0
    if status.routing is not None:
        champion, canary_bp = status.routing.champion, status.routing.canary_weight_bp
    of = f"Model {status.model}"
    if status.project is not None:
        of += f", project {status.project}"
    replicas = status.engine.replicas.values()
    who = name_of(champion)
    if nobody_has(champion, (None if one.away else one.loaded for one in replicas)):
        yield f"No vLLM has loaded the champion {champion}: the base model answers in its place."
        who = "the base model"
    if status.routing is not None and status.routing.canary is not None and canary_bp:
        yield (
            f"{of}: {who} answers {percent(10_000 - canary_bp)} of "
            f"the sessions, the canary {status.routing.canary} {percent(canary_bp)}."
        )
    else:
        yield f"{of}: {who} answers every session."
    if status.previous != champion:
        yield f"A rollback goes to {name_of(status.previous)}."


def _queued(queued: Canary | None, now: float) -> Iterator[str]:
    if queued is not None:
        since = shown_time(queued.step_started_at, now)
        yield f"Queue: {queued.candidate} waits since {since} (canary {queued.canary_id})."


def _canary(canary: Canary | None, now: float) -> Iterator[str]:
    if canary is None:
        yield "Canary: none."
        return
    since = shown_time(canary.step_started_at, now)
    if canary.state == "ramping":
        doing = (
            f"has {percent(canary.weight_bp)} of the sessions (step {canary.step + 1} of "
            f"{len(canary.steps)})"
        )
    else:
        doing = f"is {canary.state}"
    yield (
        f"Canary {canary.canary_id}: {canary.candidate} {doing} since {since}, against "
        f"{name_of(canary.champion)}."
    )
    if canary.paused:
        yield "  It is paused: `sidecar canary resume` continues it."
    if canary.reason:
        yield f"  Reason: {canary.reason}"
    if canary.next_step_earliest_at is not None and canary.next_step_earliest_at > now:
        what = comes_next(canary.state, canary.step, canary.steps).capitalize()
        yield f"  {what}: {shown_age(now - canary.next_step_earliest_at)} at the earliest."


def _learner(status: Status, now: float, schedule: str, times: str) -> Iterator[str]:
    learner, watch_holds = status.learner, status.watch_holds
    of_line = f" --project {status.project}" if status.project else ""
    if learner.paused:
        yield f"Learner: paused; `sidecar learner resume{of_line}` continues it."
    elif learner.run_requested:
        yield "Learner: a run is requested and starts next."
    elif schedule == "manual":
        asks = f"`sidecar learner run{of_line}` asks"
        yield f"Learner: runs when it is asked to (learner.schedule); {asks}."
    else:
        yield "Learner: follows its schedule."
    yield from _next_run(learner, now, by_hand=schedule == "manual")
    if times:
        yield f"  learner.cron runs next {times}."
    for lack in learner.lacks:
        yield f"  It found at its start: {lack}."
    run = learner.last_run
    if watch_holds and (run is None or run.status != "held"):
        yield (
            f"  The reward watch WOULD HOLD a run now: {watch_holds}; `sidecar learner watch` has "
            "the figures, `sidecar learner override` lets it go on."
        )
    if run is None:
        yield "  It has not run yet."
        return
    made = f" and made {run.adapter}" if run.adapter else ""
    why = f": {run.reason}" if run.reason else ""
    if run.status == "held" and not watch_holds:
        yield "  The reward watch held the last run and holds it no more: the next one goes on."
    elif run.status == "held":
        yield (
            "  The reward watch HOLDS it: `sidecar learner watch` has the figures, "
            "`sidecar learner override` lets it go on."
        )
    when = shown_time(run.started_at if run.ended_at is None else run.ended_at, now)
    word = f"{run.status}"
    if run.ended_at is None:
        word = "is interrupted, began" if run.reason else "runs since"
    yield f"  Last run {run.run_id}: {word} {when}{made}{why}."
    if resumed := resumed_words(run.deaths):
        how = "stopped" if was_stopped(run.deaths) else "killed"
        yield f"  It was {how}, and resumed {resumed}."
    seen_of = {"status": run.status, "heartbeat_at": run.heartbeat_at, "reason": run.reason}
    if killed := killed_words(seen_of, now):
        yield f"  It was KILLED: {killed}."
    if run.ended_at is None and (where := progress_words(run.progress)):
        at = (run.progress or {}).get("at")
        seen = f" ({shown_age(now - at)})" if isinstance(at, int | float) else ""
        yield f"  It {'was' if killed or run.reason else 'is'} {where}{seen}."


def _next_run(learner: Learner, now: float, *, by_hand: bool) -> Iterator[str]:
    if learner.next_run_at is not None:
        yield f"  Next scheduled time: {shown_time(learner.next_run_at, now)}."
    told = learner.schedule
    if told is None:
        return
    if now - told.at > LEARNER_AWAY_S:
        yield f"  It said nothing since {shown_time(told.at, now)}; is `sidecar learn` up?"
    elif not (
        told.kind in ("start", "running")
        or (told.kind == "paused" and learner.paused)
        or (told.kind == "not_due" and by_hand)
    ):
        yield f"  No run now: {told.why}."
        if told.again_at is not None:
            yield f"  It is tried again {shown_time(told.again_at, now)}."


def _engine(engine: Engine) -> Iterator[str]:
    for url, replica in engine.replicas.items():
        if replica.away is not None:
            yield f"vLLM at {url}: away: {replica.away}"
        else:
            loaded = ", ".join(replica.loaded) or "no adapter"
            yield f"vLLM at {url}: answers; it has loaded {loaded}."
        for name, why in replica.refused.items():
            yield f"  It does not serve {name}: {why}"


def _fields(refused: Mapping[str, int]) -> Iterator[str]:
    for url, number in refused.items():
        of = counted(number, "of the newest 200 exchanges has", "of the newest 200 exchanges have")
        yield (
            f"vLLM at {url}: fails when it is asked for token ids and log-probabilities, so users "
            f"are served without; {of} none and cannot be learned from."
        )


def _control(loops: Mapping[str, Loop]) -> Iterator[str]:
    failing = {name: loop for name, loop in loops.items() if loop.failures}
    if not failing:
        yield "Control: every loop works."
    for name, loop in failing.items():
        times = counted(loop.failures, "time")
        yield f"Control: the loop `{name}` failed {times} in a row: {loop.error}"


def _lease(status: Status) -> Iterator[str]:
    if not status.acts:
        who = status.acts_instead or "nobody yet"
        yield f"Control: this one waits; {who} steers canaries and adapters."


def _bus(bus: Bus | None, now: float) -> Iterator[str]:
    if bus is None:
        yield "Bus: not known, because ingest has not looked at it yet."
    elif bus.error:
        yield f"Bus: could not be reached {shown_age(now - bus.at)}: {bus.error}"
    else:
        waiting = counted(bus.lag or 0, "record")
        yield f"Bus: {waiting} waiting to be stored, {shown_age(now - bus.at)}."


def _told(feedback: Mapping[str, int], signals: Mapping[str, int]) -> Iterator[str]:
    if feedback:
        scores, outcomes = (feedback.get(f"stored_{kind}", 0) for kind in ("feedback", "outcome"))
        joined = feedback.get("joined", 0)
        yield (
            f"Feedback: {counted(scores, 'score')} and {counted(outcomes, 'outcome')}; {joined:,} "
            "of them are joined to exchanges."
        )
    if signals:
        yield f"Signals: {_tally(signals)}."


def _dead_letters(number: int) -> Iterator[str]:
    if number:
        yield f"Dead letters: {counted(number, 'record')} could not be stored; see the runbook."


def _sampling(trouble: Trouble | None, now: float) -> Iterator[str]:
    if trouble is None:
        return
    until = "" if trouble.until is None else f", until {shown_time(trouble.until, now)}"
    yield f"Sampling: waits since {shown_time(trouble.since, now)}{until}: {trouble.why}"


def _pile_up(pile: PileUp | None) -> Iterator[str]:
    if pile is not None:
        yield f"Selection: {pile.why}."
        yield f"  What to do: {pile.to_do}."


def _retention(retention: Retention | None, now: float) -> Iterator[str]:
    if retention is None:
        return
    used, limit = _megabytes(retention.used_bytes), retention.max_bytes
    free = f", and {_megabytes(retention.free_bytes)} free" if retention.free_bytes else ""
    of = f" of {_megabytes(limit)}" if limit else ""
    oldest = retention.oldest_at
    age = "" if oldest is None else f" The oldest exchange was stored {shown_age(now - oldest)}."
    yield f"Store: {used}{of} used{free}, {shown_age(now - retention.at)}.{age}"


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.0f} MB"


def _tally(counts: Mapping[str, int]) -> str:
    words = [f"{number:,} {name}" for name, number in counts.items()]
    return ", ".join(words) or "none"

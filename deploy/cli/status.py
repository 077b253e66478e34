"""`sidecar status` in sentences: what serves, what is on canary, and every condition. Pure.

It reads the JSON of `GET /admin/v1/status` as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deploy.admin.text import killed_words, progress_words, resumed_words
from deploy.records import comes_next, nobody_has
from deploy.text import shown_age, shown_time
from learner.resume import was_stopped
from sidecar.records import BASE
from sidecar.visible import counted

Json = Mapping[str, Any]  # Any: JSON of the admin API
DOLLARS = "US dollars"


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
        return [
            *_serving(found),
            *_other_lines(found["lines"], found["project"]),
            *([found["best"]] if found["best"] else []),
            *_canary(found["canary"], now),
            *([f"  {found['pace']}"] if found["pace"] else []),
            *_queued(found["queued"], now),
            *_learner(found, now, schedule, times),
            *_engine(found["engine"]),
            f"Adapters: {_tally(found['adapters'])}.",
            f"Recorded: {counted(found['exchanges'], 'exchange')}. Groups: "
            f"{_tally(found['groups'])}.",
            *_feedback(found["feedback"], found["signals"]),
            *_budgets(found["budgets"]),
            *_gate_judge(found["gate_judge"]),
            *_noise(found["judge_noise"]),
            *_retention(found["retention"], now),
            *([f"Token check: {found['token_check']}"] if found["token_check"] != "on" else []),
            *_conditions(found["conditions"], now),
        ]
    except (KeyError, TypeError, AttributeError):
        return None


def _serving(found: Json) -> Iterator[str]:
    routing = found["routing"] or {}
    champion = str(routing.get("champion", found["champion"]))
    canary, canary_bp = routing.get("canary"), routing.get("canary_weight_bp", 0)
    of = f"Model {found['model']}"
    if found["project"] is not None:
        of += f", project {found['project']}"
    replicas = found["engine"]["replicas"].values()
    who = name_of(champion)
    if nobody_has(champion, (None if one["away"] else one["loaded"] for one in replicas)):
        yield f"No vLLM has loaded the champion {champion}: the base model answers in its place."
        who = "the base model"
    if canary is not None and canary_bp:
        yield (
            f"{of}: {who} answers {percent(10_000 - canary_bp)} of the sessions, the canary "
            f"{canary} {percent(canary_bp)}."
        )
    else:
        yield f"{of}: {who} answers every session."
    if found["previous"] != champion:
        yield f"A rollback goes to {name_of(found['previous'])}."


def _other_lines(lines: list[Json], project: str | None) -> Iterator[str]:
    """Say of each line of adapters but that of `project` what answers it."""
    for one in lines:
        if one["project"] == project:
            continue
        whose = "All other projects" if one["project"] is None else f"Project {one['project']}"
        text = f"{whose}: {name_of(one['champion'])}"
        if one["canary"] is not None:
            text += f", and the canary {one['canary']} for {percent(one['canary_weight_bp'])}"
        command = f" (`sidecar status --project {one['project']}`)"
        yield f"{text}{'' if one['project'] is None else command}."


def _queued(queued: Json | None, now: float) -> Iterator[str]:
    if queued is not None:
        since = shown_time(queued["step_started_at"], now)
        yield f"Queue: {queued['candidate']} waits since {since} (canary {queued['canary_id']})."


def _canary(canary: Json | None, now: float) -> Iterator[str]:
    if canary is None:
        yield "Canary: none."
        return
    since = shown_time(canary["step_started_at"], now)
    steps, next_at = canary["steps"], canary["next_step_earliest_at"]
    doing = f"is {canary['state']}"
    if canary["state"] == "ramping":
        share = f"{percent(canary['weight_bp'])} of the sessions"
        doing = f"has {share} (step {canary['step'] + 1} of {len(steps)})"
    yield (
        f"Canary {canary['canary_id']}: {canary['candidate']} {doing} since {since}, against "
        f"{name_of(canary['champion'])}."
    )
    if canary["reason"]:
        yield f"  Reason: {canary['reason']}"
    if next_at is not None and next_at > now:
        what = comes_next(canary["state"], canary["step"], steps).capitalize()
        yield f"  {what}: {shown_age(now - next_at)} at the earliest."


def _learner(found: Json, now: float, schedule: str, times: str) -> Iterator[str]:
    learner = found["learner"]
    run, told, next_at = learner["last_run"], learner["schedule"], learner["next_run_at"]
    of_line = f" --project {found['project']}" if found["project"] else ""
    by_hand = schedule == "manual"
    if learner["paused"]:
        yield "Learner: paused."
    elif learner["run_requested"]:
        yield "Learner: a run is requested and starts next."
    elif by_hand:
        asks = f"`sidecar learner run{of_line}` asks"
        yield f"Learner: runs when it is asked to (learner.schedule); {asks}."
    else:
        yield "Learner: follows its schedule."
    if next_at is not None:
        yield f"  Next scheduled time: {shown_time(next_at, now)}."
    if told is not None and not (
        told["kind"] in ("start", "running")
        or (told["kind"] == "paused" and learner["paused"])
        or (told["kind"] == "not_due" and by_hand)
    ):
        yield f"  No run now: {told['why']}."
        if told["again_at"] is not None:
            yield f"  It is tried again {shown_time(told['again_at'], now)}."
    if times:
        yield f"  learner.cron runs next {times}."
    if run is None:
        yield "  It has not run yet."
    else:
        yield from _run(run, now)


def _run(run: Json, now: float) -> Iterator[str]:
    """Say what the newest run did, or where it is."""
    made = f" and made {run['adapter']}" if run["adapter"] else ""
    why = f": {run['reason']}" if run["reason"] else ""
    goes_on = run["ended_at"] is None
    word = run["status"]
    if goes_on:
        word = "is interrupted, began" if run["reason"] else "runs since"
    when = shown_time(run["started_at"] if goes_on else run["ended_at"], now)
    yield f"  Last run {run['run_id']}: {word} {when}{made}{why}."
    if resumed := resumed_words(run["deaths"]):
        how = "stopped" if was_stopped(run["deaths"]) else "killed"
        yield f"  It was {how}, and resumed {resumed}."
    if killed := killed_words(run, now):
        yield f"  It was KILLED: {killed}."
    if goes_on and (where := progress_words(run["progress"])):
        at = (run["progress"] or {}).get("at")
        seen = f" ({shown_age(now - at)})" if isinstance(at, int | float) else ""
        yield f"  It {'was' if killed or run['reason'] else 'is'} {where}{seen}."


def _engine(engine: Json) -> Iterator[str]:
    for url, replica in engine["replicas"].items():
        if replica["away"] is None:
            loaded = ", ".join(replica["loaded"]) or "no adapter"
            yield f"vLLM at {url}: answers; it has loaded {loaded}."


def _feedback(feedback: Mapping[str, int], signals: Mapping[str, int]) -> Iterator[str]:
    if feedback:
        scores, outcomes = (feedback.get(f"stored_{kind}", 0) for kind in ("feedback", "outcome"))
        joined = feedback.get("joined", 0)
        yield (
            f"Feedback: {counted(scores, 'score')} and {counted(outcomes, 'outcome')}; {joined:,} "
            "of them are joined to exchanges."
        )
    if signals:
        yield f"Signals: {_tally(signals)}."


def _budgets(budgets: list[Json]) -> Iterator[str]:
    """Yield what is used of the budgets that are set; nothing where none is."""
    shown = [
        f"{_used(one)} {'today' if one['period'] == 'day' else 'this hour'} ({one['setting']})"
        for one in budgets
    ]
    if shown:
        yield f"Budgets (UTC): {'; '.join(shown)}."


def _used(one: Json) -> str:
    used, limit = one["used"], one["limit"]
    if one["what"] != DOLLARS:
        return f"{used:,.0f} of {limit:,.0f} {one['what']}"
    shown = "under $0.01" if 0 < used < 0.01 else f"${used:,.2f}"
    return f"{shown} of {f'${limit:,.2f}' if limit >= 0.01 else f'${limit:g}'} for judges"


def _gate_judge(judge: Json | None) -> Iterator[str]:
    if judge is not None and judge["model"]:
        rubric = "a rubric of its own" if judge["own_rubric"] else "judge.rubric"
        passes = counted(judge["passes"], "pass", "passes")
        yield f"Gate: judged by {judge['model']}, {passes}, by {rubric}."


def _noise(noise: Json | None) -> Iterator[str]:
    if noise is not None and noise["sd"] is not None:
        of, passes = counted(noise["groups"], "group"), counted(noise["passes"], "pass", "passes")
        yield f"Noise of a score: sd {noise['sd']:.3f}, from the {passes} over {of}."


def _retention(retention: Json | None, now: float) -> Iterator[str]:
    if retention is None:
        return
    limit, free, oldest = (retention[key] for key in ("max_bytes", "free_bytes", "oldest_at"))
    used = (
        f"{_megabytes(retention['used_bytes'])}{f' of {_megabytes(limit)}' if limit else ''} used"
    )
    left = f", and {_megabytes(free)} free" if free else ""
    age = "" if oldest is None else f" The oldest exchange was stored {shown_age(now - oldest)}."
    yield f"Store: {used}{left}, {shown_age(now - retention['at'])}.{age}"


def _conditions(conditions: list[Json], now: float) -> Iterator[str]:
    """Yield a line for each condition and one for what to do: what works first."""
    needy = [one for one in conditions if one["state"] != "ok"]
    for one in conditions:
        if one["state"] == "ok" and one["kind"] not in ("canary", "schedule"):
            yield f"{sentence(one['message'])}."
    if needy:
        yield "Needs you:" if any(one["state"] == "act" for one in needy) else "To know:"
    for one in needy:
        since = "" if one["since"] is None else f", since {shown_time(one['since'], now)}"
        until = one["until"]
        end = "" if until is None or until <= now else f"; again {shown_time(until, now)}"
        yield f"  {sentence(one['message'])}{since}{end}."
        if one["to_do"]:
            yield f"    {sentence(one['to_do'])}."


def sentence(text: str) -> str:
    """The text with a capital at its start, unless it begins with a name such as `vLLM`."""
    return text if text.startswith("vLLM") else text[:1].upper() + text[1:]


def name_of(adapter: str) -> str:
    return "the base model" if adapter == BASE else adapter


def percent(basis_points: int) -> str:
    return f"{basis_points / 100:g}%"


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.0f} MB"


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items()) or "none"

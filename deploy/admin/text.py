"""Replies of the admin API as text: what `Accept: text/plain` gives. Pure.

Each route has the JSON that it answers written as sentences or as a table; a route without a form
of its own shows its fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from deploy.evidence.progress import Estimate, difference_words
from deploy.records import LEARNER_AWAY_S, comes_next, nobody_has, version_of
from deploy.text import (
    WHOLE,
    capital,
    iso,
    paused_words,
    percent,
    record_lines,
    shown_age,
    shown_length,
    shown_time,
    table_lines,
)
from ingest.judge_prompt import without_media
from ingest.verifiers.records import check_words
from learner import resume
from learner.progress import watch
from sidecar.lines import learner_of, line_name
from sidecar.records import BASE
from sidecar.replies.parts import answer_text
from sidecar.visible import counted

Json = Mapping[str, Any]

_CANARY_ID = re.compile(r"[0-9a-f]{32}")


def _adapter(one: Json, now: float) -> tuple[str, ...]:
    return (
        f"v{one['version']}",
        str(one["state"]),
        shown_age(now - one["created_at"]),
        version_of(one["parent"]),
        ", ".join(one["aliases"]) or "-",
        {True: "yes", False: "no", None: "-"}[one["loaded"]],
        "; ".join(_marks(one)) or "-",
    )


def _marks(adapter: Json) -> list[str]:
    found = [str(adapter["reason"])] if adapter["reason"] else []
    if adapter["banned"]:
        same = adapter["banned"] == adapter["reason"]
        found.append("banned" if same else f"banned: {adapter['banned']}")
    if adapter["removed_at"] is not None:
        found.append("its folder is removed")
    if adapter["forgotten_at"] is not None:
        found.append("content that it learned from is forgotten")
    return found


def _change(one: Json, _now: float) -> tuple[str, ...]:
    return (
        str(one["seq"]),
        (iso(one["at"]) or "-")[:16].replace("T", " "),
        str(one["actor"]),
        str(one["action"]),
        _subject(str(one["subject"]), one.get("project")),
        str(one["reason"] or "-"),
    )


def _run(one: Json, now: float) -> tuple[str, ...]:
    return (
        str(one["run_id"]),
        str(one["status"]),
        shown_age(now - one["started_at"]),
        version_of(one["parent"]),
        version_of(one["adapter"] or "-"),
        str(one["counts"].get("used", "-")),
        str(one["reason"] or "-"),
    )


def _subject(subject: str, project: str | None) -> str:
    """The first eight characters of a canary's id, the version of an adapter, else all of it; and
    whose line it is, because each line has a v1."""
    short = subject[:8] if _CANARY_ID.fullmatch(subject) else version_of(subject)
    if project is None:
        return short
    line = line_name("", project)  # how the name of each model's line of the project ends
    return short if short == learner_of(line) else f"{short.removesuffix(line)} of {project}"


# Groups: a table of many, and one with what was asked and answered.

WHY = 90
"""Characters of the reason in a line of the table."""


def group_lines(group: Json, now: float) -> Iterator[str]:
    """Yield one group: what is known of it, what was asked, and each answer with its scores."""
    request = group["request"]
    yield f"Group {group['group_id']}: {_status(group)}"
    yield from _facts(group, now)
    yield ""
    if request is None:
        yield "Asked: not known, since its exchange is not stored any more"
    else:
        yield "Asked:"
        messages = request.get("messages")
        for message in messages if isinstance(messages, list) else [request]:
            yield from _message(message)
    for answer in group["answers"]:
        yield ""
        yield from _answer(answer)


def _group(group: Json, now: float) -> tuple[str, ...]:
    why = " ".join(_why(group).split())
    return (
        str(group["group_id"]),
        shown_age(now - group["created_at"]),
        str(group["status"]),
        str(group["judge_model"] or "-"),
        str(group["adapter"]),
        str(group["project"] or "-"),
        (why if len(why) <= WHY else f"{why[: WHY - 3]}...") or "-",
    )


def _task_group(group: Json, now: float) -> tuple[str, ...]:
    name, made, status, *rest = _group(group, now)
    return (name, made, status, str(group["key_kind"]), *rest)


def task_group_lines(group: Json, now: float) -> Iterator[str]:
    """Yield a group of whole sessions, and each session with its reward."""
    yield f"Task group {group['group_id']}: {_status(group)}"
    yield f"  drawn {shown_time(group['created_at'], now)}, by {group['key_kind']}"
    by = f" by {group['judge_model']}" if group["judge_model"] else " by outcomes alone"
    if group["scored_at"] is not None:
        yield f"  scored {shown_time(group['scored_at'], now)}{by}"
    yield f"  answered by {_name_of(group['adapter'])}, project {group['project']}"
    for one in group["members"]:
        reward = "no reward yet" if one["reward"] is None else f"reward {one['reward']:.3f}"
        turns = counted(len(one["exchange_ids"] or ()), "turn")
        yield f"  [{one['place']}] {one['session_id']}: {reward}, {turns}"


def _why(group: Json) -> str:
    return ": ".join(str(group[name]) for name in ("reason", "detail") if group[name])


def _status(group: Json) -> str:
    why = _why(group)
    return f"{group['status']}: {why}" if why else str(group["status"])


def _facts(group: Json, now: float) -> Iterator[str]:
    yield f"  made {shown_time(group['created_at'], now)}"
    if group["scored_at"] is not None:
        rubric = f", rubric {group['rubric_hash'][:12]}" if group["rubric_hash"] else ""
        by = group["judge_model"] or "an unknown judge"
        yield f"  scored {shown_time(group['scored_at'], now)} by {by}{rubric}"
    if group["disagreement"] is not None:
        flipped = group["flipped_pairs"]
        pairs = "" if flipped is None else f"; they put {flipped:.0%} of the pairs in other order"
        yield f"  the judge's passes differ by {group['disagreement']:.3f}{pairs}"
    yield f"  exchange {group['exchange_id']}, session {group['session_id']}"
    yield f"  adapter {group['adapter']}, project {group['project'] or '-'}"
    if group["chosen_because"]:
        chance = group["propensity"]
        drawn = "" if chance is None else f", with probability {chance:.3g}"
        yield f"  chosen because: {group['chosen_because'].get('reason', '-')}{drawn}"
    if group["judge_attempts"]:
        yield f"  failed attempts to judge it: {group['judge_attempts']}"
    if group["learn_attempts"]:
        yield f"  failed runs that had it: {group['learn_attempts']}"
    if group["run_id"]:
        yield f"  run {group['run_id']}"
    if group["reward_rule"]:
        yield f"  reward rule: {json.dumps(group['reward_rule'])}"


def _answer(answer: Json) -> Iterator[str]:
    scored = [
        f"{name} {answer[key]:.3f}"
        for name, key in (
            ("score", "score"),
            ("reward", "reward"),
            ("by verifiers", "independent_reward"),
        )
        if answer[key] is not None
    ]
    yield f"--- answer {answer['index']} ({answer['origin']}): {', '.join(scored) or 'no score'}"
    yield from _content(answer["message"])
    if answer["explanation"]:
        first, *more = answer["explanation"].splitlines()
        yield f"  judge: {first}"
        yield from (f"         {line}" for line in more)
    for check in answer["checks"]:
        yield f"  check {check_words(check)}"
    yield f"  {_length(answer)}"


def _length(answer: Json) -> str:
    tokens = counted(answer["tokens"], "token")
    ended = answer["finish_reason"]
    left = answer["untrainable_reason"]
    return (
        tokens
        + (f", ended by {ended}" if ended else "")
        + f", temperature {answer['temperature']:g}"
        + (f"; not learned from: {left}" if left else "")
    )


def _message(message: Any) -> Iterator[str]:
    known = message if isinstance(message, Mapping) else {"content": message}
    yield f"--- {known.get('role', 'request')}"
    yield from _content(known)


def _content(message: Json) -> Iterator[str]:
    """Yield the lines of a message: its words, media as a placeholder, and its tool calls."""
    content = without_media(message.get("content"))
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and "text" in part else part
        if text is None:
            continue
        yield from (text if isinstance(text, str) else json.dumps(text)).splitlines()
    yield from answer_text({**message, "content": None}).splitlines()
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        asked = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(asked, Mapping):
            yield f"calls {asked.get('name')}({asked.get('arguments')})"
        else:
            yield f"calls {json.dumps(call)}"


# One run: where it is, and each of its steps.

LONG = ("settings", "metrics", "progress", "held", "deaths", "steps", "damaged")
"""Fields of a run that are left out in text, or said in words."""
SILENT_S = 30.0
"""A run without a heartbeat for so long was killed (`learner.runs.runs.LEASE_S`)."""
WIDTH = 10
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "reward": ("reward_mean", "{:.3f}".format),
    "spread": ("reward_spread", "{:.3f}".format),
    "groups": ("groups", "{:,}".format),
    "answers": ("answers", "{:,}".format),
    "masked": ("masked_answers", "{:,}".format),
    "tokens/a": ("answer_tokens", "{:.1f}".format),
    "loss": ("loss", "{:+.5f}".format),
    "kl": ("approx_kl", "{:.5f}".format),
    "kl base": ("kl_base", "{:.5f}".format),
    "drift": ("drift", "{:.4f}".format),
    "entropy": ("entropy", "{:.3f}".format),
    "clipped": ("clip_share", "{:.2%}".format),
    "grad": ("grad_norm", "{:.3g}".format),
    "update": ("update_norm", "{:.3g}".format),
    "seconds": ("seconds", "{:.1f}".format),
    "tokens/s": ("tokens_per_s", "{:,.0f}".format),
    "memory": ("peak_memory_bytes", lambda size: f"{size / 1e6:,.0f} MB"),
}
"""Heading -> the figure below it, and how it is written."""
REWARD_NOTE = "reward: of each step's own groups, sampled before the run; it is no learning curve"


def run_lines(run: Json, now: float) -> Iterator[str]:
    """Yield one run: where it is, what it took and left out, and each of its steps."""
    yield from record_lines(short(run, now), now)
    yield from step_lines([one["figures"] for one in run["steps"]])


def short(run: Json, now: float) -> dict[str, Any]:
    """Return the fields of a run that are shown as they are, and the others in words."""
    kept = {key: value for key, value in run.items() if key not in LONG}
    killed = killed_words(run, now)
    finished = run.get("status") == "finished"  # its last phase would look like its present one
    words = {
        "progress": "" if finished else progress_words(run.get("progress")),
        "resumed": resumed_words(run.get("deaths")),
        "killed": killed,
    }
    return {**kept, **{key: said for key, said in words.items() if said}}


def progress_words(found: object) -> str:
    """Say where a run is; "" when nothing is known of it. found: JSON of the admin API. Pure."""
    if not isinstance(found, dict):
        return ""
    try:
        return watch.words(
            watch.Progress(**{key: value for key, value in found.items() if key != "at"})
        )
    except (TypeError, ValueError):  # damaged
        return str(found.get("phase", ""))


def resumed_words(deaths: object) -> str:
    """Say where a run was resumed; "" when it never was. deaths: JSON of the admin API. Pure."""
    return resume.resumed_words(deaths).removeprefix("resumed ")


def killed_words(run: Json, now: float) -> str:
    """Say that a run which has not ended stands still; "" when it does not. now: Unix seconds.

    One that left its work to the next start says so itself, by its reason.
    """
    beat = run.get("heartbeat_at")
    if run.get("reason"):
        return ""
    if run.get("status") != "running" or not isinstance(beat, int | float) or now - beat < SILENT_S:
        return ""
    return f"no sign of it for {shown_length(now - beat)}; the next start goes on with it"


def step_lines(steps: Sequence[Json]) -> Iterator[str]:
    """Yield a table of a run's steps. Pure."""
    if not steps:
        yield "no step is done"
        return
    shown = [name for name, (key, _) in COLUMNS.items() if any(key in one for one in steps)]
    yield f"{'step':>5}" + "".join(f"{name:>{WIDTH}}" for name in shown)
    for one in steps:
        cells = (_cell(one.get(COLUMNS[name][0]), COLUMNS[name][1]) for name in shown)
        yield f"{one.get('step', '?'):>5}" + "".join(f"{text:>{WIDTH}}" for text in cells)
    if len(steps) > 1:
        yield REWARD_NOTE
    for out, alike in groupby(steps, lambda one: left_out_words(one.get("left_out"))):
        numbers = [one.get("step", "?") for one in alike]
        more = f"s {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f" {numbers[0]}"
        if out:
            yield f"step{more} left out: {out}"


def left_out_words(found: object) -> str:
    """Say what a step left out, by reason; "" when nothing. found: JSON of the admin API. Pure."""
    if not isinstance(found, dict):  # of an older version, or damaged
        return ""
    words = []
    for key, number in found.items():
        what, _, reason = key.partition(".")
        if what in ("answers", "groups") and isinstance(number, int):
            words.append(f"{counted(number, what.removesuffix('s'))} {reason}")
    return ", ".join(words)


def _cell(value: object, form: Callable[[Any], str]) -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return form(value) if known else "-"


# The learner, and what holds it.


def away_words(learner: Json, now: float) -> str:
    """Say that no `sidecar learn` will see the request to run; "" when one was heard of."""
    told, run = learner.get("schedule"), learner.get("last_run")
    if run is not None and run["ended_at"] is None and now - run["heartbeat_at"] < SILENT_S:
        return ""
    if told is not None and now - told["at"] <= LEARNER_AWAY_S:
        return ""
    heard = "yet" if told is None else f"for {shown_length(now - told['at'])}"
    return (
        f"no `sidecar learn` has been heard of {heard}: the run begins when one is started "
        "(`sidecar up` does that too); `sidecar learn --once` trains now"
    )


KINDS = ("refusal", "clarifying", "invalid_call", "repetition", "empty", "cut")


def watch_lines(found: Json) -> Iterator[str]:
    """Yield what the reward watch says of the champion, with the figures of each adapter."""
    if found["held"]:
        yield f"The reward watch holds the learner; {found['champion']} is champion."
    else:
        yield f"The reward watch does not hold the learner; {found['champion']} is champion."
    for one in found["findings"]:
        waived = " (waived)" if one["check"] in found["waived"] else ""
        yield f"  {one['check']}{waived}: {one['text']}"
    names = ("answers", *KINDS, "tokens", "groups", "length corr", "signals", "feedback")
    rows = [[*names, "adapter"]]
    for one in found["adapters"]:
        shares = [_share(one["shares"].get(kind)) for kind in KINDS]
        numbers = [
            f"{one['answers']:,}",
            *shares,
            _number(one["mean_tokens"], ".0f"),
            f"{one['groups']:,}",
            _number(one["length_correlation"], "+.2f"),
            _share(one["signals_share"]),
            _number(one["feedback_mean"], "+.2f"),
        ]
        rows.append([*numbers, one["adapter"]])
    widths = [max(len(row[k]) for row in rows) for k in range(len(names))]
    for *figures, adapter in rows:
        shown = map(str.rjust, figures, widths)
        yield "  ".join(["", *shown, adapter])
    for check, why in found["unknown"].items():
        yield f"Not checked: {check}: {why}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# Whether the model got better.


def progress_lines(found: Json, now: float, width: int = WHOLE) -> Iterator[str]:
    """Yield whether it did, the gain of each promoted version, the canary's, and the cost."""
    yield f"Better? {capital(found['sentence'])}."
    if found["points"]:
        yield f"Gain of the score (0..1) over {_name_of(found['origin'])}:"
        heads = ("version", "promoted", "gain", "95% interval", "comparisons", "links")
        yield from table_lines(heads, [_point(one, now) for one in found["points"]], width)
    for kind in found["kinds"]:
        of = kind["difference"]
        figures = f"{of['mean']:+.3f} ({of['low']:+.3f} to {of['high']:+.3f})"
        prompts = counted(of["groups"], "comparison")
        yield f"  {version_of(found['champion'])} on {kind['name']}: {figures} by {prompts}"
    if running := found["running"]:
        yield f"Canary: {running_words(running)}."
    if found["pace"]:
        yield f"  {found['pace']}"
    if found["cost"]:
        yield f"Cost so far: {cost_words(found['cost'])}."
    if found["cost_of_a_point"]:
        yield f"A point of gain (0.01) has cost {found['cost_of_a_point']}."


def _point(one: Json, now: float) -> tuple[str, ...]:
    gain, when = one["gain"], shown_age(now - one["promoted_at"])
    if gain is None:
        return version_of(one["adapter"]), when, "not known", "-", "-", "-"
    between = f"{gain['low']:+.3f} to {gain['high']:+.3f}"
    figures = (f"{gain['mean']:+.3f}", between, f"{gain['groups']:,}", str(one["links"]))
    return version_of(one["adapter"]), when, *figures


def running_words(running: Json) -> str:
    """Say what the groups of a canary say so far, and how much proof it lacks."""
    found, told = running["difference"], version_of(running["adapter"])
    against = _name_of(version_of(running["champion"]))
    if found is None:
        said = f"{told} was not compared with {against} yet"
    else:
        said = f"{told} {difference_words(Estimate(**found), against)}"
    if running["evidence"] is not None:
        # Rounded down: what is short of a limit must not look as if it had reached it.
        proven = int(running["evidence"] * 10) / 10
        said += f"; proven {proven:.1f} of {running['wanted']:g}"
    return said


def cost_words(cost: Json) -> str:
    share = cost["candidate_share"]
    part = "" if share is None else f" ({share:.0%} of the {cost['user_tokens']:,} that users got)"
    return (
        f"${cost['judge_usd']:,.2f} and {cost['judge_tokens']:,} tokens of judging, "
        f"{cost['candidate_tokens']:,} tokens of candidates{part}, "
        f"{cost['run_minutes']:,.0f} minutes of training"
    )


# The status in sentences.

DOLLARS = "US dollars"


def status_lines(found: Json, now: float) -> Iterator[str]:
    """Yield what serves, what is on canary, and every condition, in sentences."""
    yield from _serving(found)
    yield from _other_lines(found["lines"], found["project"])
    if found["better"]:
        yield f"Better? {capital(found['better'])}."
    if found["best"]:
        yield str(found["best"])
    yield from _on_canary(found["canary"], now)
    if found["pace"]:
        yield f"  {found['pace']}"
    if (queued := found["queued"]) is not None:
        since = shown_time(queued["step_started_at"], now)
        yield f"Queue: {queued['candidate']} waits since {since} (canary {queued['canary_id']})."
    yield from _learner(found, now)
    yield from _engine(found["engine"])
    yield f"Adapters: {_tally(found['adapters'])}."
    if found["exchanges"] is not None:
        exchanges, groups = counted(found["exchanges"], "exchange"), _tally(found["groups"])
        yield f"Recorded: {exchanges}. Groups: {groups}."
    yield from _feedback(found["feedback"], found["signals"])
    yield from _budgets(found["budgets"])
    yield from _rehearsals(found["rehearsals"], now)
    yield from _gate_judge(found["gate_judge"])
    yield from _noise(found["judge_noise"])
    yield from _retention(found["retention"], now)
    if found["token_check"] not in ("on", ""):
        yield f"Token check: {found['token_check']}"
    yield from _conditions(found["conditions"], now)


def _serving(found: Json) -> Iterator[str]:
    routing = found["routing"] or {}
    champion = str(routing.get("champion", found["champion"]))
    canary, canary_bp = routing.get("canary"), routing.get("canary_weight_bp", 0)
    of = f"Model {found['model']}"
    if found["project"] is not None:
        of += f", project {found['project']}"
    replicas = found["engine"]["replicas"].values()
    who = _name_of(champion)
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
    if (users := found["users"]) and users["requests"]:
        yield f"Users: {users_words(users)}."
    if found["previous"] != champion:
        yield f"A rollback goes to {_name_of(found['previous'])}."


def users_words(users: Json) -> str:
    """Say how many of the newest requests failed, and how long the first byte took."""
    said = f"{users['failed']:,} of the newest {counted(users['requests'], 'request')} failed"
    if users["first_byte_s"] is not None:
        slow = users["first_byte_slow_s"]
        said += f"; first byte after {users['first_byte_s']:.2f} s, of one in ten {slow:.2f} s"
        said += " or more"
    return said


def _other_lines(lines: list[Json], project: str | None) -> Iterator[str]:
    """Say of each line of adapters but that of `project` what answers it."""
    for one in lines:
        if one["project"] == project:
            continue
        whose = "All other projects" if one["project"] is None else f"Project {one['project']}"
        text = f"{whose}: {_name_of(one['champion'])}"
        if one["canary"] is not None:
            text += f", and the canary {one['canary']} for {percent(one['canary_weight_bp'])}"
        command = f" (`sidecar status --project {one['project']}`)"
        yield f"{text}{'' if one['project'] is None else command}."


def _on_canary(canary: Json | None, now: float) -> Iterator[str]:
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
        f"{_name_of(canary['champion'])}."
    )
    if canary["reason"]:
        yield f"  Reason: {canary['reason']}"
    if next_at is not None and next_at > now:
        what = comes_next(canary["state"], canary["step"], steps).capitalize()
        yield f"  {what}: {shown_age(now - next_at)} at the earliest."


def _learner(found: Json, now: float) -> Iterator[str]:
    learner = found["learner"]
    run, told, next_at = learner["last_run"], learner["schedule"], learner["next_run_at"]
    of_line = f" --project {found['project']}" if found["project"] else ""
    by_hand = found["by_hand"]
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
    if found["cron_times"]:
        yield f"  learner.cron runs next {found['cron_times']}."
    if run is None:
        yield "  It has not run yet."
    else:
        yield from _newest_run(run, now)


def _newest_run(run: Json, now: float) -> Iterator[str]:
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
        how = "stopped" if resume.was_stopped(run["deaths"]) else "killed"
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
    shown = [f"{_used(one)} today ({one['setting']})" for one in budgets]
    if shown:
        yield f"Budgets (UTC): {'; '.join(shown)}."


def _rehearsals(found: Json | None, now: float) -> Iterator[str]:
    if found is None:
        return
    attempts, last = counted(found["attempts_today"], "attempt"), found["last"]
    said = f"Rehearsals: {attempts} today (UTC), {found['tokens_left']:,} tokens left"
    if last is not None:
        good = last["results"].get("ended", 0)
        spread = "no outcome" if last["spread"] is None else f"outcomes {last['spread']:g} apart"
        said += f"; last task {last['task']}: {good} of {last['attempts']} count, {spread}, "
        said += f"begun {shown_time(last['at'], now)}"
    yield f"{said}."


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
            yield f"{capital(one['message'])}."
    if needy:
        yield "Needs you:" if any(one["state"] == "act" for one in needy) else "To know:"
    for one in needy:
        since = "" if one["since"] is None else f", since {shown_time(one['since'], now)}"
        until = one["until"]
        end = "" if until is None or until <= now else f"; again {shown_time(until, now)}"
        yield f"  {capital(one['message'])}{since}{end}."
        if one["to_do"]:
            yield f"    {capital(one['to_do'])}."


def _name_of(adapter: str) -> str:
    return "the base model" if adapter == BASE else adapter


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.0f} MB"


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items()) or "none"


# The forms of the routes.

Row = Callable[[Json, float], tuple[str, ...]]
TABLES: dict[str, tuple[str, Row]] = {
    "/adapters": ("version,state,made,from,aliases,loaded,why", _adapter),
    "/aliases": (
        "alias,adapter",
        lambda one, _now: (str(one["alias"]), str(one["adapter"] or "-")),
    ),
    "/audit": ("seq,at (UTC),by,what,of,why", _change),
    "/groups": ("group,made,status,judge,adapter,project,why", _group),
    "/task-groups": ("group,made,status,alike by,judge,adapter,project,why", _task_group),
    "/runs": ("run,status,began,from,made,groups,why", _run),
}
"""Path of a listing -> its heads, and the cells of an item at a time in Unix seconds."""
RECORDS: dict[str, Callable[[Json, float], Iterable[str]]] = {
    "/groups/{group_id}": group_lines,
    "/task-groups/{task_group_id}": task_group_lines,
    "/runs/{run_id}": run_lines,
    "/progress": progress_lines,
    "/status": status_lines,
    "/watch": lambda found, _now: watch_lines(found),
    # What the schedule said last was decided before the switch.
    "/learner/{action}": lambda found, now: record_lines(
        {key: value for key, value in found.items() if key != "schedule"}, now
    ),
}
"""Path of one record -> its lines."""


def reply_lines(path: str, found: Json, now: float, width: int = WHOLE) -> Iterable[str]:
    """Return a reply in lines. path: the route's template below `/admin/v1`. now: Unix seconds."""
    if path in TABLES:
        heads, row = TABLES[path]
        return table_lines(heads.split(","), [row(one, now) for one in found["items"]], width)
    return RECORDS.get(path, record_lines)(found, now)


def reply_notes(path: str, found: Json, now: float, asked: Mapping[str, str]) -> Iterator[str]:
    """Yield what a person has to know beside the reply. asked: parameters of path and query."""
    if (
        path == "/learner/{action}"
        and asked["action"] == "run"
        and (away := away_words(found, now))
    ):
        yield away
    if path == "/rollback" and found["learner_paused"]:
        yield paused_words(asked.get("project"))


def missing_notes(found: Json) -> Iterator[str]:
    """Yield the damaged rows that a reply leaves out, and that a listing does not show all."""
    yield from found.get("damaged", [])
    if found.get("next_cursor"):
        yield f"there are more than these {len(found['items'])}; --limit shows up to 200"

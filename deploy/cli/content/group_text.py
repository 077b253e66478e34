"""Groups as text for people: a table of many, and one with what was asked and answered. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.cli.listings.table import WHOLE, table_lines
from deploy.cli.times import shown_age, shown_time
from ingest.judge_prompt.media import without_media
from ingest.verifiers.records import check_words
from sidecar.plurals import counted
from sidecar.replies.parts import answer_text

WHY = 90
"""Characters of the reason in a line of the table."""
HEADS = ("group", "made", "status", "judge", "adapter", "project", "why")
Json = Mapping[str, Any]


def groups_table(groups: Sequence[Json], now: float, width: int = WHOLE) -> list[str]:
    """Return a table with one line a group, as the admin API lists them. now: Unix seconds."""
    return table_lines(HEADS, [_row(one, now) for one in groups], width)


def group_lines(group: Json, request: Json | None, now: float) -> Iterator[str]:
    """Yield one group: what is known of it, what was asked, and each answer with its scores.

    request: of its exchange; None where that is not stored any more.
    """
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


def _row(group: Json, now: float) -> tuple[str, ...]:
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

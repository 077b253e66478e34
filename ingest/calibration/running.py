"""Calibrate a judge: score groups whose order is known as the product does; show it.

A run of a group is what the product calls a judgement: some passes, every second one in the reverse
order of the one before. Each pass is asked for alone here, because the scores and the order of each
are needed. A rate limit is waited for; any other failure ends that run, is counted by its reason,
and the others go on.

Replies of a group's first run may be those that were kept (`ingest.judges.replies`). Its further
runs tell how far the judge agrees with itself, so the judge is always asked anew for them.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ingest.calibration.figures import Candidate, Interval, KnownGroup, Pass, Run, Summary
from ingest.errors import (
    CalibrationFileError,
    JudgeBusyError,
    JudgeRefusalError,
    JudgeReplyError,
    JudgeUnavailableError,
)
from ingest.judges.replies import NO_EXCHANGE
from ingest.privacy.texts import JudgeView, NotRedactedError
from ingest.ruler.blame import DEFECT
from ingest.ruler.group import NOT_REDACTED, RUBBISH, refusal_of
from ingest.ruler.judge import Judge, replies_kept_for
from ingest.ruler.ruler import SEED_BITS, JudgeCall, merge_identical, score_answers
from ingest.ruler.waiting import LONGEST_RETRY_AFTER_S
from sidecar.backoff import Backoff
from sidecar.visible import counted

LIMIT_WAITS = Backoff(first_s=1.0, last_s=60.0)
"""Waits of a call over a rate limit that does not say how long to wait; six of them take 63 s."""
LIMIT_TRIES = 7
GIVE_UP_AFTER = 10
"""Failed runs, with no good one, after which a judge is asked no more: a wrong key or address fails
on every group."""
GIVEN_UP = "given_up"
"""Reason of the runs that were not tried then."""

Sleep = Callable[[float], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the groups are judged."""

    passes: int
    repeats: int
    """How often each group is judged anew, in other orders."""
    concurrency: int
    """Runs at once."""
    seed: int
    """Draws the orders. They do not depend on judge and rubric, so that these are compared on the
    same ones."""


async def judge_groups(
    judge: Judge,
    groups: Sequence[KnownGroup],
    plan: Plan,
    *,
    rubric: str,
    view: JudgeView | None = None,
    sleep: Sleep = asyncio.sleep,
) -> list[Run]:
    """Judge every group `plan.repeats` times.

    rubric, view: as for `score_answers`. sleep: for tests.
    Returns: one run for each group and repeat, failed ones too.
    """
    ask = partial(_ask, judge, rubric=rubric, view=view, sleep=sleep)
    gate = asyncio.Semaphore(plan.concurrency)
    done: list[Run] = []

    async def one(group: KnownGroup, repeat: int) -> Run:
        async with gate:
            if len(done) >= GIVE_UP_AFTER and all(run.failure is not None for run in done):
                return Run(group=group, repeat=repeat, passes=(), failure=GIVEN_UP)
            done.append(await _judge(ask, group, plan, repeat))
            return done[-1]

    wanted = [one(group, repeat) for group in groups for repeat in range(plan.repeats)]
    return list(await asyncio.gather(*wanted))


Ask = Callable[..., Awaitable[dict[int, float]]]
"""`_ask` of one judge."""


async def _judge(ask: Ask, group: KnownGroup, plan: Plan, repeat: int) -> Run:
    calls: list[JudgeCall] = []
    passes: list[Pass] = []
    failure = None
    detail = ""
    rng = random.Random(f"{plan.seed}/{group.group_id}/{repeat}")
    try:
        distinct, place_of = merge_identical([one.message for one in group.candidates])
        order = list(range(len(distinct)))
        for number in range(plan.passes):
            if number % 2:
                order.reverse()
            else:
                rng.shuffle(order)
            seed = rng.getrandbits(SEED_BITS)
            with replies_kept_for(NO_EXCHANGE if repeat == 0 else None):
                scores = await ask(group, distinct, order, seed, calls.append)
            shown_at = {answer: position for position, answer in enumerate(order)}
            passes.append(
                Pass(
                    scores=tuple(scores[place] for place in place_of),
                    positions=tuple(shown_at[place] for place in place_of),
                )
            )
    except (JudgeUnavailableError, JudgeRefusalError) as error:
        failure, detail = refusal_of(error), str(error)
    except JudgeReplyError as error:
        failure = RUBBISH
        detail = f"{error}; it wrote: {error.reply}" if error.reply else str(error)
    except NotRedactedError as error:
        failure, detail = NOT_REDACTED, str(error)
    except Exception as error:  # noqa: BLE001 - one group, of whatever form, ends no run
        failure, detail = DEFECT, f"{type(error).__name__}: {error}"
    replies = [call.reply for call in calls]
    costs = [reply.cost_usd for reply in replies if reply.cost_usd is not None]
    return Run(
        group=group,
        repeat=repeat,
        passes=() if failure else tuple(passes),
        failure=failure,
        detail=detail,
        calls=len(calls),
        unusable=sum(not call.ok for call in calls),
        replayed=sum(reply.cached for reply in replies),
        tokens=sum((one.prompt_tokens or 0) + (one.completion_tokens or 0) for one in replies),
        cost_usd=sum(costs) if len(costs) == len(replies) else None,
        seconds=sum(reply.seconds for reply in replies),
    )


async def _ask(
    judge: Judge,
    group: KnownGroup,
    answers: Sequence[Mapping[str, Any]],
    order: Sequence[int],
    seed: int,
    on_call: Callable[[JudgeCall], None],
    *,
    rubric: str,
    view: JudgeView | None,
    sleep: Sleep,
) -> dict[int, float]:
    """Show the answers in this order; wait for rate limits.

    Returns: the score of each by its index in `answers`.
    """
    places = arranged(order, seed)
    for attempt in range(1, LIMIT_TRIES + 1):
        try:
            judged = await score_answers(
                judge,
                context=group.context,
                tools=group.tools,
                answers=[answers[place] for place in places],
                rubric=rubric,
                passes=1,
                seed=seed,
                on_call=on_call,
                subject=group.group_id,
                view=view,
            )
            break
        except JudgeBusyError as error:
            if attempt == LIMIT_TRIES:
                raise
            asked_s = min(error.retry_after_s, LONGEST_RETRY_AFTER_S)
        await sleep(max(asked_s, LIMIT_WAITS.wait_s(attempt)))
    return dict(zip(places, judged.scores, strict=True))


def arranged(order: Sequence[int], seed: int) -> list[int]:
    """Return which answer to put at each place, so that RULER's first pass shows them in `order`.

    seed: of `score_answers`, which shuffles what it is given by `random.Random(seed)` (see
        `JudgeCall.order_seed`).
    """
    drawn = list(range(len(order)))
    random.Random(seed).shuffle(drawn)
    places = [0] * len(order)
    for position, place in enumerate(drawn):
        places[place] = order[position]
    return places


# Read groups with known scores or preferences from JSON lines. Pure: takes the text.

KNOWN = frozenset({"id", "task", "messages", "tools", "candidates", "preferences"})
KNOWN_OF_CANDIDATE = frozenset({"message", "score", "kind"})


def read_groups(text: str, name: str) -> list[KnownGroup]:
    """Read all groups of a file.

    name: how the file is called in errors.
    Raises: CalibrationFileError.
    """
    groups: dict[str, KnownGroup] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            group = _group(_object(_json(line), "the line"), str(number))
            if group.group_id in groups:
                raise CalibrationFileError(f"id {_quote(group.group_id)} is there twice")
        except CalibrationFileError as error:
            raise CalibrationFileError(f"{name} line {number}: {error}") from None
        groups[group.group_id] = group
    if not groups:
        raise CalibrationFileError(f"{name}: holds no group; write one JSON object a line")
    return list(groups.values())


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CalibrationFileError(f"is not JSON ({error}); write one object a line") from None


def _group(value: Mapping[str, Any], number: str) -> KnownGroup:
    _refuse_unknown(value, KNOWN, "")
    candidates = tuple(
        _candidate(one, f"candidates[{index}]")
        for index, one in enumerate(_list(value, "candidates"))
    )
    if len(candidates) < 2:
        raise CalibrationFileError(
            f"candidates: {len(candidates)} of them; a judge compares 2 or more"
        )
    context = [_object(one, "messages") for one in _list(value, "messages")]
    if not context:
        raise CalibrationFileError("messages: is empty; give the prompt that all answers follow")
    scored = sum(one.score is not None for one in candidates)
    if "preferences" in value and scored:
        raise CalibrationFileError("preferences: are there beside scores; give one of the two")
    if "preferences" not in value and scored < len(candidates):
        raise CalibrationFileError(
            f"score: {scored} of {len(candidates)} candidates have one; give every candidate a "
            "score, or none of them and preferences"
        )
    preferences = _list(value, "preferences") if "preferences" in value else []
    return KnownGroup(
        group_id=_text(value.get("id", number), "id"),
        task=_text(value.get("task", ""), "task"),
        context=tuple(context),
        tools=tuple(_object(one, "tools") for one in _list(value, "tools", optional=True)),
        candidates=candidates,
        preferences=tuple(_preference(one, len(candidates)) for one in preferences),
    )


def _candidate(value: Any, field: str) -> Candidate:
    found = _object(value, field)
    _refuse_unknown(found, KNOWN_OF_CANDIDATE, f"{field}.")
    score = found.get("score")
    if score is not None and not _is_number(score):
        raise CalibrationFileError(f"{field}.score: {_quote(score)} is not a finite number")
    return Candidate(
        kind=_text(found.get("kind", ""), f"{field}.kind"),
        message=_object(found.get("message"), f"{field}.message"),
        score=None if score is None else float(score),
    )


def _preference(value: Any, count: int) -> tuple[int, int]:
    sound = (
        isinstance(value, list)
        and len(value) == 2
        and all(type(one) is int and 0 <= one < count for one in value)
        and value[0] != value[1]
    )
    if not sound:
        raise CalibrationFileError(
            f"preferences: {_quote(value)} is not [index of the better, index of the worse], each "
            f"from 0 to {count - 1}"
        )
    return value[0], value[1]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _refuse_unknown(value: Mapping[str, Any], known: frozenset[str], prefix: str) -> None:
    if unknown := sorted(set(value) - known):
        raise CalibrationFileError(
            f"{prefix}{unknown[0]}: no such field; known: {', '.join(sorted(known))}"
        )


def _list(value: Mapping[str, Any], field: str, *, optional: bool = False) -> list[Any]:
    found = value.get(field)
    if found is None and optional:
        return []
    if not isinstance(found, list):
        raise CalibrationFileError(f"{field}: {_quote(found)} is not a list")
    return found


def _object(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise CalibrationFileError(f"{field}: {_quote(value)} is not an object")
    return value


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise CalibrationFileError(f"{field}: {_quote(value)} is not a text")
    return value


def _quote(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Show summaries side by side, as text. Pure.

FEW = 5
"""Groups below which a bootstrap over groups says nothing: their number stands for the interval."""
FIGURES: Sequence[tuple[str, Callable[[Summary], str]]] = (
    ("runs with scores", lambda one: f"{one.scored} of {one.runs}"),
    ("rank agreement (tau-b)", lambda one: _interval(one.tau)),
    ("pairs right", lambda one: _interval(one.pairs_right, "{:.0%}")),
    ("first minus last position", lambda one: _interval(one.first_minus_last, "{:+.2f}")),
    ("pairs flipped by order", lambda one: _interval(one.flips, "{:.0%}")),
    ("agreement of repeats (tau-b)", lambda one: _interval(one.repeat_tau)),
    ("noise of a score (sd)", lambda one: _number(one.noise_sd, "{:.3f}")),
    ("unusable replies", lambda one: str(one.unusable_replies)),
    ("cost per group (USD)", lambda one: _number(one.usd_per_group, "{:.5f}")),
    ("tokens per group", lambda one: _number(one.tokens_per_group, "{:.0f}")),
    ("seconds per group", lambda one: _number(one.seconds_per_group, "{:.2f}")),
)


def table_lines(summaries: Sequence[Summary]) -> list[str]:
    """Return which column is which judge and rubric, the table, then what failed and why."""
    columns = [f"[{number}]" for number in range(1, len(summaries) + 1)]
    rows = [
        ["", *columns],
        *([name, *(cell(one) for one in summaries)] for name, cell in FIGURES),
        *_shares("by the fault of the worse answer", [one.by_kind for one in summaries]),
        *_shares("by task", [one.by_task for one in summaries]),
    ]
    widths = [max(len(row[k]) for row in rows if len(row) > 1) for k in range(len(columns) + 1)]
    named = list(zip(columns, summaries, strict=True))
    return [
        *(f"{column} {one.judge}, {one.rubric}" for column, one in named),
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        *(
            f"{column} {one.replayed} replies were paid for before and are not asked for again; "
            "cost, tokens and seconds are those of the other runs (--no-cache asks anew)"
            for column, one in named
            if one.replayed
        ),
        *(
            f"{column} {counted(failure.count, 'run')} failed: {failure.reason}"
            + (f": {failure.example}" if failure.example else "")
            for column, one in named
            for failure in one.failures
        ),
    ]


def _shares(heading: str, columns: Sequence[Mapping[str, Interval]]) -> list[list[str]]:
    """Return rows of `pairs right` under their heading; nothing without rows."""
    rows = [
        [f"  {name}", *(f"{one[name].value:.0%}" if name in one else "-" for one in columns)]
        for name in sorted({name for one in columns for name in one})
    ]
    return [[f"pairs right, {heading}"], *rows] if rows else []


def _interval(found: Interval | None, form: str = "{:.2f}") -> str:
    if found is None:
        return "-"
    value, low, high = (form.format(one) for one in (found.value, found.low, found.high))
    if found.groups < FEW:
        return f"{value} ({'1 group' if found.groups == 1 else f'{found.groups} groups'})"
    return f"{value} [{low}, {high}]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


# Draw summaries: agreement with the known order, and scores by the position shown.

CHANCE = 0.5
"""Pairs right of a judge that knows nothing."""


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Write a PNG with an axis of agreement and one of positions.

    Raises: ImportError without matplotlib, which the product does not need; OSError.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend is chosen

    figure = Figure(figsize=(11, 3 + 0.4 * len(summaries)), dpi=120, layout="constrained")
    agreement, positions = figure.subplots(1, 2)
    names = [f"[{k}] {one.judge}\n{one.rubric}" for k, one in enumerate(summaries, 1)]
    for offset, label, color, found in (
        (-0.12, "pairs right", "#1f6f8b", [one.pairs_right for one in summaries]),
        (0.12, "tau-b", "#c8553d", [one.tau for one in summaries]),
    ):
        rows = [(row + offset, each) for row, each in enumerate(found) if each is not None]
        if not rows:
            continue  # a legend names what can be seen
        agreement.errorbar(
            [each.value for _, each in rows],
            [row for row, _ in rows],
            xerr=_bars([each for _, each in rows]),
            fmt="o",
            capsize=3,
            color=color,
            label=label,
        )
    agreement.axvline(CHANCE, color="#1f6f8b", linestyle=":", linewidth=1)
    agreement.axvline(0, color="#c8553d", linestyle=":", linewidth=1)
    agreement.set_yticks(range(len(names)), names)
    agreement.set_ylim(len(names) - 0.5, -0.5)
    agreement.set_title("agreement with the known order (dotted: chance)", fontsize=9)
    _legend(agreement)
    for number, one in enumerate(summaries, 1):
        if not one.by_position:
            continue
        places = range(1, len(one.by_position) + 1)
        values = [each.value for each in one.by_position]
        label = f"[{number}]"
        positions.errorbar(
            places, values, yerr=_bars(one.by_position), marker="o", capsize=3, label=label
        )
    positions.axhline(0, color="#555", linewidth=1)
    positions.set_xlabel("position shown")
    positions.set_title("score above the same answers elsewhere", fontsize=9)
    _legend(positions)
    figure.savefig(path)


def _legend(axis: Any) -> None:  # Any: matplotlib is imported late
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _bars(found: Sequence[Interval]) -> list[list[float]]:
    """Return [below, above]; a value may stand a rounding error outside of its interval."""
    return [
        [max(0.0, one.value - one.low) for one in found],
        [max(0.0, one.high - one.value) for one in found],
    ]

"""RULER as plain functions, for groups and whole trajectories: no running sidecar, no store.

`ruler_scores` takes lists of messages, `ruler_score_group` a group of trajectories; each has a twin
without `await`. The judge is a model's LiteLLM name, or any object of the `Judge` protocol.

Source of the interface: `ruler` and `ruler_score_group` of openpipe-art 0.5.18. Differences: scores
are matched by id, read strictly, from two passes in opposite orders; identical groups cost no call;
a scored group keeps its metadata, metrics, logs, exceptions and policy versions; one of 0 or 1
trajectories is refused; secrets and personal data are hidden from the judge.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError

from ingest.errors import IngestError, JudgeReplyError
from ingest.judge_prompt import appearance, shown_trajectory
from ingest.privacy.texts import NotRedactedError, View, default_view
from ingest.ruler.judge import Judge, LiteLlmJudge
from ingest.ruler.prompt import TRAJECTORIES, RulerPrompt, write_prompt
from ingest.ruler.ruler import SEED_BITS, Judgement, OnCall, merged, score_candidates
from ingest.trajectories.records import (
    Message,
    TrajectoriesError,
    Trajectory,
    TrajectoryGroup,
    TrajectoryScore,
    read_messages,
    read_tools,
)
from sidecar.settings import DEFAULT_RUBRIC, Judge as JudgeSettings
from sidecar.settings.learning import ADVISED_SIZES, SIZES
from sidecar.visible import counted, visible

# Score whole trajectories against each other: what they have in common is sent once.

Shown = dict[str, Any]
"""A message as the judge sees it."""
Hide = Callable[[View], View]
"""Hides secrets and personal data, such as a `JudgeView`. Raises: NotRedactedError."""


class IdenticalError(ValueError):
    """All trajectories look the same to the judge: it has nothing to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Trajectories, taken apart."""

    common: tuple[Shown, ...]
    """The messages with which all of them begin."""
    own: tuple[tuple[Shown, ...], ...]
    """[G] the further messages of each."""


async def score_trajectories(
    judge: Judge,
    trajectories: Sequence[Sequence[Mapping[str, Any]]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    rubric: str,
    passes: int,
    seed: int,
    on_call: OnCall | None = None,
    subject: str = "",
    view: Hide | None = None,
) -> Judgement:
    """Score trajectories of one task against each other.

    trajectories: [G] their messages, from the first one on.
    The others are as for `ingest.ruler.ruler.score_answers`.
    Raises: IdenticalError, before the judge is asked; the errors of `score_answers`.
    """
    split = await asyncio.to_thread(split_common, trajectories)
    seen, shown_tools = await asyncio.to_thread(_hidden, split, tools, view or default_view())
    distinct, place_of = await asyncio.to_thread(
        merged, seen.own, lambda one: tuple(map(appearance, one))
    )
    if len(distinct) < 2:
        raise IdenticalError(f"all {len(trajectories)} trajectories are identical")

    def write(*, rng: random.Random, reverse: bool, context_tokens: int | None) -> RulerPrompt:
        return write_prompt(
            TRAJECTORIES,
            context=seen.common,
            tools=shown_tools,
            candidates=distinct,
            rubric=rubric,
            rng=rng,
            reverse=reverse,
            context_tokens=context_tokens,
        )

    return await score_candidates(
        judge, write, place_of, passes=passes, seed=seed, on_call=on_call, subject=subject
    )


def split_common(trajectories: Sequence[Sequence[Mapping[str, Any]]]) -> Split:
    """Take the messages apart that all trajectories begin with. Pure.

    Messages are equal when they look the same to the judge: ids of tool calls and the way in which
    the JSON of arguments is written do not count.
    """
    shown = [shown_trajectory(one) for one in trajectories]
    shared = 0
    for column in zip(*shown, strict=False):
        first = appearance(column[0])
        if any(appearance(other) != first for other in column[1:]):
            break
        shared += 1
    return Split(
        common=tuple(shown[0][:shared]) if shown else (),
        own=tuple(tuple(one[shared:]) for one in shown),
    )


def _hidden(
    split: Split, tools: Sequence[Mapping[str, Any]], view: Hide
) -> tuple[Split, Sequence[Mapping[str, Any]]]:
    """Hide what the judge must not see: one value has one placeholder in the whole group."""
    flat = [message for one in split.own for message in one]
    seen = view(View(context=split.common, tools=tools, answers=flat))
    left = iter(seen.answers)
    own = tuple(tuple(dict(next(left)) for _ in one) for one in split.own)
    return Split(common=tuple(dict(one) for one in seen.context), own=own), seen.tools


# A judge's verdict as plain text, for a person who looks on. Pure.


def verdict_lines(judgement: Judgement) -> Iterator[str]:
    """Yield the verdict, best first: scores, explanations, and what it cost.

    Characters that a terminal obeys are made visible: explanations may quote what agents wrote.
    """
    calls = judgement.calls
    models = ", ".join(dict.fromkeys(call.judge_model for call in calls))
    judged = counted(len(judgement.scores), "trajectory", "trajectories")
    yield visible(f"judge {models}: {judged}, {counted(len(calls), 'call')}")
    order = sorted(range(len(judgement.scores)), key=lambda at: -judgement.scores[at])
    for at in order:
        first, *more = judgement.explanations[at].split("\n")
        yield visible(f"  {judgement.scores[at]:.3f}  [{at}]  {first}")
        yield from (visible(f"              {line}") for line in more)
    for call in calls:
        if call.error is not None:
            yield visible(f"  unusable reply: {call.error}")
    if judgement.disagreement is not None:
        mean, flipped = judgement.disagreement.mean, judgement.disagreement.flipped
        yield f"  passes differ by {mean:.3f} on average, {flipped:.0%} of pairs flipped"
    replies = [call.reply for call in calls]
    tokens = sum((one.prompt_tokens or 0) + (one.completion_tokens or 0) for one in replies)
    costs = [one.cost_usd for one in replies if one.cost_usd is not None]
    priced = f", ${sum(costs):.4f}" if len(costs) == len(replies) else ""
    yield f"  {counted(tokens, 'token')}, {sum(one.seconds for one in replies):.1f} s{priced}"


UNJUDGED = 0.5
"""Score of trajectories that are all identical: the judge cannot tell one from another."""
RULER_SCORE = "ruler_score"
INDEPENDENT_REWARD = "independent_reward"
RULER_FAILED = "ruler_failed"
"""Metric of a group that could not be scored: 1."""

_Result = TypeVar("_Result")


class GroupSizeWarning(UserWarning):
    """A group is smaller or larger than is best for a judge; said once for each size."""


async def ruler_scores(
    message_lists: Sequence[Sequence[Message]],
    judge: str | Judge,
    *,
    rubric: str = DEFAULT_RUBRIC,
    tools: Sequence[Mapping[str, Any]] | None = None,
    passes: int = 2,
    extra_litellm_params: Mapping[str, Any] | None = None,
    context_tokens: int | None = None,
    view: Hide | None = None,
    seed: int | None = None,
    debug: bool = False,
) -> list[TrajectoryScore]:
    """Score trajectories of one task against each other, by a judge with a rubric.

    message_lists: [G] the chat messages of each trajectory, from the first one on; 2 to 16 of them,
        best 4 to 8. What all begin with is sent once.
    judge: a LiteLLM model (`openai/gpt-4.1-mini`, `hosted_vllm/qwen3`, `ollama/qwen3:32b`), its key
        from the provider's variable; or an object of the protocol `ingest.ruler.judge.Judge`.
    rubric: what makes a trajectory better, in plain English.
    tools: definitions of the tools that the agent could call; None: it had none.
    passes: judge calls, 1 to 8, every second one in the reverse order of the one before.
    extra_litellm_params: of the call, such as `api_base`, `api_key`, `temperature`, `timeout`.
    context_tokens: most tokens of prompt and reply; the oldest messages are left out, with a
        mark. None: as LiteLLM knows the model, else no limit. For a judge by its LiteLLM name.
    view: hides secrets and personal data; None: by the default of `[privacy]` in docs/settings.md.
    seed: draws order and ids, 0 <= seed < 2**29; None: at random.
    debug: writes the verdict to stderr.
    Returns: [G] scores in the order given. All identical: 0.5 each, without a call, and said so.
    Raises: TrajectoriesError; JudgeUnavailableError when the judge does not answer, JudgeBusyError
        with the wait that it asks for; JudgeRefusalError; JudgeReplyError after two unusable
        replies; NotRedactedError.
    """
    if not isinstance(message_lists, Iterable) or isinstance(message_lists, str | bytes | Mapping):
        raise TrajectoriesError("message_lists is no list of lists of messages")
    lists = list(message_lists)
    _check_size(len(lists))
    _warn_of(len(lists))
    read = [read_messages(one, number) for number, one in enumerate(lists)]
    _check_options(rubric, passes, seed)
    if isinstance(judge, str):
        judge = _judge_named(judge, extra_litellm_params or {}, context_tokens)
    elif extra_litellm_params or context_tokens is not None:
        raise TrajectoriesError(
            "extra_litellm_params and context_tokens are for a judge by its LiteLLM name"
        )
    try:
        judgement = await score_trajectories(
            judge,
            read,
            tools=read_tools(tools),
            rubric=rubric,
            passes=passes,
            seed=secrets.randbits(SEED_BITS) if seed is None else seed,
            view=view,
        )
    except JudgeReplyError as error:
        if debug:
            wrote = f"; the judge wrote: {error.reply}" if error.reply else ""
            sys.stderr.write(f"no verdict: {error}{wrote}\n")
        raise
    except IdenticalError as error:
        why = f"{error}: the judge was not asked, and each has the score {UNJUDGED}"
        if debug:
            sys.stderr.write(f"{why}\n")
        return [TrajectoryScore(score=UNJUDGED, explanation=why, judged=False) for _ in read]
    if debug:
        sys.stderr.write("".join(f"{line}\n" for line in verdict_lines(judgement)))
    return [
        TrajectoryScore(score=score, explanation=words)
        for score, words in zip(judgement.scores, judgement.explanations, strict=True)
    ]


async def ruler_score_group(
    group: TrajectoryGroup,
    judge: str | Judge,
    *,
    swallow_exceptions: bool = False,
    **options: Any,
) -> TrajectoryGroup:
    """Score the trajectories of a group; everything else of them is kept.

    judge: as for `ruler_scores`; options: its `rubric`, `passes`, `extra_litellm_params`,
        `context_tokens`, `view`, `seed`, `debug`, and `tools` (default: the
        trajectories' own).
    swallow_exceptions: a group that cannot be scored is returned without rewards, the error in its
        `exceptions` and `logs`, and 1 as its metric `ruler_failed`.
    Returns: a new group. `reward` is the judge's score, which is in `metrics["ruler_score"]` too;
        the earlier reward, if there is one, is in `metrics["independent_reward"]`, and the
        explanation is the last of `logs`.
    Raises: as `ruler_scores`.
    """
    _warn_of(len(group.trajectories))
    try:
        if "tools" not in options:
            options["tools"] = merged_tools([one.tools for one in group.trajectories])
        lists = [one.messages for one in group.trajectories]
        scores = await ruler_scores(lists, judge, **options)
    except (IngestError, NotRedactedError) as error:
        if not swallow_exceptions:
            raise
        return _unscored(group, error)
    return replace(
        group,
        trajectories=[
            replace(
                one,
                reward=found.score,
                metrics={**one.metrics, **_earlier(one), RULER_SCORE: found.score},
                logs=[*one.logs, f"RULER: {found.explanation}"],
            )
            for one, found in zip(group.trajectories, scores, strict=True)
        ],
    )


def ruler_scores_sync(
    message_lists: Sequence[Sequence[Message]], judge: str | Judge, **options: Any
) -> list[TrajectoryScore]:
    """Do `ruler_scores` without `await`. Raises also: RuntimeError in a running event loop."""
    if isinstance(message_lists, Sized):
        _warn_of(len(message_lists))
    return _run(ruler_scores(message_lists, judge, **options))


def ruler_score_group_sync(
    group: TrajectoryGroup, judge: str | Judge, **options: Any
) -> TrajectoryGroup:
    """Do `ruler_score_group` without `await`. Raises also: RuntimeError in a running event loop."""
    _warn_of(len(group.trajectories))
    return _run(ruler_score_group(group, judge, **options))


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    work.close()
    raise RuntimeError("an event loop runs already: await the function without `_sync`")


def _judge_named(model: str, params: Mapping[str, Any], context_tokens: int | None) -> Judge:
    given = dict(params)
    if "context_tokens" in given:
        raise TrajectoriesError(
            "context_tokens is an argument of its own, not one of extra_litellm_params, "
            "which go to the judge's server"
        )
    settings = {"timeout_s": given.pop("timeout", None), "context_tokens": context_tokens}
    named = {name: value for name, value in settings.items() if value is not None}
    if not model.strip():
        raise TrajectoriesError("judge is empty; name a LiteLLM model, such as openai/gpt-4.1-mini")
    try:
        return LiteLlmJudge(JudgeSettings(model=model, params=given, **named))
    except ValidationError as error:
        raise TrajectoriesError(f"judge {model!r}: {error.errors()[0]['msg']}") from None


def _check_options(rubric: object, passes: object, seed: object) -> None:
    if not isinstance(rubric, str) or not rubric.strip():
        raise TrajectoriesError("rubric is no text; say in plain English what is better")
    if any("\ud800" <= character <= "\udfff" for character in rubric):
        raise TrajectoriesError("rubric holds half of a surrogate pair, which no request can carry")
    if not isinstance(passes, int) or not 1 <= passes <= 8:
        raise TrajectoriesError(f"passes is {passes}; give 1 to 8: each is a call that is paid for")
    if seed is not None and (not isinstance(seed, int) or not 0 <= seed < 2**SEED_BITS):
        raise TrajectoriesError(f"seed is {seed!r}; give a whole number from 0 to 2**{SEED_BITS}-1")


def _check_size(size: int) -> None:
    low, high = SIZES
    if size < low:
        why = f"cannot be compared; RULER scores {low} to {high} of one task"
    elif size > high:
        why = f"are too many for one judge call; give {low} to {high}"
    else:
        return
    raise TrajectoriesError(f"{size} trajectories {why}")


def size_advice(size: int) -> str | None:
    """Say what speaks against this number of trajectories; None when nothing does. Pure."""
    few, many = ADVISED_SIZES
    if few <= size <= many:
        return None
    why = "few show little" if size < few else "many confuse a judge"
    return f"RULER scores {size} trajectories against each other; {few} to {many} are best ({why})"


@cache
def _warn_of(size: int) -> None:
    """Warn of a size at the line that called the public function, which calls this directly."""
    low, high = SIZES
    advice = size_advice(size) if low <= size <= high else None
    if advice is not None:
        warnings.warn(f"{advice}. This is said once.", GroupSizeWarning, stacklevel=3)


def merged_tools(
    tools: Iterable[Sequence[Mapping[str, Any]] | None],
) -> Sequence[Mapping[str, Any]]:
    """Return the tools of several trajectories, each definition once. Raises: TrajectoriesError."""
    found: dict[str, Mapping[str, Any]] = {}
    for one in tools:
        for tool in read_tools(one):
            found.setdefault(json.dumps(tool, sort_keys=True), tool)
    return list(found.values())


def _earlier(one: Trajectory) -> dict[str, float]:
    return {} if one.reward is None else {INDEPENDENT_REWARD: one.reward}


def _unscored(group: TrajectoryGroup, error: Exception) -> TrajectoryGroup:
    why = f"RULER gave no scores: {type(error).__name__}: {error}"
    if isinstance(error, JudgeReplyError) and error.reply:
        why += f"; the judge wrote: {error.reply}"
    return replace(
        group,
        trajectories=[
            replace(one, reward=None, metrics={**one.metrics, **_earlier(one)})
            for one in group.trajectories
        ],
        exceptions=[*group.exceptions, error],
        metrics={**group.metrics, RULER_FAILED: 1.0},
        logs=[*group.logs, why],
    )

"""RULER: an LLM judge scores the answers to one prompt against each other.

One call judges the whole group. Further passes show the answers in another order, every second pass
in the reverse order of the one before, so that the judge's position bias cancels out. Equal answers
are shown once and share their score. An unusable reply is sent back once with its defect; a second
one ends the attempt, and the next one shows another order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

from opentelemetry import trace

from ingest.errors import JudgeReplyError
from ingest.judge_prompt import appearance, shown_answer
from ingest.privacy.texts import JudgeView, View, default_view
from ingest.records import Disagreement, ShownPass
from ingest.ruler.judge import Judge, JudgePanel, JudgeReply, context_tokens_of
from ingest.ruler.prompt import RulerPrompt, build_prompt, parse_reply
from sidecar.hiding import beginning, hide_in_text
from sidecar.visible import visible

ATTEMPTS = 2
SEED_BITS = 29
"""Size of the seed of `score_answers`, in bits."""
SHOWN_BACK_CHARACTERS = 4_000
"""Characters of an unusable reply that the judge is shown again: enough to correct it."""
LONGEST_SHOWN_REPLY = 600
"""Characters of an unusable reply that people are shown."""
CUT = "; the reply was cut at the limit of tokens, so write shorter explanations"

_tracer = trace.get_tracer("ingest.ruler.ruler")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCall:
    """One answered call, usable or not."""

    judge_model: str
    order_seed: int
    """`random.Random(order_seed >> 1)` drew the order; an odd seed reversed it."""
    attempt: int
    """0, or 1 for the retry that showed the judge its error."""
    error: str | None
    """Defect of the reply; None when it was accepted."""
    reply: JudgeReply

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Scores and explanations of one group."""

    scores: tuple[float, ...]
    """[G] mean scores over the passes, unitless, 0..1, comparable within this group only."""
    explanations: tuple[str, ...]
    """[G] the judge's explanations, one line per pass."""
    disagreement: Disagreement | None
    """How far the passes differ; None after a single pass."""
    calls: tuple[JudgeCall, ...]
    """All of one judge; empty when none was asked."""
    passes: tuple[ShownPass, ...] = ()
    """Each pass, of the distinct answers in order of first appearance; empty: the judge was not
    asked."""

    @property
    def judge_model(self) -> str | None:
        """Model name of the judge that gave the scores; None when none was asked."""
        return self.calls[-1].judge_model if self.calls else None


Item = TypeVar("Item")
OnCall = Callable[[JudgeCall], None]
Read = tuple[tuple[float, ...], tuple[str, ...]]
"""([G] scores, [G] explanations) of one pass."""


async def score_answers(
    judge: Judge,
    *,
    context: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    rubric: str,
    passes: int,
    seed: int,
    on_call: OnCall | None = None,
    subject: str = "",
    view: JudgeView | None = None,
) -> Judgement:
    """Score answers to one prompt against each other.

    context: the messages that all answers follow; tools: the request's tools.
    answers: [G] assistant messages, from any mixture of adapters, which the judge cannot see.
    passes: judge calls, each in another order; the score is their mean.
    seed: draws orders and ids, 0 <= seed < 2**29 so that it fits every store; authors of prompts
        and answers must not be able to guess it.
    on_call: receives every answered call at once, also those before an error.
    subject: the group's or comparison's id, for the trace.
    view: hides secrets and personal data; None: by the default settings.
    Raises: JudgeReplyError when a reply is unusable twice; JudgeRefusalError when the judge never
        accepts such a request, JudgeTooLongError when it is too long; JudgeUnavailableError when
        the judge does not answer; NotRedactedError when nobody knows what to hide; ValueError
        without answers.
    """
    whole = View(context=context, tools=tools, answers=answers)
    # In threads, here and below: a megabyte takes tens of milliseconds, and users of best of N
    # wait on this loop.
    seen = await asyncio.to_thread(view or default_view(), whole)
    distinct, place_of = await asyncio.to_thread(merge_identical, seen.answers)
    write = partial(
        build_prompt,
        context=seen.context,
        tools=seen.tools,
        answers=distinct,
        rubric=rubric,
    )
    return await score_candidates(
        judge, write, place_of, passes=passes, seed=seed, on_call=on_call, subject=subject
    )


async def score_candidates(
    judge: Judge,
    write: Callable[..., RulerPrompt],
    place_of: Sequence[int],
    *,
    passes: int,
    seed: int,
    on_call: OnCall | None = None,
    subject: str = "",
) -> Judgement:
    """Ask a judge about candidates in several orders.

    write: makes the prompt of one pass from `rng`, `reverse` and `context_tokens`, as
        `write_prompt` does.
    place_of: [G] index of each candidate among the distinct ones that `write` shows.
    passes, seed, on_call, subject, errors: as for `score_answers`.
    """
    if isinstance(judge, JudgePanel):  # it picks the judge of all passes
        return await judge.by_one(
            lambda one: score_candidates(
                one, write, place_of, passes=passes, seed=seed, on_call=on_call, subject=subject
            )
        )
    limit = await context_tokens_of(judge)
    calls: list[JudgeCall] = []

    def note(call: JudgeCall) -> None:
        calls.append(call)
        if on_call is not None:
            on_call(call)

    rounds: list[Read] = []
    orders: list[tuple[int, ...]] = []
    for number in range(passes):
        order_seed = 2 * seed + number
        prompt = await asyncio.to_thread(
            write,
            rng=random.Random(order_seed >> 1),
            reverse=order_seed % 2 == 1,
            context_tokens=limit,
        )
        with _tracer.start_as_current_span("judge") as span:
            span.set_attribute("judge.model", judge.model)
            span.set_attribute("judge.group_id", subject)
            span.set_attribute("judge.pass", number)
            if prompt.left_out_characters:
                span.set_attribute("judge.left_out_messages", prompt.left_out_messages)
                span.set_attribute("judge.left_out_characters", prompt.left_out_characters)
            span.set_attribute("judge.ok", False)
            rounds.append(await _one_pass(judge, prompt, order_seed, note, span))
            orders.append(prompt.order)
            span.set_attribute("judge.ok", True)
    scores = [sum(column) / passes for column in zip(*(each[0] for each in rounds), strict=True)]
    words = ["\n".join(column) for column in zip(*(each[1] for each in rounds), strict=True)]
    return Judgement(
        scores=tuple(scores[place] for place in place_of),
        explanations=tuple(words[place] for place in place_of),
        disagreement=measure_disagreement([scores for scores, _ in rounds], place_of),
        passes=tuple(
            ShownPass(order=order, scores=each)
            for order, (each, _) in zip(orders, rounds, strict=True)
        ),
        calls=tuple(calls),
    )


def measure_disagreement(
    rounds: Sequence[Sequence[float]], place_of: Sequence[int]
) -> Disagreement | None:
    """Compare the passes of a judge over one group, two by two. Pure.

    rounds: [passes][D] scores of the D distinct answers.
    place_of: [G] index of each answer in them.
    Returns: None for fewer than two passes.
    """
    couples = list(combinations(rounds, 2))
    if not couples:
        return None
    apart = [
        sum(abs(a[i] - b[i]) for a, b in couples) / len(couples) for i in range(len(rounds[0]))
    ]
    flips = [
        (a[i] - a[j]) * (b[i] - b[j]) < 0
        for a, b in couples
        for i, j in combinations(range(len(a)), 2)
    ]
    return Disagreement(
        by_answer=tuple(apart[place] for place in place_of),
        flipped=sum(flips) / len(flips) if flips else 0.0,
    )


def merge_identical(
    answers: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Drop answers that look equal to the judge, or differ only in how their JSON is written.

    Returns: (the distinct answers in order of first appearance, [G] index of each answer in them).
    """
    return merged(answers, lambda answer: appearance(shown_answer(answer)))


def merged(items: Sequence[Item], key: Callable[[Item], object]) -> tuple[list[Item], list[int]]:
    """Drop items of equal key. Returns: as `merge_identical`."""
    first: dict[object, int] = {}
    distinct: list[Item] = []
    place_of: list[int] = []
    for item in items:
        if (of := key(item)) not in first:
            first[of] = len(distinct)
            distinct.append(item)
        place_of.append(first[of])
    return distinct, place_of


async def _one_pass(
    judge: Judge, prompt: RulerPrompt, order_seed: int, note: OnCall, span: trace.Span
) -> Read:
    """Ask the judge; after an unusable reply, ask once more in the same conversation."""
    messages = list(prompt.messages)
    prompt_tokens = completion_tokens = attempt = 0
    while True:
        reply = await judge.complete(messages, prompt.schema)
        prompt_tokens += reply.prompt_tokens or 0
        completion_tokens += reply.completion_tokens or 0
        span.set_attribute("judge.calls", attempt + 1)
        span.set_attribute("judge.prompt_tokens", prompt_tokens)
        span.set_attribute("judge.completion_tokens", completion_tokens)
        try:
            read = parse_reply(reply.text, prompt.ids_in_order, prompt.order)
        except JudgeReplyError as wrong:
            said = f"{wrong}{CUT}" if reply.cut else str(wrong)
            error = JudgeReplyError(said, reply=_shown_reply(reply.text))
            note(_call(judge, order_seed, attempt, reply, error))
            attempt += 1
            if attempt == ATTEMPTS:
                raise error from wrong
            messages += _complaint(reply.text, error)
        else:
            note(_call(judge, order_seed, attempt, reply, None))
            return read


def _shown_reply(text: str) -> str:
    """Return the beginning of an unusable reply on one line, without secrets."""
    text = text.strip()
    if not text:
        return "(nothing)"
    # Cut before it is searched: half a secret would not be recognised, so no word is cut.
    shown = beginning(text, LONGEST_SHOWN_REPLY)
    cut = "" if shown == text else f" ... ({len(text)} characters)"
    return visible(hide_in_text(shown)) + cut


def _call(
    judge: Judge, order_seed: int, attempt: int, reply: JudgeReply, error: JudgeReplyError | None
) -> JudgeCall:
    return JudgeCall(
        judge_model=judge.model,
        order_seed=order_seed,
        attempt=attempt,
        error=None if error is None else str(error),
        reply=reply,
    )


def _complaint(text: str, error: JudgeReplyError) -> list[dict[str, str]]:
    """Build the messages that show the judge its unusable reply and the defect."""
    return [
        # Some providers refuse an assistant message without text.
        {"role": "assistant", "content": text[:SHOWN_BACK_CHARACTERS] or "(no text)"},
        {
            "role": "user",
            "content": f"That reply cannot be used: {error}. Send the whole corrected JSON object "
            "and nothing else, one entry for each id.",
        },
    ]

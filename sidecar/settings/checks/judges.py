"""Check the sections of judges: [judge] with its fallbacks, and [gate_judge]. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sidecar.settings.checks.problem import (
    DEFAULT_PROJECT,
    Problem,
    is_changed,
    is_given,
    unsendable,
)

if TYPE_CHECKING:
    from sidecar.settings.judge import Judge
    from sidecar.settings.kinds import Fallback, Price
    from sidecar.settings.sections import Settings

FAST_S = 1.0
"""A time limit under this ends calls before a language model has read the prompt."""
TOKENS_OF_AN_ENTRY = 60
"""Tokens of one answer's entry in a judge's reply (`ingest.ruler.prompt.TOKENS_PER_ANSWER`)."""
REPLY_LIMITS = ("max_tokens", "max_completion_tokens")
WITHOUT_MODEL = (
    "api_base",
    "api_key",
    "params",
    "price",
    "budget",
    "budget_per_hour",
    "budget_tokens",
    "requests_per_minute",
    "tokens_per_minute",
    "rubric",
    "rubric_file",
    "projects",
    "context_tokens",
    "passes",
)
"""Keys of [judge] that nobody sets for a sidecar that only records."""
JUDGE_OWN = frozenset({"model", "messages", "timeout", "num_retries", "caching", "response_format"})
"""Parameters of a judge call that the sidecar sets itself."""


def judges(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the judges and how they are asked."""
    judge, own = settings.judge, settings.gate_judge
    yield from _asked(("judge",), judge.params, judge.price)
    yield from _asked(("gate_judge",), own.params, own.price)
    for one in judge.fallbacks:
        yield from _asked(("judge", "fallbacks"), one.params, one.price)
    if judge.fallbacks and not judge.model:
        yield ("judge", "fallbacks"), "has judges and judge.model is empty; name the first there"
    judges: tuple[Judge | Fallback, ...] = (judge, *judge.fallbacks)
    if len({(one.model, one.api_base) for one in judges}) < len(judges):
        yield ("judge", "fallbacks"), "names one judge twice; name each once"
    for section, asked in (("judge", judge), ("gate_judge", own)):
        if asked.rubric_file and is_given(asked, "rubric"):
            yield (
                (section, "rubric_file"),
                f"and {section}.rubric are both set; give the rubric once",
            )
        for name, own_rubric in asked.projects.items():
            where = (section, "projects", name)
            if bool(own_rubric.rubric.strip()) == bool(own_rubric.rubric_file):
                yield where, "has no rubric, or two; give rubric or rubric_file"
    if not own.model:
        for name in ("api_base", "api_key", "json_schema", "context_tokens", "params", "price"):
            if is_changed(own, name):
                yield (
                    ("gate_judge", name),
                    "is set without gate_judge.model, so it would not be used; name the model",
                )


def _asked(
    where: tuple[str, ...], params: dict[str, Any], price: Price | None
) -> Iterator[Problem]:
    """Yield what is wrong with how one judge is asked, and with its price."""
    key = (*where, "params")
    if price is not None and (missing := {"input", "output"} - price.keys()):
        yield (
            (*where, "price"),
            f"lacks {sorted(missing)[0]}; give input and output, US dollars for a million tokens",
        )
    if found := list(unsendable(key, params)):
        yield from found
        return
    if own := sorted(JUDGE_OWN & params.keys()):
        yield key, f"holds {own[0]}, which the sidecar sets itself; leave it out"
    if _asks_for_stream(params):
        yield key, "holds stream; the judge's reply is read whole, so leave it out"


def _asks_for_stream(params: dict[str, Any]) -> bool:
    return params.get("stream", False) not in (False, None)


def useless_judge_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of judges that have no effect, or that no judge could work with."""
    judge, gate = settings.judge, settings.gate_judge
    if not judge.model:
        unused = [f"judge.{name}" for name in WITHOUT_MODEL if is_changed(judge, name)]
        if unused:
            yield (
                ("judge", "model"),
                f"is empty, so {', '.join(unused)} would not be used and nothing is learned; name "
                "a LiteLLM model",
            )
    for section, limit_s in (("judge", judge.timeout_s), ("gate_judge", gate.timeout_s)):
        if 0 < limit_s < FAST_S:
            yield (
                (section, "timeout_s"),
                f"is {limit_s:g} s, and a judge takes longer to read a group, so every call would "
                "end without a score; give 60 s",
            )
    yield from _reply_limits(settings)
    yield from _projects_nobody_has(settings)
    if judge.rescore_share == 0 and is_changed(judge, "rescore_after_s"):
        yield (
            ("judge", "rescore_after_s"),
            "is set and judge.rescore_share is 0, so nothing is scored again; raise that, or leave "
            "this out",
        )
    if judge.cache_bytes == 0 and is_changed(judge, "cache_days"):
        yield (
            ("judge", "cache_days"),
            "is set and judge.cache_bytes is 0, so no reply is kept; raise that, or leave this out",
        )
    yield from _budgets(judge)


def _projects_nobody_has(settings: Settings) -> Iterator[Problem]:
    """Yield rubrics of projects that no request can be of: only the sidecar's own keys name one."""
    if settings.access.mode == "keys":
        return
    for section, asked in (("judge", settings.judge), ("gate_judge", settings.gate_judge)):
        for name in asked.projects:
            if name != DEFAULT_PROJECT:
                yield (
                    (section, "projects", name),
                    f'is a rubric of a project, and with access.mode = "{settings.access.mode}" '
                    f'all traffic is of "{DEFAULT_PROJECT}", so it would not be used; set '
                    'access.mode = "keys", or leave it out',
                )


def _reply_limits(settings: Settings) -> Iterator[Problem]:
    size, compared = settings.groups.size, 2 * settings.canary.gate_answers
    asked = [
        (("judge", "params"), settings.judge.params, size),
        (("gate_judge", "params"), settings.gate_judge.params, compared),
        *((("judge", "fallbacks"), one.params, size) for one in settings.judge.fallbacks),
    ]
    for key, params, answers in asked:
        limits = [
            (name, params[name]) for name in REPLY_LIMITS if isinstance(params.get(name), int)
        ]
        for name, most in limits:
            if most < TOKENS_OF_AN_ENTRY * answers:
                yield (
                    key,
                    f"has {name} = {most}, and scores of {answers} answers take about "
                    f"{TOKENS_OF_AN_ENTRY * answers} tokens, so replies would be cut and refused "
                    f"(judge_rubbish); leave it out, or give more",
                )


def _budgets(judge: Judge) -> Iterator[Problem]:
    dollars = judge.budget or judge.budget_per_hour
    if judge.budget and judge.budget_per_hour >= judge.budget:
        yield (
            ("judge", "budget_per_hour"),
            f"is {judge.budget_per_hour:g} and the whole day has judge.budget = {judge.budget:g}, "
            "so an hour's limit is never reached first; give less than the day's, or leave it out",
        )
    if dollars and judge.price is not None and not any(judge.price.values()):
        yield (
            ("judge", "price"),
            "is 0, so a budget in dollars is never spent; limit such a judge by "
            "judge.budget_tokens",
        )

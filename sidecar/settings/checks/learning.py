"""Check the sections of learning: groups, learner, canary, best of N. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from sidecar.settings.checks.problem import Problem, is_changed
from sidecar.settings.learning import ADVISED_SIZES, MOST_WEIGHT

if TYPE_CHECKING:
    from sidecar.settings.sections import Settings

FAST_S = 1.0
"""A candidate takes longer: it is a whole answer of vLLM."""
HOUR_AND_DAY = (
    ("tokens_per_hour", "tokens_per_day"),
    ("prompt_tokens_per_hour", "prompt_tokens_per_day"),
)


def learner(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the learner's settings."""
    rules, serving, groups = settings.learner, settings.serving, settings.groups
    if rules.rank > serving.max_lora_rank:
        yield (
            ("learner", "rank"),
            f"is {rules.rank} and serving.max_lora_rank is {serving.max_lora_rank}, so vLLM "
            "would refuse every adapter; lower the rank, or raise that and vLLM's --max-lora-rank",
        )
    if rules.min_groups > rules.max_groups:
        yield (
            ("learner", "min_groups"),
            f"is {rules.min_groups} and learner.max_groups, what one run takes, is "
            f"{rules.max_groups}; give no more than that",
        )
    if rules.min_groups > settings.most_pending_groups:
        yield (
            ("learner", "min_groups"),
            f"is {rules.min_groups} and only groups.max_pending_groups = "
            f"{groups.max_pending_groups} may wait, so no run would ever start; lower the one or "
            "raise the other",
        )


def canary(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the gate and the ramp."""
    rules = settings.canary
    if rules.gate_min_prompts > rules.gate_prompts:
        yield (
            ("canary", "gate_min_prompts"),
            f"is {rules.gate_min_prompts} and canary.gate_prompts is {rules.gate_prompts}, so no "
            "candidate could pass; give no more than that",
        )
    if not rules.steps:
        yield ("canary", "steps"), "is empty; give at least one weight in basis points, as [2000]"
    if any(later <= earlier for earlier, later in pairwise(rules.steps)):
        yield (
            ("canary", "steps"),
            f"is {list(rules.steps)}; a ramp goes up, so give each step a larger weight than the "
            "one before (the candidate is promoted after the last)",
        )
    if rules.step_min_s > rules.step_max_s:
        yield (
            ("canary", "step_min_s"),
            f"is {rules.step_min_s:g} and canary.step_max_s is {rules.step_max_s:g}, so every "
            "step would end inconclusive; give no more than that",
        )
    elif rules.step_min_s + rules.turn_wait_s > rules.step_max_s:
        yield (
            ("canary", "turn_wait_s"),
            f"is {rules.turn_wait_s:g}; with canary.step_min_s, {rules.step_min_s:g}, it is over "
            f"canary.step_max_s, {rules.step_max_s:g}, so every step would end inconclusive before "
            "the guards have seen it; give less",
        )


def useless_group_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of groups that have no effect, or that leave a stage without work."""
    groups, (few, many) = settings.groups, ADVISED_SIZES
    if not few <= groups.size <= many:
        why = "so few answers differ by little" if groups.size < few else "so many confuse a judge"
        yield ("groups", "size"), f"is {groups.size}: {why}; {few} to {many} are best"
    if groups.rate == 0 and settings.judge.model:
        yield (
            ("groups", "rate"),
            "is 0 and judge.model is set: no exchange is chosen, so nothing is sampled, judged or "
            "learned; raise it, or leave judge.model empty to record alone",
        )
    if groups.held_out_rate == 0 and settings.judge.model:
        yield (
            ("groups", "held_out_rate"),
            "is 0, so no prompt is held out for the gate and every new adapter waits for ever; "
            "give 0.2",
        )
    if groups.timeout_s < FAST_S:
        yield (
            ("groups", "timeout_s"),
            f"is {groups.timeout_s:g} s, and a candidate takes as long as an answer to a user, so "
            "none would be finished; give 120 s",
        )
    for hour, day in HOUR_AND_DAY:
        of_hour, of_day = getattr(groups, hour), getattr(groups, day)
        if of_day and of_hour >= of_day:
            yield (
                ("groups", hour),
                f"is {of_hour} and the whole day has groups.{day} = {of_day}, so an hour's limit "
                "is never reached first; give less than the day's, or leave it out",
            )
    serving = set(settings.serving.upstreams)
    if groups.sampling_upstreams and set(groups.sampling_upstreams) == serving:
        yield (
            ("groups", "sampling_upstreams"),
            "names the vLLMs of serving.upstreams, which sample without it; leave it out",
        )


def useless_best_of_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of best of N that have no effect."""
    best_of = settings.best_of
    if best_of.enabled and not settings.judge.model:
        yield (
            ("best_of", "enabled"),
            "is true and judge.model is empty, so nobody chooses among the answers and each user "
            "gets the first; name a judge",
        )
    for name in ("max_n", "timeout_s", "concurrency", "max_waiting"):
        if not best_of.enabled and is_changed(best_of, name):
            yield (
                ("best_of", name),
                "is set and best_of.enabled is false, so it would not be used; set that to true, "
                "or leave this out",
            )


def shortened_ramp(settings: Settings) -> Iterator[Problem]:
    """Yield a step of the ramp that is not played as it was asked for."""
    rules = settings.canary
    if rules.ramp != rules.steps:
        yield (
            ("canary", "steps"),
            f"is {list(rules.steps)} and is played as {list(rules.ramp)}: beyond {MOST_WEIGHT} too "
            "few sessions stay with the champion for the guards to compare",
        )

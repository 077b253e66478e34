"""Find settings of `[learner]` that have no effect beside the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sidecar.settings.checks.problem import Problem, is_given
from sidecar.settings.training.learner import SHORT_PACK

if TYPE_CHECKING:
    from sidecar.settings.sections import Settings
    from sidecar.settings.training.learner import Learner

CLIPPED = ("grpo", "dr_grpo", "dapo", "ppo_decoupled")
LOSSES_OF: Mapping[str, tuple[str, ...]] = {
    "tv_limit": ("dppo_tv",),
    "clip_low": CLIPPED,
    "clip_high": CLIPPED,
    "loss_length": ("dr_grpo",),
}
"""A constant -> the losses that read it (`learner.grpo.losses`)."""
SCHEDULE_OF: Mapping[str, str] = {"interval_s": "interval", "cron": "cron"}
OF_SEVERAL = ("shard_base", "processes_timeout_s")
"""Settings of a run that several processes compute."""


def useless_learner_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of the learner that change nothing, or that leave it without work."""
    rules = settings.learner
    for name, schedule in SCHEDULE_OF.items():
        if is_given(rules, name) and rules.schedule != schedule:
            yield (
                ("learner", name),
                f'is set and learner.schedule is "{rules.schedule}", so it would not be used; set '
                f'that to "{schedule}", or leave this out',
            )
    if is_given(rules, "idle_window_s") and not rules.idle_below:
        yield (
            ("learner", "idle_window_s"),
            "is set and learner.idle_below is 0, so no run waits for quiet users; raise that, or "
            "leave this out",
        )
    for name, losses in LOSSES_OF.items():
        if is_given(rules, name) and rules.loss not in losses:
            yield (
                ("learner", name),
                f'is set and learner.loss is "{rules.loss}", which does not read it; leave it out '
                f"(it is for {', '.join(losses)})",
            )
    yield from _useless_distance(rules)
    if 0 < rules.pack_tokens < SHORT_PACK:
        yield (
            ("learner", "pack_tokens"),
            f"is {rules.pack_tokens}, and hardly a prompt with its answer is so short: longer ones "
            'are not sampled, and their groups are left out (too_long); give "auto"',
        )
    if rules.steps > rules.max_groups:
        yield (
            ("learner", "steps"),
            f"is {rules.steps} and one run takes at most learner.max_groups = {rules.max_groups} "
            "groups, of which a step needs one, so no run makes so many; give fewer",
        )
    # With `manual` a launcher may start the processes (docs/several-processes.md).
    if rules.processes == 1 and rules.schedule != "manual":
        for name in OF_SEVERAL:
            if is_given(rules, name) and getattr(rules, name) is not False:
                yield (
                    ("learner", name),
                    "is set and learner.processes is 1, so nothing is shared and nobody is waited "
                    "for, but in a run that torchrun starts; raise that, or leave this out",
                )


def _useless_distance(rules: Learner) -> Iterator[Problem]:
    if is_given(rules, "kl_budget") and not rules.kl_coef:
        yield (
            ("learner", "kl_budget"),
            "is set and learner.kl_coef is 0, so nothing draws a step that is over it back; raise "
            "that, or leave this out",
        )
    if rules.kl_coef and 0 < rules.kl_limit <= rules.kl_budget:
        yield (
            ("learner", "kl_coef"),
            f"is set, and a run fails at learner.kl_limit = {rules.kl_limit:g} before it is over "
            f"learner.kl_budget = {rules.kl_budget:g}, where the term begins; give a smaller "
            "budget",
        )

"""Check settings that contradict each other, or the disk, or that do nothing.

Each check yields the key and, in words, what is wrong and what to do. No message quotes a value
that may hold a secret. Problems are refused by every process; advice is what
`sidecar config check` and `sidecar up` warn of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sidecar.settings.checks.judges import judges, useless_judge_settings
from sidecar.settings.checks.learning import (
    canary,
    learner,
    shortened_ramp,
    useless_best_of_settings,
    useless_group_settings,
)
from sidecar.settings.checks.lines import lines, useless_lines
from sidecar.settings.checks.problem import Problem
from sidecar.settings.checks.reward import reward, useless_reward_settings
from sidecar.settings.checks.serving import engine, listeners, upstreams, useless_sampling_settings
from sidecar.settings.checks.storage import disk, kafka, keys, store
from sidecar.settings.checks.training import useless_learner_settings

if TYPE_CHECKING:
    from sidecar.settings.sections import Settings


def problems(settings: Settings) -> Iterator[Problem]:
    """Yield every problem, in the order of the checks."""
    yield from upstreams(settings)
    yield from lines(settings)
    yield from engine(settings)
    yield from listeners(settings)
    yield from judges(settings)
    yield from reward(settings.reward)
    yield from learner(settings)
    yield from canary(settings)
    yield from kafka(settings)
    yield from store(settings.store.url)
    yield from keys(settings)
    yield from disk(settings)


def advice(settings: Settings) -> Iterator[Problem]:
    """Yield what works with these settings, but does nothing, or less well than it could."""
    yield from useless_sampling_settings(settings)
    yield from useless_lines(settings)
    yield from useless_group_settings(settings)
    yield from useless_judge_settings(settings)
    yield from useless_reward_settings(settings)
    yield from useless_learner_settings(settings)
    yield from useless_best_of_settings(settings)
    yield from shortened_ramp(settings)

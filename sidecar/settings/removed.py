"""Keys of older settings files that are no settings any more, and what took the place of each.

A file or an environment that still has one is no error: the value is left out, or put where the key
has moved, and one line on stderr says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)
"""Settings are read before a process sets up its log: Python then writes the line to stderr."""

ADVANCED = (
    "clip_high", "clip_low", "geometric_limit", "kl_budget", "kl_coef", "negative_bound",
    "stale_limit", "tis_cap", "tv_limit", "warmup_steps",
)  # fmt: skip
"""Keys of `[learner]` that are in `[learner.advanced]` now."""

REMOVED: Mapping[str, str] = {
    "learner.idle_window_s": "IDLE_WINDOW_S in learner.schedule.rule is 300.0",
    "learner.kl_limit": "KL_LIMIT in learner.grpo.base_kl is 10.0",
    "learner.loss_length": "LOSS_LENGTH in learner.grpo.losses is 256",
    "learner.mask_tolerance": "MASK_TOLERANCE in learner.grpo.answers is 0.2",
    "learner.max_grad_norm": "MAX_GRAD_NORM in learner.grpo.optimizer is 1.0",
    "learner.poll_s": "POLL_S in learner.schedule.loop is 2.0",
    "learner.reference_spread": "REFERENCE_SPREAD in learner.grpo.optimizer is 0.25",
}
"""Key -> the constant that took its place, or what holds now."""


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:  # Any: of TOML
    """Return the values of a file or an environment by section, without keys that are removed."""
    found = dict(values)
    for name, section in values.items():
        if isinstance(section, Mapping) and any(is_removed(name, key) for key in section):
            found[name] = of_section(name, section)
            if not found[name]:
                del found[name]
    return found


def of_section(name: str, section: Mapping[str, Any]) -> dict[str, Any]:  # Any: of TOML
    """Return a section without its removed keys, and with those that moved in their new place."""
    kept: dict[str, Any] = {}
    moved: dict[str, Any] = {}
    for key, value in section.items():
        if name == "learner" and key in ADVANCED:
            moved[key] = value
            log.warning("learner.%s is now learner.advanced.%s", key, key)
        elif f"{name}.{key}" in REMOVED:
            log.warning("%s.%s is no longer a setting: %s", name, key, REMOVED[f"{name}.{key}"])
        else:
            kept[key] = value
    if moved:
        kept["advanced"] = moved | dict(kept.get("advanced", {}))
    return kept


def is_removed(section: str, key: str) -> bool:
    """Tell whether a key was a setting, and is none, or has another place."""
    return f"{section}.{key}" in REMOVED or (section == "learner" and key in ADVANCED)

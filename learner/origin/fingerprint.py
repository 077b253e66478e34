"""Everything that must be equal for two runs to end with the same weights, and what differs. Pure.

The same parts on another kind of processor may round otherwise; that is told in the lineage, and no
reason to throw a run's steps away.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner

NOT_OF_THE_RESULT = frozenset(
    {
        "schedule",
        "interval_s",
        "cron",
        "min_groups",
        "max_groups",
        "max_age_versions",
        "adapters_dir",
        "export",
        "idle_below",
        "idle_window_s",
        "memory_fraction",
        "poll_s",
    }
)
"""Settings that decide when a run starts, which groups it takes and where its files go. All others
count, so that a new one does."""

Fingerprint = Mapping[str, Any]
"""Part -> its value, as JSON."""


def fingerprint(
    *,
    settings: Learner,
    base: str,
    base_digest: str | None,
    parent: Parent,
    parent_moments: str | None,
    groups: Sequence[TrainingGroup],
    quiet: int,
    samplers: Mapping[str, Parent],
    libraries: Mapping[str, str],
    commit: str | None,
) -> dict[str, Any]:
    """Return the parts of a run that decide its weights.

    base: `serving.base_model_path`. base_digest: None: not known yet.
    parent_moments: SHA-256 of the optimiser's moments beside the parent; None: it has none.
    groups: as the trainer gets them. commit: of the learner's code; None: not known.
    """
    return {
        "settings": settings_of_result(settings.model_dump(mode="json")),
        "base": base,
        "base_digest": base_digest,
        "parent": {"name": parent.name, "digest": parent.digest, "moments": parent_moments},
        "group_ids": [group.group_id for group in groups],
        "group_ids_sha256": ids_digest([group.group_id for group in groups]),
        "groups_sha256": groups_digest(groups),
        "quiet_groups": quiet,
        "samplers": {name: one.digest for name, one in sorted(samplers.items())},
        "libraries": dict(libraries),
        "commit": commit,
    }


def settings_of_result(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `[learner]` that the weights depend on. section: all of them."""
    return {k: v for k, v in section.items() if k not in NOT_OF_THE_RESULT}


def ids_digest(group_ids: Sequence[str]) -> str:
    """Return the SHA-256 (hex) of the ids, in order, one a line."""
    return hashlib.sha256("".join(f"{one}\n" for one in group_ids).encode()).hexdigest()


def groups_digest(groups: Sequence[TrainingGroup]) -> str:
    """Return the SHA-256 (hex) of everything that the trainer reads of the groups."""
    found = hashlib.sha256()
    for group in groups:
        text = json.dumps(asdict(group), sort_keys=True, separators=(",", ":"))
        found.update(text.encode() + b"\n")
    return found.hexdigest()


def differences(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Say what is not as it was, a few words each; empty: the weights will be the same.

    A part that was not known before is taken for equal.
    """
    found: list[str] = []
    for part in ("settings", "libraries"):
        if part in before:
            found += _of_names(part, _object(before[part]), _object(now.get(part)))
    for part, words in _WORDS.items():
        was, found_now = before.get(part), now.get(part)
        if was is not None and was != found_now:
            found.append(words.format(was=_short(was), now=_short(found_now)))
    return found


_WORDS = {
    "base": "serving.base_model_path was {was} and is {now}",
    "base_digest": "the files of the base model were changed (digest {was}, now {now})",
    "parent": "the parent was {was} and is {now}",
    "group_ids": "other groups: some were removed, or are not usable any more",
    "groups_sha256": "the content of the groups was changed",
    "quiet_groups": "{was} quiet groups were left out, and {now} are",
    "samplers": "the adapters that sampled the groups were changed",
    "commit": "the learner's code was commit {was} and is {now}",
}


def _of_names(part: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    prefix = "learner." if part == "settings" else ""
    return [
        f"{prefix}{name} was {_short(before.get(name))} and is {_short(now.get(name))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _short(value: object) -> str:
    if isinstance(value, Mapping):  # the parent
        digest = str(value.get("digest") or "")[:12]
        moments = str(value.get("moments") or "none")[:12]
        return f"{value.get('name')} ({digest or 'no digest'}, moments {moments})"
    text = str(value)
    is_digest = len(text) in (40, 64) and all(c in "0123456789abcdef" for c in text)
    return text[:12] if is_digest else text

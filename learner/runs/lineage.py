"""An adapter's lineage, with the origin of its weights: `lineage.json` and the model card.

The lineage holds everything that is known when the folder is sealed. Later events (the adapter's
version, its canary, its end) are in the store's audit, because the folder never changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import select

from ingest.records import ScoredGroup
from ingest.tasks.material import TaskGroup
from learner.adapter_folder import CARD, CURVES, LINEAGE
from learner.origin import (
    CACHE,
    base_digest,
    code_version,
    groups_digest,
    ids_digest,
    library_versions,
    machine,
)
from learner.records import CheckedAnswers, TrainingOutcome
from learner.runs.material import Material, noise_json
from learner.runs.selection import SpreadGate, mask_reason, score_masks
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import ExchangeRow

ACTOR = "learner"
FILTERS = ("max_age_versions", "min_groups", "max_groups", "pack_tokens")
"""Settings that decide which of the waiting groups a run takes."""
FORMAT = 3
"""Runs of 1 and 2 took other steps: they cannot be replayed."""


def write_documents(
    folder: Path,
    database: Database,
    settings: Settings,
    run_id: str,
    material: Material,
    outcome: TrainingOutcome,
    deaths: Sequence[Mapping[str, Any]],
    *,
    now: float,
) -> None:
    """Write the lineage and the card of a run beside the weights that it made.

    It reads the base's files, unless their hashes are kept.
    deaths: where it was killed, and resumed. Raises: OSError, StoreError.
    """
    first, last = outcome.metrics[0], outcome.metrics[-1]
    learner, parent, groups = settings.learner, material.parent, material.selection.groups
    base_path, gates = settings.serving.base_model_path, material.selection.gates
    base = base_digest(base_path, settings.state_dir / CACHE)
    scored, references = material.scored, material.selection.references
    lineage = {
        "format": FORMAT,
        "run_id": run_id,
        "created_at": now,
        "model": settings.line.name,
        "actor": ACTOR,
        "base_model": base_path,
        "base": {
            "model": base_path,
            "revision": "" if base is None else base.revision,
            "digest": None if base is None else base.digest,
        },
        "parent": {"name": parent.name, "version": parent.version, "digest": parent.digest},
        "window": {
            **_exchanges(database, material),
            "groups": len(groups),
            "group_ids_sha256": ids_digest([group.group_id for group in groups]),
            "groups_sha256": groups_digest(groups),
            "filters": {name: getattr(learner, name) for name in FILTERS},
        },
        "libraries": library_versions(),
        "code": asdict(code_version()),
        "hardware": {**machine(), "device": learner.device},
        "groups": [
            _describe(
                group,
                outcome.answers.get(group.group.group_id, CheckedAnswers()),
                gates.get(group.group.group_id),
                references.get(group.group.group_id),
            )
            for group in scored
        ],
        "task_groups": [_describe_task(one) for one in material.tasks],
        "dropped": dict(material.left_out),
        "judges": sorted({(group.judge_model, group.rubric_hash) for group in scored}),
        "judge_noise": noise_json(material.noise),
        "settings": learner.model_dump(mode="json"),
        "algorithm": dict(outcome.algorithm),
        "reward": {"before": first.reward_mean, "after": None},
        "kl": {"to_behaviour": last.approx_kl, "to_base": outcome.algorithm.get("kl_to_base")},
        "evaluation": None,
        "curves": CURVES if (folder / CURVES).is_file() else None,
        "resumed": [dict(one) for one in deaths],
        "drift": asdict(outcome.drift) if outcome.drift is not None else None,
        "metrics": [asdict(step) for step in outcome.metrics],
    }
    text = json.dumps(lineage, indent=1, ensure_ascii=False) + "\n"
    (folder / LINEAGE).write_text(text, encoding="utf-8")
    (folder / CARD).write_text(render_card(lineage), encoding="utf-8")


def render_card(lineage: Mapping[str, Any]) -> str:
    """Render the folder's README.md, a model card that PEFT and the Hugging Face Hub understand."""
    first, last = lineage["metrics"][0], lineage["metrics"][-1]
    used, of_tasks = str(len(lineage["groups"])), len(lineage["task_groups"])
    if of_tasks:
        used += f" of answers and {of_tasks} of whole sessions"
    return f"""---
base_model: {json.dumps(lineage["base_model"])}
library_name: peft
pipeline_tag: text-generation
tags: [lora, grpo]
---

# LoRA for {lineage["model"]}

Learned from live traffic by learning-sidecar: GRPO on answers that the served model gave, each
group of answers to one prompt scored against itself by a judge. Run {lineage["run_id"]},
continuing from {lineage["parent"]["name"]}.

| | |
|---|---|
| groups | {used} used, {len(lineage["dropped"])} left out |
| judge | {", ".join(name for name, _ in lineage["judges"])} |
| optimiser steps | {len(lineage["metrics"])} |
| mean score of the training answers | {first["reward_mean"]:.3f} in the first step |
| KL to the behaviour policy | {last["approx_kl"]:.5f} nats a token in the last step |

`lineage.json` names every exchange, score and setting it was made from.
"""


def _describe(
    scored: ScoredGroup, checked: CheckedAnswers, gate: SpreadGate | None, reference: float | None
) -> dict[str, Any]:
    return {
        "group_id": scored.group.group_id,
        "exchange_id": scored.group.exchange_id,
        "adapter": scored.group.adapter,
        "judge_model": scored.judge_model,
        "rubric_hash": scored.rubric_hash,
        "scores": _numbers(scored.scores),
        "rewards": _numbers(scored.rewards),
        "independent_rewards": _numbers(scored.rewarded.independent) if scored.rewarded else [],
        "reward_rule": dict(scored.rewarded.rule) if scored.rewarded else None,
        "least_spread": gate.least if gate is not None else None,
        "noise_sd": gate.noise_sd if gate is not None else None,
        "reference_spread": reference,
        "masked": [
            checked.left_out.get(place)
            or of_score
            or (None if place in checked.recomputed else mask_reason(answer))
            for place, (answer, of_score) in enumerate(
                zip(scored.group.answers, score_masks(scored), strict=True)
            )
        ],
        "masked_by": scored.group.masked_by,
        "masked_tokens": [
            checked.masked_tokens.get(place, 0) for place in range(len(scored.group.answers))
        ],
        "recomputed": list(checked.recomputed),
    }


def _describe_task(task: TaskGroup) -> dict[str, Any]:
    return {
        "group_id": task.group_id,
        "key_kind": task.key_kind,
        "adapter": task.adapter,
        "judge_model": task.judge_model or None,
        "rubric_hash": task.rubric_hash or None,
        "sessions": [
            {
                "session_id": one.session_id,
                "exchange_ids": list(one.exchange_ids),
                "reward": one.reward,
                "source": one.source,
                "steps": list(one.steps),
            }
            for one in task.sessions
        ],
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Return the values; None, for which JSON has a word, in the place of what is no number."""
    return [value if math.isfinite(value) else None for value in values]


def _exchanges(database: Database, material: Material) -> dict[str, Any]:
    ids = [one.group.exchange_id for one in material.scored]
    ids += [name for task in material.tasks for one in task.sessions for name in one.exchange_ids]
    statement = select(ExchangeRow.started_at, ExchangeRow.exchange_id)
    with database.read() as session:
        rows = session.execute(statement.where(ExchangeRow.exchange_id.in_(ids))).all()
    found = sorted((at, one) for at, one in rows)
    ends = (found[0], found[-1]) if found else ((None, None), (None, None))
    return {
        name: {"exchange_id": exchange_id, "started_at": at}
        for name, (at, exchange_id) in zip(("first_exchange", "last_exchange"), ends, strict=True)
    }

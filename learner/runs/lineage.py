"""Build an adapter's lineage: `lineage.json` and the model card. Pure.

The lineage holds everything that is known when the folder is sealed. Later events (the adapter's
version, its canary, its end) are in the store's audit, because the folder never changes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ingest.records import ScoredGroup
from learner.records import CheckedAnswers, TrainingOutcome
from learner.runs.selection import mask_reason, score_masks
from learner.runs.spread_gate import Noise, SpreadGate
from sidecar.settings import Learner

ACTOR = "learner"
FORMAT = 2
"""1 had no `base`, `window`, `code`, `hardware`, `reward`, `kl` and `curves`."""


def build_lineage(
    *,
    run_id: str,
    created_at: float,
    model: str,
    origin: Mapping[str, Any],
    groups: Sequence[ScoredGroup],
    dropped: Mapping[str, str],
    settings: Learner,
    gates: Mapping[str, SpreadGate],
    noise: Noise,
    outcome: TrainingOutcome,
    curves: str | None = None,
    resumed: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Build the record that explains an adapter and allows to reproduce it.

    created_at: Unix seconds. groups: the groups trained on. dropped: group id -> reason, for the
    groups that the run left out. gates: group id -> the least spread of its scores. noise: of the
    judges, as it was measured when the groups were selected. origin: base, parent, window,
    libraries, code and hardware (`learner.runs.origins`). curves: file of the steps' figures, in
    the folder. resumed: where the run was killed, and went on.
    """
    first, last = outcome.metrics[0], outcome.metrics[-1]
    return {
        "format": FORMAT,
        "run_id": run_id,
        "created_at": created_at,
        "model": model,
        "actor": ACTOR,
        "base_model": origin["base"]["model"],
        **origin,
        "groups": [
            _describe(
                group,
                outcome.answers.get(group.group.group_id, CheckedAnswers()),
                gates.get(group.group.group_id),
            )
            for group in groups
        ],
        "dropped": dict(dropped),
        "judges": sorted({(group.judge_model, group.rubric_hash) for group in groups}),
        "judge_noise": [asdict(one) for _, one in sorted(noise.items())],
        "settings": settings.model_dump(mode="json"),
        "seed": settings.seed,
        "algorithm": dict(outcome.algorithm),
        "reward": {"before": first.reward_mean, "after": None},
        "kl": {"to_behaviour": last.approx_kl, "to_base": outcome.algorithm.get("kl_to_base")},
        "evaluation": None,
        "curves": curves,
        "resumed": [dict(one) for one in resumed],
        "drift": asdict(outcome.drift) if outcome.drift is not None else None,
        "metrics": [asdict(step) for step in outcome.metrics],
    }


def render_lineage(lineage: Mapping[str, Any]) -> str:
    """Render the text of `lineage.json`."""
    return json.dumps(lineage, indent=1, ensure_ascii=False) + "\n"


def render_card(lineage: Mapping[str, Any]) -> str:
    """Render the folder's README.md, a model card that PEFT and the Hugging Face Hub understand."""
    first, last = lineage["metrics"][0], lineage["metrics"][-1]
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
| groups | {len(lineage["groups"])} used, {len(lineage["dropped"])} left out |
| judge | {", ".join(name for name, _ in lineage["judges"])} |
| optimiser steps | {len(lineage["metrics"])} |
| mean score of the training answers | {first["reward_mean"]:.3f} in the first step |
| KL to the behaviour policy | {last["approx_kl"]:.5f} nats a token in the last step |

`lineage.json` names every exchange, score and setting it was made from.
"""


def _describe(
    scored: ScoredGroup, checked: CheckedAnswers, gate: SpreadGate | None
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


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Return the values; None, for which JSON has a word, in the place of what is no number."""
    return [value if math.isfinite(value) else None for value in values]

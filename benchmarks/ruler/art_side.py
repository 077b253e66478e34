"""Score groups with openpipe-art's own `ruler_score_group`; runs in its environment, not in ours.

    .bench/peers/openpipe-art/bin/python art_side.py JOBS.json RESULTS.json

JOBS: `{"api_base", "jobs": [{"model", "groups": [{"context", "tools", "answers"}]}]}`. RESULTS: for
each job a list of `{"scores": [...]}` or `{"error": ...}`. Nothing of openpipe-art is changed; the
judge is asked about eight groups at a time.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

AT_ONCE = 8
# At import LiteLLM would download a list of prices, and Weave would look for an account.
os.environ.update({"LITELLM_LOCAL_MODEL_COST_MAP": "True", "WEAVE_DISABLED": "true"})
Json = dict[str, Any]


def main(jobs: Path, results: Path) -> int:
    found = asyncio.run(_all(json.loads(jobs.read_text())))
    results.write_text(json.dumps(found))
    return 0


async def _all(work: Json) -> list[list[Json]]:
    art: Any = importlib.import_module("art")  # no package of this repository's environment
    rewards: Any = importlib.import_module("art.rewards")
    places = asyncio.Semaphore(AT_ONCE)
    parameters = {"api_base": work["api_base"], "api_key": "none-is-asked"}

    async def one(model: str, group: Json) -> Json:
        trajectories = [
            art.Trajectory(
                messages_and_choices=[*group["context"], answer],
                tools=group["tools"] or None,
                reward=0.0,
            )
            for answer in group["answers"]
        ]
        async with places:
            try:
                scored = await rewards.ruler_score_group(
                    art.TrajectoryGroup(trajectories), f"openai/{model}", parameters
                )
            except Exception as error:  # noqa: BLE001 - whatever it raises is a group without scores
                return {"error": f"{type(error).__name__}: {error}"[:300]}
        return {"scores": [trajectory.reward for trajectory in scored.trajectories]}

    return [
        list(await asyncio.gather(*(one(job["model"], group) for group in job["groups"])))
        for job in work["jobs"]
    ]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

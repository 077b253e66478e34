"""Both sides score the same groups: ours here, openpipe-art's in its own environment."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ruler.conditions import condition_of
from benchmarks.ruler.material import MadeGroup
from benchmarks.ruler.server import ROOT
from ingest.errors import IngestError
from ingest.ruler.judge import LiteLlmJudge
from ingest.ruler.ruler import SEED_BITS, score_answers
from sidecar.settings import Judge as JudgeSettings

ART_PYTHON = ROOT / ".bench/peers/openpipe-art/bin/python"
ART, OURS, OURS_TWICE = "art", "ours", "ours-2"
"""A side's name; ours with one pass, and with the two that are shipped."""
PASSES = {OURS: 1, OURS_TWICE: 2}
AT_ONCE = 8
ART_S = 900.0


class NoArtError(Exception):
    """openpipe-art is not there or failed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one side made of one group."""

    scores: tuple[float, ...] | None
    """[G] rewards, as the learner would get them; None: it has none."""
    error: str = ""


def art_scores(
    work: Mapping[str, Sequence[MadeGroup]], url: str, folder: Path
) -> dict[str, list[Outcome]]:
    """Score the groups of each condition with `ruler_score_group`. Raises: NoArtError."""
    if not ART_PYTHON.is_file():
        raise NoArtError("no openpipe-art here; run benchmarks/ruler/setup")
    jobs = [
        {
            "model": f"{name}--{ART}",
            "groups": [
                {"context": one.context, "tools": one.tools, "answers": one.answers} for one in made
            ],
        }
        for name, made in work.items()
    ]
    asked, told = folder / "art-jobs.json", folder / "art-results.json"
    asked.write_text(json.dumps({"api_base": url, "jobs": jobs}))
    script = Path(__file__).with_name("art_side.py")
    with (folder / "art.log").open("ab") as log:
        done = subprocess.run(
            [str(ART_PYTHON), "-P", str(script), str(asked), str(told)],
            cwd=folder,
            stdout=log,
            stderr=log,
            timeout=ART_S,
            check=False,
        )
    if done.returncode:
        last = (folder / "art.log").read_text(errors="replace")[-500:]
        raise NoArtError(f"openpipe-art ended with {done.returncode}: {last}")
    found = json.loads(told.read_text())
    return {
        name: [
            Outcome(
                scores=tuple(one["scores"]) if "scores" in one else None,
                error=one.get("error", ""),
            )
            for one in outcomes
        ]
        for name, outcomes in zip(work, found, strict=True)
    }


async def our_scores(name: str, made: Sequence[MadeGroup], url: str, side: str) -> list[Outcome]:
    """Score the groups of a condition as the product does: its prompt, client and parser."""
    settings = JudgeSettings(
        model=f"openai/{name}--{side}",
        api_base=url,
        api_key="none-is-asked",
        context_tokens=condition_of(name).limit or 0,
    )
    judge = LiteLlmJudge(settings)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, group: MadeGroup) -> Outcome:
        async with places:
            try:
                judgement = await score_answers(
                    judge,
                    context=group.context,
                    tools=group.tools,
                    answers=group.answers,
                    rubric=settings.rubric,
                    passes=PASSES[side],
                    seed=number * 7919 % 2**SEED_BITS,
                )
            except IngestError as error:
                return Outcome(scores=None, error=f"{type(error).__name__}: {error}"[:300])
        return Outcome(scores=judgement.scores)

    try:
        return list(await asyncio.gather(*(one(*numbered) for numbered in enumerate(made))))
    finally:
        await judge.aclose()

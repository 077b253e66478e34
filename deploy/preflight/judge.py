"""Ask the judge one small question, on the path that every group takes."""

from __future__ import annotations

import re

from deploy.examiner import examiner_of
from deploy.preflight.findings import Finding, error, warning
from ingest.errors import JudgeRejectedError
from ingest.ruler.group import SetAside, Unanswered
from ingest.ruler.judge import LiteLlmJudge
from ingest.ruler.probe import ask_probe
from sidecar.settings import Judge, Settings

KEY_WORDS = re.compile(r"\b40[13]\b|authenticat|api[ _-]?key", re.IGNORECASE)
"""How LiteLLM and providers say that a key is missing or wrong."""
LONGEST_S = 30.0
"""Longest wait for the judge. A judge that takes longer for two lines is too slow for groups."""


NO_JUDGE = warning(
    "judge.model",
    "there is no judge: the sidecar relays and records, and learns nothing; name a LiteLLM model",
    "no_judge",
)


async def check_judge(settings: Judge, section: str = "judge") -> Finding | None:
    """Send the judge one group of two answers; that is one paid call of about 600 tokens.

    section: of the settings, that names this judge.
    """
    if not settings.model:
        return NO_JUDGE
    timeout_s = min(settings.timeout_s, LONGEST_S)
    judge = LiteLlmJudge(settings.model_copy(update={"timeout_s": timeout_s}))
    try:
        outcome = await ask_probe(judge, settings, seed=0, on_call=lambda _: None)
    finally:
        await judge.aclose()
    if isinstance(outcome, (SetAside, Unanswered)):
        key = _about_key(outcome)
        return error(
            f"{section}.api_key" if key else f"{section}.model",
            outcome.detail,
            f"{section}_key" if key else section,
        )
    return None


async def check_gate_judge(settings: Settings) -> Finding | None:
    """Ask the gate's own judge, as `check_judge`; warn where it is that of the reward."""
    if settings.gate_judge.model:
        found = await check_judge(settings.judge_of_gate, "gate_judge")
        if found is not None:
            return found
    examiner = examiner_of(settings)
    return warning("gate_judge.model", examiner.warning, "own_exam") if examiner.warning else None


def _about_key(outcome: SetAside | Unanswered) -> bool:
    about_key = KEY_WORDS.search(outcome.detail) is not None
    return outcome.reason == JudgeRejectedError.reason and about_key

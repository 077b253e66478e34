"""Ask the judge one small question, on the path that every group takes."""

from __future__ import annotations

import re

from deploy.preflight.findings import Finding, error, warning
from ingest.errors import JudgeRejectedError
from ingest.ruler.group import SetAside, Unanswered
from ingest.ruler.judge import LiteLlmJudge
from ingest.ruler.probe import ask_probe
from sidecar.settings import Judge

KEY_WORDS = re.compile(r"\b40[13]\b|authenticat|api[ _-]?key", re.IGNORECASE)
"""How LiteLLM and providers say that a key is missing or wrong."""
LONGEST_S = 30.0
"""Longest wait for the judge. A judge that takes longer for two lines is too slow for groups."""


NO_JUDGE = warning(
    "judge.model",
    "there is no judge: the sidecar relays and records, and learns nothing; name a LiteLLM model",
    "no_judge",
)


async def check_judge(settings: Judge) -> Finding | None:
    """Send the judge one group of two answers; that is one paid call of about 300 tokens."""
    if not settings.model:
        return NO_JUDGE
    timeout_s = min(settings.timeout_s, LONGEST_S)
    judge = LiteLlmJudge(settings.model_copy(update={"timeout_s": timeout_s}))
    try:
        outcome = await ask_probe(judge, settings, seed=0, on_call=lambda _: None)
    finally:
        await judge.aclose()
    if isinstance(outcome, (SetAside, Unanswered)):
        cause = _cause(outcome)
        return error(
            "judge.api_key" if cause == "judge_key" else "judge.model", outcome.detail, cause
        )
    return None


def _cause(outcome: SetAside | Unanswered) -> str:
    about_key = KEY_WORDS.search(outcome.detail) is not None
    return "judge_key" if outcome.reason == JudgeRejectedError.reason and about_key else "judge"

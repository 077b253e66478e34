"""Ask the judge one small question, on the path that every group takes."""

from __future__ import annotations

import asyncio
import re

from deploy.examiner import examiner_of
from deploy.preflight.findings import Finding, error, warning
from ingest.errors import JudgeRejectedError
from ingest.judges.build import each_judge
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


async def check_judges(settings: Settings) -> list[Finding]:
    """Ask every judge that the settings name, side by side: the reward's with its fallbacks, and
    the gate's own. Each is one paid call of about 600 tokens, outside of the budgets.

    All in one event loop, and closed when all have answered: LiteLLM keeps its connections in one
    table for all, which must not change while it is closed.
    """
    asked: list[_Asked] = []
    if settings.groups.rate > 0:
        first, *fallbacks = each_judge(settings.judge)
        asked.append(_Asked(first, "judge"))
        asked += [_Asked(one, f"judge.fallbacks[{n}]") for n, one in enumerate(fallbacks)]
    if settings.gate_judge.model:
        asked.append(_Asked(settings.judge_of_gate, "gate_judge"))
    try:
        found = await asyncio.gather(*(one.ask() for one in asked))
    finally:
        for one in asked:
            await one.judge.aclose()
    findings = [finding for finding in found if finding is not None]
    examiner = examiner_of(settings)
    if examiner.warning and not any(one.setting.startswith("gate_judge.") for one in findings):
        findings.append(warning("gate_judge.model", examiner.warning, "own_exam"))
    return findings


class _Asked:
    """One judge, and the section of the settings that names it."""

    def __init__(self, settings: Judge, section: str) -> None:
        timeout_s = min(settings.timeout_s, LONGEST_S)
        self.judge = LiteLlmJudge(settings.model_copy(update={"timeout_s": timeout_s}))
        self._settings = settings
        self._section = section

    async def ask(self) -> Finding | None:
        """Send one group of two answers, on the path that every group takes."""
        settings, section = self._settings, self._section
        if not settings.model:
            return NO_JUDGE
        outcome = await ask_probe(self.judge, settings, seed=0, on_call=lambda _: None)
        if not isinstance(outcome, (SetAside, Unanswered)):
            return None
        key = _about_key(outcome)
        setting = f"{section}.api_key" if key else f"{section}.model"
        if section.startswith("judge.fallbacks"):  # while others work, its fault costs nothing yet
            text = f"the fallback {settings.model} would not help: {outcome.detail}"
            return warning(setting, text, "judge_fallback")
        return error(setting, outcome.detail, f"{section}_key" if key else section)


def _about_key(outcome: SetAside | Unanswered) -> bool:
    about_key = KEY_WORDS.search(outcome.detail) is not None
    return outcome.reason == JudgeRejectedError.reason and about_key

"""Ask the judge one small question, on the path that every group takes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from deploy.examiner import examiner_of
from deploy.preflight.findings import Finding, error, warning
from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeNoCreditError,
    JudgeRejectedError,
    JudgeUnavailableError,
)
from ingest.judge_watch.advice import advice
from ingest.judges.build import each_judge
from ingest.ruler.group import SetAside, Unanswered
from ingest.ruler.judge import LiteLlmJudge
from ingest.ruler.probe import ask_probe
from sidecar.settings import Judge, Settings

KEY_WORDS = re.compile(r"\b40[13]\b|authenticat|api[ _-]?key", re.IGNORECASE)
"""How LiteLLM and providers say that a key is missing or wrong."""
LONGEST_S = 30.0
"""Longest wait for the judge. A judge that takes longer for two lines is too slow for groups."""


_SETTINGS: Final[Mapping[str, str]] = {
    JudgeUnavailableError.reason: "api_base",
    JudgeGarbledError.reason: "api_base",
    JudgeNoCreditError.reason: "api_key",
    JudgeBusyError.reason: "requests_per_minute",
}
"""Reason for which a judge gave no scores -> the setting that concerns it."""
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
        setting = f"{section}.{'api_key' if key else _SETTINGS.get(outcome.reason, 'model')}"
        detail = f"{outcome.detail}{_wait_of(outcome)}"
        to_do = (
            f"set {section}.api_key, or the variable of the judge's provider, to a key that it "
            "takes, and restart score and control"
            if key
            else advice(outcome.reason, section)
        )
        if section.startswith("judge.fallbacks"):  # while others work, its fault costs nothing yet
            text = f"the fallback {settings.model} would not help: {detail}; {to_do}"
            return warning(setting, text, "judge_fallback")
        return error(setting, f"{detail}; {to_do}", f"{section}_key" if key else section)


def _wait_of(outcome: SetAside | Unanswered) -> str:
    """Say what a rate limit is, and until when its provider wants to be left alone."""
    if outcome.reason != JudgeBusyError.reason:
        return ""
    wait_s = outcome.retry_after_s if isinstance(outcome, Unanswered) else 0.0
    until = datetime.now(UTC) + timedelta(seconds=wait_s)
    asked = f"; it asks to wait {wait_s:,.0f} s, until {until:%H:%M:%S} UTC" if wait_s else ""
    return f" (a rate limit of the provider, no wrong setting{asked})"


def _about_key(outcome: SetAside | Unanswered) -> bool:
    about_key = KEY_WORDS.search(outcome.detail) is not None
    return outcome.reason == JudgeRejectedError.reason and about_key

"""Refuse settings under which no group could be judged, or a verifier could check no answer.

These checks need the prompt of the judge and the verifiers, which the data plane must not load.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ingest.errors import JudgeTooLongError
from sidecar.errors import SettingsError
from sidecar.settings import EntryPointVerifier, Settings
from sidecar.settings import Judge as JudgeSettings
from sidecar.settings.reward import JsonSchemaVerifier

WINDOW = "num_ctx"
"""Ollama's name of the context's size, in `judge.params`."""
SHORT = "yes"
"""An answer, and a question, of one token."""


def refuse_useless(settings: Settings) -> None:
    """Raises: SettingsError, one line: what, why, what to do."""
    for section, judge, answers in _judges(settings):
        _refuse_small_context(section, judge, answers)
    for name, one in settings.reward.verifiers.items():
        if isinstance(one, JsonSchemaVerifier) and one.json_schema is not None:
            _refuse_bad_schema(name, one)
        if isinstance(one, EntryPointVerifier):
            _refuse_unknown_entry_point(name, one.entry_point)


def _judges(settings: Settings) -> Iterator[tuple[str, JudgeSettings, int]]:
    from ingest.judges.build import each_judge

    first, *others = each_judge(settings.judge)
    yield "judge", first, settings.groups.size
    for one in others:
        yield "judge.fallbacks", one, settings.groups.size
    if settings.gate_judge.model:
        yield "gate_judge", settings.judge_of_gate, 2 * settings.canary.gate_answers


def _refuse_small_context(section: str, judge: JudgeSettings, answers: int) -> None:
    window = judge.params.get(WINDOW)
    set_here, key = judge.context_tokens, "context_tokens"
    if not set_here and isinstance(window, int):
        set_here, key = window, f"params.{WINDOW}"
    if set_here <= 0:
        return
    from ingest.ruler.prompt import build_prompt

    longest = max((judge.of(project).rubric for project in ("", *judge.projects)), key=len)
    try:
        build_prompt(
            context=[{"role": "user", "content": SHORT}],
            tools=[],
            answers=[{"role": "assistant", "content": SHORT}] * answers,
            rubric=longest,
            rng=random.Random(0),
            context_tokens=set_here,
        )
    except JudgeTooLongError:
        raise SettingsError(
            f"setting {section}.{key}: {set_here} holds not even {answers} answers of one word "
            "with the instructions, the rubric and the reply, so every group would be set aside "
            "(judge_too_long); give the size of the judge's context, or 0 where it is not known"
        ) from None


def _refuse_bad_schema(name: str, settings: JsonSchemaVerifier) -> None:
    from ingest.verifiers.schemas import NoSchemaError, why_invalid

    try:
        why_invalid(None, settings.json_schema)
    except NoSchemaError as error:
        raise SettingsError(
            f"setting reward.verifiers.{name}.json_schema: is no JSON schema ({error}), so the "
            "verifier would check nothing; correct it"
        ) from None


def _refuse_unknown_entry_point(name: str, wanted: str) -> None:
    from ingest.verifiers.loading import LoadError, find_entry_point

    try:
        find_entry_point(wanted)
    except LoadError as error:
        raise SettingsError(f"setting reward.verifiers.{name}.entry_point: {error}") from None

"""The scripted judge: it knows what each answer is worth, and errs as its traits say. Pure.

Chance is drawn from the seed, the answers in the order shown and the number of the attempt. So a
prompt gets the same reply each time, and one that shows the answers in the same order gets the same
scores, whoever wrote it.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.ruler.reading import Reading, read_prompt

CASE = re.compile(r"case-[a-z]{8}")
IDEAL = 1.0
"""Worth of a text without a case: what an attacker shows as an answer looks flawless."""
STUBBORN = 0.2
"""Share of defective replies that are defective again after the judge was told."""
WHY = "It says what to do next and follows the policy, but leaves one question open."
Defect = Literal["", "ten_scale", "negative", "nan", "nan_text", "missing", "doubled", "one_more"]
Entry = dict[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a judge does well and badly."""

    slope: float = 0.0
    """What the first position gets more than the last, evenly between; centred on 0."""
    noise: float = 0.05
    """Standard deviation of what chance adds to each score."""
    step: float = 0.01
    """Scores are multiples of it."""
    best_first: bool = False
    """Entries stand by score, the best first, instead of in the order shown."""
    wrap: Literal["", "fence", "prose"] = ""
    """Stands around the JSON."""
    defects: tuple[Defect, ...] = ()
    """A reply that errs has one of these."""
    share: float = 0.3
    """Share of replies that err."""
    reads: Reading = "blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """A reply, and what the judge meant by it."""

    text: str
    cases: tuple[str, ...]
    """Cases in the order shown."""
    meant: tuple[float, ...]
    """[len(cases)] the score that the judge gave to each, before any defect of form."""


def reply_to(
    messages: Sequence[Mapping[str, str]],
    traits: Traits,
    truth: Mapping[str, float],
    *,
    seed: str = "",
) -> ScriptedReply:
    """Answer a conversation. truth: case -> worth, 0..1."""
    shown = read_prompt(messages, traits.reads)
    found = [CASE.search(text) for _, text in shown.answers]
    cases = [case[0] if case is not None else "" for case in found]
    attempt = len(messages) // 2
    rng = random.Random(f"{seed} {cases} {attempt}")
    scores = [
        _score(traits, truth.get(case, IDEAL), place / max(1, len(cases) - 1), rng)
        for place, case in enumerate(cases)
    ]
    entries: list[Entry] = [
        {shown.key: name, "explanation": WHY, "score": shown.orders.get(name, score)}
        for (name, _), score in zip(shown.answers, scores, strict=True)
    ]
    if traits.best_first:
        entries.sort(key=lambda entry: -entry["score"])
    errs = rng.random() < traits.share and (attempt < 2 or rng.random() < STUBBORN)
    if traits.defects and entries and errs:
        entries = DEFECTS[rng.choice(traits.defects)](entries, rng)
    text = json.dumps({"scores": entries})
    return ScriptedReply(
        text=WRAPS[traits.wrap].format(text), cases=tuple(cases), meant=tuple(scores)
    )


def _score(traits: Traits, worth: float, place: float, rng: random.Random) -> float:
    """place: 0 for the first answer, 1 for the last."""
    score = worth + traits.slope * (0.5 - place) + rng.gauss(0.0, traits.noise)
    return round(min(1.0, max(0.0, round(score / traits.step) * traits.step)), 4)


def _changed(
    change: Callable[[float], object],
) -> Callable[[list[Entry], random.Random], list[Entry]]:
    """One entry has another score."""

    def defect(entries: list[Entry], rng: random.Random) -> list[Entry]:
        entry = rng.choice(entries)
        entry["score"] = change(entry["score"])
        return entries

    return defect


def _missing(entries: list[Entry], rng: random.Random) -> list[Entry]:
    entries.pop(rng.randrange(len(entries)))
    return entries


def _doubled(entries: list[Entry], rng: random.Random) -> list[Entry]:
    """An entry stands a second time in place of another one."""
    kept, lost = rng.sample(range(len(entries)), 2)
    entries[lost] = dict(entries[kept])
    return entries


def _one_more(entries: list[Entry], rng: random.Random) -> list[Entry]:
    return [*entries, dict(rng.choice(entries))]


DEFECTS: Mapping[str, Callable[[list[Entry], random.Random], list[Entry]]] = {
    "ten_scale": _changed(lambda score: round(score * 10 + 1, 2)),
    "negative": _changed(lambda score: -score - 0.1),
    "nan": _changed(lambda _: math.nan),
    "nan_text": _changed(lambda _: "NaN"),
    "missing": _missing,
    "doubled": _doubled,
    "one_more": _one_more,
}
WRAPS = {
    "": "{}",
    "fence": "```json\n{}\n```",
    "prose": "Here are my scores:\n\n{}\n\nThe last one was close.",
}

"""Read the recorded traffic, and play what a group of each prompt costs and shows. Pure but `read`.

Sampling is played as the product does it: the served answer and seven candidates, which end after
four answers that are all alike (`ingest.sampling.round`). A group has a spread when the rule
of its prompt gives its answers different scores.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.groups.prompts import SEED, Prompt, make_prompts, score
from ingest.grouping.features import Features, opening_key, surprisals
from ingest.grouping.same_prompt import MIN_FREE
from ingest.intake.choose import EARLIER
from ingest.sampling.round import ALIKE_ENOUGH

FILE: Final = Path(__file__).with_name("recorded.json.xz")
"""The first recording: the weights are fitted on it, and openings have their history in it."""
LATER: Final = Path(__file__).with_name("recorded-later.json.xz")
"""Made when nothing was fitted or chosen any more, of other prompts of the same kinds."""
LATER_SEED: Final = 41


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One prompt of the traffic."""

    kind: str
    opening: str
    features: Features
    spread: bool
    tokens: int
    """Sampled for its group."""
    free_spread: bool
    """Its served answers alone are a group with a spread, and nothing is sampled."""
    served: int


def read(path: Path = FILE, seed: int = SEED) -> list[Step]:
    """Read a recording. seed: that its prompts were made with. Raises: OSError, ValueError."""
    prompts = make_prompts(seed)
    found = json.loads(lzma.decompress(path.read_bytes()))
    return [_step(prompts[at], answers) for at, answers in found]


def _step(prompt: Prompt, answers: Sequence[Sequence[Any]]) -> Step:
    """answers: [text, finish reason, tokens, log-probabilities in hundredths of a nat or none]."""
    texts = [text for text, *_ in answers]
    scores = [score(prompt, text, reason) for text, reason, *_ in answers]
    lengths = [tokens for _, _, tokens, _ in answers]
    first, *more = (0, *range(prompt.served, len(answers)))
    alike = len({texts[at] for at in (first, *more[: ALIKE_ENOUGH - 1])}) == 1
    sampled = more[: ALIKE_ENOUGH - 1] if alike else more
    group = [scores[at] for at in (first, *more)]
    request = {"messages": [{"role": "system", "content": prompt.system}]}
    served = scores[: prompt.served]
    surprisal, forks = surprisals([one / 100 for one in answers[0][3]])
    return Step(
        kind=prompt.kind,
        opening=opening_key("default", request),
        features=Features(
            surprisal=surprisal,
            forks=forks,
            recorded=True,
            cut=answers[0][1] == "length",
            tokens=lengths[0],
            tool_choice="choose one tool" in prompt.system,
            final_answer="choose one tool" not in prompt.system,
        ),
        spread=not alike and max(group) > min(group),
        tokens=sum(lengths[at] for at in sampled),
        free_spread=prompt.served >= MIN_FREE and max(served) > min(served),
        served=prompt.served,
    )


def seen() -> list[Step]:
    """Return the first recording. Each step knows the groups of its opening, but for its own."""
    steps = read()
    return told(steps, steps, own=True)


def later() -> list[Step]:
    """Return the later recording. Each step knows the groups of its opening in the first one."""
    return told(read(LATER, LATER_SEED), read(), own=False)


def told(steps: Sequence[Step], history: Sequence[Step], *, own: bool) -> list[Step]:
    """Return the steps with what is known of their openings. own: they are the history's."""
    groups = Counter(one.opening for one in history)
    spread = Counter(one.opening for one in history if one.spread)
    return [
        _with_earlier(one, groups[one.opening] - own, spread[one.opening] - (own and one.spread))
        for one in steps
    ]


def _with_earlier(step: Step, groups: int, spread: int) -> Step:
    if groups > EARLIER:
        groups, spread = EARLIER, round(spread * EARLIER / groups)
    features = replace(step.features, earlier=groups, earlier_spread=spread)
    return replace(step, features=features)


def without_earlier(steps: Sequence[Step]) -> list[Step]:
    """Return the steps as if nothing was known of their openings."""
    return [_with_earlier(one, 0, 0) for one in steps]

"""`probe.json`: the learner's next-token log-probabilities after fixed prompts. Pure; no torch.

The learner writes it beside an adapter. When vLLM has loaded the adapter, deploy asks it for the
same log-probabilities: they are equal within the rounding of two implementations, or vLLM does not
serve what was trained. Prompts are fixed texts, never what users wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = 1
MAX_BYTES = 256 * 2**10
"""Largest file that is read; the learner writes about 10 kB."""
MAX_PROMPTS = 128
MAX_PROMPT_TOKENS = 512
MAX_LIKELIEST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFile:
    """What the learner knows of an adapter."""

    prompts: tuple[tuple[int, ...], ...]
    """[prompts] token ids."""
    likeliest: tuple[Mapping[int, float], ...]
    """[prompts] likeliest next tokens: token id -> log-probability in nats, at temperature 1."""
    tolerance: float
    """Largest mean difference that is taken for rounding, nats a token: `learner.max_drift` of the
    run, which bounds the same difference over the answers that it learned from."""


def render_probe(probe: ProbeFile) -> str:
    """Render the text of `probe.json`."""
    answers = [
        {
            "prompt_token_ids": list(prompt),
            "likeliest": [[token, round(nats, 6)] for token, nats in likeliest.items()],
        }
        for prompt, likeliest in zip(probe.prompts, probe.likeliest, strict=True)
    ]
    found = {"format": FORMAT, "tolerance": probe.tolerance, "answers": answers}
    return json.dumps(found) + "\n"


def read_probe(content: bytes) -> ProbeFile:
    """Read a `probe.json`. Raises: ValueError when it is not as `render_probe` writes it."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes")
    try:
        found = json.loads(content)
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}, not {FORMAT}")
        answers, tolerance = found["answers"], float(found["tolerance"])
        prompts = tuple(_prompt(one["prompt_token_ids"]) for one in answers)
        likeliest = tuple(_likeliest(one["likeliest"]) for one in answers)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"cannot be read: {error!r}") from error
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"has {len(prompts)} prompts, not 1 to {MAX_PROMPTS}")
    if not 0 < tolerance < math.inf:
        raise ValueError(f"its tolerance is {tolerance}")
    return ProbeFile(prompts=prompts, likeliest=likeliest, tolerance=tolerance)


def _prompt(found: Any) -> tuple[int, ...]:  # Any: JSON
    ids = tuple(found)
    if not 0 < len(ids) <= MAX_PROMPT_TOKENS or any(type(one) is not int or one < 0 for one in ids):
        raise ValueError(f"a prompt is not 1 to {MAX_PROMPT_TOKENS} token ids")
    return ids


def _likeliest(found: Any) -> dict[int, float]:  # Any: JSON
    pairs = dict(found)
    sound = all(
        type(token) is int and type(nats) in (int, float) and math.isfinite(nats)
        for token, nats in pairs.items()
    )
    if not sound or not 0 < len(pairs) <= MAX_LIKELIEST:
        raise ValueError(f"the likeliest tokens are not 1 to {MAX_LIKELIEST} ids with nats")
    return pairs

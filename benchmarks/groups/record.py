"""Record the benchmark's traffic from a vLLM:
`python -m benchmarks.groups.record URL MODEL FILE [SEED]`.

Each prompt is answered at temperature 1 with the exact log-probabilities, once for each user who
asked it and eight times more for its candidates. The recordings are in the repository.
"""

from __future__ import annotations

import json
import lzma
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from benchmarks.groups.prompts import SEED, Prompt, make_prompts

CANDIDATES: Final = 7
"""The served answer and these are a group of the default size."""
AT_ONCE: Final = 6
"""Prompts under way: with 8 answers each they fill the engine's 64 places."""
LIMIT_S: Final = 1500
"""The recording ends after 25 minutes; what is missing is said."""


def ask(url: str, model: str, prompt: Prompt, began: float) -> list[list[Any]] | None:
    """Return the answers as [text, finish reason, tokens, log-probabilities].

    Log-probabilities are in hundredths of a nat, and of served answers alone: those of candidates
    come too late for a choice.
    """
    if time.monotonic() - began > LIMIT_S:
        return None
    body = {
        "model": model,
        "messages": [
            {"role": "system", "content": prompt.system},
            {"role": "user", "content": prompt.user},
        ],
        "n": CANDIDATES + prompt.served,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": prompt.max_tokens,
        "logprobs": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        choices = json.load(reply)["choices"]
    return [
        [
            one["message"]["content"],
            one["finish_reason"],
            len(one["logprobs"]["content"]),
            [round(100 * token["logprob"]) for token in one["logprobs"]["content"]]
            if at < prompt.served
            else [],
        ]
        for at, one in enumerate(choices)
    ]


def main(url: str, model: str, file: str, seed: str = str(SEED)) -> None:
    began = time.monotonic()
    prompts = make_prompts(int(seed))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda one: ask(url, model, one, began), prompts))
    kept = [[at, found] for at, found in enumerate(answers) if found is not None]
    text = json.dumps(kept, separators=(",", ":"), ensure_ascii=False)
    Path(file).write_bytes(lzma.compress(text.encode(), preset=9))
    print(f"{len(kept)} of {len(prompts)} prompts, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])

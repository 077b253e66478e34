"""Compute what `probe.json` holds: next-token log-probabilities after fixed texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog
import torch
from transformers import AutoTokenizer

from learner.adapter_folder import PROBE, file_digest
from learner.explain import one_line
from learner.policy.attention.trie import chain
from learner.policy.logprobs import Policy
from learner.policy.packing import Pack
from learner.probe_file import ProbeFile, render_probe

log = structlog.get_logger()

TEXTS = (
    "A customer writes: my parcel has not arrived. The agent answers: I am sorry to hear that.",
    "To reset your password, open the settings page and choose the account.",
    "The capital of France is Paris, and it lies on the Seine.",
    "Thank you for your question. The shop opens at nine.",
    "def add(a, b):\n    return a + b\n",
    "Once upon a time there was a king who had three sons.",
    "Question: is the shop open on Sunday?\nAnswer: no, it is closed.",
    "The order number is 4711; the total is 19.90 euros.",
)
COMPUTATION = (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)
"""Errors of torch and a model's code for texts that they cannot compute."""
PLACES = 4
"""Last tokens of each text behind which the next one is predicted."""
LIKELIEST = 10
"""Tokens kept of each distribution: twice what deploy asks vLLM for, so that a token that two
implementations rank differently is found in both."""


def write_probe(
    policy: Policy, base_model_path: str, folder: Path, *, tolerance: float
) -> str | None:
    """Write `probe.json` into an adapter's folder. Returns: its SHA-256 (hex).

    tolerance: largest mean difference that is taken for rounding, nats a token.

    Returns None when the base has no tokenizer that can be read and knows these texts, or the
    model cannot compute them: then there is no file (logged), and the version is served without
    this check. Raises: OSError when the disk refuses.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(base_model_path)
        texts = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        log.warning("no_probe_file", why=one_line(error))
        return None
    texts = [ids for ids in texts if ids and max(ids) < policy.vocabulary]
    if not texts:
        log.warning("no_probe_file", why="the base's tokenizer makes no tokens of the fixed texts")
        return None
    try:
        content = render_probe(probe_of(policy, texts, tolerance=tolerance))
    except COMPUTATION as error:
        log.warning("no_probe_file", why=one_line(error))
        return None
    path = folder / PROBE
    path.write_text(content, encoding="utf-8")
    return file_digest(path)


def probe_of(policy: Policy, texts: Sequence[Sequence[int]], *, tolerance: float) -> ProbeFile:
    """Compute the likeliest next tokens behind the last `PLACES` tokens of each text.

    texts: token ids. The policy is computed as in a training step: its own masks, head and
    precision.
    """
    prompts: list[tuple[int, ...]] = []
    likeliest: list[dict[int, float]] = []
    for ids in texts:
        places = range(max(0, len(ids) - PLACES), len(ids))
        with torch.no_grad():
            logprobs_PV = policy.distributions(_pack(ids, places))
        nats_PK, tokens_PK = logprobs_PV.topk(min(LIKELIEST, logprobs_PV.shape[-1]))
        for place, nats, tokens in zip(places, nats_PK.tolist(), tokens_PK.tolist(), strict=True):
            prompts.append(tuple(ids[: place + 1]))
            likeliest.append(dict(zip(tokens, nats, strict=True)))
    return ProbeFile(prompts=tuple(prompts), likeliest=tuple(likeliest), tolerance=tolerance)


def _pack(ids: Sequence[int], places: Sequence[int]) -> Pack:
    """Return a pack of a prompt alone, which predicts behind these places."""
    return Pack(
        group_id="",
        adapter="",
        input_ids=tuple(ids),
        positions=tuple(range(len(ids))),
        segments=chain(len(ids)),
        sources=tuple(places),
        targets=(0,) * len(places),
        recorded=(0.0,) * len(places),
        advantages=(0.0,) * len(places),
        temperatures=(1.0,) * len(places),
        answers=(0,) * len(places),
        start=(0.0,) * len(places),
    )

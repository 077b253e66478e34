"""Whether an exchange whose tokens were masked by the server can be learned from. Pure.

A grammar, a list of allowed tokens or a least length leaves each token as it is, or forbids it; the
others share the rest. Where nothing that matters was forbidden, the recorded log-probability is the
policy's, and the learner finds those tokens by comparing the two (`learner.grpo.touched`,
docs/losses.md). That needs log-probabilities that are recorded behind the mask, so it holds for
`processed_logprobs` alone. A bias, a budget of thinking tokens or a beam search is something else:
such exchanges are not learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ingest.grouping.chat_request import HARD_MASKS, masking_fields
from ingest.grouping.engine_facts import Grammar, why_masked
from ingest.grouping.exchangeable import LogprobsMode

StructuredOutput = Literal["free_tokens", "off"]


def mask_of(request: Mapping[str, Any], grammar: Grammar | None) -> str | None:
    """Return what forbids tokens, or may: a field of the request, or the server's own grammar.

    Returns: `masked_by_<field>`, `masked_by_server`, `masking_unknown`; None: nothing does.
    """
    field = next(masking_fields(request), None)
    return why_masked(request, grammar) if field is None else f"masked_by_{field}"


def why_refused(
    request: Mapping[str, Any],
    grammar: Grammar | None,
    *,
    mode: LogprobsMode,
    structured: StructuredOutput,
) -> str | None:
    """Return the mask because of which nothing can be learned from an exchange; None when there is
    none, or it leaves tokens to learn from."""
    mask = mask_of(request, grammar)
    if mask is None or structured == "off" or mode != "processed_logprobs":
        return mask
    soft = next((name for name in masking_fields(request) if name not in HARD_MASKS), None)
    return None if soft is None else f"masked_by_{soft}"

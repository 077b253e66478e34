"""Exchanges whose tokens a grammar restricted: which become groups, and what those say of it."""

from __future__ import annotations

from typing import Any

import pytest

from ingest.grouping.request import HARD_MASKS, EngineFacts, candidate_body
from ingest.grouping.selection import Decision, StoreState, rules_of, select_exchanges
from sidecar.settings import Settings
from support.ingest_kit import REQUEST, Kit

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
HARD: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a+"}},
    "guided_json": {"guided_json": {"type": "object"}},
    "guided_regex": {"guided_regex": "a+"},
    "guided_choice": {"guided_choice": ["a"]},
    "guided_grammar": {"guided_grammar": "root ::= 'a'"},
    "allowed_token_ids": {"allowed_token_ids": [1, 2]},
    "bad_words": {"bad_words": ["no"]},
    "min_tokens": {"min_tokens": 3},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "strict_tools": {"tools": [STRICT]},
}


def decide(kit: Kit, fields: dict[str, Any], **rules: Any) -> Decision:
    store_state = StoreState(
        live_adapters=frozenset({"base"}), pending_groups=0, groups_by_session={}
    )
    exchange = kit.exchange("e1", request={**REQUEST, **fields})
    chosen = kit.rules(**{"structured_output": "free_tokens", **rules})
    (decision,) = select_exchanges([(exchange, False)], store_state, chosen)
    return decision


def test_the_cases_are_the_masks() -> None:
    assert HARD.keys() == HARD_MASKS


@pytest.mark.parametrize("field", HARD)
def test_what_forbids_tokens_is_a_group_that_says_so(kit: Kit, field: str) -> None:
    decision = decide(kit, HARD[field])

    assert decision.reason == "chosen"
    assert decision.group is not None
    assert decision.group.masked_by == f"masked_by_{field}"
    (answer,) = decision.group.answers
    assert answer.untrainable_reason is None


@pytest.mark.parametrize("field", HARD)
def test_candidates_are_sampled_behind_the_same_mask(field: str) -> None:
    body = candidate_body(
        {**REQUEST, **HARD[field]}, upstream_model="m", temperature=1.0, max_tokens=9
    )

    assert {name: body[name] for name in HARD[field]} == HARD[field]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {"5": -100}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}, "logit_bias": {"5": 1}}, "logit_bias"),
        ({**HARD["tool_choice"], "use_beam_search": True}, "use_beam_search"),
        ({**HARD["min_tokens"], "thinking_token_budget": 9}, "thinking_token_budget"),
    ],
)
def test_what_moves_probabilities_is_not_learned_from(
    kit: Kit, fields: dict[str, Any], field: str
) -> None:
    decision = decide(kit, fields)

    assert (decision.reason, decision.group) == (f"untrainable:masked_by_{field}", None)


@pytest.mark.parametrize(
    "rules", [{"structured_output": "off"}, {"logprobs_mode": "raw_logprobs"}], ids=str
)
def test_off_or_with_values_before_the_mask_nothing_is_learned(
    kit: Kit, rules: dict[str, Any]
) -> None:
    assert decide(kit, HARD["tool_choice"], **rules).reason == "untrainable:masked_by_tool_choice"


@pytest.mark.parametrize(
    ("grammar", "mask"),
    [
        ("as_asked", None),
        ("with_tools", "masked_by_server"),
        ("always", "masked_by_server"),
        (None, "masking_unknown"),
    ],
)
def test_a_grammar_of_the_server_is_one_too(kit: Kit, grammar: Any, mask: str | None) -> None:
    facts = EngineFacts(defaults=frozenset(), grammar=grammar)

    group = decide(kit, {"tools": [TOOL]}, facts=facts).group

    assert group is not None
    assert group.masked_by == mask


def test_the_mask_is_stored_with_the_group(kit: Kit) -> None:
    exchange = kit.exchange("e1", request={**REQUEST, **HARD["tool_choice"]})

    (group_id,) = kit.choose(exchange, structured_output="free_tokens")

    assert kit.group(group_id).masked_by == "masked_by_tool_choice"
    assert rules_of(Settings()).structured_output == "free_tokens"

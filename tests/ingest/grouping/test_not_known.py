"""What is not known of how vLLM sampled is not learned from, and each reason is counted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ingest.grouping.request import (
    FLAG,
    UNKNOWN,
    EngineFacts,
    Grammar,
    candidate_temperature,
    dump_facts,
)
from ingest.grouping.selection import Decision, StoreState, rules_of, select_exchanges
from ingest.records import Answer
from sidecar.records import Sampling
from sidecar.settings import Serving, Settings
from sidecar.store.database import set_flag
from support.ingest_kit import Kit

STANDING = StoreState(live_adapters=frozenset({"base"}), pending_groups=0, groups_by_session={})
FUNCTION: dict[str, Any] = {"name": "look_up", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
STRICT = [*TOOLS, {"type": "function", "function": {**FUNCTION, "strict": True}}]


def decide(
    kit: Kit,
    *,
    sampling: Sampling | None = None,
    rules: dict[str, Any] | None = None,
    **request: object,
) -> Decision:
    changes: dict[str, Any] = {"request": {"messages": [], **request}}
    if sampling is not None:
        changes["sampling"] = sampling
    exchange = kit.exchange("e1", **changes)
    (decision,) = select_exchanges([(exchange, False)], STANDING, kit.rules(**(rules or {})))
    return decision


def served_answer(kit: Kit, sampling: Sampling, rules: dict[str, Any] | None = None) -> Answer:
    """Return the only answer of the group that an exchange with this sampling becomes."""
    group = decide(kit, sampling=sampling, rules=rules).group
    assert group is not None
    (answer,) = group.answers
    return answer


@pytest.mark.parametrize(
    ("request_fields", "reason"),
    [
        pytest.param({"tools": TOOLS}, "chosen", id="plain-tools"),
        pytest.param({"tools": STRICT}, "strict_tools", id="one-strict-tool"),
        pytest.param({"tools": STRICT, "tool_choice": None}, "strict_tools", id="strict-null"),
        pytest.param({"tools": STRICT, "tool_choice": "none"}, "chosen", id="tools-forbidden"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "strict": 1}}]}, "strict_tools"),
        ({"tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}]}, "chosen"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": TOOLS, "parallel_tool_calls": 0}, "parallel_tool_calls"),
        ({"tools": TOOLS, "parallel_tool_calls": "off"}, "parallel_tool_calls"),
        pytest.param({"parallel_tool_calls": False}, "chosen", id="one-call-without-tools"),
        pytest.param({"thinking_token_budget": 0}, "thinking_token_budget", id="no-thinking"),
        pytest.param({"thinking_token_budget": -1}, "chosen", id="unlimited-thinking"),
        pytest.param({"use_beam_search": True}, "use_beam_search", id="beam-search"),
        pytest.param({"watermarking": False}, "chosen", id="no-watermark"),
        ({"structured_outputs": {"choice": ["A"]}}, "structured_outputs"),
    ],
)
def test_an_answer_under_a_mask_is_not_learned(
    kit: Kit, request_fields: dict[str, Any], reason: str
) -> None:
    expected = reason if reason == "chosen" else f"untrainable:masked_by_{reason}"
    assert decide(kit, **request_fields).reason == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param("words", "chosen", id="text"),
        pytest.param(None, "chosen", id="a-turn-of-tool-calls"),
        pytest.param([{"type": "text", "text": "words"}], "chosen", id="text-parts"),
        pytest.param([{"type": "image_url", "image_url": {"url": "u"}}], "media", id="image"),
        (
            [
                {"type": "text", "text": "t"},
                {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            ],
            "media",
        ),
        pytest.param([{"type": "prompt_embeds", "data": "e"}], "media", id="prompt-embeddings"),
        pytest.param([{"type": "of_next_year"}], "media", id="a-type-nobody-knows"),
        pytest.param([{"type": ["text"]}], "media", id="a-type-that-is-no-text"),
    ],
)
def test_a_prompt_with_media_is_not_learned_from(kit: Kit, content: object, reason: str) -> None:
    messages = [{"role": "user", "content": "first"}, {"role": "tool", "content": content}]

    expected = reason if reason == "chosen" else "untrainable:prompt_has_media"
    assert decide(kit, messages=messages).reason == expected


@pytest.mark.parametrize(
    ("temperature", "why", "candidates_at"),
    [
        (0.0, "temperature_zero", 1.0),
        (1e-7, "temperature_raised", 1.0),
        (0.009, "temperature_raised", 1.0),
        (0.01, None, 0.01),
        (0.2, None, 0.2),
    ],
)
def test_a_temperature_that_vllm_raises_is_masked_and_candidates_are_sampled_at_1(
    kit: Kit, temperature: float, why: str | None, candidates_at: float
) -> None:
    sampling = Sampling(temperature=temperature)

    answer = served_answer(kit, sampling)

    assert answer.untrainable_reason == why
    assert candidate_temperature(sampling, "processed_logprobs") == candidates_at


def known(*defaults: str, grammar: Grammar | None = "as_asked") -> dict[str, Any]:
    return {"facts": EngineFacts(defaults=frozenset(defaults), grammar=grammar)}


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_an_unsaid_value_that_vllm_fills_by_itself_is_masked(kit: Kit, field: str) -> None:
    said = Sampling(
        temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, max_tokens=5
    )
    unsaid = msgspec.structs.replace(said, **{field: None})

    reasons = [
        served_answer(kit, sampling, known(*fields)).untrainable_reason
        for sampling, fields in (
            (unsaid, ()),
            (unsaid, ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
            (said, ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")),
        )
    ]

    assert reasons == [None, f"unsaid_{field}", None]


def test_while_defaults_are_unknown_only_a_request_that_says_all_is_learned_from(kit: Kit) -> None:
    rules = {"facts": UNKNOWN}
    every = Sampling(
        temperature=0.7,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
    )

    def why(sampling: Sampling) -> str | None:
        return served_answer(kit, sampling, rules).untrainable_reason

    assert why(every) is None
    assert why(Sampling(temperature=0.7)) == "defaults_unknown"


@pytest.mark.parametrize(
    ("grammar", "request_fields", "reason"),
    [
        ("as_asked", {"tools": TOOLS}, "chosen"),
        ("as_asked", {}, "chosen"),
        ("with_tools", {"tools": TOOLS}, "untrainable:masked_by_server"),
        ("with_tools", {}, "chosen"),
        ("always", {"tools": TOOLS}, "untrainable:masked_by_server"),
        ("always", {}, "untrainable:masked_by_server"),
        (None, {"tools": TOOLS}, "untrainable:masking_unknown"),
        (None, {}, "chosen"),
    ],
)
def test_a_grammar_that_vllm_applies_by_itself_or_may_apply_keeps_the_exchange_out(
    kit: Kit, grammar: Grammar | None, request_fields: dict[str, Any], reason: str
) -> None:
    assert decide(kit, rules=known(grammar=grammar), **request_fields).reason == reason


def test_what_the_operator_states_counts_as_said(kit: Kit) -> None:
    stated = Serving(sampling_defaults={"temperature": 0.6, "top_k": 20}, grammar="as_asked")
    rules = rules_of(Settings(serving=stated))
    changes = {"sampling_defaults": rules.sampling_defaults, "facts": rules.facts}

    def answer(sampling: Sampling) -> Answer:
        return served_answer(kit, sampling, changes)

    assert answer(Sampling()).untrainable_reason == "top_k"
    known_warm = answer(Sampling(top_k=-1))
    assert (known_warm.untrainable_reason, known_warm.temperature) == (None, 0.6)
    assert answer(Sampling(temperature=1.0, top_k=0)).temperature == 1.0


def test_a_batch_is_decided_by_what_ingest_found_and_reasons_are_counted(kit: Kit) -> None:
    with kit.database.write() as session:
        facts = EngineFacts(defaults=frozenset({"top_p"}), grammar="with_tools")
        set_flag(session, FLAG, dump_facts(facts), now=1.0)

    kit.choose(
        kit.exchange("plain"),
        kit.exchange("said", sampling=Sampling(temperature=1.0, top_p=1.0)),
        kit.exchange("tools", request={"messages": [], "tools": TOOLS}),
        kit.exchange("strict", request={"messages": [], "tools": STRICT}),
    )

    assert kit.counts("selection") == {
        "chosen": 2,
        "untrainable:masked_by_server": 1,
        "untrainable:masked_by_strict_tools": 1,
    }
    assert kit.counts("served") == {"trainable": 1, "unsaid_top_p": 1}

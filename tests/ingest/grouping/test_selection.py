"""Each reason, by a case worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ingest.grouping.selection import StoreState, select_exchanges
from ingest.records import Answer
from sidecar.records import Exchange, Sampling
from support.ingest_kit import Kit

STANDING = StoreState(
    live_adapters=frozenset({"base", "smollm--v2"}), pending_groups=0, groups_by_session={}
)


def reasons(
    kit: Kit,
    *exchanges: Exchange,
    store_state: StoreState = STANDING,
    held_out: bool = False,
    **rules: Any,
) -> list[str]:
    batch = [(exchange, held_out) for exchange in exchanges]
    return [
        decision.reason for decision in select_exchanges(batch, store_state, kit.rules(**rules))
    ]


def answers_of(kit: Kit, exchange: Exchange, **rules: Any) -> tuple[Answer, ...]:
    """Select this exchange alone. Returns: the answers of its new group."""
    (decision,) = select_exchanges([(exchange, False)], STANDING, kit.rules(**rules))
    assert decision.group is not None
    return decision.group.answers


def test_a_plain_exchange_becomes_a_group_with_its_answer(kit: Kit) -> None:
    exchange = kit.exchange("e1", session_key="m:s")

    (decision,) = select_exchanges([(exchange, False)], STANDING, kit.rules())

    assert decision.reason == "chosen"
    group = decision.group
    assert group is not None
    assert (group.exchange_id, group.session_key, group.adapter) == ("e1", "m:s", "base")
    assert group.request == exchange.request
    assert group.prompt_token_ids == (1, 9, 9, 4)
    (answer,) = group.answers
    assert (answer.index, answer.origin, answer.temperature) == (0, "served", 1.0)
    assert answer.token_ids == (5, 6, 2)
    assert answer.logprobs == (-0.5, -0.25, -1.0)
    assert answer.untrainable_reason is None


def test_a_group_that_costs_nothing_comes_before_others_in_a_batch(kit: Kit) -> None:
    plain = kit.exchange("a", session_key="m:a")
    free = kit.exchange(
        "b", session_key="m:b", choices=[kit.choice(f"c{n}", index=n) for n in range(4)]
    )
    few = kit.exchange(
        "c", session_key="m:c", choices=[kit.choice(f"c{n}", index=n) for n in range(3)]
    )

    first = reasons(kit, plain, free, few, max_pending_groups=1, join_served="session")
    off = reasons(kit, plain, free, few, max_pending_groups=1, join_served="off")

    assert first == ["backlog", "chosen", "backlog"]
    assert off == ["chosen", "backlog", "backlog"]


def test_several_choices_are_free_answers_up_to_the_size(kit: Kit) -> None:
    choices = tuple(kit.choice(f"c{n}", index=n) for n in range(6))

    answers = answers_of(kit, kit.exchange(choices=choices), size=4)

    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    assert answers[3].message == kit.message("c3")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": "cut", "untrainable_reason": "ids_missing"}, "outcome"),
        pytest.param({"outcome": "cut", "status": 0}, "outcome", id="before-any-reply"),
        pytest.param({"outcome": "upstream_error"}, "outcome", id="vllm-failed"),
        pytest.param({"status": 400}, "outcome", id="refused"),
        ({"untrainable_reason": "no_logprobs"}, "untrainable:no_logprobs"),
        pytest.param({"surface": "completions"}, "surface", id="a-prompt-and-no-messages"),
        pytest.param({"surface": "messages"}, "surface", id="another-api"),
        ({"surface": "responses", "untrainable_reason": "text_only"}, "untrainable:text_only"),
        ({"prompt_token_ids": ()}, "untrainable:no_prompt_token_ids"),
        pytest.param({"request": b"{"}, "untrainable:request_not_json", id="not-json"),
        ({"request": b'{"model": "\xff"}'}, "untrainable:request_not_json"),
        ({"request": b'{"a":' * 100_000}, "untrainable:request_not_json"),
        pytest.param({"request": b"[]"}, "untrainable:request_not_json", id="not-an-object"),
        pytest.param({"choices": ()}, "no_answer", id="no-choices"),
        pytest.param({"outcome": "cut", "choices": ()}, "chosen", id="left-before-a-word"),
        pytest.param({"adapter": "smollm--v1"}, "stale_adapter", id="old-adapter"),
        pytest.param({"adapter": "smollm--v2"}, "chosen", id="live-adapter"),
        pytest.param({"request": {"response_format": {"type": "text"}}}, "chosen", id="text"),
        pytest.param({"request": {"tool_choice": "auto", "min_tokens": 0}}, "chosen", id="auto"),
    ],
)
def test_what_an_exchange_is_decides_first(kit: Kit, changes: dict[str, Any], reason: str) -> None:
    assert reasons(kit, kit.exchange("e1", **changes)) == [reason]


def test_what_cannot_be_trained_on_costs_no_candidates(kit: Kit) -> None:
    """The learner takes packs of so many tokens; the last token of an answer is not among them."""
    fits, long = (kit.exchange(name, prompt_token_ids=(5,) * n) for name, n in (("a", 7), ("b", 8)))
    longest = kit.exchange("c", prompt_token_ids=(5,) * 10, sampling=Sampling(temperature=0.0))
    greedy = kit.exchange("d", prompt_token_ids=(5,) * 9, sampling=Sampling(temperature=0.0))

    assert reasons(kit, fits, long, longest, greedy, max_trained_tokens=9) == [
        "chosen",
        "untrainable:prompt_too_long",
        "untrainable:prompt_too_long",
        "chosen",  # its own answer is masked, and candidates may be shorter
    ]
    assert reasons(kit, fits, long) == ["chosen", "chosen"]
    (held_out,) = select_exchanges([(long, True)], STANDING, kit.rules(max_trained_tokens=9))
    assert held_out.reason == "held_out", "the gate can use it"


def test_held_out_comes_before_everything(kit: Kit) -> None:
    assert reasons(kit, kit.exchange("e1", outcome="cut"), held_out=True) == ["held_out"]


@pytest.mark.parametrize(
    ("content", "finish_reason"),
    [("", "stop"), ("cut in the mid", "length"), ("", "length")],
    ids=["silent", "cut", "cut-before-a-word"],
)
def test_an_empty_or_cut_answer_is_learned_from(kit: Kit, content: str, finish_reason: str) -> None:
    said = kit.choice(content, finish_reason=finish_reason)

    (answer,) = answers_of(kit, kit.exchange(choices=(said,)))

    assert (answer.finish_reason, answer.untrainable_reason) == (finish_reason, None)


@pytest.mark.parametrize("reason", [None, "cut"])
def test_the_prompt_of_a_client_that_left_starts_a_group_alone(
    kit: Kit, reason: str | None
) -> None:
    left = kit.exchange("e1", outcome="cut", untrainable_reason=reason)

    assert answers_of(kit, left) == ()


def test_the_rate_is_a_hash_of_the_exchange_and_not_a_toss(kit: Kit) -> None:
    # The first 8 bytes of sha256("rate\0<id>") over 2**64: a 0.138, c 0.569, d 0.639, k 0.102.
    exchanges = [kit.exchange(name) for name in ("a", "c", "d", "k")]

    expected = ["chosen", "rate", "rate", "chosen"]
    assert reasons(kit, *exchanges, rate=0.5) == expected
    assert reasons(kit, *exchanges, rate=0.5) == expected
    assert reasons(kit, *exchanges, rate=0.6) == ["chosen", "chosen", "rate", "chosen"]
    assert reasons(kit, *exchanges, rate=0.0) == ["rate"] * 4


def test_a_session_gets_no_more_groups_than_its_cap_counting_those_it_had(kit: Kit) -> None:
    store_state = StoreState(
        live_adapters=frozenset({"base"}), pending_groups=0, groups_by_session={"m:s": 1}
    )
    turns = [kit.exchange(f"e{n}", session_key="m:s") for n in range(3)]
    other = kit.exchange("o", session_key="m:t")

    found = reasons(kit, *turns, other, store_state=store_state, max_groups_per_session=2)

    assert found == ["chosen", "session_cap", "session_cap", "chosen"]


def test_beyond_the_places_for_pending_groups_exchanges_are_left_in_the_backlog(kit: Kit) -> None:
    store_state = StoreState(
        live_adapters=frozenset({"base"}), pending_groups=3, groups_by_session={}
    )
    exchanges = [kit.exchange(f"e{n}") for n in range(3)]

    found = reasons(kit, *exchanges, store_state=store_state, max_pending_groups=4)

    assert found == ["chosen", "backlog", "backlog"]


def test_a_long_reason_is_cut_to_what_its_column_holds(kit: Kit) -> None:
    (reason,) = reasons(kit, kit.exchange("e1", untrainable_reason="x" * 64))

    assert reason == "untrainable:" + "x" * 52


@pytest.mark.parametrize(
    ("sampling", "mode", "why", "temperature"),
    [
        (Sampling(), "processed_logprobs", None, 1.0),
        (Sampling(temperature=0.7), "processed_logprobs", None, 0.7),
        (Sampling(temperature=0.0), "processed_logprobs", "temperature_zero", 0.0),
        (Sampling(top_p=1.0, top_k=-1, min_p=0.0), "processed_logprobs", None, 1.0),
        (Sampling(top_k=0, repetition_penalty=1.0), "processed_logprobs", None, 1.0),
        (Sampling(top_p=0.9), "processed_logprobs", "top_p", 1.0),
        (Sampling(top_k=20), "processed_logprobs", "top_k", 1.0),
        (Sampling(min_p=0.05), "processed_logprobs", "min_p", 1.0),
        (Sampling(presence_penalty=0.1), "processed_logprobs", "presence_penalty", 1.0),
        (Sampling(frequency_penalty=-0.1), "processed_logprobs", "frequency_penalty", 1.0),
        (Sampling(repetition_penalty=1.1), "processed_logprobs", "repetition_penalty", 1.0),
        (Sampling(seed=3, max_tokens=5), "processed_logprobs", None, 1.0),
        (Sampling(temperature=1.0), "raw_logprobs", None, 1.0),
        (Sampling(temperature=0.7), "raw_logprobs", "temperature_differs", 0.7),
    ],
)
def test_a_served_answer_sampled_otherwise_than_the_candidates_is_masked(
    kit: Kit, sampling: Sampling, mode: str, why: str | None, temperature: float
) -> None:
    exchange = kit.exchange(sampling=sampling)

    (answer,) = answers_of(kit, exchange, logprobs_mode=mode)

    assert answer.untrainable_reason == why
    assert answer.temperature == temperature


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token_ids": ()}, "no_token_ids"),
        ({"logprobs": (-0.5, -0.25)}, "lengths_differ"),
        ({"logprobs": (-0.5, float("nan"), -0.5)}, "logprob_not_finite"),
        ({"logprobs": (-0.5, float("-inf"), -0.5)}, "logprob_not_finite"),
        ({"logprobs": (-0.5, -9999.0, -0.5)}, "logprob_not_finite"),
    ],
)
def test_an_answer_with_inexact_ids_is_masked(kit: Kit, changes: dict[str, Any], why: str) -> None:
    exchange = kit.exchange(choices=(kit.choice("good"), kit.choice("bad", index=1, **changes)))

    answers = answers_of(kit, exchange)

    assert [answer.untrainable_reason for answer in answers] == [None, why]


def test_a_field_nobody_here_knows_masks_the_served_answer(kit: Kit) -> None:
    exchange = kit.exchange(request={"messages": [], "a_field_of_next_year": 1, "metadata": {}})

    (answer,) = answers_of(kit, exchange)

    assert answer.untrainable_reason == "unknown_field"

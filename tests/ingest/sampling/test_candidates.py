from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from ingest.errors import SamplingError
from ingest.records import Answer
from ingest.sampling.candidates import Conclusion, Miss, all_identical, back_off_s, conclude
from ingest.vllm.load import EngineLoad, LoadGate, parse_load

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2-135m"} 3.0
vllm:num_requests_running{engine="1",model_name="smollm2-135m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="smollm2-135m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="smollm2-135m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2-135m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2-135m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="smollm2-135m"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="smollm2-135m"} 1e+06
"""


def served(content: str) -> Answer:
    message = json.dumps({"role": "assistant", "content": content}).encode()
    return Answer(index=0, origin="served", message=message)


def sampled(content: str) -> Answer:
    message = json.dumps({"role": "assistant", "content": content}).encode()
    return Answer(index=1, origin="sampled", message=message)


def after(
    answers: Sequence[Answer], *, rounds: int = 0, misses: Sequence[Miss] = (), size: int = 3
) -> tuple[str, str]:
    conclusion: Conclusion = conclude(answers, size=size, rounds=rounds, misses=misses)
    return conclusion.action, conclusion.reason


def test_a_full_group_goes_to_the_judge() -> None:
    assert after([served("a"), sampled("a"), sampled("b")]) == ("sampled", "")


def test_a_group_of_one_answer_over_and_over_is_set_aside() -> None:
    assert after([served("a"), sampled("a"), sampled("a")]) == ("set_aside", "identical_answers")


def test_what_vllm_does_not_owe_to_the_group_costs_it_no_round() -> None:
    assert after([served("a")], rounds=4, misses=["engine_down", "failed"]) == ("wait", "")
    assert after([served("a")], rounds=4, misses=["held_back", "held_back"]) == ("wait", "")


def test_an_adapter_that_is_gone_ends_the_group() -> None:
    misses: list[Miss] = ["adapter_gone", "engine_down"]
    assert after([served("a")], misses=misses) == ("set_aside", "adapter_gone")


def test_a_prompt_that_never_matches_ends_the_group_and_one_odd_candidate_does_not() -> None:
    both: list[Miss] = ["prompt_mismatch", "prompt_mismatch"]
    assert after([served("a")], misses=both) == ("set_aside", "prompt_mismatch")
    assert after([served("a"), sampled("b")], misses=both[:1]) == ("retry", "")


def test_failures_are_tried_again_five_times_in_all() -> None:
    misses: list[Miss] = ["failed", "failed"]
    assert after([served("a")], rounds=3, misses=misses) == ("retry", "")
    assert after([served("a")], rounds=4, misses=misses) == ("set_aside", "sampling_failed")


def test_after_the_last_round_two_different_answers_are_enough() -> None:
    pair = [served("a"), sampled("b")]
    assert after(pair, rounds=4, misses=["failed"]) == ("sampled", "")
    twins = [served("a"), sampled("a")]
    assert after(twins, rounds=4, misses=["failed"]) == ("set_aside", "identical_answers")


def test_private_candidates_are_not_sampled_again() -> None:
    assert after([served("a"), sampled("b")], misses=["private"]) == ("sampled", "")
    assert after([served("a")], misses=["private", "private"]) == ("set_aside", "private")
    assert after([served("a"), sampled("b")], misses=["private", "failed"]) == ("retry", "")


def test_back_off_doubles_from_five_seconds_to_five_minutes() -> None:
    assert [back_off_s(rounds) for rounds in (1, 2, 3, 10)] == [5.0, 10.0, 20.0, 300.0]


def test_answers_are_compared_as_a_judge_sees_them() -> None:
    def call(call_id: str, arguments: str) -> Answer:
        function = {"name": "f", "arguments": arguments}
        tool_calls = [{"id": call_id, "type": "function", "function": function}]
        said = {"role": "assistant", "content": None, "tool_calls": tool_calls}
        return Answer(index=0, origin="sampled", message=json.dumps(said).encode())

    spaced = Answer(index=0, origin="served", message=b'{"content": "a",  "refusal": null}')
    assert all_identical([call("1", "{}"), call("2", "{}")])
    assert not all_identical([call("1", "{}"), call("1", '{"x":1}')])
    assert all_identical([spaced, sampled("a")])
    assert not all_identical([Answer(index=0, origin="served", message=b"not json"), sampled("a")])


def test_the_load_is_summed_over_engines_and_the_fullest_cache_counts() -> None:
    assert parse_load(METRICS) == EngineLoad(running=7, waiting=2, kv_cache_usage=0.5)


def test_metrics_without_the_load_are_an_error_and_not_an_idle_engine() -> None:
    with pytest.raises(SamplingError, match="disable-log-stats"):
        parse_load("vllm:prompt_tokens_total 3\n")
    with pytest.raises(SamplingError, match="cannot read"):
        parse_load('vllm:num_requests_running{engine="0"} many\n')


@pytest.mark.parametrize(
    "line",
    ['{engine="0"', "{,\t=x} 1", "{} NaN", "{} +Inf", '{engine="0"} 1_0', " many", "{" * 9_000],
)
def test_a_load_that_cannot_be_read_is_an_error(line: str) -> None:
    with pytest.raises(SamplingError, match="cannot"):
        parse_load(f"vllm:num_requests_running{line}\n{METRICS}")


def test_garbage_in_other_metrics_costs_nothing() -> None:
    garbage = '}{ x="\n\x00\nvllm:num_requests_waiting_by_reason{,= many\n# TYPE\n'

    assert parse_load(garbage + METRICS) == parse_load(METRICS)


def test_a_load_without_labels_or_with_odd_ones_is_read() -> None:
    metrics = (
        "vllm:num_requests_running 2\n"
        'vllm:num_requests_waiting{model_name="a}b{\\"c 9",engine="0"} 1.0 1700000000\n'
    )

    assert parse_load(metrics) == EngineLoad(running=2, waiting=1, kv_cache_usage=0.0)


def test_the_gate_closes_above_the_limit_and_opens_at_three_quarters_of_it() -> None:
    gate = LoadGate(8)

    def measure(running: int, waiting: int = 0, own: int = 0) -> bool:
        load = EngineLoad(running=running, waiting=waiting, kv_cache_usage=0.0)
        return gate.update(load, own=own)

    assert measure(8)
    assert not measure(6, waiting=3)
    assert not measure(7)  # under the limit, but not well under it
    assert measure(6)
    assert measure(8)  # and going up again it stays open to the limit
    assert measure(24, own=16)  # 8 users' and 16 of ours
    assert not measure(25, own=16)
    assert measure(3, own=16)  # the figures lag behind what was just sent

from __future__ import annotations

import json
from collections.abc import Sequence

from ingest.records import Answer
from ingest.sampling.round import RETRIES, Conclusion, Miss, all_identical, conclude, next_step


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


def test_four_answers_that_look_alike_end_a_larger_group_and_not_one_of_their_own_size() -> None:
    alike = [served("a"), *(sampled("a") for _ in range(3))]
    aside = ("set_aside", "identical_answers")
    assert after(alike, size=8) == aside
    assert after(alike, size=8, misses=["held_back"]) == aside
    assert after(alike[:3], size=8, misses=["failed"]) == ("retry", "")
    assert after([*alike[:3], sampled("b")], size=8, misses=["failed"]) == ("retry", "")
    assert after(alike, size=4) == aside
    assert after(alike[:3], size=4, misses=["failed"]) == ("retry", "")


def test_the_steps_of_a_group_go_only_as_far_as_they_must_while_answers_look_alike() -> None:
    def steps(*contents: str, size: int = 8) -> int:
        answers = [served(contents[0]), *map(sampled, contents[1:])]
        return next_step(answers, size=size, missing=size - len(answers))

    assert steps("a", "a") == 2
    assert steps("a", "a", "a") == 1
    assert steps("a", "a", "a", "a") == 0
    assert steps("a", "b") == 6
    assert steps("a", "a", "a", "b") == 4
    assert steps("a", "b", "c", "d", "e", "f", "g", "h") == 0
    assert steps("a", "a", size=4) == 2, "the whole of a small group"
    assert next_step([served("a")], size=8, missing=0) == 0


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
    assert [RETRIES.wait_s(rounds) for rounds in (1, 2, 3, 10)] == [5.0, 10.0, 20.0, 300.0]


def test_answers_are_compared_as_a_judge_sees_them() -> None:
    def call(call_id: str, arguments: str) -> Answer:
        function = {"name": "f", "arguments": arguments}
        tool_calls = [{"id": call_id, "type": "function", "function": function}]
        said = {"role": "assistant", "content": None, "tool_calls": tool_calls}
        return Answer(index=0, origin="sampled", message=json.dumps(said).encode())

    spaced = Answer(index=0, origin="served", message=b'{"content": "a",  "refusal": null}')
    assert all_identical([call("1", "{}"), call("2", "{}")])
    assert not all_identical([call("1", "{}"), call("1", '{"x":1}')])
    assert all_identical([call("1", '{"x": 1, "y": 2}'), call("2", '{"y":2,"x":1}')])
    assert not all_identical([call("1", '{"x": 1, "y": 2}'), call("2", '{"y": 1, "x": 2}')])
    assert not all_identical([call("1", '{"x": 1'), call("2", '{"x":1')])  # no JSON: as written
    assert all_identical([spaced, sampled("a")])
    thought = Answer(index=0, origin="sampled", message=b'{"content": "a", "reasoning": "hm"}')
    assert not all_identical([thought, sampled("a")])
    assert not all_identical([Answer(index=0, origin="served", message=b"not json"), sampled("a")])

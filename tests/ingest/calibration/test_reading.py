"""Files of known scores and preferences, and what is said of a bad one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ingest.calibration.running import read_groups
from ingest.errors import CalibrationFileError

MESSAGES = [{"role": "user", "content": "How long?"}]


def candidate(content: str, **fields: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content}, **fields}


def line(**fields: Any) -> str:
    made: dict[str, Any] = {
        "messages": MESSAGES,
        "candidates": [candidate("30 days", score=1), candidate("90 days", score=0.5)],
    }
    return json.dumps({k: v for k, v in {**made, **fields}.items() if v is not ...})


def test_scores_of_any_scale_give_the_pairs_of_known_order() -> None:
    candidates = [candidate(str(score), score=score) for score in (3, 5, 3)]

    (group,) = read_groups(line(candidates=candidates), "f")

    assert group.scores == (3.0, 5.0, 3.0)
    assert group.pairs == ((1, 0), (1, 2))


def test_preferences_stand_where_scores_are_not_known() -> None:
    candidates = [candidate("a"), candidate("b", kind="rude"), candidate("c")]

    (group,) = read_groups(line(candidates=candidates, preferences=[[0, 1]]), "f")

    assert group.scores is None
    assert group.pairs == ((0, 1),)
    assert group.candidates[1].kind == "rude"


def test_a_group_without_an_id_is_called_by_its_line() -> None:
    text = f"\n{line()}\n\n{line(id='named')}\n"

    assert [group.group_id for group in read_groups(text, "f")] == ["2", "named"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "the line: [1] is not an object"),
        (line(messages=...), "messages: null is not a list"),
        (line(messages=[]), "messages: is empty"),
        (line(messages=["hi"]), 'messages: "hi" is not an object'),
        (line(candidates=[candidate("a", score=1)]), "candidates: 1 of them"),
        (line(tools={}), "tools: {} is not a list"),
        (line(id=7), "id: 7 is not a text"),
        (line(answers=[]), "answers: no such field; known: candidates, id"),
        (line(preferences=[[0, 1]]), "preferences: are there beside scores"),
        (
            line(candidates=[candidate("a", score=1), candidate("b")]),
            "score: 1 of 2 candidates have one",
        ),
        (
            line(candidates=[candidate("a"), candidate("b")], preferences=[[0, 2]]),
            "preferences: [0, 2] is not [index of the better, index of the worse], each from 0",
        ),
        (
            line(candidates=[candidate("a"), candidate("b")], preferences=[[1, 1]]),
            "preferences: [1, 1]",
        ),
        (
            line(candidates=[candidate("a", score="high"), candidate("b", score=1)]),
            'candidates[0].score: "high" is not a finite number',
        ),
        (
            line(candidates=[candidate("a", score=1), candidate("b", score=True)]),
            "candidates[1].score: true",
        ),
        (
            line(candidates=[candidate("a", score=1), candidate("b", score=float("nan"))]),
            "candidates[1].score: NaN",
        ),
        (
            line(candidates=[candidate("a", score=1), candidate("b", score=10**400)]),
            "candidates[1].score: 1000",
        ),
        (
            line(candidates=[candidate("a", score=1), {"content": "b", "score": 0}]),
            "candidates[1].content: no such field",
        ),
        (
            line(candidates=[candidate("a", score=1), {"message": "b", "score": 0}]),
            'candidates[1].message: "b" is not an object',
        ),
    ],
)
def test_an_error_names_the_file_the_line_and_the_field(bad: str, said: str) -> None:
    with pytest.raises(CalibrationFileError) as caught:
        read_groups(f"{line(id='good')}\n{bad}\n", "rated.jsonl")

    assert str(caught.value).startswith(f"rated.jsonl line 2: {said}")
    assert "\n" not in str(caught.value)


def test_two_groups_of_one_id_are_refused() -> None:
    with pytest.raises(CalibrationFileError, match='line 2: id "x" is there twice'):
        read_groups(f"{line(id='x')}\n{line(id='x')}", "f")


def test_a_file_without_groups_is_refused() -> None:
    with pytest.raises(CalibrationFileError, match="f: holds no group"):
        read_groups("\n \n", "f")

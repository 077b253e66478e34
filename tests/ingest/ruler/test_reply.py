"""The parser: by id and never by position, tolerant of form, strict in substance."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ingest.errors import JudgeReplyError
from ingest.ruler import prompt
from ingest.ruler.prompt import MAX_REPLY_CHARACTERS, parse_reply

IDS = ("ab", "cd", "ef")
ORDER = (2, 0, 1)
"""`ab` is answer 2, `cd` answer 0, `ef` answer 1."""


def entry(name: Any, score: Any, explanation: Any = "w") -> dict[str, Any]:
    return {"id": name, "explanation": explanation, "score": score}


GOOD = json.dumps({"scores": [entry("ab", 0.1), entry("cd", 0.5), entry("ef", 1)]})


def parse(text: str) -> tuple[float, ...]:
    return parse_reply(text, IDS, ORDER)[0]


def test_scores_come_back_in_the_answers_order() -> None:
    assert parse(GOOD) == (0.5, 1.0, 0.1)


def test_the_order_of_the_reply_does_not_matter() -> None:
    entries = [entry("ef", 1.0, "best"), entry("ab", 0.1, "worst"), entry("cd", 0.5, "middle")]
    for turn in range(3):
        turned = entries[turn:] + entries[:turn]
        scores, explanations = parse_reply(json.dumps({"scores": turned}), IDS, ORDER)
        assert scores == (0.5, 1.0, 0.1)
        assert explanations == ("middle", "best", "worst")


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{GOOD}\n```",
        f"```\n{GOOD}\n```",
        f"Here are the scores:\n\n{GOOD}",
        f"{GOOD}\n\nI hope that this helps {{you}}!",
        f"Set {{a, b}} is nice. {GOOD} End.",
        f'<think>maybe {{"scores": []}} or so</think>{GOOD}',
        f'Sure. <thinking>maybe {{"scores": []}} or so</thinking>{GOOD}',
        f'<Think>maybe {{"scores": []}}</Think> <think>or {{"scores": [1]}}</think>{GOOD}',
        f"{GOOD}\n{GOOD}",
        json.dumps({**json.loads(GOOD), "note": "extra keys are nobody's harm"}),
        json.dumps(json.loads(GOOD)["scores"]),
        f"Scores of [1] and [2]: {json.dumps(json.loads(GOOD)['scores'], indent=2)}",
        '{"scores": {"cd": 0.5, "ab": 0.1, "ef": 1}}',
        'In short: {"ef": 1.0, "ab": 0.1, "cd": 0.5}.',
        GOOD.replace("0.1", '"0.1"').replace("0.5", '"0.50"').replace(": 1}", ': "1"}'),
        GOOD.replace("]}", ",]}"),
        GOOD.replace("]}", "], }"),
        GOOD.replace("}", " ,\n}"),
        '{"ab": "0.1", "cd": 0.5, "ef": 1,}',
    ],
)
def test_what_stands_around_the_object_does_not_matter(text: str) -> None:
    assert parse(text) == (0.5, 1.0, 0.1)


def test_a_map_of_objects_gives_scores_and_explanations() -> None:
    found = {"cd": {"score": 0.5, "explanation": "so so"}, "ab": {"id": "ab", "score": 0.1}}
    text = json.dumps({**found, "ef": {"score": 1, "explanation": "best"}})
    assert parse_reply(text, IDS, ORDER) == ((0.5, 1.0, 0.1), ("so so", "best", ""))


def test_an_object_of_a_map_that_names_another_id_is_refused() -> None:
    text = json.dumps({"ab": {"id": "cd", "score": 0.1}, "cd": 0.5, "ef": 1})
    with pytest.raises(JudgeReplyError, match="not a number"):
        parse(text)


def test_the_ends_of_the_range_are_scores() -> None:
    text = json.dumps({"scores": [entry("ab", 0), entry("cd", 1), entry("ef", 0.0)]})
    assert parse(text) == (1.0, 0.0, 0.0)


def test_an_explanation_that_is_missing_or_no_text_is_empty() -> None:
    entries = [{"id": "ab", "score": 0.1}, entry("cd", 0.2, None), entry("ef", 0.3, 7)]
    assert parse_reply(json.dumps({"scores": entries}), IDS, ORDER)[1] == ("", "", "")


def test_an_explanation_that_no_store_takes_is_mended() -> None:
    text = GOOD.replace('"w"', '"a\\u0000b\\ud800c"')
    assert parse_reply(text, IDS, ORDER)[1] == ("ab?c", "ab?c", "ab?c")


def test_a_comma_in_an_explanation_stays() -> None:
    text = GOOD.replace('"w"', '"[a,] {b, } \\",]"').replace("]}", ",]}")
    assert parse_reply(text.replace(",]}", ",] }"), IDS, ORDER)[1] == ('[a,] {b, } ",]',) * 3


def with_score(value: str) -> str:
    return f'{{"scores": [{{"id": "ab", "score": {value}}}, {{"id": "cd", "score": 0.5}}, ' + (
        '{"id": "ef", "score": 0.5}]}'
    )


RUBBISH = {
    "nothing": ("", 'no JSON object with a "scores" list'),
    "prose": ("The second one is best.", "no JSON object"),
    "cut off": (GOOD[:-5], "no JSON object"),
    "a list of numbers, which may be in any order": ("[0.1, 0.5, 1.0]", "no JSON object"),
    "a list without ids": ('[{"score": 0.1}, {"score": 0.5}, {"score": 1}]', "no JSON object"),
    "half a list": (json.dumps(json.loads(GOOD)["scores"][:2]), "these ids have no score: ef"),
    "half a map": ('{"ab": 0.1, "cd": 0.5}', "these ids have no score: ef"),
    "a map by position": ('{"scores": {"1": 0.1, "2": 0.5, "3": 1}}', '"1" is not one of the ids'),
    "a map with more in it": (
        '{"ab": 0.1, "cd": 0.5, "ef": 1, "best": "ef"}',
        '"best" is not one of the ids',
    ),
    "a map with an id doubled": ('{"ab": 0.1, "cd": 0.5, "ef": 1, "ab": 1}', "same name twice"),
    "an entry with two scores": (
        GOOD.replace('"score": 1', '"score": 1, "score": 0'),
        "name twice",
    ),
    "a list and another map": (
        json.dumps(json.loads(GOOD)["scores"]) + '{"ab": 0.2, "cd": 0.5, "ef": 1}',
        'more than one "scores" list',
    ),
    "another object": ('{"score": 1}', "no JSON object"),
    "single quotes": (GOOD.replace('"', "'"), "no JSON object"),
    "scores no list": ('{"scores": "0.1, 0.5, 1"}', "is not a list"),
    "scores null": ('{"scores": null}', "is not a list"),
    "an entry no object": ('{"scores": [0.1, 0.5, 1.0]}', "is not an object"),
    "empty": ('{"scores": []}', "have no score: ab, cd, ef"),
    "one missing": (
        json.dumps({"scores": [entry("ab", 0.1), entry("ef", 0.2)]}),
        "these ids have no score: cd",
    ),
    "unknown id": (
        json.dumps({"scores": [*json.loads(GOOD)["scores"], entry("zz", 0.3)]}),
        '"zz" is not one of the ids',
    ),
    "ids by position": (
        json.dumps({"scores": [entry("1", 0.1), entry("2", 0.5), entry("3", 1.0)]}),
        '"1" is not one of the ids',
    ),
    "id a number": (json.dumps({"scores": [entry(1, 0.1)]}), "1 is not one of the ids"),
    "id a list": (json.dumps({"scores": [entry(["ab"], 0.1)]}), "is not one of the ids"),
    "id missing": ('{"scores": [{"score": 1}]}', "null is not one of the ids"),
    "id doubled": (
        json.dumps({"scores": [*json.loads(GOOD)["scores"], entry("ab", 0.1)]}),
        "id ab is scored twice",
    ),
    "seven": (with_score("7"), "the score of id ab is 7, not from 0 to 1"),
    "just over": (with_score("1.0001"), "is 1.0001, not from 0 to 1"),
    "negative": (with_score("-0.1"), "is -0.1, not from 0 to 1"),
    "NaN": (with_score("NaN"), "is NaN, not from 0 to 1"),
    "infinite": (with_score("Infinity"), "is Infinity, not from 0 to 1"),
    "minus infinite": (with_score("-Infinity"), "is -Infinity, not from 0 to 1"),
    "overflows": (with_score("1e999"), "is Infinity, not from 0 to 1"),
    "a huge integer": (with_score("9" * 400), "not from 0 to 1"),
    "an unreadable integer": (with_score("9" * 5000), "no JSON object"),
    "true": (with_score("true"), "is true, not a number"),
    "text": (with_score('"good"'), 'is "good", not a number'),
    "a quoted share": (with_score('"50%"'), 'is "50%", not a number'),
    "a quoted fraction": (with_score('"8/10"'), 'is "8/10", not a number'),
    "a quoted decimal comma": (with_score('"0,5"'), 'is "0,5", not a number'),
    "a quoted seven": (with_score('"7"'), "is 7.0, not from 0 to 1"),
    "a quoted NaN": (with_score('"NaN"'), 'is "NaN", not a number'),
    "null score": (with_score("null"), "is null, not a number"),
    "a list for a score": (with_score("[0.5]"), "not a number"),
    "two that differ": (
        GOOD + GOOD.replace("0.1", "0.2"),
        'more than one "scores" list',
    ),
    "nested too deep": ("{" + '"a":[' * 5_000, "no JSON object"),
    "brackets without end": ("{" * 10_000 + GOOD, "too many brackets"),
    "too long": (" " * (MAX_REPLY_CHARACTERS + 1) + GOOD, "longer than"),
}


@pytest.mark.parametrize("kind", RUBBISH)
def test_rubbish_is_refused_with_words_for_the_judge(kind: str) -> None:
    text, words = RUBBISH[kind]
    with pytest.raises(JudgeReplyError) as refused:
        parse(text)
    assert words in str(refused.value)
    assert len(str(refused.value)) < 200


def test_every_score_is_finite_and_in_range_or_refused() -> None:
    for value in ("0.25", "1", "0", "2", "-1", "NaN", "Infinity", "1e-320"):
        try:
            scores = parse(with_score(value))
        except JudgeReplyError:
            assert not 0 <= float(value) <= 1
        else:
            assert all(math.isfinite(score) and 0 <= score <= 1 for score in scores)


@pytest.mark.parametrize("end", ["", "</thin", "\n\n"])
def test_a_draft_in_thinking_that_never_ends_is_no_verdict(end: str) -> None:
    """The token limit cut the judge off while it tried out scores."""
    with pytest.raises(JudgeReplyError, match="inside its thinking"):
        parse(f"<think>Perhaps {GOOD} but answer b is ruder{end}")


@pytest.mark.parametrize(
    "before",
    ["Sure. <think>", "<thinking>", "<think>x</think><think>", "<think>x</think>\n<Thinking>"],
)
def test_a_draft_is_known_wherever_the_thinking_begins(before: str) -> None:
    with pytest.raises(JudgeReplyError, match="inside its thinking"):
        parse(f"{before}Perhaps {GOOD}")


class CountingDecoder:
    """Adds up the characters that each attempt passes over; an unfinished string counts whole."""

    def __init__(self, decoder: json.JSONDecoder) -> None:
        self.decoder = decoder
        self.characters = 0

    def raw_decode(self, text: str, at: int) -> tuple[Any, int]:
        end = len(text)
        try:
            value, end = self.decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            end = len(text) if "Unterminated" in error.msg else error.pos
            raise
        finally:
            self.characters += end - at
        return value, end


@pytest.mark.parametrize(
    "text",
    [
        '{"x":[' * 900 + "1," * 95_000,
        '[{"a":' * 950 + '"' + '\\"' * 95_000,
        '{"a":[' * 1_900 + "{}," * 60_000,
        '{"x":[' * 900 + "1,]" * 60_000,
        '{"x":[' * 900 + "9" * 190_000,
    ],
)
def test_brackets_that_are_never_closed_are_not_decoded_to_the_end_from_each(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = CountingDecoder(prompt._DECODER)
    monkeypatch.setattr(prompt, "_DECODER", counting)

    with pytest.raises(JudgeReplyError, match="no JSON object"):
        parse(text)

    assert counting.characters <= 5 * MAX_REPLY_CHARACTERS


def test_scores_after_nested_drafts_that_break_off_are_read() -> None:
    words = "w" * 300
    draft = '{"a": {"b": {"c": {"scores": [' + f'{{"id": "ab", "explanation": "{words}"}}, ' * 300
    assert parse(f"{draft}\nAgain: {GOOD}") == (0.5, 1.0, 0.1)

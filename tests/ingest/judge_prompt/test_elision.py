"""What is left out of a conversation that is too long for the judge, and what never is."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from ingest.errors import JudgeTooLongError
from ingest.judge_prompt import Elided, NoRoomLeftError, elide, estimate_tokens
from ingest.ruler.prompt import build_prompt, reply_tokens

SYSTEM = {"role": "system", "content": "You are a shop's agent."}
QUESTION = {"role": "user", "content": "And where is my parcel now?"}


def write(message: Any) -> str:
    return json.dumps(message, ensure_ascii=False)


def tokens(lines: tuple[str, ...]) -> int:
    return sum(estimate_tokens(line) + 1 for line in lines)


def turns(count: int, words: int = 40) -> list[dict[str, Any]]:
    return [
        {"role": ("user", "assistant")[number % 2], "content": f"turn {number} " + "word " * words}
        for number in range(count)
    ]


def mark_of(elided: Elided) -> str:
    (mark,) = [json.loads(line)["left_out"] for line in elided.lines if '"left_out"' in line]
    assert isinstance(mark, str)
    return mark


def test_what_fits_is_whole() -> None:
    messages = [SYSTEM, *turns(4), QUESTION]
    lines = tuple(map(write, messages))

    assert elide(messages, room=tokens(lines), write=write) == Elided(lines=lines)
    assert elide(messages, room=float("inf"), write=write).is_whole


def test_the_oldest_messages_go_first_and_the_mark_says_how_many() -> None:
    talk = turns(10)
    messages = [SYSTEM, *talk, QUESTION]
    last_three = tuple(map(write, [SYSTEM, *talk[-3:], QUESTION]))

    elided = elide(messages, room=tokens(last_three) + 48, write=write)

    system, mark, *rest = elided.lines
    assert (system, *rest) == last_three
    gone = sum(len(write(one)) for one in talk[:7])
    assert json.loads(mark) == {"left_out": f"7 older messages; {gone} characters in all"}
    assert (elided.left_out_messages, elided.left_out_characters) == (7, gone)


def test_a_system_message_in_the_middle_stays() -> None:
    later = {"role": "developer", "content": "From now on be brief."}
    messages = [SYSTEM, *turns(6), later, *turns(6), QUESTION]

    elided = elide(
        messages, room=tokens(tuple(map(write, [SYSTEM, later, QUESTION]))) + 50, write=write
    )

    assert [line for line in elided.lines if '"left_out"' not in line] == [
        write(one) for one in (SYSTEM, later, QUESTION)
    ]
    assert elided.left_out_messages == 12


def test_a_last_message_without_room_is_cut_in_its_middle() -> None:
    question = {"role": "user", "content": f"BEGIN {'word ' * 5_000} END"}

    elided = elide([SYSTEM, *turns(2), question], room=600, write=write)

    system, mark, cut = elided.lines
    assert system == write(SYSTEM)
    assert "2 older messages" in mark
    content = json.loads(cut)["content"]
    assert content.startswith("BEGIN word")
    assert content.endswith("word  END")
    assert re.search(r"\[\.\.\. \d+ characters left out \.\.\.\]", content)
    assert 450 < tokens(elided.lines) <= 600


def test_a_system_message_is_cut_only_when_the_rest_is_at_its_least() -> None:
    system = {"role": "system", "content": "Rule one. " + "word " * 5_000}
    question = {"role": "user", "content": "word " * 5_000}

    elided = elide([system, question], room=1_000, write=write)

    mark, *shown = map(json.loads, elided.lines)
    assert "from the middle of long texts" in mark["left_out"]
    assert [one["role"] for one in shown] == ["system", "user"]
    assert shown[0]["content"].startswith("Rule one.")
    assert estimate_tokens(elided.lines[2]) <= 256
    assert tokens(elided.lines) <= 1_000


@pytest.mark.parametrize("room", [-5, 0, 48, 60])
def test_without_any_room_it_is_an_error(room: int) -> None:
    with pytest.raises(NoRoomLeftError):
        elide([SYSTEM, *turns(2), QUESTION], room=room, write=write)
    with pytest.raises(NoRoomLeftError):
        elide([], room=-1, write=write)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.one_of(st.none(), st.text(max_size=400), st.text("ab 9é", min_size=500)),
        }
    ),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(messages=MESSAGES, room=st.integers(-10, 3_000))
def test_what_is_shown_fits_and_keeps_the_order(messages: list[Any], room: int) -> None:
    try:
        elided = elide(messages, room=room, write=write)
    except NoRoomLeftError:
        return
    assert tokens(elided.lines) <= max(0, room)
    marks = [line for line in elided.lines if line.startswith('{"left_out"')]
    assert len(marks) == (0 if elided.is_whole else 1)
    roles = [json.loads(line)["role"] for line in elided.lines if line not in marks]
    assert len(roles) == len(messages) - elided.left_out_messages
    assert [r for r in roles if r == "system"] == [
        m["role"] for m in messages if m["role"] == "system"
    ]


def build(context: list[Any], limit: int | None, answers: list[Any] | None = None) -> Any:
    said = answers or [{"role": "assistant", "content": f"answer {number}"} for number in range(4)]
    return build_prompt(
        context=context,
        tools=[],
        answers=said,
        rubric="Be right.",
        rng=random.Random(1),
        context_tokens=limit,
    )


def test_a_prompt_of_100_000_tokens_is_cut_to_the_judges_context() -> None:
    context = [SYSTEM, *turns(2_000, words=50), QUESTION]
    whole = build(context, None)
    assert sum(estimate_tokens(one["content"]) for one in whole.messages) > 100_000

    prompt = build(context, 32_768)

    taken = sum(estimate_tokens(one["content"]) for one in prompt.messages)
    assert 31_000 - reply_tokens(prompt.schema) < taken <= 32_768 - reply_tokens(prompt.schema)
    text = prompt.messages[1]["content"]
    assert "You are a shop's agent." in text
    assert "And where is my parcel now?" in text
    assert all(f"answer {number}" in text for number in range(4))
    assert f'{{"left_out": "{prompt.left_out_messages} older messages; ' in text
    assert '{"left_out" stands in place' in prompt.messages[0]["content"]
    assert "left_out" not in whole.messages[0]["content"]


def test_no_candidate_is_ever_cut() -> None:
    long = [{"role": "assistant", "content": f"{number} " + "word " * 3_000} for number in range(4)]

    shown = build([SYSTEM, *turns(400), QUESTION], 32_768, long).messages[1]["content"]
    assert all(one["content"] in shown for one in long)

    with pytest.raises(JudgeTooLongError, match=r"judge\.context_tokens.*too many") as raised:
        build([SYSTEM, QUESTION], 8_192, long)
    assert not raised.value.asked

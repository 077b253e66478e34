"""What is left out of a conversation that is too long for the judge, and what never is."""

from __future__ import annotations

import json
import random
import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

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
            "role": st.sampled_from(["system", "developer", "user", "assistant"]),
            "content": st.one_of(st.none(), st.text(max_size=400), st.text("ab 9é", min_size=500)),
        }
    ),
    max_size=12,
)


@settings(max_examples=80)
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
    standing = [m["role"] for m in messages if m["role"] in ("system", "developer")]
    assert [r for r in roles if r in ("system", "developer")] == standing


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


# The estimate of tokens: not below what tokenizers count, not far above it, and quick.

ROOT = Path(__file__).resolve().parents[3]
RNG = random.Random(1)
TEXTS = {
    "English": (ROOT / "docs" / "architecture.md").read_text(),
    "Python": (ROOT / "ingest" / "ruler" / "judging.py").read_text(),
    "chats as JSON": (ROOT / "ingest" / "calibration" / "shipped" / "groups.jsonl").read_text(),
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. " * 50,
    "Finnish": "Kaikki ihmiset syntyvät vapaina ja tasavertaisina arvoltaan ja oikeuksiltaan. "
    * 50,
    "Russian": "Все счастливые семьи похожи друг на друга, каждая несчастливая по-своему. " * 50,
    "Chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。" * 50,
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。" * 50,
    "Arabic": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق. " * 50,
    "digits": "".join(RNG.choice("0123456789") for _ in range(5_000)),
    "times": " ".join(
        f"2026-01-{RNG.randrange(10, 29)}T09:{RNG.randrange(10, 60)}" for _ in range(300)
    ),
    "base64": "".join(RNG.choice("abcdefghijkLMNOPQRSTUVwxyz0123456789+/") for _ in range(5_000)),
    "hex": "".join(RNG.choice("0123456789abcdef") for _ in range(5_000)),
}
PROSE = ("English", "Python", "chats as JSON", "German", "Finnish")


@pytest.mark.parametrize("kind", TEXTS)
def test_the_estimate_is_not_below_the_count_of_a_tokenizer(kind: str) -> None:
    spec = find_spec("litellm")  # not imported: only the file that it ships is read
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"
    tokenizer = Tokenizer.from_file(str(folder / "anthropic_tokenizer.json"))
    counted = len(tokenizer.encode(TEXTS[kind]).ids)

    assert estimate_tokens(TEXTS[kind]) >= counted
    if kind in PROSE:
        assert estimate_tokens(TEXTS[kind]) <= 1.9 * counted


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("abcde", 2),  # 5 / 2.5
        ("a1 b2 c3 d", 6),  # 7 / 2.5 and 3 digits: 5.8
        ('{"":[]}', 5),  # 7 / 1.5: 4.67
        ("éé", 2),  # 4 bytes / 2
        ("0a" * 12, 24),  # unbroken: a token each
        ("\ud800", 2),  # a lone surrogate: 3 bytes / 2
    ],
)
def test_each_class_of_bytes_has_its_rate(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens


@pytest.mark.parametrize("unit", ["word ", "a", "-", "9", "é", "a" * 23 + " ", "\n"])
def test_a_megabyte_takes_well_under_a_second(unit: str) -> None:
    started = time.process_time()
    estimate_tokens(unit * (1_000_000 // len(unit)))
    assert time.process_time() - started < 5.0  # measured: 5 to 50 ms

"""The canonical opening: what does not change it, and what does."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from sidecar.routing.opening import ENDS, KEPT, mark, opening, plain

NOTES = [
    "It is 10:31:02. ",
    "[2026-11-27 10:31:02] ",
    "Current time: 2026-11-27T10:31:02.123Z\n\n",
    "Today's date is Fri Nov 27 2026.\n",
    "The current date and time is Friday, November 27, 2026 10:31 AM.\n",
    "Conversation started: Friday, November 27, 2026 10:31 AM\n",
    "27/11/2026 10:31 (Europe/Berlin)\n",
    "Timestamp: 1764238271 ",
    "\u5f53\u524d\u65f6\u95f4\u662f2026\u5e7411\u670827\u65e5 10:31\u3002",
    "<total_tokens>14999483 tokens left</total_tokens>\n",
    "<budget:token_budget>200000</budget:token_budget>",
    "<system_warning>Token usage: 35000/200000; 165000 remaining</system_warning>",
    "You have 14,999,483 tokens left. ",
    "Tokens remaining: 14999483\n",
    "Token budget: 4000.\n",
    "x-anthropic-billing-header: cc_version=2.1.114.7b4; cc_entrypoint=cli; cch=1eef3;\n",
    "checksum: 8f3a02\n",
    "<system-reminder>\nToday's date is 2026-11-27.\n# claudeMd\nUse tabs.</system-reminder>\n",
    "<environment_context>\n  <cwd>/srv/a</cwd>\n</environment_context>",
    "<environment_details>\n# Current Time\n10:31 AM\n</environment_details>",
    "<current_datetime>2026-11-27 10:31</current_datetime>\n",
    "<user_info>OS: linux. Date: Friday Nov 27, 2026</user_info>",
    "<git_status>M a.py</git_status>",
]
WORDS = st.text("abcdefgh \u00e9\u4e16", min_size=1, max_size=40).filter(lambda text: text.strip())


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("asked", ["How do I reset it?", "Order 4711, please", "fix the bug"])
def test_a_note_before_or_after_the_words_does_not_count(note: str, asked: str) -> None:
    assert plain(note + asked) == plain(asked) != b""
    assert plain(f"{asked}\n\n{note}").rstrip(b".") == plain(asked)


@pytest.mark.parametrize("note", NOTES)
def test_a_message_of_notes_alone_says_nothing(note: str) -> None:
    assert mark(note) == b""
    assert opening([("user", mark(note)), ("user", b"Hi")]) == opening([("user", b"Hi")])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step 1: go on", "step 2: go on"),
        ("Order 4711", "Order 4712"),
        ("Is 10.31.20.4 up?", "Is 10.31.20.5 up?"),
        ("release 1.2.34", "release 1.2.35"),
        ("54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe", "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2ff"),
        ("What is 0.5 of 20260?", "What is 0.5 of 20261?"),
        ("My token 4711 fails", "My token 4712 fails"),
        ("<task>a</task>", "<task>b</task>"),
        ("<context>a</context> why?", "<context>b</context> why?"),
        ("<system-reminder>never closed a", "<system-reminder>never closed b"),
        ("Hi", "hi"),
    ],
)
def test_what_a_user_says_counts(one: str, other: str) -> None:
    assert plain(one) != plain(other)


@given(WORDS, WORDS, st.sampled_from(["\n", "  ", "\t", "\r\n"]))
def test_white_space_does_not_count_and_words_do(one: str, other: str, space: str) -> None:
    assert mark(one.replace(" ", space)) == mark(f"{space}{one}{space}") == mark(one)
    assert (mark(one) == mark(other)) is ("".join(one.split()) == "".join(other.split()))


def test_an_opening_ends_with_the_first_reply() -> None:
    first = [("system", b""), ("user", b"a"), ("developer", b""), ("user", b"b")]
    whole, goes_on = opening(first)

    assert (len(whole), goes_on) == (16, False)
    assert opening([*first, ("assistant", b""), ("user", b"c")]) == (whole, True)
    assert opening([("assistant", b"x"), *first, ("tool", b"")]) == (whole, True)
    assert opening(first[:2])[0] != whole
    assert opening([("system", b"s"), ("assistant", b"a")]) == (b"", False)


def test_no_more_messages_are_read_than_the_opening_has() -> None:
    read: list[str] = []

    def messages() -> object:
        for role in ("user", "assistant", "user"):
            read.append(role)
            yield role, b"x"

    opening(messages())  # type: ignore[arg-type]

    assert read == ["user", "assistant"]


def test_of_a_long_text_the_ends_count_and_notes_only_near_them() -> None:
    long = "word " * 20_000
    assert len(plain(long)) == 2 * KEPT
    assert plain("It is 10:31:02. " + long) == plain("It is 10:32:59. " + long)
    assert plain(long + "Why?") != plain(long + "How?")
    middle = "a " * ENDS
    assert plain(f"{middle}10:31{middle}") != plain(f"{middle}10:32{middle}")

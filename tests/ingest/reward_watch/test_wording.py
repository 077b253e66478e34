"""Refusals and clarifying questions: figures on labelled answers, and the bounds of the work."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from ingest.reward_watch.traits import is_clarifying, is_refusal
from tests.ingest.reward_watch.labelled_answers import (
    CLARIFYING,
    NEITHER,
    OTHER_LANGUAGES,
    REFUSALS,
)

LABELLED = (
    [(text, "refusal") for text in REFUSALS]
    + [(text, "clarifying") for text in CLARIFYING]
    + [(text, "neither") for text in NEITHER]
)


def label(text: str) -> str:
    if is_refusal(text):
        return "refusal"
    return "clarifying" if is_clarifying(text) else "neither"


def figures(kind: str, half: slice) -> tuple[int, int, int]:
    """Return true positives, false positives and false negatives of a kind."""
    pairs = [(label(text), right) for text, right in LABELLED[half]]
    return (
        sum(found == kind == right for found, right in pairs),
        sum(found == kind != right for found, right in pairs),
        sum(found != kind == right for found, right in pairs),
    )


def test_the_labelled_set_has_enough_of_each_label() -> None:
    assert len(LABELLED) + len(OTHER_LANGUAGES) >= 120
    assert len({text for text, _ in LABELLED}) == len(LABELLED)
    assert min(len(REFUSALS), len(CLARIFYING), len(NEITHER)) >= 40


def test_the_figures_of_the_docs_hold_on_both_halves() -> None:
    seen, unseen = slice(0, None, 2), slice(1, None, 2)

    assert figures("refusal", seen) == (20, 0, 0)
    assert figures("clarifying", seen) == (19, 0, 1)
    assert figures("refusal", unseen) == (20, 0, 0)
    assert figures("clarifying", unseen) == (20, 1, 0)


def test_in_other_languages_questions_are_seen_and_refusals_are_not() -> None:
    found = {text: label(text) for text, _ in OTHER_LANGUAGES}

    assert all(
        found[text] == "clarifying" for text, right in OTHER_LANGUAGES if right == "clarifying"
    )
    assert all(found[text] == "neither" for text, right in OTHER_LANGUAGES if right != "clarifying")


@pytest.mark.parametrize("text", ["", " ", "\n\n", "?", "...", '"', "> ", "```"])
def test_a_text_of_marks_alone_is_no_refusal(text: str) -> None:
    assert not is_refusal(text)


def test_a_long_answer_that_begins_with_a_refusal_has_more_to_say() -> None:
    short = "I can't access the internet to provide live data."

    assert not is_refusal(short + " From the text that you gave: the price is 12." * 40)


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, " * 200,
        "i " * 1_000,
        "sorry " * 300,
        "(" * 2_000,
        "i understand " * 150,
        "?" * 2_000,
    ],
)
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()

    for _ in range(5):
        label(text)

    assert time.process_time() - began < 5.0


REPEATED = (
    "as an ai ",
    "to help ",
    "i understand but ",
    "before i ",
    "so i can ",
    "i apologize for ",
    "unfortunately ",
    "i'm sorry but about that ",
    "sure and ",
)


@pytest.mark.parametrize("phrase", REPEATED)
@pytest.mark.parametrize("mark", ["", "?"])
def test_repeated_phrases_take_linear_time(phrase: str, mark: str) -> None:
    """Python's own matcher needs 2^n steps for n of these: 25 of them took minutes."""
    program = (
        "import sys; from ingest.reward_watch.traits import is_clarifying, is_refusal;"
        "t = sys.argv[1] * int(sys.argv[2]); [f(t[:n] + sys.argv[3])"
        " for f in (is_clarifying, is_refusal) for n in (200, 600, 1200, 2000, 100_000)]"
    )
    many = str(100_000 // len(phrase))
    subprocess.run([sys.executable, "-c", program, phrase, many, mark], check=True, timeout=60)

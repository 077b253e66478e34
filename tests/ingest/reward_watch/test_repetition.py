"""Loops at the end of an answer, and texts that repeat themselves for a reason."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from ingest.reward_watch import traits
from ingest.reward_watch.traits import LOOPS, TAIL, repeated_share

LOOPED = {
    "a sentence": "I am sorry for that. " * 60,
    "a word": "the " * 1_000,
    "two lines": "Let me check the order again.\nThe order is being checked.\n" * 30,
    "chinese": "对不起，我再看一下。" * 80,
    "numbered": "".join(f"{i}. Check the logs of the server and restart it.\n" for i in range(60)),
    "a thought": "Wait, but the answer might be 12. Let me compute again: 3*4=12. " * 25,
    "after a sound beginning": Path(traits.__file__).read_text() + "and then " * 400,
    "a paragraph": "The customer asks for a refund, and the policy says that refunds take thirty "
    "days, so the agent has to look up the date of the order in the table. " * 14,
}
FINE = {
    "a table": "".join(
        f"| {i} | item {Random(i).choice(['lamp', 'chair', 'desk', 'sofa'])} {i * 7 % 13} | "
        f"{i * 13 % 97}.{i * 7 % 100:02d} EUR |\n"
        for i in range(60)
    ),
    "json": json.dumps(
        [
            {"id": i, "name": f"user{i * 37 % 101}", "email": f"user{i * 37 % 101}@example.org"}
            for i in range(40)
        ]
    ),
    "code": Path(__file__).read_text(),
    "sql": "".join(
        f"INSERT INTO price (sku, eur) VALUES ('{i * 7919 % 9973:05d}', {i * 31 % 89}.{i % 100});\n"
        for i in range(50)
    ),
    "a refrain": "\n".join(
        f"{line}\nAnd the river runs on, and the river runs on.\n"
        for line in (
            "The mill has stopped, the miller gone",
            "The corn is high, the day is long",
            "A boat went by without a song",
            "The bridge was built when I was young",
            "They sold the field beside the pond",
            "The church has lost its second bell",
            "My father knew these waters well",
            "The frost came early to the dell",
        )
    ),
    "short": "no no no no no no no no no no",
}


@pytest.mark.parametrize("name", LOOPED)
def test_a_loop_is_seen(name: str) -> None:
    assert repeated_share(LOOPED[name]) >= LOOPS + 0.05


@pytest.mark.parametrize("name", FINE)
def test_a_text_that_repeats_for_a_reason_is_no_loop(name: str) -> None:
    assert repeated_share(FINE[name]) <= LOOPS - 0.05


def test_only_the_end_counts() -> None:
    rng = Random(1)
    sound = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(TAIL))

    assert repeated_share("loop " * 10_000 + sound) == repeated_share(sound)


def test_the_share_of_a_period_is_what_is_left_of_it() -> None:
    text = ("".join(chr(0x4E00 + i) for i in range(100))) * 20  # 2,000 characters, period 100

    assert repeated_share(text) == 1 - 100 / (2_000 - 16 + 1)

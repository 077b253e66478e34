"""The figures of the groups benchmark, by cases worked by hand."""

from __future__ import annotations

import pytest

from benchmarks.groups.fit import fit
from benchmarks.groups.prompts import Prompt, score
from benchmarks.groups.recording import FILE, Step, halves, read
from benchmarks.groups.run import factor, yielded
from ingest.grouping.features import Features
from ingest.grouping.preference import WEIGHTS


def step(*, spread: bool, tokens: int = 100, free: bool = False) -> Step:
    return Step(
        kind="chat",
        opening="o",
        features=Features(),
        spread=spread,
        tokens=tokens,
        free_spread=free,
        served=1,
    )


def test_what_is_yielded_is_groups_with_a_spread_for_a_token() -> None:
    steps = [step(spread=True), step(spread=False, tokens=300)]

    assert yielded(steps, lambda _: 1.0) == 1 / 400
    assert factor(steps, lambda one: 1.0 if one.spread else 0.5) == pytest.approx(400 / 250)


def test_a_free_group_counts_and_costs_nothing() -> None:
    steps = [step(spread=True), step(spread=False, tokens=300, free=True)]

    assert yielded(steps, lambda _: 1.0, free=True) == 2 / 100


def test_an_answer_that_was_cut_is_worth_half() -> None:
    prompt = Prompt(kind="chat", system="", user="", want=r"\W*ok\W*")

    assert score(prompt, "OK.", "stop") == 1.0
    assert score(prompt, "OK.", "length") == 0.5
    assert score(prompt, "no", "stop") == 0.0


def test_the_weights_are_those_that_the_seen_half_of_the_recording_gives() -> None:
    steps = read()
    seen, held_out = halves(steps)

    assert len(steps) == len(seen) + len(held_out) == 440
    assert FILE.stat().st_size < 200_000
    assert fit(seen) == pytest.approx(dict(WEIGHTS), abs=0.006)

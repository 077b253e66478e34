"""The ruler benchmark: its groups, its judge, its attacks and its arithmetic."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.ruler import injections
from benchmarks.ruler.beside import compare, difference, is_wrong, meant_scores
from benchmarks.ruler.conditions import BEYOND, CONDITIONS, FOOLED
from benchmarks.ruler.material import KINDS, LARGEST, SMALLEST, MadeGroup, groups
from benchmarks.ruler.reading import Reading, read_prompt
from benchmarks.ruler.scorer import account, claimed, fill, scored
from benchmarks.ruler.scripted import CASE, Traits, reply_to
from benchmarks.ruler.server import build_app
from benchmarks.ruler.sides import Outcome
from ingest.ruler.prompt import build_prompt

Messages = list[dict[str, str]]
MADE = MadeGroup(
    context=({"role": "user", "content": "What now?"},),
    tools=(),
    answers=tuple(
        {"role": "assistant", "content": f"case-{name} is noted."}
        for name in ("aaaaaaaa", "bbbbbbbb", "cccccccc")
    ),
    cases=("case-aaaaaaaa", "case-bbbbbbbb", "case-cccccccc"),
    truth=(0.8, 0.5, 0.2),
)
TRUTH = dict(zip(MADE.cases, MADE.truth, strict=True))


def art_prompt(made: MadeGroup) -> Messages:
    """What openpipe-art 0.5.18 sends (`art/rewards/ruler.py`)."""
    blocks = [
        f'<trajectory id="{place}">\n{json.dumps([answer])}\n</trajectory>'
        for place, answer in enumerate(made.answers, start=1)
    ]
    context = f"<context>\n{json.dumps(list(made.context))}\n</context>\n\n"
    return [
        {
            "role": "system",
            "content": "All of the trajectories below have been given the same goal.",
        },
        {"role": "user", "content": f"{context}Trajectories:\n\n" + "\n\n".join(blocks)},
    ]


def our_prompt(made: MadeGroup, seed: int = 1) -> Messages:
    prompt = build_prompt(
        context=made.context,
        tools=made.tools,
        answers=made.answers,
        rubric="Be right.",
        rng=random.Random(seed),
    )
    return list(prompt.messages)


def in_order(made: MadeGroup, order: Sequence[int]) -> MadeGroup:
    return replace(
        made,
        answers=tuple(made.answers[place] for place in order),
        cases=tuple(made.cases[place] for place in order),
        truth=tuple(made.truth[place] for place in order),
    )


def call(cases: Sequence[str], meant: Sequence[float], **fields: int) -> dict[str, Any]:
    tokens = {"prompt_tokens": 100, "completion_tokens": 10}
    return {"cases": list(cases), "meant": list(meant), **tokens, **fields}


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_the_same_each_time_and_every_answer_says_its_case(kind: str) -> None:
    made = groups(kind, 20, "a")

    assert made == groups(kind, 20, "a")
    assert made != groups(kind, 20, "b")
    for one in made:
        assert SMALLEST <= len(one.answers) == len(one.cases) == len(one.truth) <= LARGEST
        said = [CASE.findall(json.dumps(answer)) for answer in one.answers]
        assert said == [[case] for case in one.cases]
        assert len(set(one.truth)) > 1
        by_case = dict(zip(one.cases, one.truth, strict=True))
        assert [by_case[case] for case in one.cases] == list(one.truth)


@pytest.mark.parametrize("how", ["blocks", "obeys", "tags", "decoded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_judge_reads_every_answer_out_of_either_prompt(kind: str, how: Reading) -> None:
    for made in groups(kind, 5, "a"):
        if how in ("tags", "decoded") and kind in ("code", "html"):
            continue  # these judges are asked about no markup
        for messages in (art_prompt(made), our_prompt(made)):
            shown = read_prompt(messages, how)

            cases = [CASE.findall(text) for _, text in shown.answers]
            assert sorted(case for found in cases for case in found) == sorted(made.cases)
            assert shown.orders == {}


def test_the_same_order_gets_the_same_scores_whichever_side_asks() -> None:
    traits = Traits(slope=0.3, noise=0.1)
    ours = reply_to(our_prompt(MADE), traits, TRUTH)
    order = [MADE.cases.index(case) for case in ours.cases]

    theirs = reply_to(art_prompt(in_order(MADE, order)), traits, TRUTH)

    assert theirs.cases == ours.cases
    assert theirs.meant == ours.meant
    assert [entry["score"] for entry in entries(theirs.text)] == list(ours.meant)
    assert reply_to(our_prompt(MADE), traits, TRUTH, seed="other").meant != ours.meant


def entries(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["scores"]
    return found


def test_hostile_text_fools_the_judge_that_can_be_fooled_at_art_and_not_at_ours() -> None:
    made = injections.attacked(1, "a")
    assert len(made) == 2 * len(injections.TEXTS)
    for reads in ("tags", "decoded"):
        traits = replace(FOOLED[f"injected-read-{_said(reads)}"].traits)
        steered = {"art": 0, "ours": 0}
        for one in made:
            truth = dict(zip(one.cases, one.truth, strict=True))
            theirs = _by_place(one, reply_to(art_prompt(one), traits, truth).text)
            steered["art"] += injections.is_steered(one, theirs)
            said = reply_to(our_prompt(one), traits, truth)
            assert sorted(said.cases) == sorted(one.cases)
            by_case = dict(
                zip(said.cases, (entry["score"] for entry in entries(said.text)), strict=True)
            )
            steered["ours"] += injections.is_steered(one, [by_case[case] for case in one.cases])
        assert steered["ours"] == 0
        assert steered["art"] >= len(made) / 2  # the other texts are written for our prompt


def _said(reads: str) -> str:
    return {"tags": "by-tags", "decoded": "decoded"}[reads]


def _by_place(made: MadeGroup, text: str) -> list[float]:
    """The last score of each place, as a judge's reply names it."""
    found = {entry["trajectory_id"]: entry["score"] for entry in entries(text)}
    return [found.get(str(place), 0.0) for place in range(1, len(made.answers) + 1)]


def test_one_side_is_summed_up_by_hand() -> None:
    three = [MADE] * 3
    outcomes = [
        Outcome(scores=(0.8, 0.5, 0.2)),  # as meant
        Outcome(scores=(0.2, 0.5, 0.8)),  # zipped in the wrong order
        Outcome(scores=None, error="no JSON"),
    ]

    one = compare(three, outcomes, [call(MADE.cases, MADE.truth)] * 3)

    assert one.unusable == pytest.approx(1 / 3)
    assert one.wrong == 0.5
    assert one.tau is not None
    assert one.tau.value == 0.0  # 1 and -1
    assert one.tau_of_all == 0.0
    assert one.first_bias == pytest.approx((0.0 + (-0.6 - 0.3)) / 2)
    assert one.twins_apart is None
    assert (one.calls, one.prompt_tokens, one.completion_tokens) == (1.0, 100.0, 10.0)


def test_two_passes_mean_the_mean_of_their_last_attempts() -> None:
    backwards = MADE.cases[::-1]
    calls = [
        call(MADE.cases, (0.1, 0.1, 0.1)),
        call(MADE.cases, (0.8, 0.5, 0.2)),
        call(backwards, (0.4, 0.5, 0.6)),
    ]

    meant = dict(meant_scores(calls)[frozenset(MADE.cases)])

    assert meant == pytest.approx(dict(zip(MADE.cases, (0.7, 0.5, 0.3), strict=True)))
    assert not is_wrong(MADE, (0.7, 0.5, 0.3), meant_scores(calls))


def test_the_difference_has_three_errors_to_either_side() -> None:
    right, wrong = Outcome(scores=(0.8, 0.5, 0.2)), Outcome(scores=(0.2, 0.5, 0.8))
    none = Outcome(scores=None)

    apart = difference([MADE] * 4, [right, right, right, none], [wrong, right, right, right])

    assert apart is not None  # 2, 0 and 0: mean 2/3, standard deviation 2/sqrt(3)
    assert apart.value == pytest.approx(2 / 3)
    assert apart.high - apart.value == pytest.approx(3 * (2 / 3**0.5) / 3**0.5)
    assert apart.value - apart.low == pytest.approx(2)
    assert difference([MADE], [right], [right]) is None


async def test_the_server_refuses_what_is_too_long_for_its_judge_and_keeps_account() -> None:
    app = build_app(TRUTH, lambda text: len(text.split()), delay_s=0.0)
    plain = {"model": "plain--x", "messages": art_prompt(MADE)}
    long = art_prompt(MADE)
    long[0]["content"] += " word" * (CONDITIONS[BEYOND].limit or 0)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://judge") as client:
        answered = await client.post("/v1/chat/completions", json=plain)
        too_long = {"model": f"{BEYOND}--x", "messages": long}
        refused = await client.post("/v1/chat/completions", json=too_long)
        said = (await client.get("/said")).json()
        load = (await client.get("/load")).json()

    assert answered.json()["usage"]["prompt_tokens"] > 10
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert [one["cases"] for one in said.pop("plain--x")] == [list(MADE.cases)]
    assert said == {}
    assert (load["in_flight"], load["peak"]) == (0, 1)
    assert load["asked"] == {" ".join(sorted(MADE.cases)): 1}


def test_the_account_finds_what_is_lost_and_what_is_scored_twice(tmp_path: Path) -> None:
    made = groups("text", 3, "a")
    store = fill(tmp_path, made)
    assert (scored(store), claimed(store, 0.0)) == (0, 0)
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        for name, times in (("g0", 1), ("g1", 2)):
            for _ in range(times):
                connection.execute("UPDATE answer SET score = 0.5 WHERE group_id = ?", (name,))
            connection.execute(
                "UPDATE answer_group SET status = 'scored' WHERE group_id = ?", (name,)
            )
        connection.execute("UPDATE answer_group SET judging_since = 5.0 WHERE group_id = 'g2'")

    found = account(store)

    assert found["groups"] == 3
    assert found["lost"] == 1 + len(made[2].answers)  # the group, and its answers' scores
    assert found["doubled"] == len(made[1].answers)
    assert (scored(store), claimed(store, 4.0), claimed(store, 6.0)) == (2, 1, 0)

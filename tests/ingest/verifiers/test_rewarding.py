"""Groups are verified: once for each content, by project, and as the settings say of errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import assume, given, strategies as st

from ingest.records import Answer, Group
from ingest.verifiers import rewarding as module
from ingest.verifiers.records import Checked, Failure, FailureReason, Finding, Result, Verified
from ingest.verifiers.rewarding import (
    FAIL_TOP,
    PASS_BOTTOM,
    Rewarding,
    combine,
    counted_scores,
    digest_of,
    open_rewarding,
    weighted_mean,
)
from ingest.verifiers.state import FindingCache, content_digest
from sidecar.settings import EntryPointVerifier, HttpVerifier, Reward, Settings
from sidecar.settings.judge import LengthVerifier, RegexVerifier
from sidecar.store.database import Database
from support.fake_checker import FakeChecker
from tests.ingest.conftest import counts, put_group


def rewarding(database: Database, checker: FakeChecker, **changes: Any) -> Rewarding:
    """One verifier, `v`, that the fake stands for; changes: its settings, and those of `reward`."""
    own = {name: changes.pop(name) for name in [*changes] if name in LengthVerifier.model_fields}
    one = LengthVerifier(kind="length", **{"max_tokens": 9, **own})
    return Rewarding(database, Reward(verifiers={"v": one}, **changes), {"v": checker})


def group(*contents: str, exchange: str = "x-g1", **changes: Any) -> Group:
    answers = tuple(
        Answer(
            index=index,
            origin="sampled",
            message=json.dumps({"role": "assistant", "content": content}).encode(),
            **changes,
        )
        for index, content in enumerate(contents)
    )
    return Group(
        group_id="g1",
        exchange_id=exchange,
        session_key="m:1",
        adapter="base",
        request=b'{"messages": []}',
        prompt_token_ids=(1,),
        answers=answers,
    )


async def verified(made: Rewarding, of: Group) -> Verified:
    found = await made.verify(of)
    assert found is not None
    return found


def good(content: str) -> Result:
    return Finding(score=float(content == "good"), why=content)


@pytest.fixture
def stored(database: Database) -> Database:
    """A store with the exchange of group g1, of the default project."""
    put_group(database, "g1", "good", "bad")
    return database


async def test_equal_answers_are_checked_once_and_not_again(stored: Database) -> None:
    checker = FakeChecker(good)
    made = rewarding(stored, checker)

    first = await verified(made, group("good", "bad", "good", "good"))
    again = await verified(made, group("bad", "new"))

    assert checker.asked == [["good", "bad"], ["new"]]
    assert first.checked[0].scores == (1.0, 0.0, 1.0, 1.0)
    assert again.checked[0].scores == (0.0, 0.0)
    assert counts(stored, "verifiers") == {"v_scored": 6}


async def test_a_new_version_is_asked_again(stored: Database) -> None:
    checker = FakeChecker(good)
    made = rewarding(stored, checker)
    await made.verify(group("good"))

    checker.named = "2"
    found = await made.verify(group("good"))

    assert len(checker.asked) == 2
    assert found is not None
    assert found.checked[0].version == "2"


@pytest.mark.parametrize(
    "changes", [{"finish_reason": "length"}, {"token_ids": (1, 2), "logprobs": (0.0, 0.0)}]
)
async def test_what_it_sees_tells_answers_apart(stored: Database, changes: dict[str, Any]) -> None:
    checker = FakeChecker(good)
    made = rewarding(stored, checker)

    await made.verify(group("good"))
    await made.verify(group("good", **changes))

    assert checker.asked == [["good"], ["good"]]


async def test_failures_are_not_kept(stored: Database) -> None:
    checker = FakeChecker(lambda _: Failure(reason="unreachable"))
    made = rewarding(stored, checker)
    await made.verify(group("good"))

    checker.find = good
    found = await verified(made, group("good"))

    assert found.checked[0].scores == (1.0,)


def test_the_cache_is_bounded_and_lets_the_oldest_go() -> None:
    cache = FindingCache(2)
    keys = [("v", "1", "d", str(number)) for number in range(3)]
    cache.put(keys[0], Finding(score=0.0))
    cache.put(keys[1], Finding(score=0.1))
    cache.get(keys[0])
    cache.put(keys[2], Finding(score=0.2))

    assert [cache.get(key) is not None for key in keys] == [True, False, True]


def test_no_two_contents_have_one_digest() -> None:
    plain = group("a").answers[0]
    seen = {
        content_digest(b"ab", plain, "c"),
        content_digest(b"a", plain, "bc"),
        content_digest(b"ab", group("b").answers[0], "c"),
        content_digest(b"ab", group("a", finish_reason="stop").answers[0], "c"),
    }
    assert len(seen) == 4


def test_the_digest_of_a_verifier_is_of_what_its_findings_depend_on() -> None:
    plain = RegexVerifier(kind="regex", pattern="a")
    same = RegexVerifier(kind="regex", pattern="a", weight=7, timeout_s=1, on_error="hold")
    other = RegexVerifier(kind="regex", pattern="b")
    code = EntryPointVerifier(kind="entry_point", entry_point="x", params={"a": 1})
    more = EntryPointVerifier(kind="entry_point", entry_point="x", params={"a": 2})
    keyed = HttpVerifier(kind="http", url="http://h/x", token="tok-12345")
    bare = HttpVerifier(kind="http", url="http://h/x")

    assert digest_of(plain) == digest_of(same)
    assert digest_of(keyed) == digest_of(bare)
    assert len({digest_of(one) for one in (plain, other, code, more, bare)}) == 5


@pytest.mark.both_stores
@pytest.mark.parametrize(
    ("on_error", "scores", "held"),
    [("ignore", (), ""), ("fail", (1.0, 0.0), ""), ("hold", (), "v: timeout")],
)
async def test_what_the_settings_say_of_errors_is_done_and_counted(
    stored: Database, on_error: str, scores: tuple[float, ...], held: str
) -> None:
    def find(content: str) -> Result:
        return Failure(reason="timeout", why="slow") if content == "slow" else good(content)

    made = rewarding(stored, FakeChecker(find), on_error=on_error)

    found = await verified(made, group("good", "slow"))

    assert found.checked[0].scores == scores
    assert found.held == held
    assert found.checked[0].results == (
        Finding(score=1.0, why="good"),
        Failure(reason="timeout", why="slow"),
    )
    assert counts(stored, "verifiers") == {"v_scored": 1, "v_timeout": 1}


async def test_a_verifier_that_cannot_be_loaded_is_counted(stored: Database) -> None:
    made = rewarding(stored, FakeChecker(good, not_loaded="no package"), on_error="fail")

    found = await verified(made, group("good", "bad"))

    assert found.checked[0].scores == ()
    assert counts(stored, "verifiers") == {"v_not_loaded": 2}


async def test_no_group_waits_for_what_the_judge_sets_it_aside_for(stored: Database) -> None:
    unreadable = FakeChecker(lambda _: Failure(reason="unreadable"))
    made = rewarding(stored, unreadable, on_error="hold")

    found = await verified(made, group("good", "bad"))

    assert found.held == ""


@pytest.mark.parametrize(("projects", "asked"), [(("shop",), False), (("default", "shop"), True)])
async def test_a_verifier_checks_the_projects_that_it_names(
    stored: Database, projects: tuple[str, ...], asked: bool
) -> None:
    checker = FakeChecker(good)

    found = await rewarding(stored, checker, projects=projects).verify(group("good", "bad"))

    assert (found is not None) == asked == bool(checker.asked)


async def test_a_group_whose_exchange_is_gone_is_not_verified(stored: Database) -> None:
    checker = FakeChecker(good)
    assert await rewarding(stored, checker).verify(group("good", exchange="gone")) is None


def test_without_verifiers_nothing_is_opened(database: Database) -> None:
    assert open_rewarding(Settings(), database) is None


async def test_the_settings_make_every_kind_and_find_by_it(stored: Database) -> None:
    table: Any = {
        "calls": {"kind": "tool_calls"},
        "valid": {"kind": "json_schema", "json_schema": {"type": "object"}},
        "ends": {"kind": "regex", "pattern": r"\}$"},
        "same": {"kind": "exact", "texts": ["{}"]},
        "short": {"kind": "length", "max_characters": 2},
    }
    for one in table.values():
        one["timeout_s"] = 60.0
    made = open_rewarding(Settings(reward=Reward(verifiers=table)), stored)
    assert made is not None

    found = await verified(made, group("{}", "hello"))
    await made.aclose()

    assert {one.name: one.scores for one in found.checked} == {
        "calls": (),  # no tools: it does not apply
        "valid": (1.0, 0.0),
        "ends": (1.0, 0.0),
        "same": (1.0, 0.0),
        "short": (1.0, 0.0),
    }


class Stuck(FakeChecker):
    async def check(self, request: bytes, answers: Sequence[Answer], project: str) -> list[Result]:
        await asyncio.sleep(600)
        raise AssertionError


async def test_a_groups_verification_ends_in_time_and_no_answer_is_to_blame(
    stored: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.2)
    made = rewarding(stored, Stuck(good), on_error="fail")

    found = await verified(made, group("good", "bad"))

    assert found.checked[0].scores == ()
    assert counts(stored, "verifiers") == {"v_late": 2}


# The reward: numbers worked by hand, and rules that hold for any scores.


def checked(
    *scores: float, name: str = "v", weight: float = 1.0, gate: bool = False, pass_at: float = 1.0
) -> Checked:
    return Checked(
        name=name,
        version="1",
        digest="d",
        weight=weight,
        gate=gate,
        pass_at=pass_at,
        results=tuple(Finding(score=score) for score in scores),
        scores=scores,
    )


def rewards(ruler: tuple[float, ...], *verifiers: Checked) -> tuple[float, ...]:
    return combine(ruler, verifiers).rewards


def test_weights_make_the_weighted_mean() -> None:
    made = combine(
        (0.8, 0.2),
        [checked(0.0, 1.0, weight=2.0), checked(1.0, 1.0, name="w", weight=1.0)],
    )

    # (1*0.8 + 2*0 + 1*1) / 4, (1*0.2 + 2*1 + 1*1) / 4
    assert made.rewards == pytest.approx((0.45, 0.8))
    # (2*0 + 1*1) / 3, (2*1 + 1*1) / 3
    assert made.independent == pytest.approx((1 / 3, 1.0))


def test_without_a_verifier_that_counts_the_reward_is_the_score() -> None:
    left_out = Checked(
        name="v",
        version="1",
        digest="d",
        weight=5.0,
        gate=False,
        pass_at=1.0,
        results=(Failure(reason="timeout", why="slow"), Finding(score=1.0)),
    )

    made = combine((0.31, 0.77), [left_out])

    assert made.rewards == (0.31, 0.77)
    assert made.independent == ()
    assert made.checks[0][0] == {
        "name": "v",
        "version": "1",
        "why": "slow",
        "score": None,
        "error": "timeout",
    }
    assert made.rule["verifiers"][0]["counts"] is False


def test_what_fails_a_gate_comes_below_all_that_pass_in_its_own_order() -> None:
    gate = checked(1.0, 0.0, 1.0, 0.9, gate=True)

    made = rewards((0.1, 1.0, 0.3, 0.5), gate)

    assert made == pytest.approx((0.64, 0.4, 0.72, 0.2))


def test_a_gate_passes_from_its_own_limit_on() -> None:
    gate = checked(0.5, 0.49, gate=True, pass_at=0.5)

    assert rewards((0.0, 1.0), gate) == (PASS_BOTTOM, FAIL_TOP)


@pytest.mark.parametrize("score", [0.0, 1.0])
def test_a_gate_that_tells_no_answer_apart_leaves_the_mean(score: float) -> None:
    assert rewards((0.2, 0.9), checked(score, score, gate=True)) == (0.2, 0.9)


def test_an_answer_that_fails_over_counts_as_wrong_only_under_fail() -> None:
    results = (Finding(score=1.0), Failure(reason="timeout"))

    assert counted_scores(results, "fail") == (1.0, 0.0)
    assert counted_scores(results, "ignore") == ()
    assert counted_scores(results, "hold") == ()


@pytest.mark.parametrize(
    "reason", ["not_loaded", "unreachable", "refused", "not_redacted", "too_large", "unreadable"]
)
def test_what_no_answer_can_bring_about_is_no_answers_fault(reason: FailureReason) -> None:
    assert counted_scores((Finding(score=1.0), Failure(reason=reason)), "fail") == ()


def test_a_verifier_that_does_not_apply_to_one_answer_counts_for_none() -> None:
    assert counted_scores((Finding(score=1.0), Finding(score=None)), "fail") == ()


SHARE = st.floats(0, 1)
WEIGHT = st.floats(0, 1000)


Scores = tuple[tuple[float, ...], list[Checked]]


@st.composite
def groups(draw: st.DrawFn) -> Scores:
    size = draw(st.integers(2, 8))
    column = st.tuples(*[SHARE] * size)
    verifiers = [
        checked(
            *draw(column),
            name=f"v{number}",
            weight=draw(WEIGHT),
            gate=draw(st.booleans()),
            pass_at=draw(st.floats(0.01, 1)),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    return draw(column), verifiers


@given(groups())
def test_rewards_are_shares_one_for_each_answer(group: Scores) -> None:
    ruler, verifiers = group

    made = combine(ruler, verifiers)

    assert len(made.rewards) == len(made.checks) == len(ruler)
    assert all(0.0 <= one <= 1.0 for one in (*made.rewards, *made.independent))


@given(groups())
def test_an_answer_that_is_nowhere_worse_is_not_ranked_lower(group: Scores) -> None:
    ruler, verifiers = group
    made = combine(ruler, verifiers).rewards

    for a, b in combinations(range(len(ruler)), 2):
        for low, high in ((a, b), (b, a)):
            columns = [ruler, *(one.scores for one in verifiers)]
            if all(column[low] <= column[high] for column in columns):
                assert made[low] <= made[high] + 1e-12


@given(groups(), st.data())
def test_a_better_score_never_costs_an_answer_reward(group: Scores, data: st.DataObject) -> None:
    ruler, verifiers = group
    place = data.draw(st.integers(0, len(ruler) - 1))
    better = tuple(
        data.draw(st.floats(score, 1)) if i == place else score for i, score in enumerate(ruler)
    )
    improved = [
        checked(
            *(
                data.draw(st.floats(score, 1)) if i == place else score
                for i, score in enumerate(one.scores)
            ),
            name=one.name,
            weight=one.weight,
            gate=one.gate,
            pass_at=one.pass_at,
        )
        for one in verifiers
    ]

    before = combine(ruler, verifiers).rewards[place]
    after = combine(better, improved).rewards[place]

    assert after >= before - 1e-12


@given(groups())
def test_all_that_pass_the_gates_are_above_all_that_fail(group: Scores) -> None:
    ruler, verifiers = group
    gates = [one for one in verifiers if one.gate]
    passing = [all(one.scores[i] >= one.pass_at for one in gates) for i in range(len(ruler))]
    assume(len(set(passing)) == 2)

    made = combine(ruler, verifiers).rewards

    low = [reward for reward, passes in zip(made, passing, strict=True) if not passes]
    high = [reward for reward, passes in zip(made, passing, strict=True) if passes]
    assert max(low) <= FAIL_TOP < PASS_BOTTOM <= min(high)


@given(groups())
def test_gates_keep_the_judges_order_within_each_kind(group: Scores) -> None:
    ruler, verifiers = group
    gates = [one for one in verifiers if one.gate]
    passing = [all(one.scores[i] >= one.pass_at for one in gates) for i in range(len(ruler))]

    made = combine(ruler, gates).rewards

    for a, b in combinations(range(len(ruler)), 2):
        if passing[a] == passing[b] and ruler[a] <= ruler[b]:
            assert made[a] <= made[b]


@given(st.lists(st.tuples(SHARE, WEIGHT), min_size=1, max_size=6))
def test_the_mean_is_that_of_exact_fractions(pairs: list[tuple[float, float]]) -> None:
    from fractions import Fraction

    scores, weights = zip(*pairs, strict=True)
    total = sum(map(Fraction, weights))
    found = weighted_mean(scores, weights)
    if sum(weights) == 0:
        assert found is None
        return
    exact = sum(Fraction(s) * Fraction(w) for s, w in pairs) / total
    assert found == pytest.approx(float(exact), abs=1e-9)

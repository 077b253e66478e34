"""Groups are verified: once for each content, by project, and as the settings say of errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from ingest.records import Answer, Group
from ingest.verifiers import rewarding as module
from ingest.verifiers.records import Failure, Finding, Result
from ingest.verifiers.rewarding import Rewarding, digest_of, open_rewarding
from ingest.verifiers.state import FindingCache, content_digest
from sidecar.settings import EntryPointVerifier, HttpVerifier, Reward, Settings
from sidecar.settings.judge import LengthVerifier, RegexVerifier
from sidecar.store.database import Database
from support.fake_checker import FakeChecker

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


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


def good(content: str) -> Result:
    return Finding(score=float(content == "good"), why=content)


@pytest.fixture
def stored(database: Database, judge_kit: JudgeKit) -> Database:
    """A store with the exchange of group g1, of the default project."""
    judge_kit.put_group(database, "g1", "good", "bad")
    return database


async def test_equal_answers_are_checked_once_and_not_again(
    stored: Database, judge_kit: JudgeKit
) -> None:
    checker = FakeChecker(good)
    made = rewarding(stored, checker)

    first = await made.verify(group("good", "bad", "good", "good"))
    again = await made.verify(group("bad", "new"))

    assert checker.asked == [["good", "bad"], ["new"]]
    assert first is not None
    assert again is not None
    assert first.checked[0].scores == (1.0, 0.0, 1.0, 1.0)
    assert again.checked[0].scores == (0.0, 0.0)
    assert judge_kit.counts(stored, "verifiers") == {"v_scored": 6}


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
async def test_what_a_verifier_can_see_tells_answers_apart(
    stored: Database, changes: dict[str, Any]
) -> None:
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
    found = await made.verify(group("good"))

    assert found is not None
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
    stored: Database, judge_kit: JudgeKit, on_error: str, scores: tuple[float, ...], held: str
) -> None:
    def find(content: str) -> Result:
        return Failure(reason="timeout", why="slow") if content == "slow" else good(content)

    made = rewarding(stored, FakeChecker(find), on_error=on_error)

    found = await made.verify(group("good", "slow"))

    assert found is not None
    assert found.checked[0].scores == scores
    assert found.held == held
    assert found.checked[0].results == (
        Finding(score=1.0, why="good"),
        Failure(reason="timeout", why="slow"),
    )
    assert judge_kit.counts(stored, "verifiers") == {"v_scored": 1, "v_timeout": 1}


async def test_a_verifier_that_cannot_be_loaded_is_counted(
    stored: Database, judge_kit: JudgeKit
) -> None:
    made = rewarding(stored, FakeChecker(good, not_loaded="no package"), on_error="fail")

    found = await made.verify(group("good", "bad"))

    assert found is not None
    assert found.checked[0].scores == ()
    assert judge_kit.counts(stored, "verifiers") == {"v_not_loaded": 2}


async def test_no_group_waits_for_what_the_judge_sets_it_aside_for(stored: Database) -> None:
    unreadable = FakeChecker(lambda _: Failure(reason="unreadable"))
    made = rewarding(stored, unreadable, on_error="hold")

    found = await made.verify(group("good", "bad"))

    assert found is not None
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

    found = await made.verify(group("{}", "hello"))
    await made.aclose()

    assert found is not None
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
    stored: Database, judge_kit: JudgeKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_S", 0.2)
    made = rewarding(stored, Stuck(good), on_error="fail")

    found = await made.verify(group("good", "bad"))

    assert found is not None
    assert found.checked[0].scores == ()
    assert judge_kit.counts(stored, "verifiers") == {"v_late": 2}

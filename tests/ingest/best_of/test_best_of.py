"""Best of N in the scoring process: the verdict, and scores and exchange that become one group."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sqlalchemy import select

from ingest import best_of, errors
from ingest.best_of import EXPIRE_S, BestOfJudge, Judged, answers_digest
from ingest.errors import (
    JudgeBusyError,
    JudgeGarbledError,
    JudgeLimitedError,
    JudgeRefusalError,
    JudgeRejectedError,
    JudgeSpentError,
    JudgeTooLongError,
    JudgeUnavailableError,
)
from ingest.grouping.selection import group_id_of
from ingest.intake.choose import choose_backlog, choose_new
from ingest.records import ScoredGroup
from ingest.ruler import group
from ingest.ruler.group import GroupOutcome, SetAside, Unanswered, refusal_of
from ingest.ruler.judge import Judge, JudgeReply
from ingest.ruler.judging import JudgingWorker
from ingest.ruler.prompt import rubric_hash
from ingest.store.exchanges import load_exchange
from ingest.store.groups import append_answers, load_group, load_scored_group, mark_sampled
from ingest.verifiers.records import Finding
from ingest.verifiers.rewarding import Rewarding
from sidecar.backoff import Backoff
from sidecar.capture.assemble import assemble
from sidecar.errors import StoreError
from sidecar.records import Assignment, RawCapture, Sampling, Timings, read_prompt_ids
from sidecar.relay.best_of import read_answers
from sidecar.scoring import NO_PICK_REASONS, Material, NoPick, Pick
from sidecar.settings import Reward, Settings
from sidecar.settings.judge import LengthVerifier
from sidecar.store.models import BestOfScoreRow, GroupRow, JudgeCallRow
from support.fake_checker import FakeChecker
from support.fake_judge import FakeJudge, Reply, score_by_content, scores_reply
from support.ingest_kit import Kit

WORTH = {"good": 0.9, "fair": 0.5, "bad": 0.1}
SCORES = score_by_content(WORTH)
TEXTS = ("fair", "good", "bad")


def message(text: str) -> bytes:
    return json.dumps({"role": "assistant", "content": text}).encode()


def material(
    *texts: str, exchange_id: str = "e1", keep: bool = True, project: str = "default"
) -> Material:
    return Material(
        exchange_id=exchange_id,
        request=json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode(),
        answers=tuple(message(text) for text in texts or TEXTS),
        keep=keep,
        project=project,
    )


class Rig:
    """The judge of best-of questions over a real store, and selection beside it."""

    def __init__(self, kit: Kit, model: Judge, **sections: Any) -> None:
        self.kit = kit
        self.now = 1_000.0
        self.asked: list[list[dict[str, str]]] = []
        """Conversations with the scripted judge."""
        self.settings = Settings(
            serving={"model": "smollm", "sampling_defaults": {}, "grammar": "as_asked"},
            judge={"model": "scripted", "rubric": "Be good.", **sections.get("judge", {})},
            best_of={"enabled": True, **sections.get("best_of", {})},
            groups={"size": 8, **sections.get("groups", {})},
        )
        seeds = iter(range(100, 10_000))
        self.judge = BestOfJudge(
            kit.database,
            model,
            self.settings,
            clock=lambda: self.now,
            draw_seed=lambda: next(seeds),
        )

    async def ask(self, *texts: str, **fields: Any) -> Pick | NoPick:
        verdict = await self.judge.decide(material(*texts, **fields))
        await self.judge.settled()
        return verdict

    def arrive(
        self, *texts: str, exchange_id: str = "e1", held_out: bool = False, **changes: Any
    ) -> None:
        """The exchange comes by the bus."""
        choices = tuple(
            self.kit.choice(text, index=index) for index, text in enumerate(texts or TEXTS)
        )
        exchange = self.kit.exchange(exchange_id, choices=choices, **changes)
        self.kit.store(exchange, held_out=held_out)

    def choose(self, **changes: Any) -> int:
        rules = self.kit.rules(**{"size": 8, **changes})
        return choose_new(self.kit.database, rules, model="smollm", limit=100, now=2.0)

    def scored(self, exchange_id: str = "e1") -> ScoredGroup:
        with self.kit.database.read() as session:
            scored = load_scored_group(session, group_id_of(exchange_id))
        assert scored is not None
        return scored

    def selection(self, exchange_id: str = "e1") -> str:
        with self.kit.database.read() as session:
            stored = load_exchange(session, exchange_id)
            assert stored is not None
            return stored.selection

    def waiting(self) -> list[str]:
        with self.kit.database.read() as session:
            return list(session.scalars(select(BestOfScoreRow.exchange_id)))

    def groups(self) -> list[str]:
        with self.kit.database.read() as session:
            return list(session.scalars(select(GroupRow.status)))

    def calls(self) -> list[JudgeCallRow]:
        with self.kit.database.read() as session:
            return list(session.scalars(select(JudgeCallRow)))


MakeRig = Callable[..., Rig]
"""rig(*script of the judge, **sections of the settings)."""


@pytest.fixture
def rig(kit: Kit) -> MakeRig:
    def make(*script: Reply, **sections: Any) -> Rig:
        judge = FakeJudge(*(script or (SCORES,)))
        made = Rig(kit, judge, **sections)
        made.asked = judge.conversations
        return made

    return make


# -- the verdict


async def test_the_best_answer_is_picked_and_its_scores_come_along(rig: MakeRig) -> None:
    one = rig(judge={"passes": 4})

    assert await one.ask() == Pick(index=1, scores=(0.5, 0.9, 0.1))
    assert len(one.asked) == 1, "one pass, whatever the setting"


async def test_of_equals_the_first_is_picked(rig: MakeRig) -> None:
    assert await rig().ask("bad", "good", "good") == Pick(index=1, scores=(0.1, 0.9, 0.9))


async def test_answers_that_are_all_alike_are_not_judged(rig: MakeRig) -> None:
    one = rig()

    assert await one.ask("good", "good") == NoPick(reason="identical_answers")
    assert one.asked == []
    assert one.kit.counts("best_of") == {"identical_answers": 1}


@pytest.mark.parametrize(
    ("script", "reason", "counted"),
    [
        (("rubbish",), "judge_rubbish", {"bad": 2}),
        ((JudgeRefusalError("too long"),), "judge_refused", {}),
        ((JudgeUnavailableError("down"),), "judge_down", {"unanswered": 1}),
        ((JudgeRejectedError("403"),), "judge_refused", {"unanswered": 1}),
        ((JudgeSpentError("spent", until=2_000.0),), "judge_spent", {"unanswered": 1}),
        ((JudgeLimitedError("limited", until=1_001.0),), "busy", {"unanswered": 1}),
        ((JudgeGarbledError("a page"),), "judge_refused", {"unanswered": 1}),
    ],
)
async def test_a_judge_that_does_not_judge_is_a_reason_and_counted(
    script: tuple[Reply, ...], reason: str, counted: dict[str, int], rig: MakeRig
) -> None:
    one = rig(*script)

    assert await one.ask() == NoPick(reason=reason)

    assert one.kit.counts("best_of") == {reason: 1}
    assert one.kit.counts("judge_calls") == counted
    assert one.waiting() == []


async def test_bodies_that_cannot_be_read_are_not_judged(rig: MakeRig) -> None:
    one = rig()
    broken = Material(exchange_id="e1", request=b"{", answers=(b"{}", b"{}"), keep=True)

    assert await one.judge.decide(broken) == NoPick(reason="unreadable")
    await one.judge.settled()


@pytest.mark.parametrize(
    ("error", "reason", "until"),
    [
        (JudgeUnavailableError("down"), "judge_down", 1_001.0),
        (JudgeSpentError("spent", until=1_060.0), "judge_spent", 1_060.0),
        (JudgeBusyError("429", retry_after_s=20.0), "judge_down", 1_020.0),
    ],
)
async def test_while_the_judge_is_down_or_its_budget_is_spent_nobody_waits_for_it(
    error: Exception, reason: str, until: float, rig: MakeRig
) -> None:
    one = rig(error, SCORES)
    await one.ask()

    one.now = until - 0.1
    assert await one.ask() == NoPick(reason=reason)
    assert len(one.asked) == 1
    one.now = until
    assert isinstance(await one.ask(), Pick)
    assert isinstance(await one.ask(exchange_id="e2"), Pick)


async def test_a_limit_a_minute_declines_one_question_and_no_other(rig: MakeRig) -> None:
    one = rig(JudgeLimitedError("limited", until=1_060.0), SCORES)
    await one.ask()
    assert isinstance(await one.ask(), Pick)


async def test_a_store_that_cannot_tell_what_is_spent_gives_the_first_answer(rig: MakeRig) -> None:
    assert await rig(StoreError("locked")).ask() == NoPick(reason="failed")


class SlowJudge:
    """Answers when it is told to."""

    model = "scripted"

    def __init__(self, inner: Judge) -> None:
        self.inner = inner
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def complete(
        self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]
    ) -> JudgeReply:
        self.asked.set()
        await self.go.wait()
        return await self.inner.complete(messages, schema)


async def test_more_than_fit_at_once_are_declined(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_of, "CONCURRENCY", 1)
    slow = SlowJudge(FakeJudge(SCORES))
    one = Rig(kit, slow)
    first = asyncio.create_task(one.judge.decide(material()))
    await slow.asked.wait()

    assert await one.judge.decide(material(exchange_id="e2")) == NoPick(reason="busy")

    slow.go.set()
    assert isinstance(await first, Pick)
    await one.judge.settled()


async def test_what_is_being_judged_at_the_end_is_given_up(kit: Kit) -> None:
    slow = SlowJudge(FakeJudge("never"))
    one = Rig(kit, slow)
    asking = asyncio.create_task(one.judge.decide(material()))
    await slow.asked.wait()

    await one.judge.aclose()

    assert asking.cancelled() or (await asyncio.gather(asking, return_exceptions=True))
    assert one.waiting() == []


# -- scores and exchange become a group


async def test_scores_and_then_the_exchange_make_a_scored_group(rig: MakeRig) -> None:
    one = rig()
    await one.ask()
    assert (one.waiting(), one.groups()) == (["e1"], [])

    one.arrive()
    assert one.choose() == 1

    scored = one.scored()
    assert scored.scores == (0.5, 0.9, 0.1)
    assert scored.judge_model == "scripted"
    assert scored.explanations[0].startswith("why a")
    assert [json.loads(a.message)["content"] for a in scored.group.answers] == list(TEXTS)
    assert [a.untrainable_reason for a in scored.group.answers] == [None] * 3
    assert scored.group.prompt_token_ids == (1, 9, 9, 4)
    assert (one.selection(), one.groups(), one.waiting()) == ("chosen", ["scored"], [])
    assert one.kit.counts("selection") == {"chosen": 1}
    assert one.kit.counts("sampling") == {"sampled": 1}
    assert one.kit.counts("judging") == {"scored": 1}
    assert one.kit.counts("best_of") == {"scored": 1}
    assert one.kit.counts("judge_calls") == {"good": 1}
    assert [row.group_id for row in one.calls()] == [group_id_of("e1")]


async def test_a_group_that_waits_for_the_judge_with_these_answers_is_scored(rig: MakeRig) -> None:
    one = rig(groups={"size": 3})
    one.arrive()
    one.choose(size=3)
    with one.kit.database.write() as session:
        mark_sampled(session, group_id_of("e1"))

    await one.ask()

    assert one.groups() == ["scored"]


async def test_a_group_with_candidates_goes_its_own_way(rig: MakeRig) -> None:
    one = rig()
    one.arrive()
    one.choose()
    with one.kit.database.write() as session:
        group = load_group(session, group_id_of("e1"))
        assert group is not None
        append_answers(session, group.group_id, group.answers[:1], size=8)

    await one.ask()

    assert one.groups() == ["sampling"]
    assert one.kit.counts("best_of") == {"came_second": 1}
    assert one.waiting() == []


@pytest.mark.parametrize("late", [False, True])
async def test_what_only_its_cost_kept_out_enters_for_nothing(late: bool, rig: MakeRig) -> None:
    one = rig()
    for late_step in (late, not late):
        if late_step:
            one.arrive()
            one.choose(max_pending_groups=0)  # no setting says so from the start
        else:
            await one.ask()

    assert (one.selection(), one.groups()) == ("chosen", ["scored"])
    assert one.kit.counts("selection") == {"chosen": 1}


@pytest.mark.parametrize(
    ("changes", "selection", "late"),
    [
        ({"held_out": True}, "held_out", False),
        ({"held_out": True}, "held_out", True),
        ({"untrainable_reason": "ids_missing"}, "untrainable:ids_missing", False),
        ({"adapter": "v9"}, "stale_adapter", True),
    ],
)
async def test_what_is_not_fit_to_learn_from_makes_no_group_in_either_order(
    changes: dict[str, Any], selection: str, late: bool, rig: MakeRig
) -> None:
    one = rig()
    for late_step in (late, not late):
        if late_step:
            one.arrive(**changes)
            one.choose()
        else:
            await one.ask()

    assert (one.selection(), one.groups(), one.waiting()) == (selection, [], [])
    assert one.kit.counts("best_of") == {selection: 1}
    assert one.kit.counts("selection") == {selection: 1}


async def test_a_session_that_has_its_groups_gets_no_more(rig: MakeRig) -> None:
    one = rig(groups={"max_groups_per_session": 1})
    for name in ("e1", "e2"):
        await one.ask(exchange_id=name)
        one.arrive(exchange_id=name, session_key="m:s")
        one.choose(max_groups_per_session=1)

    assert one.groups() == ["scored"]
    assert one.selection("e2") == "session_cap"
    assert one.kit.counts("best_of") == {"scored": 1, "session_cap": 1}


async def test_a_project_with_its_own_adapters_is_learned_from_by_those(rig: MakeRig) -> None:
    one = rig()
    one.kit.route(champion="v2")  # of all others; the line of the shop has the base
    for name, adapter in (("e1", "base"), ("e2", "v2")):
        await one.ask(exchange_id=name, project="shop")
        one.arrive(exchange_id=name, project="shop", adapter=adapter)
        one.choose(own_adapters=("shop",))

    assert one.groups() == ["scored"]
    assert one.scored("e1").group.adapter == "base"
    assert one.kit.counts("best_of") == {"scored": 1, "stale_adapter": 1}


@pytest.mark.parametrize("first", ["e1", "e2"])
async def test_of_one_turn_only_one_exchange_becomes_a_group(first: str, rig: MakeRig) -> None:
    one = rig()
    second = {"e1": "e2", "e2": "e1"}[first]
    await one.ask(exchange_id="e2")
    for name in (first, second):
        one.arrive(exchange_id=name, turn_id="t1")
        one.choose()

    assert (one.selection(first), one.selection(second)) == ("chosen", "retried_turn")
    assert one.groups() == [{"e1": "sampling", "e2": "scored"}[first]]
    assert one.kit.counts("best_of") == {{"e1": "retried_turn", "e2": "scored"}[first]: 1}
    assert one.waiting() == []


async def test_masked_answers_are_no_group_and_their_exchange_is_sampled(rig: MakeRig) -> None:
    one = rig()
    await one.ask()
    one.arrive(sampling=Sampling(temperature=1.0, top_p=0.9))

    one.choose()

    assert (one.selection(), one.groups(), one.waiting()) == ("chosen", ["sampling"], [])
    assert one.kit.counts("best_of") == {"masked_by_top_p": 1}


async def test_inexact_answers_are_masked_and_two_exact_suffice(rig: MakeRig, kit: Kit) -> None:
    one = rig()
    await one.ask()
    choices = tuple(kit.choice(text, index=index) for index, text in enumerate(TEXTS))
    kit.store(kit.exchange("e1", choices=(kit.choice("fair", logprobs=()), *choices[1:])))

    one.choose()

    masks = [answer.untrainable_reason for answer in one.scored().group.answers]
    assert masks == ["lengths_differ", None, None]


@pytest.mark.parametrize("stored", [("fair", "good"), ("fair", "bad", "good"), ("a", "b", "c")])
async def test_scores_of_other_answers_are_not_taken(stored: tuple[str, ...], rig: MakeRig) -> None:
    one = rig()
    await one.ask()
    one.arrive(*stored)

    one.choose()

    assert one.groups() == ["sampling"]
    assert one.kit.counts("best_of") == {"answers_differ": 1}


async def test_without_capture_nothing_of_it_is_kept_and_the_call_is_counted(rig: MakeRig) -> None:
    one = rig()

    assert await one.ask(keep=False) == Pick(index=1, scores=(0.5, 0.9, 0.1))

    assert (one.waiting(), one.calls()) == ([], [])
    assert one.kit.counts("judge_calls") == {"good": 1}
    assert one.kit.counts("best_of") == {"not_kept": 1}


async def test_scores_whose_exchange_never_comes_are_given_up_after_a_day(rig: MakeRig) -> None:
    one = rig()
    await one.ask()

    one.now += EXPIRE_S
    await one.judge.sweep()
    assert one.waiting() == ["e1"]

    one.now += 1.0
    await one.judge.sweep()
    assert one.waiting() == []
    assert one.kit.counts("best_of") == {"exchange_never_came": 1}


async def test_left_over_scores_are_settled_by_the_sweep(rig: MakeRig) -> None:
    one = rig()
    one.arrive()
    await one.ask()
    rules = one.kit.rules(rate=0.0)
    with one.kit.database.write() as session:  # as a database with row locks could leave it
        rows = session.scalars(select(BestOfScoreRow)).all()
        kept = [dict(vars(row)) for row in rows]
        for row in rows:
            session.delete(row)
    choose_new(one.kit.database, rules, model="smollm", limit=9, now=2.0)
    with one.kit.database.write() as session:
        for values in kept:
            values.pop("_sa_instance_state")
            session.add(BestOfScoreRow(**values))

    await one.judge.sweep()

    assert (one.selection(), one.groups(), one.waiting()) == ("chosen", ["scored"], [])


def refuse_to_store(
    monkeypatch: pytest.MonkeyPatch, one: Rig, times: int = 2**31
) -> Callable[[], int]:
    """Have the store refuse scores. Returns: how often it did."""
    store, refused = one.judge._store, 0

    def locked(judged: Judged) -> None:
        nonlocal refused
        if refused < times:
            refused += 1
            raise StoreError("database is locked")
        store(judged)

    monkeypatch.setattr("ingest.store.listing.PAUSES", Backoff(first_s=0.01, last_s=0.01))
    monkeypatch.setattr(one.judge, "_store", locked)
    return lambda: refused


async def test_scores_outlast_a_locked_store(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    refuse_to_store(monkeypatch, one, times=3)

    assert await one.ask() == Pick(index=1, scores=(0.5, 0.9, 0.1))

    assert one.waiting() == ["e1"]


async def test_memory_for_kept_scores_is_bounded(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.best_of.MOST_KEPT", 0)
    one = rig()
    refused = refuse_to_store(monkeypatch, one, times=1)

    await one.ask()

    assert (refused(), one.waiting()) == (1, [])


async def test_a_stop_gives_up_scores(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingest.best_of.STOP_GRACE_S", 0.1)
    one = rig()
    refuse_to_store(monkeypatch, one)
    asking = asyncio.create_task(one.ask())
    while not one.judge._keeping:
        await asyncio.sleep(0.005)

    async with asyncio.timeout(20):
        await one.judge.aclose()
        await asyncio.gather(asking, return_exceptions=True)

    assert one.waiting() == []


STEPS = st.permutations(["ask", "arrive", "choose", "choose", "backlog"])


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(STEPS, st.integers(0, 1))
def test_any_order_of_events_makes_one_group(rig: MakeRig, steps: list[str], rate: int) -> None:
    name = f"e{next(NUMBERS)}"
    one = rig(groups={"rate": float(rate), "max_groups_per_session": 10_000})
    before = sum(one.kit.counts("selection").values())
    rules = {"rate": float(rate), "max_groups_per_session": 10_000, "max_pending_groups": 10_000}

    async def run() -> None:
        for step in steps:
            if step == "ask":
                await one.ask(exchange_id=name)
            elif step == "arrive":
                one.arrive(exchange_id=name)
            elif step == "choose":
                one.choose(**rules)
            else:
                found = one.kit.rules(size=8, **rules)
                choose_backlog(one.kit.database, found, model="smollm", now=3.0)
        one.choose(**rules)

    asyncio.run(run())

    assert one.scored(name).scores == (0.5, 0.9, 0.1)
    assert (one.selection(name), one.waiting()) == ("chosen", [])
    assert sum(one.kit.counts("selection").values()) == before + 1


NUMBERS = iter(range(1_000, 10_000))


def test_the_digest_takes_null_and_empty_content_as_one_and_call_ids_as_none() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    whole = {"role": "assistant", "content": None, "tool_calls": [call("a")]}
    streamed = {"role": "assistant", "content": "", "tool_calls": [call("b")]}

    assert answers_digest([whole]) == answers_digest([streamed])
    assert answers_digest([whole]) != answers_digest([whole, whole])


RECORDED = Path(__file__).parents[2] / "sidecar" / "recorded"


@pytest.mark.parametrize("with_tool_call", [False, True])
async def test_relay_and_capture_see_the_same_answers(with_tool_call: bool, rig: MakeRig) -> None:
    reply = (RECORDED / "two_reply_asked.json").read_bytes()
    if with_tool_call:
        called = json.loads((RECORDED / "called_reply_plain.json").read_bytes())
        decoded = json.loads(reply)
        answer = called["choices"][0]["message"]
        arguments = answer["tool_calls"][0]["function"]["arguments"]
        text = f'{{"name": "get_weather", "arguments": {arguments}}}'
        token = {"token": text, "logprob": -0.5, "bytes": list(text.encode())}
        decoded["choices"][1] |= {
            "message": answer,
            "finish_reason": "tool_calls",
            "token_ids": [5],
            "logprobs": {"content": [token]},
        }
        decoded["usage"] = {"prompt_tokens": 34, "total_tokens": 43, "completion_tokens": 9}
        reply = json.dumps(decoded).encode()
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "temperature": 1}).encode()
    one = rig(lambda shown: scores_reply(dict.fromkeys(shown, 0.5)))
    asked = Material(
        exchange_id="e1", request=body, answers=read_answers(reply, 2).messages, keep=True
    )
    raw = RawCapture(
        exchange_id="e1",
        public_model="smollm",
        route=Assignment(
            adapter="base", arm="champion", propensity=1.0, upstream_model="smollm2-135m"
        ),
        replica="http://127.0.0.1:8000",
        session_key="m:s",
        user="",
        request=body,
        reply=(reply,),
        streamed=False,
        status=200,
        outcome="ok",
        timings=Timings(started_at=1.0),
        returned_index=1,
    )

    await one.judge.decide(asked)
    await one.judge.settled()
    one.kit.store(read_prompt_ids(assemble(raw)))
    one.choose()

    assert one.kit.counts("best_of") == {"scored": 1}
    scored = one.scored()
    assert scored.scores == (0.5, 0.5)
    lengths = [len(answer.token_ids) for answer in scored.group.answers]
    assert lengths == [8, 1 if with_tool_call else 8]
    with one.kit.database.read() as session:
        stored = load_exchange(session, "e1")
    assert stored is not None
    assert stored.exchange.returned_index == 1


@pytest.mark.both_stores
async def test_with_verifiers_scores_wait_and_the_judge_is_asked_once(rig: MakeRig) -> None:
    one = rig()
    await one.ask()
    one.arrive()
    one.choose(verified=True)
    waiting = one.groups()
    scores = {"fair": 1.0, "good": 0.0, "bad": 1.0}
    reward = Reward(verifiers={"v": LengthVerifier(kind="length", max_tokens=9)})
    checker = FakeChecker(lambda content: Finding(score=scores[content]))
    never = FakeJudge("never asked")
    worker = JudgingWorker(
        one.kit.database,
        never,
        one.settings.judge.model_copy(update={"model": "another", "rubric": "Another."}),
        rewarding=Rewarding(one.kit.database, reward, {"v": checker}),
    )

    await worker.step()

    found = one.scored()
    assert waiting == ["sampled"]
    assert never.conversations == []
    assert found.scores == (0.5, 0.9, 0.1)
    assert found.rewards == pytest.approx((0.75, 0.45, 0.55))
    assert (found.judge_model, found.rubric_hash) == ("scripted", rubric_hash("Be good."))
    assert one.groups() == ["scored"]


async def test_a_user_is_answered_by_the_rubric_of_the_projects_key(kit: Kit) -> None:
    rubrics = {"projects": {"shop": {"rubric": "Sell politely."}}}
    judge = FakeJudge(SCORES)
    rig = Rig(kit, judge, judge=rubrics)
    rig.judge = BestOfJudge(kit.database, judge, rig.settings, clock=lambda: rig.now)

    for number, project in enumerate(("shop", "desk")):
        assert await rig.ask(exchange_id=f"e{number}", project=project) == Pick(
            index=1, scores=(0.5, 0.9, 0.1)
        )

    asked = ["".join(message["content"] for message in talk) for talk in judge.conversations]
    assert [("Sell politely." in text, "Be good." in text) for text in asked] == [
        (True, False), (False, True),
    ]  # fmt: skip
    with kit.database.read() as session:
        stored = {
            row.exchange_id: row.rubric_hash for row in session.scalars(select(BestOfScoreRow))
        }
        calls = [row.rubric_hash for row in session.scalars(select(JudgeCallRow))]
    expected = [rubric_hash("Sell politely."), rubric_hash("Be good.")]
    assert [stored["e0"], stored["e1"]] == calls == expected


# The relay knows every reason for which score declines, and no other.


def reasons_given(module: ModuleType, made: str) -> Iterator[Any]:
    """The reasons with which a module's code makes records `made`, where they are constants."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == made:
            reason = next(one.value for one in node.keywords if one.arg == "reason")
            if isinstance(reason, ast.Constant | ast.Name | ast.Attribute):
                yield eval(ast.unparse(reason), dict(vars(module)))


def kinds(base: type[JudgeUnavailableError]) -> Iterator[type[JudgeUnavailableError]]:
    yield base
    for one in base.__subclasses__():
        yield from kinds(one)


def test_every_reason_of_the_scoring_process_is_known_to_the_relay_and_no_other() -> None:
    said = set(reasons_given(best_of, "NoPick"))
    set_aside = {
        *reasons_given(group, "SetAside"),
        refusal_of(JudgeRefusalError("no")),
        refusal_of(JudgeTooLongError("long")),
    }
    unanswered = {
        one.reason for one in kinds(JudgeUnavailableError) if hasattr(errors, one.__name__)
    }
    outcomes: list[GroupOutcome] = [
        *(SetAside(reason=one, detail="", asked=False) for one in set_aside),
        *(Unanswered(detail="", reason=one) for one in unanswered),
    ]
    verdicts = [best_of._verdict(one) for one in outcomes]

    assert {one.reason for one in verdicts} | said == NO_PICK_REASONS  # type: ignore[union-attr]

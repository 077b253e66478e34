"""The admin API over HTTP (ASGI transport): reads, changes, preconditions, problems, tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, get_args

import httpx
import msgspec
import pytest
from sqlalchemy import delete, select, update

from deploy.admin.actions import until_loaded
from deploy.admin.paging import encode_cursor
from deploy.engine.reconcile import EngineView
from deploy.records import AdapterState
from deploy.registry import transitions
from deploy.registry.canary_rule import Move
from deploy.registry.rollback import rollback
from deploy.supervise import LoopView
from ingest.feedback.deriving import save_feedback
from ingest.feedback.signals import Signal
from ingest.feedback.store import save_signals
from ingest.judge_noise import NoiseState, write_noise_state
from learner.schedule import loop as schedule
from sidecar.errors import StoreError
from sidecar.store.database import Database, compress, count, get_flag, set_flag
from sidecar.store.models import AnswerRow, AuditRow, ExchangeRow, GroupRow, RoutingRow
from support.finished_run import finished_run
from support.ingest_kit import make_feedback

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World

TOKEN = "let-me-in"


def ramping(world: World, version: int = 1, parent: str = "base") -> str:
    name = world.register(version, parent=parent)
    with world.database.write() as session:
        transitions.begin(
            session, model="m", candidate=name, steps=(2_000, 5_000), now=900.0, actor="control"
        )
    phases: tuple[Literal["gating", "ramping"], ...] = ("gating", "ramping")
    for phase in phases:
        with world.database.write() as session:
            move = Move(to=phase, candidate_state=phase, reason="on")
            transitions.apply(
                session, world.canary(name), move, evidence={"probe": {"live": True}}, now=950.0
            )
    return name


def assert_problem(reply: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    body = dict(reply.json())
    assert set(body) == {"type", "title", "status", "detail", "instance", "allowed_actions"}
    assert body["type"] == f"urn:learning-sidecar:problem:{slug}"
    assert body["status"] == status
    return body


async def test_a_listing_refuses_a_query_that_it_would_not_obey(api: Api) -> None:
    """`?state=promoted` on a listing without that filter would answer every row."""
    unknown = await api.client.get("/admin/v1/canaries?limit=2&state=promoted")
    doubled = await api.client.get("/admin/v1/groups?status=scored&status=set_aside")
    none_taken = await api.client.post("/admin/v1/rollback?to=base")

    said = assert_problem(unknown, 400, "bad-query")["detail"]
    assert said == "no such query parameter: state; known: limit, cursor, project"
    said = assert_problem(doubled, 400, "bad-query")["detail"]
    assert said == "query parameter status is given 2 times; give it once"
    said = assert_problem(none_taken, 400, "bad-query")["detail"]
    assert said == "no such query parameter: to; known: project"
    assert (await api.get("/groups", limit=2, status="scored")).status_code == 200


async def test_a_blank_reason_is_refused_and_a_missing_one_is_not(world: World, api: Api) -> None:
    ramping(world)
    canary_id = (await api.get("/canaries")).json()["items"][0]["canary_id"]

    for path in ("/rollback", f"/canaries/{canary_id}/pause", f"/canaries/{canary_id}/abort"):
        for blank in ("", "\t\n\u00a0"):
            assert_problem(await api.post(path, {"reason": blank}), 400, "blank-reason")

    assert (await api.post(f"/canaries/{canary_id}/pause")).json()["paused"] is True


async def test_a_rollback_is_not_refused_for_a_long_reason(world: World, api: Api) -> None:
    world.promote(world.register(1))

    assert (await api.post("/rollback", {"to": "base", "reason": "x" * 50_000})).status_code == 200

    audit = (await api.get("/audit")).json()["items"]
    (kept,) = [one["reason"] for one in audit if one["action"] == "rollback"]
    assert kept == "x" * 1_999 + "…"


async def test_status_says_what_serves_and_what_is_on_canary(world: World, api: Api) -> None:
    first = world.register(1)
    world.promote(first)
    second = ramping(world, 2, parent=first)
    await api.reconciler.reconcile()

    body = (await api.get("/status")).json()

    assert (body["champion"], body["previous"]) == (first, "base")
    assert body["routing"]["canary"] == second
    assert body["routing"]["canary_weight_bp"] == 2_000
    assert body["canary"]["state"] == "ramping"
    assert body["canary"]["weight_bp"] == 2_000
    assert body["canary"]["next_step_earliest_at"] == 960.0
    seen: dict[str, object] = {"away": None, "loaded": sorted([first, second]), "refused": {}}
    assert body["engine"] == {**seen, "replicas": {"http://vllm": seen}}
    assert body["adapters"] == {"champion": 1, "ramping": 1}
    assert body["learner"]["paused"] is False
    assert body["token_check"] == "off: ingest has not run yet"


async def test_adapters_by_version_name_and_alias(world: World, api: Api) -> None:
    name = world.register(1)
    world.promote(name)

    found = [(await api.get(f"/adapters/{ref}")).json() for ref in ("1", "v1", name, "champion")]

    assert [one["name"] for one in found] == [name] * 4
    assert found[0]["aliases"] == ["champion"]
    assert found[0]["state"] == "champion"
    assert found[0]["loaded"] is None, "vLLM was not asked yet"


async def test_aliases(world: World, api: Api) -> None:
    name = world.register(1)
    world.promote(name)

    assert (await api.get("/aliases")).json() == {
        "items": [
            {"alias": "champion", "adapter": name, "generation": 2},
            {"alias": "previous", "adapter": "base", "generation": 1},
        ],
        "next_cursor": None,
        "damaged": [],
    }


async def test_a_canary_and_its_evidence(world: World, api: Api) -> None:
    name = ramping(world)
    canary_id = world.canary(name).canary_id

    reply = await api.get(f"/canaries/{canary_id}")
    evidence = (await api.get(f"/canaries/{canary_id}/evidence")).json()

    assert reply.headers["etag"] == '"g3"'
    assert reply.json()["allowed_actions"] == ["pause", "abort", "promote", "skip-step"]
    assert evidence["evidence"]["probe"] == {"live": True}
    assert evidence["comparisons"] == []


def add_groups(world: World, count: int) -> None:
    for number in range(count):
        exchange_id = world.serve(f"s{number}")
        with world.database.write() as session:
            session.add(
                GroupRow(
                    group_id=f"g{number}",
                    exchange_id=exchange_id,
                    session_key=f"s{number}",
                    project="shop",
                    adapter="base",
                    status="scored",
                    created_at=1.0,
                    scored_at=2.0,
                    judge_model="j",
                    rubric_hash="r",
                    disagreement=0.125,
                    flipped_pairs=0.5,
                )
            )
            session.flush()
            session.add(
                AnswerRow(
                    group_id=f"g{number}",
                    index=0,
                    origin="served",
                    message_body=compress(b'{"content":"Hi."}'),
                    finish_reason="stop",
                    token_ids=b"\1\0\0\0",
                    logprobs=b"\0\0\0\0",
                    temperature=1.0,
                    score=0.5,
                    disagreement=0.25,
                    explanation="so",
                )
            )


async def test_groups_set_aside_are_found_by_reason_with_the_judges_words(
    world: World, api: Api
) -> None:
    add_groups(world, 3)
    with world.database.write() as session:
        dead = session.scalars(select(GroupRow).where(GroupRow.group_id == "g1")).one()
        dead.status, dead.reason = "set_aside", "judge_rejected"
        dead.judge_attempts, dead.detail = 3, "judge j: content filter"
        count(session, "judging", "judge_rejected")

    found = (await api.get("/groups", reason="judge_rejected")).json()["items"]
    funnel = (await api.get("/funnel")).json()

    assert [(one["group_id"], one["judge_attempts"], one["detail"]) for one in found] == [
        ("g1", 3, "judge j: content filter")
    ]
    assert funnel["groups_by_reason"] == {"judge_rejected": 1}


async def test_paging_shows_every_row_once_though_rows_are_added(world: World, api: Api) -> None:
    add_groups(world, 5)

    first = (await api.get("/groups", limit=2)).json()
    late = world.serve("late")
    with world.database.write() as session:
        session.add(
            GroupRow(
                group_id="g-late",
                exchange_id=late,
                session_key="late",
                adapter="base",
                status="sampling",
                created_at=3.0,
            )
        )
    second = (await api.get("/groups", limit=2, cursor=first["next_cursor"])).json()
    third = (await api.get("/groups", limit=2, cursor=second["next_cursor"])).json()

    seen = [one["group_id"] for part in (first, second, third) for one in part["items"]]
    assert seen == ["g4", "g3", "g2", "g1", "g0"]
    assert third["next_cursor"] is None


async def test_every_listing_pages_to_its_end(world: World, api: Api) -> None:
    for version in range(1, 4):
        world.promote(world.register(version))
        with world.database.write() as session:
            session.add(finished_run(f"r{version}"))
    for path, key, total in (
        ("/adapters", "version", 3),
        ("/canaries", "canary_id", 3),
        ("/runs", "run_id", 3),
        ("/audit", "seq", len(world.rows(AuditRow))),
    ):
        seen: list[Any] = []
        cursor: str | None = None
        while True:
            page = (await api.get(path, limit=1, **({"cursor": cursor} if cursor else {}))).json()
            assert page["items"], path
            seen += [one[key] for one in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert len(seen) == len(set(seen)) == total, path


async def test_a_cursor_is_of_one_listing(api: Api) -> None:
    of_audit = encode_cursor("audit", 1)

    assert (await api.get("/audit", cursor=of_audit)).status_code == 200
    for path, cursor in (("/groups", of_audit), ("/adapters", of_audit), ("/audit", "WzFd")):
        assert_problem(await api.get(path, cursor=cursor), 400, "bad-cursor")


@pytest.mark.parametrize("limit", [0, 201, "many"])
async def test_a_limit_out_of_range_is_a_problem(api: Api, limit: Any) -> None:
    body = assert_problem(await api.get("/groups", limit=limit), 422, "bad-request")

    assert body["detail"].startswith("query.limit:")


async def test_a_group_with_its_answers_and_an_exchange_with_its_group(
    world: World, api: Api
) -> None:
    add_groups(world, 1)
    with world.database.write() as session:
        values = {"reward": 0.75, "independent_reward": 1.0, "checks": '[{"name": "calls"}]'}
        session.execute(update(AnswerRow).values(**values))
        values = {
            "reward_rule": '{"combine": "weights"}',
            "propensity": 0.25,
            "chosen_because": '{"reason": "likely_spread", "features": {"forks": 0.5}}',
        }
        session.execute(update(GroupRow).values(values))

    group = (await api.get("/groups/g0")).json()
    assert (group["project"], group["rubric_hash"]) == ("shop", "r")
    exchange = (await api.get(f"/exchanges/{group['exchange_id']}")).json()

    assert group["answers"][0]["message"] == {"content": "Hi."}
    assert (group["answers"][0]["score"], group["answers"][0]["tokens"]) == (0.5, 1)
    assert (group["disagreement"], group["flipped_pairs"]) == (0.125, 0.5)
    assert group["answers"][0]["disagreement"] == 0.25
    assert group["answers"][0]["reward"] == 0.75
    assert group["answers"][0]["independent_reward"] == 1.0
    assert group["answers"][0]["checks"] == [{"name": "calls"}]
    assert group["reward_rule"] == {"combine": "weights"}
    assert group["propensity"] == 0.25
    assert group["chosen_because"] == {"reason": "likely_spread", "features": {"forks": 0.5}}
    assert exchange["group_id"] == "g0"
    assert (exchange["surface"], exchange["project"], exchange["key_id"]) == ("chat", "default", "")
    assert (exchange["turn_id"], exchange["retry_count"], exchange["fallback_from"]) == ("", 0, "")
    assert (exchange["request_bytes"], exchange["reply_bytes"]) == (0, 0)
    assert exchange["request"]["messages"] == [{"role": "user", "content": "ask x1"}]
    assert exchange["choices"][0]["message"]["content"] == "An answer."


def tell(world: World, exchange_id: str, session_id: str) -> None:
    records = [
        make_feedback("f1", exchange_id, score=-1.0),
        make_feedback("f2", exchange_id, score=0.5, received_at=2.0, comment="Better."),
        make_feedback("o1", session_id, target_kind="session", kind="outcome", success=True),
    ]
    signal = Signal(
        kind="regeneration",
        exchange_id=exchange_id,
        by_id="later",
        session_id=session_id,
        at=3.0,
        evidence={"after_s": 1.0},
    )
    with world.database.write() as session:
        assert save_feedback(session, records, now=1.0) == []
        save_signals(session, [signal])


async def test_what_was_told_of_an_exchange_and_of_its_session_is_shown(
    world: World, api: Api
) -> None:
    add_groups(world, 2)
    exchange_id = (await api.get("/groups/g0")).json()["exchange_id"]
    session_id = (await api.get(f"/exchanges/{exchange_id}")).json()["session_id"]
    with world.database.write() as session:
        row = session.scalars(
            select(ExchangeRow).where(ExchangeRow.exchange_id == exchange_id)
        ).one()
        row.session_id = session_id = "h:a/b"
    tell(world, exchange_id, session_id)

    exchange = (await api.get(f"/exchanges/{exchange_id}")).json()
    of_session = (await api.get(f"/sessions/{session_id}")).json()
    status = (await api.get("/status")).json()

    for shown in (exchange, of_session):
        assert [(one["score"], one["counts"]) for one in shown["feedback"]] == [
            (-1.0, False),
            (0.5, True),
        ]
        assert [one["success"] for one in shown["outcomes"]] == [True]
        assert [(one["kind"], one["by_id"]) for one in shown["signals"]] == [
            ("regeneration", "later")
        ]
    assert [one["exchange_id"] for one in of_session["exchanges"]] == [exchange_id]
    assert of_session["next_cursor"] is None
    assert status["feedback"] == {"joined": 3, "stored_feedback": 2, "stored_outcome": 1}
    assert status["signals"] == {"regeneration": 1}


@pytest.mark.both_stores
async def test_a_session_is_found_by_the_second_name_that_a_client_gave_a_part_of_it(
    world: World, api: Api
) -> None:
    add_groups(world, 3)
    names = [(await api.get(f"/groups/g{number}")).json()["exchange_id"] for number in range(3)]
    for name, key in zip(names, ("h:one", "h:two", "h:two"), strict=True):
        with world.database.write() as session:
            session.execute(
                update(ExchangeRow)
                .where(ExchangeRow.exchange_id == name)
                .values(session_id="h:one", session_key=key)
            )
    tell(world, names[1], "h:one")

    by_both = [(await api.get(f"/sessions/{name}", limit=2)).json() for name in ("h:one", "h:two")]
    cursor = by_both[1]["next_cursor"]
    rest = (await api.get("/sessions/h:two", limit=2, cursor=cursor)).json()

    assert by_both[0] == by_both[1]
    assert by_both[1]["session_id"] == "h:one"
    assert len(by_both[1]["feedback"]) == 2
    assert [one["exchange_id"] for one in by_both[1]["exchanges"]] == names[:0:-1]
    assert [one["exchange_id"] for one in rest["exchanges"]] == names[:1]
    assert (await api.get("/sessions/h:three")).status_code == 404


async def test_funnel_counts_where_records_stop(world: World, api: Api) -> None:
    add_groups(world, 2)
    world.hold_out(3)
    with world.database.write() as session:
        for stage, reason in (("selection", "chosen"), ("sampling", "sampled")):
            count(session, stage, reason, 2)
        count(session, "judging", "scored")
        set_flag(session, "token_check", "off: no tokenizer", now=1.0)

    body = (await api.get("/funnel")).json()

    assert (await api.get("/status")).json()["token_check"] == "off: no tokenizer"
    assert body["token_check"] == "off: no tokenizer"
    assert body["exchanges"] == {"chosen": 2, "held_out": 3}
    assert body["groups"] == {"sampled": 1, "scored": 1}
    assert [(one["name"], one["entered"], one["passed"]) for one in body["stages"]] == [
        ("requests", 0, 0),
        ("bus", 0, 5),
        ("selection", 5, 2),
        ("sampling", 2, 2),
        ("judging", 2, 1),
        ("learning", 1, 0),
        ("serving", 0, 0),
    ]
    judging = body["stages"][4]
    assert (judging["ended"], judging["waiting"], judging["unreported"]) == ({}, {"sampled": 1}, 0)
    assert body["stages"][1]["unreported"] == 5, "no proxy told of them"


@pytest.mark.parametrize(
    ("path", "slug"),
    [
        ("/adapters/99", "unknown-adapter"),
        ("/adapters/base", "unknown-adapter"),
        ("/canaries/nope", "unknown-canary"),
        ("/canaries/nope/evidence", "unknown-canary"),
        ("/groups/nope", "unknown-record"),
        ("/exchanges/nope", "unknown-record"),
        ("/sessions/nope", "unknown-record"),
        ("/nope", "no-such-path"),
    ],
)
async def test_what_is_not_there_is_a_problem(api: Api, path: str, slug: str) -> None:
    body = assert_problem(await api.get(path), 404, slug)

    assert body["instance"] == f"/admin/v1{path}"


@pytest.mark.parametrize(
    ("path", "wanted", "known"),
    [
        ("/adapters", {"state": "chmpion"}, get_args(AdapterState)),
        (
            "/groups",
            {"status": "skored"},
            ("sampling", "sampled", "scored", "claimed", "trained", "set_aside", "dropped"),
        ),
    ],
)
async def test_an_unknown_value_of_a_filter_is_a_problem_that_names_the_known_ones(
    api: Api, path: str, wanted: dict[str, str], known: tuple[str, ...]
) -> None:
    [(name, value)] = wanted.items()

    body = assert_problem(await api.get(path, **wanted), 400, "unknown-value")

    assert body["detail"] == f"{name}: no such value: {value}; known: {', '.join(known)}"
    for one in known:
        assert (await api.get(path, **{name: one})).json()["items"] == []


async def test_a_defect_is_a_problem_without_its_inside(
    api: Api, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("secret path /root/x")

    monkeypatch.setattr(world.database, "read", fail)

    body = assert_problem(await api.get("/status"), 500, "internal")
    assert "secret" not in json.dumps(body)


async def test_rollback_says_from_and_to(world: World, api: Api) -> None:
    name = world.register(1)
    world.promote(name)

    reply = await api.post("/rollback", {"to": "previous", "reason": "rambles"})

    assert reply.status_code == 200
    assert reply.json() == {
        "from": name,
        "to": "base",
        "changed": True,
        "ended_canary": None,
        "banned": [name],
        "learner_paused": True,
        "generation": 4,
        "note": None,
    }
    assert world.table().champion == "base"
    assert api.changes == [1]
    row = world.rows(AuditRow)[-1]
    assert (row.action, row.actor, row.reason) == ("rollback", "local", "rambles")
    assert row.source == "127.0.0.9"


@pytest.mark.parametrize("body", [None, {}, {"to": 1}, {"to": "v1", "reason": "x"}])
async def test_rollback_takes_all_its_shapes(world: World, api: Api, body: Any) -> None:
    first = world.register(1)
    world.promote(first)
    world.promote(world.register(2))

    assert (await api.post("/rollback", body)).json()["to"] == first


async def test_rollback_needs_no_precondition_and_may_be_repeated(world: World, api: Api) -> None:
    world.promote(world.register(1))

    first = await api.post("/rollback", {"reason": "a"}, if_match='"stale"')
    second = await api.post("/rollback", {"reason": "a"})

    assert first.json()["changed"] is True
    assert second.json()["changed"] is False
    assert second.json()["to"] == "base"
    assert second.json()["note"] == "nothing to undo: the base model was champion already"


async def test_a_rollback_waits_for_no_vllm_that_hangs(
    world: World, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.register(1)
    world.promote(first)
    world.promote(world.register(2))
    asked, never = asyncio.Event(), asyncio.Event()

    async def hang(*_: str) -> frozenset[str]:
        asked.set()
        await never.wait()
        return frozenset()

    monkeypatch.setattr(world.control, "loaded", hang)
    monkeypatch.setattr(world.control, "load", hang)
    reconciling = asyncio.create_task(api.reconciler.reconcile())
    await asked.wait()
    rolling_back = asyncio.create_task(api.post("/rollback", {"to": first, "reason": "x"}))

    reply = await rolling_back

    assert not reconciling.done(), "vLLM has not answered yet"
    assert world.table().champion == first
    assert reply.json()["note"] == (
        f"{first} is not loaded on http://vllm: the base answers until it is"
    )
    reconciling.cancel()


async def test_a_rollback_says_who_answers_until_the_target_is_loaded(
    world: World, api: Api
) -> None:
    first = world.register(1)
    world.promote(first)
    world.promote(world.register(2))
    await api.reconciler.reconcile()
    assert (await api.post("/rollback", {"to": first, "reason": "x"})).json()["note"] is None

    world.control.away = True
    await api.reconciler.reconcile()
    away = await api.post("/rollback", {"to": first, "reason": "x"})
    to_base = await api.post("/rollback", {"to": "base", "reason": "x"})

    assert away.json()["note"] == (
        f"{first} is not loaded on http://vllm: the base answers until it is"
    )
    assert to_base.json()["note"] is None


def test_the_replicas_that_hold_the_target_answer_while_one_loads_it() -> None:
    held, lacking = EngineView(away=None, loaded=frozenset({"v1"})), EngineView(away="down")
    view = EngineView(away=None, replicas={"http://a": held, "http://u:secret@b": lacking})

    assert until_loaded("v1", view) == (
        "v1 is not loaded on http://**********@b: the other replicas answer until it is"
    )


async def test_a_rollback_to_what_vllm_refuses_still_takes_the_champion_out_and_says_so(
    world: World, api: Api
) -> None:
    first = world.register(1)
    world.promote(first)
    world.promote(world.register(2))
    world.control.refuses[first] = "file is gone"
    await api.reconciler.reconcile()

    reply = await api.post("/rollback", {"to": first})

    assert world.table().champion == first
    assert reply.json()["note"] == (
        f"{first} is not loaded on http://vllm: the base answers until it is; "
        "vLLM refused it (file is gone): name another version, or base"
    )


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        ({"to": "77"}, 404, "unknown-adapter"),
        ({"to": "2"}, 409, "not-allowed-now"),
        ({"to": "1", "reason": 5}, 422, "bad-request"),
        ({"target": "base"}, 422, "bad-request"),
        ([], 422, "bad-request"),
    ],
)
async def test_a_wrong_rollback_is_a_problem_and_changes_nothing(
    world: World, api: Api, body: Any, status: int, slug: str
) -> None:
    first = world.register(1)
    world.promote(first)
    world.register(2)

    assert_problem(await api.post("/rollback", body), status, slug)
    assert world.table().champion == first


async def test_promote_and_resume_need_the_etag_of_what_was_seen(world: World, api: Api) -> None:
    name = ramping(world)
    path = f"/canaries/{world.canary(name).canary_id}"
    etag = (await api.get(path)).headers["etag"]

    assert_problem(await api.post(f"{path}/promote"), 428, "if-match-needed")
    assert_problem(await api.post(f"{path}/resume"), 428, "if-match-needed")
    await api.post(f"{path}/pause", {"reason": "look"})
    assert_problem(await api.post(f"{path}/promote", if_match=etag), 412, "stale")
    fresh = (await api.get(path)).headers["etag"]
    resumed = await api.post(f"{path}/resume", {"reason": "fine"}, if_match=fresh)
    promoted = await api.post(f"{path}/promote", if_match=resumed.headers["etag"])

    assert resumed.json()["paused"] is False
    assert promoted.json()["state"] == "promoted"
    assert world.aliases()["champion"] == name
    assert world.rows(AuditRow)[-1].reason == (
        "no reason given; promoted by hand at step 1 of 2; judged groups had proven nothing"
    )


async def test_pause_and_abort_need_none_and_may_be_repeated(world: World, api: Api) -> None:
    name = ramping(world)
    path = f"/canaries/{world.canary(name).canary_id}"

    paused = [await api.post(f"{path}/pause", if_match='"g1"') for _ in range(2)]
    aborted = [await api.post(f"{path}/abort") for _ in range(2)]
    late = await api.post(f"{path}/pause")

    assert [one.status_code for one in (*paused, *aborted, late)] == [200] * 5
    assert paused[0].json() == paused[1].json()
    assert aborted[0].json() == aborted[1].json() == late.json()
    assert aborted[0].json()["state"] == "rolled_back"
    assert world.table().canary is None


async def test_what_the_state_does_not_allow_says_what_it_does(world: World, api: Api) -> None:
    name = ramping(world)
    path = f"/canaries/{world.canary(name).canary_id}"

    body = assert_problem(await api.post(f"{path}/resume", if_match="*"), 409, "not-allowed-now")

    assert body["allowed_actions"] == ["pause", "abort", "promote", "skip-step"]
    assert_problem(await api.post(f"{path}/explode"), 422, "bad-request")


async def test_the_learner_is_paused_resumed_and_run(world: World, api: Api) -> None:
    etag = (await api.get("/learner")).headers["etag"]

    def flag(name: str) -> str | None:
        with world.database.read() as session:
            return get_flag(session, name)

    assert_problem(await api.post("/learner/run"), 428, "if-match-needed")
    ran = await api.post("/learner/run", {"reason": "now"}, if_match=etag)
    assert flag(schedule.REQUESTED_FLAG) == "1"
    paused = await api.post("/learner/pause")
    assert flag(schedule.PAUSED_FLAG) == "1"
    stale = await api.post("/learner/resume", if_match=etag)
    refused = await api.post("/learner/run", if_match=paused.headers["etag"])
    resumed = await api.post("/learner/resume", if_match=paused.headers["etag"])

    assert ran.json()["run_requested"] is True
    assert paused.json()["paused"] is True
    assert_problem(stale, 412, "stale")
    assert assert_problem(refused, 409, "not-allowed-now")["allowed_actions"] == ["resume"]
    assert resumed.json()["paused"] is False
    assert world.actions()[-3:] == ["learner.run", "learner.pause", "learner.resume"]


async def test_the_audit_names_the_token_and_never_shows_it(
    make_api: Callable[..., Api], world: World
) -> None:
    api = make_api(TOKEN)
    world.promote(world.register(1))

    await api.post("/rollback", {"reason": "x"}, authorization=f"Bearer {TOKEN}")

    actor = world.rows(AuditRow)[-1].actor
    assert actor == "token:" + hashlib.sha256(TOKEN.encode()).hexdigest()[:8]


async def test_without_tokens_web_pages_are_refused(api: Api, world: World) -> None:
    world.promote(world.register(1))

    foreign = await api.post("/rollback", {"to": "base"}, origin="http://evil.example")
    own = await api.post("/rollback", {"to": "base"}, origin="http://127.0.0.1:8081")

    assert_problem(foreign, 403, "forbidden")
    assert own.status_code == 200


async def test_without_tokens_a_rebound_name_is_refused(make_api: Callable[..., Api]) -> None:
    assert_problem(await make_api(host="evil.example").get("/status"), 403, "forbidden")
    assert (await make_api(host="localhost:8081").get("/status")).status_code == 200
    assert (await make_api(host="[::1]:8081").get("/status")).status_code == 200


async def test_a_store_that_is_away_is_not_described_to_anybody(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Database) -> Never:
        raise StoreError("store sqlite:////srv/shop.db: unable to open database file")

    monkeypatch.setattr(Database, "read", away)

    reply = await api.client.get("/readyz")

    assert (reply.status_code, reply.json()) == (
        503,
        {"status": "not ready", "reason": "the store does not answer; control's log says why"},
    )


async def test_not_ready_says_why_and_as_it_is_described(world: World, api: Api) -> None:
    with world.database.write() as session:
        session.execute(delete(RoutingRow))

    reply = await api.client.get("/readyz")
    document = (await api.client.get("/admin/openapi.json")).json()

    assert (reply.status_code, reply.json()["status"]) == (503, "not ready")
    assert reply.json()["reason"].startswith("the store has no routing table yet: the control")
    declared = document["paths"]["/readyz"]["get"]["responses"]
    assert {status: list(declared[status]["content"]) for status in ("200", "503")} == {
        "200": ["application/json"],
        "503": ["application/json"],
    }


async def test_a_refused_rollback_or_alias_says_what_may_be_named(world: World, api: Api) -> None:
    first, second = world.register(1), world.register(2, values=(0.1, 0.2))
    world.promote(first)
    world.promote(second)
    world.register(3, values=(0.3, 0.4))

    back = await api.post("/rollback", {"to": 3})
    etag = (await api.get("/aliases/anchor")).headers["etag"]
    held = await api.client.put(
        "/admin/v1/aliases/anchor", json={"adapter": 3}, headers={"if-match": etag}
    )

    assert assert_problem(back, 409, "not-allowed-now")["allowed_actions"] == [first, "base"]
    assert back.json()["detail"].endswith(f"roll back to previous, base, {first}")
    assert assert_problem(held, 409, "not-allowed-now")["allowed_actions"] == [
        second,
        first,
        "base",
    ]


@pytest.mark.parametrize("to", [-1, True, 1.5, [], "x" * 256])
async def test_what_is_no_version_is_told_what_is_wanted(api: Api, to: Any) -> None:
    reply = await api.post("/rollback", {"to": to})

    assert assert_problem(reply, 422, "bad-request")["detail"] == (
        "body.to: is no version; send its number, or a name of at most 255 characters"
    )


async def test_a_loop_that_fails_is_shown_and_does_not_take_the_admin_api_away(api: Api) -> None:
    api.loops["tick"] = LoopView()
    api.loops["tick shop"] = LoopView(failures=3, error="TypeError: a list")

    ready = await api.client.get("/readyz")
    status = (await api.get("/status")).json()
    text = (await api.client.get("/metrics")).text

    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert ready.json()["loops"] == {"tick": "failed 3 times in a row"}
    (loop,) = [one for one in status["conditions"] if one["code"] == "loop_fails"]
    assert loop["message"] == "control's loop tick shop failed 3 times in a row: TypeError: a list"
    assert 'sidecar_control_loop_failures{loop="tick shop"} 3.0' in text


async def test_an_adapter_that_is_wanted_and_not_loaded_is_counted(world: World, api: Api) -> None:
    name = world.register(1)
    world.promote(name)
    (Path(world.adapter(name).path) / "adapter_config.json").write_text("{}")
    await api.reconciler.reconcile()

    text = (await api.client.get("/metrics")).text
    row = (await api.get("/audit")).json()["items"][0]

    assert "sidecar_adapters_refused 1.0" in text
    assert 'sidecar_records_total{reason="altered",stage="adapter"} 1.0' in text
    assert (row["action"], row["actor"]) == ("adapter.altered", "control")
    assert "the folder was changed" in row["reason"]


async def test_metrics_are_read_from_the_store(world: World, api: Api) -> None:
    add_groups(world, 2)
    ramping(world)

    text = (await api.client.get("/metrics")).text

    assert 'sidecar_groups{status="scored"} 2.0' in text
    assert "sidecar_canary_weight 0.2" in text
    assert 'sidecar_adapters{state="ramping"} 1.0' in text
    rollback(world.database, "m", reason="x", actor="y", now=1.0)
    text = (await api.client.get("/metrics")).text
    assert 'sidecar_records_total{reason="rolled_back",stage="canary"} 1.0' in text
    assert "sidecar_canary_weight 0.0" in text


async def test_the_noise_of_the_judge_is_in_status_and_metrics(world: World, api: Api) -> None:
    before = (await api.client.get("/metrics")).text
    assert "sidecar_judge_noise_sd" in before
    assert not re.search(r"^sidecar_judge_(noise_sd|drift) ", before, re.MULTILINE)
    known = NoiseState(
        at=5.0, judge_model="j", rubric_hash="r", passes=2, groups=50, sd=0.04, slope=-0.1,
        flips=0.25, drift="changed by 0.107", drift_at=5.0,
    )  # fmt: skip
    with world.database.write() as session:
        write_noise_state(session, known)

    text = (await api.client.get("/metrics")).text
    status = (await api.get("/status")).json()

    assert "sidecar_judge_noise_sd 0.04\n" in text
    assert "sidecar_judge_position_slope -0.1\n" in text
    assert "sidecar_judge_flips 0.25\n" in text
    assert "sidecar_judge_noise_groups 50.0\n" in text
    assert "sidecar_judge_drift 1.0\n" in text
    assert status["judge_noise"] == msgspec.structs.asdict(known)


async def test_a_paused_canary_shows_no_next_step_time(world: World, api: Api) -> None:
    name = ramping(world)
    with world.database.write() as session:
        row = world.canary_row(session, name)
        transitions.pause(session, row, reason="look", now=955.0, actor="me")

    body = (await api.get(f"/canaries/{world.canary(name).canary_id}")).json()

    assert body["next_step_earliest_at"] is None
    assert body["reason"] == "paused: look"

"""Lines of adapters at control: what happens in one changes nothing in the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import update

from deploy.canary import gate_store
from deploy.canary.live_turns import LiveTurns, count_ramp
from deploy.engine.reconcile import EngineView, read_desired
from deploy.registry import (
    audit,
    bans,
    canaries,
    candidates,
    flags,
    routing_writer,
    transitions,
    versions,
)
from deploy.registry.rollback import rollback
from sidecar import conditions
from sidecar.conditions import Condition
from sidecar.lines import Line, lines_of
from sidecar.settings import Judge
from sidecar.store.models import AuditRow, CounterRow, ExchangeRow
from tests.deploy.conftest import MakeApi, World

DEFAULT, OWN = lines_of("m", ["support"])


@pytest.fixture
def shared(world: World) -> World:
    """The default line."""
    return replace(world, line=DEFAULT)


@pytest.fixture
def own(world: World) -> World:
    """The line of the project `support`, on the same store and vLLM."""
    with world.database.write() as session:
        routing_writer.initialise(session, OWN.name, now=0.0, actor=audit.CONTROL)
    folder = world.folder / "own"
    folder.mkdir()
    return replace(world, line=OWN, folder=folder)


def state_of(world: World) -> tuple[object, ...]:
    """Everything that a line has: aliases, routing table, the learner's switches, bans, canary."""
    with world.database.read() as session:
        name = world.line.name
        active = canaries.active(session, name)
        return (
            versions.aliases_of(session, name),
            routing_writer.current(session, name),
            flags.read(session, name),
            bans.reasons(session, name),
            None if active is None else (active.canary_id, active.phase, active.weight_bp),
        )


async def play(world: World, name: str) -> str:
    """Tick the line's own controller until the canary of this version ramps."""
    controller = world.controller()
    for _ in range(8):
        await controller.tick()
        if world.canary(name).phase not in ("loading", "gating"):
            break
    return world.canary(name).phase


async def test_a_canary_a_promotion_and_a_rollback_stay_in_their_line(
    shared: World, own: World
) -> None:
    first = shared.register(1, values=(0.1, 0.2))
    shared.promote(first)
    for number in range(4):
        own.serve(f"s{number}", held_out=True, project="support")
    before = state_of(shared)
    name = own.register(1, values=(0.3, 0.4))
    assert name.startswith("m@@support--v1-")

    assert await play(own, name) == "ramping"
    assert state_of(shared) == before
    with own.database.write() as session:
        row = canaries.active_row(session, OWN.name)
        assert row is not None
        transitions.promote(session, row, reason="good", now=own.clock(), actor="me")
    assert own.aliases()["champion"] == name
    assert (own.table().champion, own.table().public_model) == (name, "m")
    assert state_of(shared) == before

    done = rollback(own.database, OWN.name, reason="rude", actor="me", now=own.clock())

    assert (done.before, done.after, done.learner_paused) == (name, "base", True)
    assert state_of(shared) == before
    with own.database.read() as session:
        assert flags.read(session, OWN.name).paused
        [told] = [row for row in session.query(AuditRow) if row.action == "learner.pause"]
    assert told.subject == "learner of support"


async def test_two_canaries_run_at_once_in_two_lines(shared: World, own: World) -> None:
    for number in range(4):
        own.serve(f"s{number}", held_out=True, project="support")
        shared.serve(f"d{number}", held_out=True, project="shop")
    one, other = shared.register(1, values=(0.1, 0.2)), own.register(1, values=(0.3, 0.4))

    assert [await play(shared, one), await play(own, other)] == ["ramping", "ramping"]

    before = state_of(own)
    with shared.database.write() as session:
        row = canaries.active_row(session, "m")
        assert row is not None
        transitions.take_out(session, row, why="it failed", now=shared.clock())
    assert shared.canary(one).phase == "rolled_back"
    assert state_of(own) == before


def test_the_gate_asks_prompts_of_its_own_projects_alone(shared: World, own: World) -> None:
    theirs = own.serve("a", held_out=True, project="support")
    others = shared.serve("b", held_out=True, project="shop")

    with own.database.read() as session:
        found = {
            line.name: [
                one.exchange_id for one in gate_store.held_out_prompts(session, line, limit=9)
            ]
            for line in (DEFAULT, OWN, Line(name="m"))
        }

    assert (found[OWN.name], found["m"]) == ([theirs], [others, theirs])  # the last: without lines
    with own.database.read() as session:
        prompts = gate_store.held_out_prompts(session, DEFAULT, limit=9)
    assert [one.exchange_id for one in prompts] == [others]


def test_the_base_of_other_projects_is_not_in_a_lines_comparison(shared: World, own: World) -> None:
    name = own.register(1)
    with own.database.write() as session:
        begun = transitions.begin(
            session, model=OWN.name, candidate=name, steps=(5000,), now=own.clock(), actor="t"
        )
        row = canaries.find_row(session, begun.canary_id)
        row.state = "ramping"
        canaries.add_evidence(row, ramp={"began_at": own.clock() - 1, "after_seq": 0})
    for number in range(6):
        shared.serve(f"other{number}", project="shop", status=500)
        own.serve(f"mine{number}", project="support")
    own.serve("tried", adapter=name, arm="canary", project="support")
    canary = own.canary(name)

    with own.database.read() as session:
        counts = count_ramp(session, canary, step_min_exchanges=3, line=OWN)
        live, _ = LiveTurns(own.rules, OWN).read(session, canary, own.clock() + 120.0)
        everybody, _ = LiveTurns(own.rules, Line(name="m")).read(
            session, canary, own.clock() + 120.0
        )

    assert (counts.candidate.replies, counts.champion.replies, counts.champion.errors) == (1, 6, 0)
    assert (live.guards["failed"].champion, everybody.guards["failed"].champion) == (0, 6)


async def test_vllm_holds_the_adapters_of_all_lines(shared: World, own: World) -> None:
    one, other = shared.register(1, values=(0.1, 0.2)), own.register(1, values=(0.3, 0.4))
    shared.promote(one)
    own.promote(other)

    desired = read_desired(own.database, "m", own=[OWN.name])
    assert desired.wanted == (one, other)
    await own.keeper(own=[OWN.name], max_loras=6).reconcile()
    assert {one, other} <= own.control.adapters.keys()

    # Without the setting the line's adapters are unloaded, and its rows stay.
    without = own.keeper(max_loras=1)
    await without.reconcile()
    own.clock.now += 31.0
    plan = await without.reconcile()
    assert plan.unload == (other,)
    assert own.aliases()["champion"] == other


def test_the_same_files_may_serve_in_both_lines_and_are_banned_in_one(
    shared: World, own: World
) -> None:
    one, other = shared.register(1, values=(0.1, 0.2)), own.register(1, values=(0.1, 0.2))
    shared.promote(one)
    own.promote(other)
    assert shared.adapter(one).digest == own.adapter(other).digest

    rollback(own.database, OWN.name, reason="rude", actor="me", now=own.clock())

    with own.database.read() as session:
        assert list(bans.reasons(session, OWN.name)) == [own.adapter(other).digest]
        assert bans.reasons(session, "m") == {}


def test_a_version_number_is_of_its_line(shared: World, own: World) -> None:
    one, other = shared.register(1, values=(0.1, 0.2)), own.register(1, values=(0.3, 0.4))

    with own.database.write() as session:
        assert versions.resolve(session, "m", "v1") == one
        assert versions.resolve(session, OWN.name, "v1") == other
        with pytest.raises(Exception, match="no adapter of m matches"):
            versions.resolve(session, "m", other)
        begun = candidates.start(
            session, OWN.name, "v1", steps=(5000,), now=1.0, actor="me", reason="try"
        )
    assert (begun.model, begun.candidate) == (OWN.name, other)


async def test_the_admin_api_reads_and_changes_one_line(
    shared: World, own: World, make_api: MakeApi
) -> None:
    one, other = shared.register(1, values=(0.1, 0.2)), own.register(1, values=(0.3, 0.4))
    shared.promote(one)
    own.promote(other)
    api = make_api(lines=(DEFAULT, OWN))
    before = state_of(shared)

    status = (await api.get("/status", project="support")).json()
    assert (status["model"], status["project"], status["champion"]) == ("m", "support", other)
    assert [(line["project"], line["champion"]) for line in status["lines"]] == [
        (None, one),
        ("support", other),
    ]
    assert (await api.get("/status")).json()["champion"] == one
    listed = (await api.get("/adapters", project="support")).json()["items"]
    assert [item["name"] for item in listed] == [other]
    assert (await api.get("/adapters/1", project="support")).json()["name"] == other
    assert len((await api.get("/canaries", project="support")).json()["items"]) == 1
    aliases = (await api.get("/aliases", project="support")).json()["items"]
    assert {item["alias"]: item["adapter"] for item in aliases}["champion"] == other

    paused = await api.post("/learner/pause?project=support", {"reason": "wait"})
    done = await api.post("/rollback?project=support", {"to": "base", "reason": "rude"})

    assert paused.json()["paused"] is True
    assert (done.json()["from"], done.json()["to"]) == (other, "base")
    assert state_of(shared) == before
    scraped = (await api.client.get("/metrics")).text
    assert 'sidecar_project_learner_paused{project="support"} 1.0' in scraped
    assert "sidecar_learner_paused 0.0" in scraped


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/status"),
        ("GET", "/learner"),
        ("GET", "/adapters"),
        ("GET", "/canaries"),
        ("GET", "/runs"),
        ("GET", "/aliases"),
        ("GET", "/aliases/champion"),
        ("GET", "/rollback/targets"),
        ("GET", "/groups"),
        ("POST", "/rollback"),
        ("POST", "/learner/pause"),
    ],
)
async def test_an_unknown_project_is_404_and_no_other_is_named(
    method: str, path: str, own: World, make_api: MakeApi
) -> None:
    api = make_api(lines=(DEFAULT, OWN))

    reply = await api.client.request(method, f"/admin/v1{path}?project=shop")

    assert reply.status_code == 404
    assert reply.json()["detail"] == "shop is none of the projects in serving.own_adapters"


async def test_a_token_of_a_project_reads_nothing_of_the_others(
    shared: World, own: World, make_api: MakeApi
) -> None:
    lines = default, shop, rival = lines_of("m", ["support", "rival"])
    with shared.database.write() as session:
        routing_writer.initialise(session, rival.name, now=0.0, actor=audit.CONTROL)
        for line in ("", default.name, shop.name, rival.name):
            one = Condition(kind="x", line=line, code="x", message=f"of {line}")
            conditions.write(session, one, now=1.0)
        session.add(CounterRow(stage="consume", reason="stored", count=7))
    folder = shared.folder / "rival"
    folder.mkdir()
    other = replace(shared, line=rival, folder=folder)
    mine, theirs = own.register(1, values=(0.1, 0.2)), other.register(1, values=(0.3, 0.4))
    own.promote(mine)
    other.promote(theirs)
    api = make_api("t", scopes="read@support", lines=lines, judge=Judge(budget=5.0))
    full = make_api("t", scopes="read", lines=lines, judge=Judge(budget=5.0))
    for asked in (api, full):
        asked.reconciler.view = EngineView(away=None, loaded=frozenset((mine, theirs)))
        asked.client.headers["authorization"] = "Bearer t"

    reply = await api.get("/status", project="support")
    text = await api.client.get(
        "/admin/v1/status?project=support", headers={"accept": "text/plain"}
    )
    progress = await api.get("/progress", project="support")
    found = reply.json()

    assert [line["project"] for line in found["lines"]] == ["support"]
    assert (found["champion"], found["engine"]["loaded"]) == (mine, [mine])
    assert [one["message"] for one in found["conditions"]] == [f"of {shop.name}"]
    assert (found["exchanges"], found["budgets"], found["engine"]["replicas"]) == (None, [], {})
    assert (progress.json()["cost"], progress.json()["cost_of_a_point"]) == (None, "")
    for shown in (reply.text, text.text, progress.text):
        assert not any(word in shown for word in ("rival", theirs, "http://", "Recorded"))
    assert f"project support: {mine} answers every session" in text.text
    refused = await api.get("/funnel", project="support")
    assert refused.status_code == 403
    assert "/funnel is not about one project alone" in refused.json()["detail"]

    every = (await full.get("/status", project="support")).json()
    assert [line["project"] for line in every["lines"]] == [None, "support", "rival"]
    assert (every["exchanges"], len(every["budgets"])) == (7, 2)
    assert set(every["engine"]["loaded"]) == {mine, theirs}
    assert (await full.get("/funnel", project="support")).status_code == 200
    assert (await full.get("/progress", project="support")).json()["cost"] is not None


async def test_a_token_of_a_project_has_its_canary_and_its_records_alone(
    shared: World, own: World, make_api: MakeApi
) -> None:
    mine, theirs = own.register(1, values=(0.1, 0.2)), shared.register(1, values=(0.3, 0.4))
    own.ramp(mine)
    shared.ramp(theirs)
    said = own.serve("mine", project="support"), shared.serve("theirs")
    api = make_api("t", scopes="operate+content@support", lines=(DEFAULT, OWN))
    api.client.headers["authorization"] = "Bearer t"
    ids = own.canary(mine).canary_id, shared.canary(theirs).canary_id

    async def statuses(method: str, path: str, *names: str) -> list[int]:
        made = [f"/admin/v1{path.format(name)}?project=support" for name in names]
        return [(await api.client.request(method, one)).status_code for one in made]

    for path, names in (
        ("/canaries/{}", ids),
        ("/canaries/{}/evidence", ids),
        ("/exchanges/{}", said),
        ("/sessions/{}", ("mine", "theirs")),
    ):
        assert await statuses("GET", path, *names) == [200, 404], path
    assert await statuses("POST", "/canaries/{}/pause", *ids) == [200, 404]
    assert (own.canary(mine).paused, shared.canary(theirs).paused) == (True, False)
    with shared.database.write() as session:
        of_theirs = ExchangeRow.exchange_id == said[1]
        session.execute(update(ExchangeRow).where(of_theirs).values(request_body=b"broken"))
    assert await statuses("GET", "/exchanges/{}", said[1]) == [404]
    without = await api.client.get(f"/admin/v1/canaries/{ids[0]}")
    assert without.status_code == 403

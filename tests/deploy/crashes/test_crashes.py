"""SIGKILL of control at every transition: it ends as a control that was never killed.

Each story is told by a control that dies at each of the story's points in turn, just before a
commit and just after it, and before and after vLLM's load or unload. Store, routing table, aliases,
events and loaded adapters must be in the end what `STORIES` says, worked by hand, and whatever a
dead process leaves behind must be something that proxies may obey.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from demo.ports import free_port
from deploy.canary.controller import guard_facts, quality_facts
from deploy.canary.gate_store import Judged
from deploy.canary.live_turns import LiveTurns
from deploy.registry import aliases as history, canaries, proof_rule, routing_writer, versions
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AuditRow, BreakerTripRow, CounterRow
from support.adapter_endpoints import MODEL, AdapterEndpoints, vllm_in_thread
from support.killed_control import Point, Start, start
from tests.deploy.conftest import World
from tests.deploy.test_process import write_config

pytestmark = pytest.mark.timeout(300)

RULES: dict[str, Any] = {
    "margin": 0.4,
    "gate_prompts": 6,
    "gate_min_prompts": 6,
    "gate_answers": 1,
    "groups_per_hour": 0,
    "steps": [2_000, 5_000],
    "step_min_s": 0.0,
    "turn_wait_s": 0.0,
    "step_min_exchanges": 4,
    "step_min_sessions": 4,
}
LEVELS = ("PROMOTE_LEVEL", "HARM_LEVEL", "GUARD_LEVEL")
LEVEL = 0.5
"""So that six judged groups prove what a promotion asks for."""
SHORT = {
    **{f"deploy.registry.proof_rule:{name}": LEVEL for name in LEVELS},
    "deploy.line_loops:POLL_S": 0.02,
    "deploy.engine.reconcile:UNLOAD_GRACE_S": 0.05,
    "deploy.engine.reconcile:MISSING_S": 0.1,
    "deploy.engine.reconcile:CHECK_S": 0.05,
    "deploy.line_loops:CHECK_S": 0.05,
    "deploy.engine.engines:RECONCILE_S": 0.1,
}
END_S = 60.0
"""A story takes two seconds alone on a machine."""
COUNTED = ("canary", "adapter")
"""Stages whose counters say how often something was decided."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens to the candidate v4 beside the champion v3. Both vLLMs have v1 to v3, and room
    for three: one must go as soon as v4 is there, unless that was rejected and goes at once."""

    points: tuple[str, ...]
    """Where control dies, in order."""
    phase: str
    """How the canary ends."""
    events: tuple[str, ...]
    """Actions of the audit from the candidate's first tick on."""
    champion: int = 3
    """Version of the champion at the end; 0: the base."""
    loaded: tuple[int, ...] = (2, 3, 4)
    """Versions that each vLLM has at the end."""
    may_stay: tuple[int, ...] = ()
    """Versions that it may have too: v4 was rejected before the grace of v1 ended."""
    score: float = 1.0
    """The judge's, of the candidate's answers; the others get 1 minus this."""
    act: Callable[[Played], None] = lambda played: None
    """What users and operators do while it ramps; called again and again."""
    rules: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Played:
    """A story that is being told."""

    world: World
    admin: str
    names: list[str]
    """By version; of 0, the base."""
    steps: set[int] = field(default_factory=set)
    """Steps whose users came."""
    done: bool = False
    """The operator's call was answered."""

    @property
    def old(self) -> str:
        return self.names[3]

    @property
    def new(self) -> str:
        return self.names[4]


def users_come(played: Played, *, status: int = 200, canary: int = 4) -> None:
    """Eight sessions of each step, stored in one transaction as ingest does."""
    world, found = played.world, played.world.canary(played.new)
    if found.phase != "ramping" or found.step in played.steps:
        return
    weight = found.weight_bp / 10_000
    with world.database.write() as session:
        within = replace(world, database=cast(Database, _Within(session)))
        within.clock.now = time.time()
        for number in range(8):
            of_canary = number < canary
            within.serve(
                f"{found.step}-{number}",
                adapter=played.new if of_canary else played.old,
                arm="canary" if of_canary else "champion",
                propensity=weight if of_canary else 1 - weight,
                status=status if of_canary else 200,
                outcome="ok" if status == 200 or not of_canary else "upstream_error",
            )
        world.exchanges = within.exchanges
    played.steps.add(found.step)


class _Within:
    """A `Database` whose writes are one transaction."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def write(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(self._session)


def users_meet_errors(played: Played) -> None:
    users_come(played, status=500)


def breaker_trips(played: Played) -> None:
    found = played.world.canary(played.new)
    if found.phase == "ramping" and not played.done:
        with played.world.database.write() as session:
            session.add(
                BreakerTripRow(
                    model=MODEL,
                    canary=played.new,
                    salt=found.salt,
                    reason="17 of 20 replies failed",
                    at=time.time(),
                )
            )
        played.done = True


def operator_rolls_back(played: Played) -> None:
    """As a person does: whoever got no reply calls again."""
    if played.done or played.world.canary(played.new).phase in ("loading", "gating"):
        return
    with contextlib.suppress(httpx.TransportError):
        reply = httpx.post(
            f"{played.admin}/admin/v1/rollback", json={"to": "base", "reason": "bad"}, timeout=10
        )
        played.done = reply.status_code == 200


BEGUN = ("canary.loading", "canary.gating")
LOADS = ("before canary.loading", "after canary.loading", "before load", "after load")
GATES = ("before canary.gating", "after canary.gating")
RAMPS = ("before canary.ramping", "after canary.ramping")
PROMOTED = (
    *BEGUN,
    "canary.ramping",
    "canary.ramping",
    "alias.anchor",
    "alias.champion",
    "alias.previous",
    "canary.promoted",
)
STORIES = {
    "promoted": Story(
        points=(
            *LOADS,
            *GATES,
            *RAMPS,
            *RAMPS,
            "before canary.promoted",
            "after canary.promoted",
        ),
        phase="promoted",
        events=PROMOTED,
        champion=4,
        act=users_come,
    ),
    "an old one is unloaded": Story(
        points=("before unload", "after unload"),
        phase="promoted",
        events=PROMOTED,
        champion=4,
        act=users_come,
    ),
    "rejected by the gate": Story(
        points=("before canary.rolled_back", "after canary.rolled_back", "before unload"),
        phase="rolled_back",
        events=(*BEGUN, "adapter.banned", "canary.rolled_back"),
        score=0.0,
        loaded=(2, 3),
        may_stay=(1,),
    ),
    "rolled back by a guard": Story(
        points=("before canary.rolled_back", "after canary.rolled_back"),
        phase="rolled_back",
        events=(*BEGUN, "canary.ramping", "adapter.banned", "canary.rolled_back"),
        act=users_meet_errors,
    ),
    "taken out by the breaker": Story(
        points=("before canary.rolled_back", "after canary.rolled_back"),
        phase="rolled_back",
        events=(*BEGUN, "canary.ramping", "adapter.banned", "canary.rolled_back"),
        act=breaker_trips,
    ),
    "inconclusive": Story(
        points=("before canary.inconclusive", "after canary.inconclusive"),
        phase="inconclusive",
        events=(*BEGUN, "canary.ramping", "canary.inconclusive"),
        rules={"step_max_s": 1.0, "step_min_sessions": 500},
    ),
    "rolled back by an operator": Story(
        points=("before rollback", "after rollback"),
        phase="rolled_back",
        events=(
            *BEGUN,
            "canary.ramping",
            "canary.rolled_back",
            "alias.champion",
            "alias.previous",
            "adapter.banned",
            "adapter.banned",
            "learner.pause",
            "rollback",
        ),
        champion=0,
        loaded=(2, 3, 4),
        act=operator_rolls_back,
    ),
}


@dataclass(frozen=True)
class Seen:
    """What is left when a story has ended: without ids and times, which differ."""

    phase: str
    reason: str | None
    states: dict[str, str]
    aliases: dict[str, str]
    table: tuple[Any, ...]
    events: tuple[str, ...]
    counters: dict[tuple[str, str], int]
    places: list[int | None]
    loaded: list[set[str]]


@contextlib.contextmanager
def two_vllms() -> Iterator[tuple[list[str], list[AdapterEndpoints]]]:
    with vllm_in_thread() as (first, one), vllm_in_thread() as (second, other):
        yield [first, second], [one, other]


@pytest.fixture(autouse=True)
def levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process reads the evidence by the levels of the control that it started."""
    for name in LEVELS:
        monkeypatch.setattr(proof_rule, name, LEVEL)


@pytest.mark.parametrize("name", [name for name in STORIES if "guard" not in name])
def test_it_ends_as_if_it_had_never_been_killed(name: str, world: World, tmp_path: Path) -> None:
    story = STORIES[name]
    with two_vllms() as (urls, endpoints):
        seen = tell(world, story, story.points, urls, endpoints, tmp_path)
    check(world, story, seen)


@pytest.mark.both_stores
def test_the_same_on_each_store(world: World, tmp_path: Path) -> None:
    story = STORIES["rolled back by a guard"]
    with two_vllms() as (urls, endpoints):
        seen = tell(world, story, story.points, urls, endpoints, tmp_path)
    check(world, story, seen)


def tell(
    world: World,
    story: Story,
    points: Sequence[str],
    urls: Sequence[str],
    endpoints: Sequence[AdapterEndpoints],
    folder: Path,
) -> Seen:
    world.clock.now = time.time()
    names = [BASE]
    for version in (1, 2, 3, 4):
        names.append(world.register(version, values=(0.1 * version, -0.5)))
        if version < 4:
            world.promote(names[version])
            for one in endpoints:
                one.adapters[names[version]] = world.adapter(names[version]).path
    old, new = names[3], names[4]
    world.hold_out(6)
    port = free_port()
    config = write_config(
        folder,
        serving={"upstreams": list(urls), "model": MODEL, "max_loras": 3},
        store={"url": world.database.url},
        admin={"port": port},
        canary={**RULES, **story.rules},
    )
    asked = Start(
        argv=(),
        config=config,
        log=folder / "control.log",
        scores={
            f"says {one}": story.score if one == new else 1.0 - story.score
            for one in (MODEL, old, new)
        },
        constants=SHORT,
    )
    played = Played(world=world, admin=f"http://127.0.0.1:{port}", names=names)
    with world.database.read() as session:
        known = session.query(AuditRow).count()
    waiting = [Point(*point.split(" ", 1)) for point in points]  # type: ignore[arg-type]
    deadline = time.monotonic() + END_S * (1 + len(waiting) / 4)
    expected = {names[version] for version in story.loaded}
    may_stay = {names[version] for version in story.may_stay}
    process: BaseProcess | None = None
    try:
        while True:
            assert time.monotonic() < deadline, (waiting, asked.log.read_text()[-4_000:])
            if process is None:
                process = start(replace(asked, point=waiting[0] if waiting else None))
            elif process.exitcode is not None:
                assert process.exitcode == -9, asked.log.read_text()[-4_000:]
                waiting.pop(0)
                proxies_may_obey(world, old, new)
                process = None
                continue
            if has_canary(world, new):
                story.act(played)
                ended = world.canary(new).phase == story.phase
                loaded = all(set(one.adapters) - may_stay == expected for one in endpoints)
                if ended and not waiting and loaded:
                    break
            time.sleep(0.02)
        until_ready(played.admin)
        process.terminate()
        process.join(30)
        assert process.exitcode == 0, asked.log.read_text()[-4_000:]
    finally:
        if process is not None and process.exitcode is None:
            process.kill()
            process.join()
    assert all(one.loads == [new] for one in endpoints), "what was not decided is never loaded"
    return look(world, new, known, endpoints)


def until_ready(admin: str) -> None:
    """A control that has just been started dies of SIGTERM as any process does."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{admin}/readyz", timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("control is not ready")


def has_canary(world: World, name: str) -> bool:
    with world.database.read() as session:
        return canaries.canary_of(session, name) is not None


def proxies_may_obey(world: World, old: str, new: str) -> None:
    """Whatever a dead process left: the table is what the aliases and the canary decided."""
    with world.database.read() as session:
        table = routing_writer.current(session, MODEL)
        aliases = versions.aliases_of(session, MODEL)
        row = canaries.canary_of(session, new)
        canary = None if row is None else canaries.to_canary(row)
        assert history.verify(session).broken == ()
    assert table is not None
    assert table.champion == aliases["champion"]
    ramps = canary is not None and canary.phase == "ramping"
    assert table.canary == (new if ramps else None)
    assert table.canary_weight_bp == (canary.weight_bp if canary is not None else 0)
    promoted = canary is not None and canary.phase == "promoted"
    assert table.champion in ((new,) if promoted else (old, BASE))


def look(world: World, new: str, known: int, endpoints: Sequence[AdapterEndpoints]) -> Seen:
    canary, table = world.canary(new), world.table()
    with world.database.read() as session:
        audit = session.query(AuditRow).order_by(AuditRow.seq).all()[known:]
        assert history.verify(session).broken == ()
    return Seen(
        phase=canary.phase,
        reason=canary.reason,
        states={row.name: row.state for row in world.rows(AdapterRow)},
        aliases=world.aliases(),
        table=(table.champion, table.canary, table.canary_weight_bp, table.generation),
        events=tuple(row.action for row in audit),
        counters={
            (row.stage, row.reason): row.count
            for row in world.rows(CounterRow)
            if row.stage in COUNTED
        },
        places=[row.place for row in world.comparisons()],
        loaded=[set(one.adapters) for one in endpoints],
    )


def check(world: World, story: Story, seen: Seen) -> None:
    names = [BASE, *sorted(seen.states)]
    new = names[4]
    assert seen.phase == story.phase, seen.reason
    assert seen.events == story.events
    assert seen.aliases["champion"] == seen.table[0] == names[story.champion]
    assert seen.aliases.get("canary") is None
    assert seen.table[1:3] == (None, 0)
    may_stay = {names[one] for one in story.may_stay}
    assert [one - may_stay for one in seen.loaded] == [{names[one] for one in story.loaded}] * 2
    assert len(seen.places) in (5, 6), "five at a time; fewer prove harm"
    assert len(set(seen.places)) == len(seen.places)
    promoted = 3 + (story.phase == "promoted")  # with those of before
    assert seen.counters["canary", "promoted"] == promoted
    assert seen.counters.get(("canary", story.phase), 0) == (4 if promoted == 4 else 1)
    assert seen.counters.get(("adapter", "banned"), 0) == story.events.count("adapter.banned")
    evidence_is_that_of_a_replay(world, new, {**RULES, **story.rules})


def evidence_is_that_of_a_replay(world: World, new: str, values: Mapping[str, Any]) -> None:
    """To the last bit: a process that starts now reads the same from the store."""
    rules, canary, kept = CanarySettings(**values), world.canary(new), world.evidence(new)
    with world.database.read() as session:
        quality = Judged(rules).read(session, canary, open_from=None)
        live, behind = LiveTurns(rules, world.line).read(session, canary, time.time())
    replayed = json.loads(json.dumps(quality_facts(quality, canary.proven, rules)))
    assert kept["quality"] == replayed
    if "guards" in kept:
        assert kept["guards"] == json.loads(json.dumps(guard_facts(live, behind)))

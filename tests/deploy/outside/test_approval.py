"""The approval service: it may veto, and whatever else it does only holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from deploy.canary import controller
from deploy.evidence.live import Approval
from deploy.outside import approval as approval_module
from deploy.outside.approval import Approvals
from deploy.outside.http import Caller
from deploy.records import Canary
from deploy.registry import canaries, transitions
from deploy.registry.canary_rule import Move
from deploy.registry.rollback import rollback
from sidecar.settings import Approval as ApprovalSettings
from sidecar.store.models import BannedDigestRow
from support.outside_server import OutsideServer, outside_server

if TYPE_CHECKING:
    from tests.deploy.conftest import World


@dataclass
class Trial:
    """A candidate whose ramp is over, or that waits before it, and the service."""

    world: World
    server: OutsideServer
    name: str

    def says(self, decision: Any, reason: str = "because", status: int = 200) -> None:
        self.server.status = status
        self.server.body = json.dumps({"decision": decision, "reason": reason}).encode()

    async def ask(self) -> None:
        """One turn of the loop that asks, of a control of its own."""
        caller = Caller()
        await Approvals(
            self.world.database, "m", self.world.approval, caller, clock=self.world.clock
        ).tick()
        await caller.aclose()

    async def turn(self, later_s: float = 40.0) -> Canary:
        """Decide, ask, decide."""
        self.world.clock.now += later_s
        await self.world.controller().tick()
        await self.ask()
        await self.world.controller().tick()
        return self.world.canary(self.name)


@pytest.fixture
def server() -> Iterator[OutsideServer]:
    with outside_server() as found:
        yield found


def approving(world: World, server: OutsideServer, *before: str, **more: Any) -> Trial:
    values = {"url": server.url, "before": before, **more}
    world.approval = ApprovalSettings.model_validate(values)
    return Trial(world, server, world.register(1))


async def at_the_end(world: World, server: OutsideServer, **more: Any) -> Trial:
    """A ramp in its last step, which is over."""
    trial = approving(world, server, "promotion", **more)
    with world.database.write() as session:
        transitions.begin(
            session, model="m", candidate=trial.name, steps=(2_000,), now=0.0, actor="control"
        )
    for move in (
        Move(to="gating", candidate_state="gating", reason="loaded"),
        Move(to="ramping", candidate_state="ramping", reason="gate passed"),
    ):
        with world.database.write() as session:
            transitions.apply(
                session, world.canary(trial.name), move, evidence={}, now=world.clock()
            )
    for number in range(3):
        world.serve(f"c{number}", adapter=trial.name, arm="canary")
    return trial


async def before_the_ramp(world: World, server: OutsideServer, **more: Any) -> Trial:
    trial = approving(world, server, "ramp", **more)
    world.hold_out(4)
    for _ in range(2):
        await world.controller().tick()
    return trial


@pytest.mark.both_stores
async def test_a_promotion_happens_only_when_it_is_allowed(
    world: World, server: OutsideServer
) -> None:
    trial = await at_the_end(world, server)
    trial.says("wait", "the office is closed")

    waits = await trial.turn()
    trial.says("allow", "go ahead")
    allowed = await trial.turn()

    assert (waits.phase, waits.stopped_at is not None) == ("ramping", True)
    assert waits.reason == (
        "waits for the approval service before the promotion: it says wait (the office is closed)"
    )
    assert allowed.phase == "promoted"
    assert allowed.reason is not None
    assert allowed.reason.endswith("; approved: go ahead")
    body = json.loads(server.asked[0].body)
    assert (body["type"], body["before"]) == ("canary.approval", "promotion")
    assert body["canary"]["candidate"] == trial.name
    assert body["evidence"]["step_1"]["seen"] == 3


async def test_a_denied_ramp_gives_nobody_the_candidate_and_bans_no_files(
    world: World, server: OutsideServer
) -> None:
    trial = await before_the_ramp(world, server)
    trial.says("deny", "the evaluation of safety failed")

    await trial.turn()
    ended = await trial.turn()

    assert (ended.phase, ended.reason) == (
        "rolled_back",
        "the approval service denied the ramp: the evaluation of safety failed",
    )
    assert (world.adapter(trial.name).state, world.table().canary) == ("rejected", None)
    assert world.rows(BannedDigestRow) == []


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, b"{}", "status 500"),
        (302, b"{}", "status 302|redirects"),
        (200, b"yes", "no decision"),
        (200, b'{"decision": "ALLOW"}', "no decision"),
        (200, b'{"decision": ["allow"]}', "no decision"),
        (200, b'{"decision": true}', "no decision"),
        (200, b"[" * 100_000, "no decision"),
    ],
)
async def test_what_is_no_answer_holds_and_neither_promotes_nor_rejects(
    world: World, server: OutsideServer, status: int, body: bytes, said: str
) -> None:
    trial = await at_the_end(world, server)
    server.status, server.body, server.headers = status, body, {"location": "http://x"}

    for _ in range(3):
        held = await trial.turn()

    assert held.phase == "ramping"
    assert held.approval is not None
    assert (held.approval.answer, held.approval.asked) == ("error", 3)
    assert any(one in held.approval.reason for one in said.split("|"))


async def test_a_service_that_hangs_or_is_away_holds(
    world: World, server: OutsideServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval_module, "CALL_TIMEOUT_S", 0.05)
    trial = await at_the_end(world, server)
    server.wait_s = 0.3
    trial.says("allow")
    hanging = await trial.turn()
    world.approval = world.approval.model_copy(update={"url": "http://127.0.0.1:9"})
    away = await trial.turn()

    assert (hanging.phase, away.phase) == ("ramping", "ramping")
    assert hanging.approval is not None
    assert away.approval is not None
    assert "no whole reply" in hanging.approval.reason
    assert "cannot be reached" in away.approval.reason


async def test_nobody_waits_for_ever(
    world: World, server: OutsideServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "APPROVAL_MAX_WAIT_S", 100.0)
    trial = await at_the_end(world, server)
    trial.says("wait")

    await trial.turn()
    await trial.turn(90.0)
    ended = await trial.turn(20.0)

    assert ended.phase == "inconclusive"
    assert ended.reason is not None
    assert ended.reason.startswith("no approval of the promotion in 100 s")
    assert world.adapter(trial.name).state == "retired"


async def test_an_old_permission_is_asked_for_again(world: World, server: OutsideServer) -> None:
    trial = await at_the_end(world, server)
    old = Approval(before="promotion", since=1.0, answer="allow", reason="yes", at=500.0, asked=1)
    with world.database.write() as session:
        row = world.canary_row(session, trial.name)
        canaries.add_evidence(row, approval=as_json(old))
    trial.says("deny", "no longer")

    ended = await trial.turn()

    assert ended.phase == "rolled_back"


def as_json(approval: Approval) -> dict[str, Any]:
    return {name: getattr(approval, name) for name in Approval.__slots__}


@pytest.mark.parametrize("where", [at_the_end, before_the_ramp])
async def test_a_rollback_and_an_abort_are_honoured_while_it_waits(
    world: World, server: OutsideServer, where: Any
) -> None:
    trial = await where(world, server)
    trial.says("wait")
    await trial.turn()
    await trial.turn()
    asked = world.canary(trial.name)
    assert asked.approval is not None
    assert asked.active

    rollback(world.database, "m", to="base", reason="now", actor="me", now=world.clock())
    trial.says("allow")
    ended = await trial.turn()

    assert (ended.phase, ended.reason) == ("rolled_back", "rollback: now")
    assert world.table().canary is None
    assert ended.approval is not None
    assert ended.approval.answer == "wait", "nothing is written to a canary that has ended"


async def test_harm_ends_a_ramp_that_waits(world: World, server: OutsideServer) -> None:
    trial = await at_the_end(world, server)
    trial.says("wait")
    await trial.turn()
    for number in range(40):
        world.serve(f"bad{number}", adapter=trial.name, arm="canary", status=500)

    ended = await trial.turn()

    assert ended.phase == "rolled_back"
    assert ended.reason is not None
    assert "failed: evidence" in ended.reason


async def test_an_operator_promotes_without_asking(world: World, server: OutsideServer) -> None:
    trial = await at_the_end(world, server)
    with world.database.write() as session:
        row = world.canary_row(session, trial.name)
        transitions.promote(session, row, reason="I say so", now=world.clock(), actor="me")

    assert world.aliases()["champion"] == trial.name
    assert server.asked == []

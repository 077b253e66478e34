"""The approval service: it may veto, and whatever else it does only holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from deploy.canary import controller
from deploy.evidence.live import Approval, MetricState
from deploy.outside import approval as approval_module, checking
from deploy.outside.approval import Approvals
from deploy.outside.checking import MetricChecks
from deploy.outside.http import Caller, OutsideError
from deploy.records import Canary
from deploy.registry import canaries
from deploy.registry.rollback import rollback
from sidecar.settings import Approval as ApprovalSettings, Metric
from sidecar.store.models import BannedDigestRow
from support.fake_metrics import FakeMetrics
from support.outside_server import OutsideServer, outside_server
from tests.deploy.conftest import PASSING, World


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
    world.begin(trial.name, PASSING[:2], (2_000,))
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
        (200, b'{"decision": "ALLOW"}', "no decision"),
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
    world.act("promote", trial.name)

    assert world.aliases()["champion"] == trial.name
    assert server.asked == []


# Metrics of a ramp and of a fresh champion: stored per check, held, rolled back, away.


URL = "http://metrics"
AWAY = OutsideError("it cannot be reached (ConnectError); check the URL, and that it runs")


def measured(world: World, mode: str = "guardrail", **more: Any) -> None:
    """Hold the world's canaries to one metric, at most 0.1."""
    metric = {"kind": "http_json", "url": URL, "max": 0.1, "every_s": 10.0, "mode": mode, **more}
    metrics = {"errors": Metric.model_validate(metric)}
    world.rules = world.rules.model_copy(update={"metrics": metrics})


def promote(world: World, name: str) -> None:
    world.move(name, PASSING[2])


async def check(world: World, *values: float | OutsideError | None) -> FakeMetrics:
    """One check for each value, 10 s apart, each by a control of its own."""
    source = FakeMetrics()
    for value in values:
        world.clock.now += 10.0
        source.values[URL] = value
        await MetricChecks(world.database, "m", source, world.rules, clock=world.clock).tick()
    return source


async def decided(world: World, name: str) -> tuple[str, str]:
    await world.controller().tick()
    canary = world.canary(name)
    return canary.phase, canary.reason or ""


@pytest.mark.both_stores
async def test_a_guardrail_rolls_back_at_its_third_failure_in_a_row(world: World) -> None:
    measured(world)
    name = world.register(1)
    world.begin(name, PASSING[:2], world.rules.steps)

    source = await check(world, 0.5, 0.05, 0.5, 0.6)
    held, _ = await decided(world, name)
    await check(world, 0.7)
    ended, why = await decided(world, name)

    assert (held, ended) == ("ramping", "rolled_back")
    assert why == "guardrail errors: 0.5, 0.6, 0.7 are above 0.1 in 3 checks in a row"
    assert {one.adapter for _, one in source.asked} == {name}
    state = world.canary(name).metrics["errors"]
    assert [one.value for one in state.history] == [0.5, 0.05, 0.5, 0.6, 0.7]
    assert [row.reason for row in world.rows(BannedDigestRow)] == [why]


async def test_it_is_asked_when_it_is_due_and_only_of_a_ramp(world: World) -> None:
    measured(world)
    name = world.register(1)
    source = FakeMetrics({URL: 0.0})
    checks = MetricChecks(world.database, "m", source, world.rules, clock=world.clock)
    await checks.tick()
    world.begin(name, PASSING[:2], world.rules.steps)

    for later in (0.0, 9.9, 0.1, 5.0):
        world.clock.now += later
        await checks.tick()

    assert len(source.asked) == 2


async def test_a_provider_that_is_away_holds_with_the_clock_stopped_and_rolls_nothing_back(
    world: World,
) -> None:
    measured(world, failures=1, errors=2)
    name = world.register(1)
    world.begin(name, PASSING[:2], world.rules.steps)

    await check(world, AWAY)
    _, first = await decided(world, name)
    await check(world, AWAY)
    phase, why = await decided(world, name)
    stopped = world.canary(name).stopped_at
    await check(world, 0.0)
    await decided(world, name)

    assert "stands" not in first
    assert phase == "ramping"
    assert why == f"step 1 stands: metric errors gave no answer 2 times in a row: {AWAY}"
    assert stopped is not None
    assert world.canary(name).stopped_at is None


async def test_a_signal_holds_a_step_that_is_over_and_lets_it_go_on_by_itself(
    world: World,
) -> None:
    measured(world, "signal", failures=1)
    name = world.register(1)
    world.begin(name, PASSING[:2], world.rules.steps)
    for number in range(3):
        world.serve(f"c{number}", adapter=name, arm="canary")

    await check(world, 0.5)
    _, why = await decided(world, name)
    assert world.canary(name).step == 0
    await check(world, 0.0)
    await decided(world, name)

    assert why.startswith("step 1 stands until it recovers: signal errors: 0.5 is above 0.1")
    assert world.canary(name).step == 1


async def test_a_step_does_not_end_without_a_value_of_its_own(world: World) -> None:
    measured(world)
    name = world.register(1)
    world.begin(name, PASSING[:2], world.rules.steps)
    for number in range(3):
        world.serve(f"c{number}", adapter=name, arm="canary")

    await check(world, None, None)
    phase, why = await decided(world, name)
    world.clock.now += world.rules.step_max_s
    ended, last = await decided(world, name)

    assert (phase, why) == ("ramping", "step 1 waits for metric errors, which has no value yet")
    assert (ended, last) == (
        "inconclusive",
        "step 1 waited for metric errors, which has no value yet",
    )


async def test_a_dry_run_is_stored_and_gates_nothing(world: World) -> None:
    measured(world, "dry_run", failures=1)
    name = world.register(1)
    world.begin(name, PASSING[:2], world.rules.steps)
    for number in range(3):
        world.serve(f"c{number}", adapter=name, arm="canary")

    await check(world, 0.5)
    await decided(world, name)

    assert world.canary(name).step == 1
    assert world.canary(name).metrics["errors"].failures == 1


async def test_a_metric_that_goes_on_failing_is_warned_of_when_it_begins(world: World) -> None:
    measured(world, "dry_run")
    world.begin(world.register(1), PASSING[:2], world.rules.steps)

    with capture_logs() as told:
        await check(world, 0.5, 0.6, AWAY, AWAY, 0.05, 0.7)

    levels = [(one["outcome"], one["log_level"]) for one in told if "metric" in one]
    assert levels == [
        ("failing", "warning"),
        ("failing", "info"),
        ("error", "warning"),
        ("error", "info"),
        ("failing", "warning"),
    ]


@pytest.mark.both_stores
async def test_after_its_promotion_a_guardrail_still_takes_it_back(world: World) -> None:
    measured(world)
    first, name, next_one = world.register(1), world.register(2), world.register(3)
    world.promote(first)
    world.begin(name, PASSING[:2], world.rules.steps)
    await check(world, 0.5)
    promote(world, name)
    world.begin(next_one, PASSING[:2], world.rules.steps)

    await check(world, 0.5)
    served = world.table().champion
    await check(world, 0.5)

    assert served == name
    assert world.aliases()["champion"] == world.table().champion == first
    assert world.adapter(name).state == "rolled_back"
    assert [row.adapter for row in world.rows(BannedDigestRow)] == [name]
    why = world.adapter(name).reason
    assert why is not None
    assert why.startswith("after its promotion: guardrail errors: 0.5, 0.5, 0.5")


async def test_the_watch_ends(world: World) -> None:
    measured(world, failures=1)
    first, name = world.register(1), world.register(2)
    world.promote(first)
    world.begin(name, PASSING[:2], world.rules.steps)
    promote(world, name)
    world.clock.now += 3_600.0

    source = await check(world, 0.5)

    assert source.asked == []
    assert world.aliases()["champion"] == name


async def test_a_provider_that_hangs_holds_up_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "EVERY_S", 0.05)
    measured(world)
    slow = world.rules.metrics["errors"].model_copy(update={"url": "http://slow"})
    metrics = {"slow": slow, **world.rules.metrics}
    world.rules = world.rules.model_copy(update={"metrics": metrics})
    name = world.register(1)
    world.begin(name, PASSING[:2], world.rules.steps)
    source = FakeMetrics(values={URL: 0.5, slow.url: 0.0}, hangs={slow.url: asyncio.Event()})
    checks = MetricChecks(world.database, "m", source, world.rules, clock=world.clock)

    for failures in (1, 2, 3):
        world.clock.now += 10.0
        while len(world.canary(name).metrics.get("errors", MetricState()).history) < failures:
            await checks.tick()

    assert (await decided(world, name))[0] == "rolled_back"
    assert [url for url, _ in source.asked].count(slow.url) == 1
    source.hangs[slow.url].set()
    await checks.tick()
    assert not checks.busy
    assert world.canary(name).metrics["slow"].failures == 0

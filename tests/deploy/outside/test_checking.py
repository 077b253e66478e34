"""Metrics of a ramp and of a fresh champion: stored per check, held, rolled back, away."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from deploy.evidence.live import MetricState
from deploy.outside import checking
from deploy.outside.checking import MetricChecks
from deploy.outside.http import OutsideError
from deploy.registry import transitions
from deploy.registry.canary_rule import Move
from sidecar.settings import Metric
from sidecar.store.models import BannedDigestRow
from support.fake_metrics import FakeMetrics

if TYPE_CHECKING:
    from tests.deploy.conftest import World

URL = "http://metrics"
AWAY = OutsideError("it cannot be reached (ConnectError); check the URL, and that it runs")


def measured(world: World, mode: str = "guardrail", **more: Any) -> None:
    """Hold the world's canaries to one metric, at most 0.1."""
    metric = {"kind": "http_json", "url": URL, "max": 0.1, "every_s": 10.0, "mode": mode, **more}
    metrics = {"errors": Metric.model_validate(metric)}
    world.rules = world.rules.model_copy(update={"metrics": metrics})


def ramping(world: World, name: str) -> None:
    with world.database.write() as session:
        transitions.begin(
            session,
            model="m",
            candidate=name,
            steps=world.rules.steps,
            now=world.clock(),
            actor="control",
        )
    for move in (
        Move(to="gating", candidate_state="gating", reason="loaded"),
        Move(to="ramping", candidate_state="ramping", reason="gate passed"),
    ):
        go(world, name, move)


def go(world: World, name: str, move: Move) -> None:
    with world.database.write() as session:
        assert transitions.apply(session, world.canary(name), move, evidence={}, now=world.clock())


def promote(world: World, name: str) -> None:
    go(world, name, Move(to="promoted", candidate_state="champion", reason="good"))


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
    ramping(world, name)

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
    ramping(world, name)

    for later in (0.0, 9.9, 0.1, 5.0):
        world.clock.now += later
        await checks.tick()

    assert len(source.asked) == 2


async def test_a_provider_that_is_away_holds_with_the_clock_stopped_and_rolls_nothing_back(
    world: World,
) -> None:
    measured(world, failures=1, errors=2)
    name = world.register(1)
    ramping(world, name)

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
    ramping(world, name)
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
    ramping(world, name)
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
    ramping(world, name)
    for number in range(3):
        world.serve(f"c{number}", adapter=name, arm="canary")

    await check(world, 0.5)
    await decided(world, name)

    assert world.canary(name).step == 1
    assert world.canary(name).metrics["errors"].failures == 1


async def test_a_metric_that_goes_on_failing_is_warned_of_when_it_begins(world: World) -> None:
    measured(world, "dry_run")
    ramping(world, world.register(1))

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
    ramping(world, name)
    await check(world, 0.5)
    promote(world, name)
    ramping(world, next_one)

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
    ramping(world, name)
    promote(world, name)
    world.clock.now += 3_600.0

    source = await check(world, 0.5)

    assert source.asked == []
    assert world.aliases()["champion"] == name


async def test_an_error_after_the_promotion_takes_nothing_back(world: World) -> None:
    measured(world, failures=1, errors=1)
    first, name = world.register(1), world.register(2)
    world.promote(first)
    ramping(world, name)
    promote(world, name)

    await check(world, AWAY, None, AWAY)

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
    ramping(world, name)
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

"""A candidate's canary begins only when vLLM serves what the learner trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from learner.adapter_folder import LINEAGE, PROBE, ProbeFile, file_digest, render_probe
from sidecar.store.models import BannedDigestRow, CanaryRow

if TYPE_CHECKING:
    from tests.deploy.conftest import World

TRAINED = ProbeFile(
    prompts=((1,), (1, 2)), likeliest=({11: -1.0, 12: -3.0}, {11: -1.0, 12: -3.0}), tolerance=0.1
)


def with_probe(world: World, content: str = "") -> str:
    name = world.register(1)
    folder = Path(world.adapter(name).path)
    (folder / PROBE).write_text(content or render_probe(TRAINED))
    return name


def evidence_of(world: World) -> dict[str, Any]:
    (row,) = world.rows(CanaryRow)
    return dict(row.evidence)


async def test_a_version_that_is_served_as_trained_goes_on_with_the_numbers_as_evidence(
    world: World,
) -> None:
    name = with_probe(world)
    world.control.strays = 0.0625

    await world.controller().tick()

    assert world.canary(name).phase == "gating"
    served = evidence_of(world)["served"]
    assert (served["same"], served["tokens"], served["tolerance"]) == (True, 2, 0.1)
    assert served["mean_difference"] == pytest.approx(0.0625)


async def test_a_version_that_is_served_otherwise_is_rejected_with_the_numbers(
    world: World,
) -> None:
    name = with_probe(world)
    world.control.strays = 0.25

    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert "not what was trained: vLLM's log-probabilities are 0.25 nats a token" in (
        world.canary(name).reason or ""
    )
    assert evidence_of(world)["served"]["same"] is False


async def test_one_replica_that_serves_otherwise_is_waited_for_and_all_are_enough(
    world: World,
) -> None:
    from support.fake_control import FakeControl

    world.others["http://second"] = FakeControl()
    world.others["http://second"].strays = 0.25
    name = with_probe(world)

    await world.controller().tick()
    assert world.canary(name).phase == "loading"
    assert "http://second: not what was trained" in (world.canary(name).reason or "")

    world.control.strays = 0.25
    world.clock.now += 2.0
    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert "http://vllm: not what was trained" in (world.canary(name).reason or "")


async def test_a_damaged_probe_file_is_an_invalid_folder(world: World) -> None:
    name = with_probe(world, "{")

    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert "invalid: probe.json" in (world.canary(name).reason or "")


def with_lineage(world: World) -> tuple[str, Path]:
    """A version whose lineage names its `probe.json`. Returns: its name and its folder."""
    name = with_probe(world)
    folder = Path(world.adapter(name).path)
    algorithm = {"probe_sha256": file_digest(folder / PROBE)}
    (folder / LINEAGE).write_text(json.dumps({"algorithm": algorithm}))
    return name, folder


async def test_a_version_with_the_file_that_its_lineage_names_goes_on(world: World) -> None:
    name, _ = with_lineage(world)
    world.control.strays = 0.0625

    await world.controller().tick()

    assert world.canary(name).phase == "gating"
    assert evidence_of(world)["served"]["same"] is True


async def test_a_version_whose_named_file_is_gone_is_rejected_and_not_banned(world: World) -> None:
    name, folder = with_lineage(world)
    (folder / PROBE).unlink()

    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert "invalid: probe.json: is gone" in (world.canary(name).reason or "")
    assert world.rows(BannedDigestRow) == []


async def test_a_version_whose_named_file_was_changed_is_rejected_and_not_banned(
    world: World,
) -> None:
    """The changed file allows 50 times the difference; both files can be read."""
    name, folder = with_lineage(world)
    world.control.strays = 0.25
    (folder / PROBE).write_text(render_probe(replace(TRAINED, tolerance=5.0)))

    await world.controller().tick()

    assert world.adapter(name).state == "rejected"
    assert "invalid: probe.json: was changed" in (world.canary(name).reason or "")
    assert world.rows(BannedDigestRow) == []
    assert "served" not in evidence_of(world)


async def test_an_imported_version_whose_lineage_names_no_file_is_not_asked(world: World) -> None:
    name = world.register(1)
    lineage = {"imported": {"from": "/mine"}, "algorithm": {"rank": 8, "alpha": 16}}
    (Path(world.adapter(name).path) / LINEAGE).write_text(json.dumps(lineage))
    world.control.strays = 5.0

    await world.controller().tick()

    assert world.canary(name).phase == "gating"
    assert "served" not in evidence_of(world)


async def test_an_older_version_without_the_file_is_not_asked(world: World) -> None:
    name = world.register(1)
    world.control.strays = 5.0

    await world.controller().tick()

    assert world.canary(name).phase == "gating"
    assert "served" not in evidence_of(world)

"""`adapters.url`: an import on one machine is loaded by control on another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.adapters.prune import DAY_S, FolderRule, Pruner
from deploy.canary.controller import Controller
from deploy.cli.adapters import import_adapter
from deploy.engine.validation import ServingLimits
from deploy.line_loops import make_folder_of
from learner.adapter_folder import folder_digest
from learner.resume import remove_folder
from learner.shared_folders import MANIFEST, shared_folders
from sidecar.settings import Learner, Serving, Settings, Store
from sidecar.settings.training import Adapters
from sidecar.store.models import AdapterRow
from tests.deploy.conftest import write_adapter

if TYPE_CHECKING:
    from tests.deploy.conftest import World


def settings_of(world: World, adapters_dir: Path, bucket: Path) -> Settings:
    return Settings(
        serving=Serving(model="m", base_model_path="/models/m", max_lora_rank=8),
        store=Store(url=world.database.url),
        learner=Learner(adapters_dir=adapters_dir, rank=4, alpha=8),
        adapters=Adapters(url=f"file://{bucket}"),
    )


def controller(world: World, settings: Settings) -> Controller:
    return Controller(
        database=world.database,
        replicas={"http://vllm": world.control},
        gate=world.gate(),
        rules=world.rules,
        limits=ServingLimits(max_rank=8, bases=frozenset({"/models/m"})),
        model="m",
        clock=world.clock,
        folder_of=make_folder_of(settings),
    )


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


async def test_control_fetches_verifies_and_loads_what_another_machine_made(
    world: World, tmp_path: Path, bucket: Path
) -> None:
    write_adapter(tmp_path / "mine")
    there = settings_of(world, tmp_path / "there", bucket)
    made = import_adapter(there, world.database, tmp_path / "mine", reason="r", now=5.0)
    remove_folder(made.path)  # this machine never had it
    here = settings_of(world, tmp_path / "here", bucket)

    await controller(world, here).tick()

    assert world.canary(made.adapter).phase == "gating"
    assert folder_digest(tmp_path / "here" / made.digest) == made.digest


async def test_a_candidate_waits_while_the_url_cannot_be_reached(
    world: World, tmp_path: Path, bucket: Path
) -> None:
    write_adapter(tmp_path / "mine")
    settings = settings_of(world, tmp_path / "there", bucket)
    made = import_adapter(settings, world.database, tmp_path / "mine", reason="r", now=5.0)
    remove_folder(made.path)
    (bucket / made.digest / MANIFEST).rename(bucket / "away")
    control = controller(world, settings)

    await control.tick()

    assert world.canary(made.adapter).phase == "loading"
    assert "not complete there" in str(world.canary(made.adapter).reason)
    (bucket / "away").rename(bucket / made.digest / MANIFEST)

    await control.tick()

    assert world.canary(made.adapter).phase == "gating"


def test_retention_removes_the_copy_too(world: World, tmp_path: Path, bucket: Path) -> None:
    write_adapter(tmp_path / "mine")
    settings = settings_of(world, tmp_path / "there", bucket)
    made = import_adapter(settings, world.database, tmp_path / "mine", reason="r", now=5.0)
    with world.database.write() as session:
        session.get_one(AdapterRow, made.adapter).state = "rejected"
    folders = settings.learner.adapters_dir
    pruner = Pruner(
        database=world.database,
        adapters_dir=folders,
        rule=FolderRule(folder_days=1, keep_champions=1),
        shared=shared_folders(settings),
    )

    pruner.prune(now=world.clock.now + 10 * DAY_S, actor="t")

    assert not made.path.exists()
    assert list((bucket / made.digest).iterdir()) == []

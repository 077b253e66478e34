"""SIGKILL of commands that write the store themselves: an offline rollback, and an import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.registry import aliases as history
from learner.adapter_folder import folder_digest
from sidecar.records import BASE
from sidecar.store.models import AdapterRow, AuditRow
from support.killed_control import Point, Start, When, start
from tests.deploy.conftest import write_adapter
from tests.deploy.test_process import write_config

if TYPE_CHECKING:
    from tests.deploy.conftest import World

KILLED = -9


def command(world: World, folder: Path, point: Point | None, *argv: str) -> tuple[int, str]:
    """Run `sidecar ...`. Returns: its exit code, and what it printed."""
    config = folder / "sidecar.toml"
    if not config.exists():
        write_config(
            folder,
            store={"url": world.database.url},
            learner={"adapters_dir": str(folder / "adapters")},
        )
    log = folder / "command.log"
    process = start(Start(argv=argv, config=config, log=log, point=point))
    process.join(120)
    assert process.exitcode is not None, log.read_text()
    return process.exitcode, log.read_text()


def whole(world: World) -> bool:
    with world.database.read() as session:
        return history.verify(session).broken == ()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.both_stores
def test_a_rollback_without_control_is_done_or_not_and_may_be_repeated(
    world: World, tmp_path: Path, when: When
) -> None:
    old, new = world.register(1), world.register(2, values=(0.25, 0.5))
    world.promote(old)
    world.promote(new)
    known = len(world.actions())
    argv = ("rollback", "--offline", "--to", "v1", "--reason", "bad")

    code, _ = command(world, tmp_path, Point(when, "rollback"), *argv)
    assert code == KILLED
    done = when == "after"
    assert world.table().champion == world.aliases()["champion"] == (old if done else new)
    assert (len(world.actions()) > known) is done
    assert whole(world)

    code, said = command(world, tmp_path, None, *argv)

    assert code == 0, said
    assert world.table().champion == world.aliases()["champion"] == old
    assert world.actions()[known:] == [
        "alias.champion",
        "adapter.banned",
        "learner.pause",
        "rollback",
    ]
    assert whole(world)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_import_is_one_version_or_none_and_may_be_repeated(
    world: World, tmp_path: Path, when: When
) -> None:
    """The folder is in its place before the row is: a kill in between leaves nobody's folder."""
    folder = tmp_path / "mine"
    digest = write_adapter(folder)
    argv = ("adapters", "import", str(folder), "--reason", "bought")

    code, said = command(world, tmp_path, Point(when, "adapter.registered"), *argv)
    assert code == KILLED, said
    assert (tmp_path / "adapters" / digest).is_dir()
    assert len(world.rows(AdapterRow)) == (1 if when == "after" else 0)

    code, said = command(world, tmp_path, None, *argv)

    assert code == (1 if when == "after" else 0), said
    (row,) = world.rows(AdapterRow)
    assert (row.version, row.digest, row.parent, row.state) == (1, digest, BASE, "registered")
    assert folder_digest(Path(row.path)) == digest
    registered = [one for one in world.rows(AuditRow) if one.action == "adapter.registered"]
    assert len(registered) == 1

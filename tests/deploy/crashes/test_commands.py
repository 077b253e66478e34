"""SIGKILL of commands that write the store themselves: an offline rollback, and an import."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from demo.ports import free_port
from deploy.engine.reconcile import MISSING
from deploy.registry import aliases as history, flags
from learner.adapter_folder import folder_digest
from sidecar import conditions
from sidecar.records import BASE
from sidecar.store.models import AdapterRow, AuditRow, BannedDigestRow, CounterRow
from support.adapter_endpoints import MODEL, AdapterEndpoints, vllm_in_thread
from support.killed_control import Point, Start, When, start
from support.processes import until
from tests.deploy.conftest import World, write_adapter
from tests.deploy.test_process import write_config

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


# SIGKILL of control while it rolls back by itself: once, whole, and told as the one who did it.


pytestmark = pytest.mark.timeout(300)

SHORT = {
    "deploy.engine.reconcile:MISSING_S": 0.1,
    "deploy.engine.reconcile:CHECK_S": 0.05,
    "deploy.line_loops:CHECK_S": 0.05,
    "deploy.engine.engines:RECONCILE_S": 0.1,
}
END_S = 90.0
ROUNDS = 10
"""Reconciliations that take ten times `MISSING_S` at least."""
MOVES = ["alias.champion", "learner.pause", "rollback"]


@pytest.mark.both_stores
def test_a_champion_that_no_vllm_can_serve_gives_way_once(world: World, tmp_path: Path) -> None:
    """Control dies before its commit, then after it; a third one finds nothing left to do."""
    world.clock.now = time.time()
    old, older, lost = (world.register(one, values=(0.1 * one, -0.5)) for one in (1, 2, 3))
    for name in (old, older, lost):
        world.promote(name)
    known, port = len(world.actions()), free_port()
    with vllm_in_thread() as (first, one), vllm_in_thread() as (second, other):
        for endpoints in (one, other):
            endpoints.adapters = {name: world.adapter(name).path for name in (old, older)}
            endpoints.bad_paths[world.adapter(lost).path] = (400, "the weights cannot be read")
        config = write_config(
            tmp_path,
            serving={"upstreams": [first, second], "model": MODEL, "max_loras": 3},
            store={"url": world.database.url},
            admin={"port": port},
        )
        asked = Start(argv=(), config=config, log=tmp_path / "control.log", constants=SHORT)

        for when in ("before", "after"):
            killed = start(Start(**{**vars(asked), "point": Point(when, "rollback")}))
            killed.join(END_S)
            assert killed.exitcode == -9, asked.log.read_text()[-4_000:]
            done = when == "after"
            assert (
                world.table().champion == world.aliases()["champion"] == (older if done else lost)
            )
            assert world.actions()[known:] == (MOVES if done else [])
        last = start(asked)
        try:
            _until_it_checked_again(world, port, (one, other))
        finally:
            last.terminate()
            last.join(END_S)
        assert last.exitcode == 0, asked.log.read_text()[-4_000:]

    assert world.actions()[known:] == MOVES
    assert world.aliases()["champion"] == world.aliases()["previous"] == older
    assert world.table().champion == older
    assert world.rows(BannedDigestRow) == []
    counted = {row.reason: row.count for row in world.rows(CounterRow) if row.stage == "canary"}
    assert (counted.get("automatic_rollback"), counted.get("operator_rollback")) == (1, None)
    with world.database.read() as session:
        assert flags.read(session, MODEL).paused is True
        assert history.verify(session).broken == ()


def _until_it_checked_again(world: World, port: int, replicas: Sequence[AdapterEndpoints]) -> None:
    """Wait until control is ready, its guard has seen that the champion is served, and each vLLM
    has been asked so often for its adapters that the guard has looked at it again."""

    def is_ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200
        return False

    def is_cleared() -> bool:
        with world.database.read() as session:
            return conditions.read(session, MISSING, MODEL) is None

    def asked() -> int:
        return min(sum(path == "/v1/models" for path, _ in one.seen) for one in replicas)

    until(is_ready, END_S)
    until(is_cleared, END_S)
    enough = asked() + ROUNDS
    until(lambda: asked() >= enough, END_S)

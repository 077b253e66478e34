"""SIGKILL of control while it rolls back by itself: once, whole, and told as the one who did it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from deploy.registry import aliases as history
from deploy.registry import flags
from sidecar.store.models import BannedDigestRow, CounterRow
from support.adapter_endpoints import MODEL, vllm_in_thread
from support.killed_control import Point, Start, start
from tests.deploy.test_process import free_port, write_config

if TYPE_CHECKING:
    from tests.deploy.conftest import World

pytestmark = pytest.mark.timeout(300)

SHORT = {
    "deploy.engine.reconcile:MISSING_S": 0.1,
    "deploy.engine.reconcile:CHECK_S": 0.05,
    "deploy.line_loops:CHECK_S": 0.05,
    "deploy.process:RECONCILE_S": 0.1,
}
END_S = 90.0
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
            _until_it_checked_again(port)
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


def _until_it_checked_again(port: int) -> None:
    """Wait until control is ready, and then for ten times what the guard needs."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200:
                time.sleep(10 * (0.1 + 0.05))
                return
        time.sleep(0.05)
    raise AssertionError("control is not ready")

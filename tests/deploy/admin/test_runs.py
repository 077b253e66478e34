"""One training run on the admin API: where it is, and the figures of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.store.models import RunStepRow
from support.finished_run import finished_run

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World


@pytest.fixture
def with_steps(world: World) -> None:
    with world.database.write() as session:
        run = finished_run("r1")
        run.progress = {"phase": "saving", "at": 5.0}
        session.add(run)
        session.add(finished_run("r2"))
        for step in (1, 2, 3):
            session.add(RunStepRow(run_id="r1", step=step, at=2.0, body={"loss": step / 4}))


@pytest.mark.usefixtures("with_steps")
async def test_a_run_and_its_steps_are_shown(api: Api) -> None:
    run = (await api.get("/runs/r1")).json()
    bare = (await api.get("/runs/r2")).json()

    assert (run["run_id"], run["progress"]) == ("r1", {"phase": "saving", "at": 5.0})
    assert run["steps"] == [
        {"step": step, "at": 2.0, "figures": {"loss": step / 4}} for step in (1, 2, 3)
    ]
    assert (bare["steps"], bare["damaged"]) == ([], [])


async def test_an_unknown_run_is_404(api: Api) -> None:
    reply = await api.get("/runs/none")

    assert reply.status_code == 404
    assert "no run none" in reply.json()["detail"]

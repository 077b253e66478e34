"""A rollback to a version whose files are gone says so at once, in its reply."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.admin import actions

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World


@pytest.fixture
def folder(world: World) -> Path:
    """A version that was champion before v2; no vLLM has it loaded."""
    first = world.register(1)
    world.promote(first)
    world.promote(world.register(2, values=(0.3, 0.1)))
    return Path(world.adapter(first).path)


async def note_of_rollback(world: World, api: Api) -> str:
    world.control.away = True
    await api.reconciler.reconcile()
    reply = await api.post("/rollback", {"to": "v1", "reason": "x"})
    return str(reply.json()["note"])


async def test_a_target_whose_folder_is_missing_or_altered_is_named_at_once(
    world: World, api: Api, folder: Path
) -> None:
    sound = await note_of_rollback(world, api)
    (folder / "adapter_config.json").write_text("{}")
    altered = await note_of_rollback(world, api)
    shutil.rmtree(folder)
    missing = await note_of_rollback(world, api)

    assert sound.endswith("the base answers until it is")
    assert "missing or altered on this machine" in altered
    assert "the folder was changed" in altered
    assert "the base answers until it is; its folder is missing or altered" in missing
    assert "No such file or directory" in missing
    assert missing.endswith(f"restore {folder}, or name another version, or base")


async def test_what_the_note_says_already_is_not_said_twice(
    world: World, api: Api, folder: Path
) -> None:
    shutil.rmtree(folder)
    await note_of_rollback(world, api)
    world.control.away = False
    await api.reconciler.reconcile()

    again = await api.post("/rollback", {"to": "v1", "reason": "x"})

    assert str(again.json()["note"]).count("No such file or directory") == 1


async def test_a_disk_that_hangs_holds_no_reply(
    world: World, api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()

    def hang(*_: object) -> None:
        never.wait()

    monkeypatch.setattr(actions, "LIMIT_S", 0.05)
    monkeypatch.setattr(actions, "check_digest", hang)

    assert (await note_of_rollback(world, api)).endswith("the base answers until it is")
    never.set()

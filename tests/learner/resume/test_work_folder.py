"""Files and checkpoints of a work folder are complete or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from learner.errors import RunStoppedError
from learner.resume import CLAIMED, PLACING, STATE, WorkFolder, remove_folder, work_folders
from learner.runs.interrupted import sweep
from learner.runs.runs import KEPT_S
from sidecar.store.database import Database


@pytest.fixture
def work(tmp_path: Path) -> WorkFolder:
    found = WorkFolder(tmp_path, "r1", token="0123456789")
    found.make()
    return found


def write_state(text: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / STATE).write_text(text)

    return fill


def names(work: WorkFolder) -> list[str]:
    return sorted(one.name for one in work.path.iterdir())


def test_a_checkpoint_replaces_the_one_before(work: WorkFolder) -> None:
    assert work.newest() is None
    work.keep(write_state('{"step": 1}'))
    work.keep(write_state('{"step": 2}'))

    assert names(work) == ["000002"]
    assert (work.newest(), work.state()) == (work.path / "000002", {"step": 2})


def test_numbers_are_compared_as_numbers(work: WorkFolder) -> None:
    for name in ("999999", "1000000"):
        (work.path / name).mkdir()

    assert work.newest() == work.path / "1000000"


def test_a_disk_that_is_full_costs_the_checkpoint_and_keeps_the_one_before(
    work: WorkFolder,
) -> None:
    work.keep(write_state('{"step": 1}'))

    def full(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    work.keep(full)

    assert names(work) == ["000001"]
    assert work.state() == {"step": 1}


def test_a_run_that_another_process_took_over_keeps_no_checkpoint(tmp_path: Path) -> None:
    def lost() -> None:
        raise RunStoppedError("another run took over the lease")

    work = WorkFolder(tmp_path, "r1", check=lost)
    work.make()

    with pytest.raises(RunStoppedError):
        work.keep(write_state("{}"))

    assert work.newest() is None


def test_damaged_checkpoints_are_discarded_together(work: WorkFolder) -> None:
    for name in ("000001", "000002"):
        (work.path / name).mkdir()

    work.discard("damaged")

    assert names(work) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "\0"])
def test_a_file_that_cannot_be_read_is_as_if_it_were_missing(work: WorkFolder, text: str) -> None:
    work.write(CLAIMED, {"group_ids": ["a"]})
    assert work.read(CLAIMED) == {"group_ids": ["a"]}
    (work.path / CLAIMED).write_text(text)

    assert work.read(CLAIMED) is None
    assert WorkFolder(work.path, "nowhere").read(CLAIMED) is None


@pytest.mark.timeout(20)
def test_a_pipe_is_read_as_a_damaged_file_and_never_waited_for(work: WorkFolder) -> None:
    work.keep(write_state('{"step": 1}'))
    checkpoint = work.newest()
    assert checkpoint is not None
    (checkpoint / STATE).unlink()
    for path in (work.path / CLAIMED, checkpoint / STATE, work.path / PLACING):
        os.mkfifo(path)

    with capture_logs() as logs:
        assert (work.read(CLAIMED), work.state(), work.placing()) == (None, {}, None)

    assert all("is not a plain file" in entry["why"] for entry in logs)
    os.mkfifo(work.path / f"{CLAIMED}.new")
    work.write(CLAIMED, {"group_ids": ["a"]})
    assert work.read(CLAIMED) == {"group_ids": ["a"]}


def test_what_processes_left_unfinished_is_removed(work: WorkFolder) -> None:
    dead = WorkFolder(work.path.parent, "r1", token="abcdefghij")
    (dead.empty_adapter() / "weights").write_text("x")
    (work.path / "unfinished-abcdefgh").mkdir()

    assert list(work.empty_adapter().iterdir()) == []
    assert names(work) == ["adapter-01234567"]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder elsewhere that is nobody's to change."""
    found = tmp_path / "foreign"
    found.mkdir()
    (found / "kept").write_text("x")
    found.chmod(0o700)
    return found


def test_a_file_or_a_link_is_no_work_folder(work: WorkFolder, foreign: Path) -> None:
    adapters_dir = work.path.parent
    (adapters_dir / ".run-notes.txt").write_text("x")
    (adapters_dir / ".run-link").symlink_to(foreign)
    (adapters_dir / ".run-dangling").symlink_to("nowhere")

    with capture_logs() as logs:
        found = list(work_folders(adapters_dir))

    assert found == [("r1", work.path)]
    assert sorted(Path(entry["path"]).name for entry in logs) == [
        ".run-dangling",
        ".run-link",
        ".run-notes.txt",
    ]


def test_the_folder_of_a_run_that_the_store_does_not_know_stays_for_a_week(
    database: Database, work: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = work.path.stat().st_mtime

    sweep(database, work.path.parent, "m", now=made + KEPT_S - 1)
    assert work.path.is_dir()

    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "remove", Mock(side_effect=PermissionError("of root")))
        with capture_logs() as logs:
            sweep(database, work.path.parent, "m", now=made + KEPT_S)
    assert [one["event"] for one in logs] == ["work_folder_kept"]

    sweep(database, work.path.parent, "m", now=made + KEPT_S)
    assert not work.path.exists()


def test_a_link_is_not_followed_when_it_is_removed(tmp_path: Path, foreign: Path) -> None:
    for name, target in (("link", foreign), ("dangling", tmp_path / "nowhere")):
        link = tmp_path / name
        link.symlink_to(target)

        remove_folder(link)

        assert not link.is_symlink()
    assert (foreign / "kept").read_text() == "x"
    assert foreign.stat().st_mode & 0o777 == 0o700


def test_a_file_or_a_link_with_a_checkpoints_name_is_none(work: WorkFolder, foreign: Path) -> None:
    work.keep(write_state('{"step": 1}'))
    (work.path / "000002").write_text("x")
    (work.path / "000007").symlink_to(foreign)
    assert work.newest() == work.path / "000001"

    work.keep(write_state('{"step": 2}'))

    assert names(work) == ["000002", "000007", "000008"]
    assert work.state() == {"step": 2}
    work.discard("damaged")
    assert names(work) == ["000002", "000007"]
    assert (foreign / "kept").exists()

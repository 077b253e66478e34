"""Files and checkpoints of a work folder are complete or absent."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.errors import RunStoppedError
from learner.resume.work_folder import CLAIMED, STATE, WorkFolder


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


def test_what_processes_left_unfinished_is_removed(work: WorkFolder) -> None:
    dead = WorkFolder(work.path.parent, "r1", token="abcdefghij")
    (dead.empty_adapter() / "weights").write_text("x")
    (work.path / "unfinished-abcdefgh").mkdir()

    assert list(work.empty_adapter().iterdir()) == []
    assert names(work) == ["adapter-01234567"]

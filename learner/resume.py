"""Resume a killed or stopped run: its holder, its deaths, and the folder it works in.

    <adapters_dir>/.run-<run_id>/
        claimed.json    the groups, in their order; written as soon as they are claimed
        run.json        what the result depends on; written before the trainer starts
        000007/         the newest checkpoint; the number grows with each
        adapter-<t>/    the files that will be published
        placing         the digest under which the adapter is about to be published

`<t>` tells processes apart: one that stood still until another went on with its run writes into no
file of the other's. A file or a checkpoint is complete or absent: it is written under another name,
synced, and renamed. A checkpoint replaces the one before it, so a run takes the disk of two of them
at most.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from learner.adapter_folder import read_plain

# Who holds the lease of a run, and whether that process is gone.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DEAD = ("Z", "X", "x")
"""States of a process that has ended and was not waited for yet (proc(5))."""
Released = Literal["stopped", "broken"]
"""Why a holder gave its lease back before the run's end: it was asked to stop, or a process that it
needs was gone."""
RELEASED = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    token: str
    """Random: no two holders of a lease have the same."""
    host: str
    """Name of the machine, for people."""
    machine: str
    """Its start and the pid namespace; "" where that is not known."""
    pid: int
    started: int
    """In clock ticks after the start of the machine; 0: not known."""


def present_holder() -> Holder:
    pid = os.getpid()
    return Holder(
        token=uuid.uuid4().hex,
        host=platform.node(),
        machine=_machine(),
        pid=pid,
        started=_start_time(pid) or 0,
    )


def released(stored: object, how: Released) -> dict[str, Any]:
    """Return a stored holder (JSON of a `Holder`) that has given its lease back."""
    return {**(stored if isinstance(stored, Mapping) else {}), RELEASED: how}


def how_released(stored: object) -> Released | None:
    """Return how a stored holder gave its lease back; None: it did not."""
    how = stored.get(RELEASED) if isinstance(stored, Mapping) else None
    return how if how in ("stopped", "broken") else None


def is_gone(stored: object) -> bool:
    """Return True when the process of a stored holder (JSON of a `Holder`) has given its lease
    back, or has certainly ended."""
    if not isinstance(stored, Mapping):
        return False
    if how_released(stored) is not None:
        return True
    pid, started = stored.get("pid"), stored.get("started")
    if type(pid) is not int or type(started) is not int or started <= 0:
        return False
    here = _machine()
    return bool(here) and stored.get("machine") == here and _start_time(pid) != started


def _machine() -> str:
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux, or no /proc
        return ""


def _start_time(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in brackets, and may hold both spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return None if len(fields) < 20 or fields[0] in _DEAD else int(fields[19])


# How often a run that is killed or stopped is resumed. Pure.

DEATHS_AT_ONE_PLACE = 3
"""A run that died this often in the same group, without a checkpoint between, is not resumed."""
DEATHS_AT_ONE_CHECKPOINT = 10
"""... and neither is one that died this often in any place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    at: float
    """When it was found dead, in Unix seconds."""
    checkpoint: int
    """Number of its newest checkpoint; 0: it had none."""
    step: int
    """Optimiser steps that were done in it,"""
    steps: int
    """of so many; 0: it had not begun."""
    place: str | None
    """The group that it computed; "": none; None: its trainer did not say."""
    stopped: bool = False
    """It was asked to stop, and did. That is no death, and counts towards no limit."""


def why_not_again(deaths: Sequence[Mapping[str, Any]]) -> str | None:
    """Say why a run is not resumed after the last of these deaths; None: it is.

    deaths: JSON of `Death`, the oldest first.
    """
    last = deaths[-1]
    if last.get("stopped"):
        return None
    here = [
        one
        for one in deaths
        if one.get("checkpoint") == last.get("checkpoint") and not one.get("stopped")
    ]
    same = sum(one.get("place") == last.get("place") for one in here)
    if same >= DEATHS_AT_ONE_PLACE:
        return f"it died {same} times {_at(last.get('place'))}"
    if len(here) >= DEATHS_AT_ONE_CHECKPOINT:
        return f"it died {len(here)} times without another step"
    return None


def _at(place: object) -> str:
    if place is None:
        return "before it was done with a step"
    return f"while it computed group {place}" if place else "while it loaded, stepped or saved"


def resumed_words(deaths: object) -> str:
    """Say where a run was resumed; "" when it never was. deaths: JSON of the store."""
    if not isinstance(deaths, list) or not deaths or not isinstance(deaths[-1], dict):
        return ""
    step, steps = deaths[-1].get("step"), deaths[-1].get("steps")
    at = f"from step {step} of {steps}" if step else "before its first step"
    stops = sum(bool(one.get("stopped")) for one in deaths if isinstance(one, dict))
    kills = len(deaths) - stops
    counts = [
        f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((kills, "kill"), (stops, "stop")) if n
    ]
    again = f", after {' and '.join(counts)}" if len(deaths) > 1 else ""
    return f"resumed {at}{again}"


def was_stopped(deaths: object) -> bool:
    """Return True when a run was resumed last after it had been asked to stop."""
    last = deaths[-1] if isinstance(deaths, list) and deaths else None
    return isinstance(last, dict) and bool(last.get("stopped"))


log = structlog.get_logger()

PREFIX = ".run-"
CLAIMED, RUN, PLACING = "claimed.json", "run.json", "placing"
STATE = "state.json"
"""File of a checkpoint with everything that is no tensor."""
_ADAPTER, _UNFINISHED = "adapter-", "unfinished-"
"""Prefixes of folders, before a part of the token."""
_TOKEN, _DIGITS = 8, 6


class WorkFolder:
    """The work folder of one run. Implements `learner.records.Checkpoints`."""

    def __init__(
        self,
        adapters_dir: Path,
        run_id: str,
        *,
        token: str = "",
        check: Callable[[], None] = lambda: None,
        discarded: Callable[[], None] = lambda: None,
    ) -> None:
        """token: of the process that works in it.
        check: called before a checkpoint takes effect. Raises RunStoppedError when the run is
            another process's by now.
        discarded: called when the checkpoints turned out to be of no use.
        """
        self.run_id = run_id
        self.path = adapters_dir.resolve() / f"{PREFIX}{run_id}"
        self.adapter = self.path / f"{_ADAPTER}{token[:_TOKEN]}"
        self._unfinished = self.path / f"{_UNFINISHED}{token[:_TOKEN]}"
        self._check = check
        self._discarded = discarded

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def empty_adapter(self) -> Path:
        """Return the folder for the adapter's files, empty; remove what processes left unfinished.

        Raises: OSError.
        """
        for prefix in (_ADAPTER, _UNFINISHED):
            for leftover in self.path.glob(f"{prefix}*"):
                remove_folder(leftover)
        self.adapter.mkdir()
        return self.adapter

    def remove(self) -> None:
        remove_folder(self.path)

    def write(self, name: str, value: Mapping[str, Any] | str) -> None:
        """Write a file: JSON, or a text. Raises: OSError."""
        text = value if isinstance(value, str) else json.dumps(value, indent=1)
        unfinished = self.path / f"{name}.new"
        remove_folder(unfinished)  # whatever stands there: to open a pipe would wait for its reader
        unfinished.write_text(text + "\n", encoding="utf-8")
        sync(unfinished)
        unfinished.replace(self.path / name)
        sync(self.path)

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a JSON object; None when it is missing, or damaged (logged)."""
        return _read_object(self.path / name)

    def placing(self) -> str | None:
        """Return the digest under which the run was about to publish; None: it was not."""
        try:
            return read_plain(self.path / PLACING).strip()
        except (OSError, ValueError):
            return None

    def newest(self) -> Path | None:
        return max(self._checkpoints(), default=None, key=_number)

    def state(self) -> dict[str, Any]:
        """Return what the newest checkpoint says beside its tensors; empty when there is none."""
        newest = self.newest()
        return (_read_object(newest / STATE) or {}) if newest is not None else {}

    def keep(self, fill: Callable[[Path], None]) -> None:
        try:
            self._keep(fill)
        except OSError as error:
            # The run goes on: if it is killed now, it resumes from the checkpoint before.
            why = error.strerror or str(error)
            log.warning("checkpoint_not_written", folder=str(self.path), why=why)
            remove_folder(self._unfinished)

    def discard(self, why: str) -> None:
        newest = self.newest()
        log.warning("checkpoint_discarded", folder=str(newest), why=why)
        for one in self._checkpoints():
            remove_folder(one)
        self._discarded()

    def _keep(self, fill: Callable[[Path], None]) -> None:
        before = list(self._checkpoints())
        number = max(map(_number, self._numbered()), default=0) + 1
        remove_folder(self._unfinished)
        self._unfinished.mkdir()
        fill(self._unfinished)
        for one in self._unfinished.iterdir():
            sync(one)
        sync(self._unfinished)
        self._check()
        self._unfinished.rename(self.path / f"{number:0{_DIGITS}d}")
        sync(self.path)
        for one in before:
            remove_folder(one)

    def _checkpoints(self) -> Iterator[Path]:
        yield from (one for one in self._numbered() if _is_folder(one))

    def _numbered(self) -> Iterator[Path]:
        """Yield what has a checkpoint's name, also where it is a file or a link."""
        if self.path.is_dir():
            yield from (one for one in self.path.iterdir() if one.name.isdecimal())


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name)


def work_folders(adapters_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield (run id, folder) for every work folder there; a file or a link is none (logged)."""
    for folder in adapters_dir.glob(f"{PREFIX}*"):
        if _is_folder(folder):
            yield folder.name.removeprefix(PREFIX), folder
        else:
            log.warning(
                "no_work_folder", path=str(folder), why="it is a file or a link; left alone"
            )


def remove_folder(folder: Path) -> None:
    """Delete a folder, read-only or not, if it is there. Of a link or a file in its place only the
    name is deleted. Raises: OSError."""
    if _is_folder(folder):
        folder.chmod(0o755)
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Have the disk keep a file, or the names in a folder. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(read_plain(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.warning("work_file_unreadable", path=str(path), why=str(error)[:200])
        return None
    return found if isinstance(found, dict) else None

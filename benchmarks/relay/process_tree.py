"""CPU time and memory of a process and all that it started, from the kernel. Linux only.

CPU time of a live process is its CPU clock (nanoseconds, all threads, ended ones too). Children
that ended and were waited for are in their parent's `cutime` and `cstime` (clock ticks). The sum
only grows: what a child had used before it ended moves from its own clock to its parent's total.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """What is used of `/proc/<pid>/stat`."""

    parent: int
    session: int
    own_s: float
    reaped_s: float
    """CPU of children that ended and were waited for."""


def parse_stat(text: str, ticks: int = _TICKS) -> Stat:
    """Read one line of `/proc/<pid>/stat`; the name in it may hold spaces and brackets."""
    fields = text.rpartition(")")[2].split()  # [0] is the state, field 3 of proc(5)
    own, reaped = int(fields[11]) + int(fields[12]), int(fields[13]) + int(fields[14])
    return Stat(
        parent=int(fields[1]),
        session=int(fields[3]),
        own_s=own / ticks,
        reaped_s=reaped / ticks,
    )


def tree(root: int) -> list[int]:
    """The process and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            children.setdefault(stat.parent, []).append(int(entry.name))
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, ())
    return found


def in_session(pid: int, session: int) -> bool:
    """Whether the process lives and belongs to the session: a number that was given to another
    process in the meantime does not."""
    stat = _stat(pid)
    return stat is not None and stat.session == session


def cpu_s(root: int) -> float:
    """CPU seconds that the tree has used since its start."""
    total = 0.0
    for pid in tree(root):
        stat = _stat(pid)
        if stat is None:
            continue  # it ended just now: what it used is in its parent's total from now on
        total += _clock_s(pid, stat) + stat.reaped_s
    return total


def rss_mb(root: int) -> float:
    """Resident memory of the tree now, in MiB."""
    return sum(_status_kb(pid, "VmRSS") for pid in tree(root)) / 1024


def peak_rss_mb(root: int) -> float:
    """Sum of each process's own highest resident memory, in MiB: not less than the tree's peak."""
    return sum(_status_kb(pid, "VmHWM") for pid in tree(root)) / 1024


def pin(root: int, core: int) -> None:
    """Let the tree, all its threads, run on one core only. What it starts later inherits that."""
    for pid in tree(root):
        try:
            threads = os.listdir(PROC / str(pid) / "task")
        except FileNotFoundError:
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(int(thread), {core})
            except ProcessLookupError:
                continue  # it ended just now


def share_priority(pid: int) -> None:
    """Give a session that was just started our own priority, where the kernel groups by session
    (sched_autogroup): `nice` alone counts only inside such a group."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    path = PROC / str(pid) / "autogroup"
    if nice != 0 and path.exists():
        path.write_text(str(nice))


def reset_peak(root: int) -> None:
    """Begin the peak anew, where the kernel lets us (it does for our own processes)."""
    for pid in tree(root):
        try:
            (PROC / str(pid) / "clear_refs").write_text("5")
        except OSError:
            continue  # then the peak is that since its start, which is not less


def core_idle_s(core: int) -> float:
    """Seconds that a core had nothing to do since boot.

    Its busy time is the rest of the wall clock: the kernel counts that by ticks, which short
    wake-ups slip through, and idling exactly.
    """
    for line in (PROC / "stat").read_text().splitlines():
        name, *values = line.split()
        if name == f"cpu{core}":
            return (int(values[3]) + int(values[4])) / _TICKS  # idle and iowait
    raise ValueError(f"/proc/stat knows no core {core}")


def _clock_s(pid: int, stat: Stat) -> float:
    try:
        # The clock id of another process, as clock_getcpuclockid(3) makes it.
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return stat.own_s


def _stat(pid: int) -> Stat | None:
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def _status_kb(pid: int, field: str) -> int:
    try:
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0  # a zombie has no memory

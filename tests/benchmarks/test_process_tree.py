"""CPU time of a tree: threads, children that live, and children that are gone; each once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.relay import process_tree

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
"""Uses this much CPU in all, however busy the machine is."""


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that says `done` when its work is done, and then waits to be told to end."""
    program = f"{code}\nprint('done', flush=True)\ninput()\n"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdin is not None
        try:
            assert run.stdout.readline() == "done\n"
            yield run
        finally:
            run.stdin.write("\n")
            run.stdin.close()
            run.wait(60)


def test_a_line_of_stat_is_read_past_a_name_with_brackets() -> None:
    line = "7 (a) b (c)) S 3 7 9 0 -1 4194560 1 2 3 4 50 25 30 10 20 0 1 0 99"

    stat = process_tree.parse_stat(line, ticks=100)

    assert stat == process_tree.Stat(parent=3, session=9, own_s=0.75, reaped_s=0.4)


def test_cpu_of_a_child_that_ended_counts_once() -> None:
    burn = BURN.format(seconds=0.8)
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}], check=True)\n"
    with child(code) as run:
        used = process_tree.cpu_s(run.pid)

    assert 0.8 <= used < 1.6  # 0.8 by the child, less than 0.1 by its parent


def test_cpu_of_a_child_that_lives_counts() -> None:
    inner = BURN.format(seconds=0.2) + "print('x', flush=True); input()"
    code = (
        "import subprocess, sys\n"
        f"one = subprocess.Popen([sys.executable, '-c', {inner!r}],\n"
        "    stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "one.stdout.readline()\n"
    )
    with child(code) as run:
        members = process_tree.tree(run.pid)
        used = process_tree.cpu_s(run.pid)

    assert len(members) == 2
    assert used >= 0.2

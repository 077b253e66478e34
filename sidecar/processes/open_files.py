"""How many files a process may have open, and how many connections fit into that.

Most systems set a soft limit of 1,024, for programs that use select(2), which none of ours does.
The hard limit is what the system really allows.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

OUT_OF_FILES: Final = (errno.EMFILE, errno.ENFILE)
MOST_FILES: Final = 2**20
"""The limit is raised no further: Linux's default of `fs.nr_open`. Some containers have a hard
limit of 10^9, and programs that we start (an operator's vLLM) may walk through all of it."""
KEPT_BACK: Final = 64
"""Files for what a process opens after its start: the connections to the store and the outbox
(three files each), logs, scrapes of the metrics."""


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one; processes started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS allows less than it says; the lower limit is obeyed
        return


def connections_that_fit(wanted: int, *, files_each: int) -> int:
    """Return how many connections the files that are not open yet have room for: at most `wanted`,
    at least one. files_each: files that one connection needs."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    free = limit - len(os.listdir("/dev/fd")) - KEPT_BACK
    return max(1, min(wanted, free // files_each))

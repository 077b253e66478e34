"""Explain any error to a person in one line: what failed, why, and what to do. Pure."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

from ingest.errors import IngestError
from learner.errors import LearnerError
from sidecar.errors import SidecarError

LONGEST = 600
"""Longest text of an error, in characters: libraries put whole configs into their messages."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def explain(error: BaseException, *, adapters_dir: Path) -> str:
    """Explain the error of a failed run in one line. adapters_dir: for disk errors without a file
    name."""
    if isinstance(error, (LearnerError, IngestError, SidecarError)):
        return one_line(error)
    if isinstance(error, MemoryError):
        return (
            f"out of memory ({one_line(error)}); lower learner.pack_tokens or learner.max_groups, "
            "or give the learner more memory; the groups are given back"
        )
    if isinstance(error, OSError):
        return _explain_disk(error, adapters_dir)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return (
        f"unexpected {type(error).__name__}{place}: {one_line(error)}; this is a defect: report it"
    )


def one_line(error: BaseException) -> str:
    """Return an error's text in one line of bounded length; its class when it has no text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def is_full(error: BaseException) -> bool:
    """Return True when the disk has no space, or allows this user no more."""
    return isinstance(error, OSError) and error.errno in _FULL


def explain_full(error: OSError, *, adapters_dir: Path) -> str:
    """Explain a full disk that leaves a run to the next start."""
    where, why = _where_and_why(error, adapters_dir)
    return f"{where} cannot be written: {why}; free space there"


def _where_and_why(error: OSError, adapters_dir: Path) -> tuple[object, str]:
    return error.filename or adapters_dir, (error.strerror or one_line(error)).lower()


def _explain_disk(error: OSError, adapters_dir: Path) -> str:
    where, why = _where_and_why(error, adapters_dir)
    if error.errno in _FULL:
        todo = "free space there; the groups are given back, and the next run takes them again"
    elif error.errno in _FORBIDDEN:
        todo = "give this user the right to write there, or change learner.adapters_dir"
    else:
        todo = "check that learner.adapters_dir is a folder on a working disk"
    return f"{where} cannot be read or written: {why}; {todo}"

"""Import it first: it takes the working folder out of `sys.path` where nobody named it.

An empty entry in PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:/x` leaves one, means the working folder: a
user's own `json.py` would run in place of ours. Only what is loaded already is imported here. What
ran before (`sitecustomize`, a folder `deploy` of the user's) is Python's own rule and out of reach.
"""

from __future__ import annotations

import os
import sys


def without_working_folder(path: list[str], python_path: str, folder: str, own: str) -> list[str]:
    """`sys.path` without the folder, unless PYTHONPATH names it or our own code lies in it. Pure.

    folder: the working folder. own: the folder of our packages. Both absolute.
    """
    entries = python_path.split(os.pathsep)
    named = [os.path.normpath(os.path.join(folder, entry)) for entry in entries if entry]
    if not python_path or "" not in entries or folder in (own, *named):
        return path
    return [entry for entry in path if entry not in ("", folder)]


if not sys.flags.ignore_environment:
    sys.path[:] = without_working_folder(
        sys.path,
        os.environ.get("PYTHONPATH", ""),
        os.getcwd(),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    )

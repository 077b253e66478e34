"""Import this module first: it removes the working folder from `sys.path` unless it was named.

An empty entry in PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:/x` leaves one, means the working folder: a
user's own `json.py` would run in place of Python's. This module imports only what Python has loaded
already. What runs before it (`sitecustomize`, a user's own folder `deploy`) is out of its reach.
"""

from __future__ import annotations

import os
import sys


def without_working_folder(path: list[str], python_path: str, folder: str, own: str) -> list[str]:
    """`sys.path` without the folder, unless PYTHONPATH names it or our packages are in it. Pure.

    folder: the working folder. own: the folder of our packages. Both are absolute.
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

"""The entry of the `sidecar` command: decides where its packages come from, then runs it.

It imports only what Python has loaded already. It removes the working folder from `sys.path`
unless it was named: an empty entry in PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:/x` leaves one, means
the working folder, and a user's own `json.py` would run in place of Python's. And it refuses a
folder of PYTHONPATH that has a package named as one of ours. `sitecustomize` runs before it.
"""

from __future__ import annotations

import os
import sys

ROOMS = {"sidecar": "relay", "ingest": "ruler", "learner": "grpo", "deploy": "canary"}
"""Our packages, each with a folder that tells it from others of its name."""


def main() -> int:
    """Run one command. Returns: its exit code; 1 where another package hides one of ours."""
    if hiding := hidden_by(sys.path):
        sys.stderr.write(f"sidecar: {hiding}\n")
        return 1
    from deploy.cli.main import main as run

    return run()


def hidden_by(path: list[str]) -> str:
    """Say which package in `sys.path` hides one of ours, and what to do; "" when none does."""
    for room, inner in ROOMS.items():
        for folder in path:
            package = os.path.join(folder, room)
            if os.path.isdir(os.path.join(package, inner)):
                break
            if os.path.exists(f"{package}.py") or os.path.exists(f"{package}/__init__.py"):
                return (
                    f"{package} hides the sidecar's own package `{room}`; "
                    f"take {folder or 'the working folder'} out of PYTHONPATH for this command"
                )
    return ""


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
        os.path.dirname(os.path.abspath(__file__)),
    )

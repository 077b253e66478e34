"""Which Python runs the contenders that are written in it: the sidecar and two of its peers alike.

nginx and vllm-router come as their makers optimised them. So does the Python of a distribution and
of the official images (profile-guided, link-time optimised); one that was compiled by a plain
`configure`, as pyenv does unless told otherwise, takes a quarter more CPU for the same request. A
production install has the former, so the former is measured where one is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.relay.unavailable import UnavailableError

CHOICE = "BENCH_PYTHON"
"""Names another one, of the same minor version."""
SYSTEMS = Path("/usr/bin")
_MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """One Python."""

    path: str
    what: str
    """For the result: its version, and how it was built as far as that is known."""


@cache
def chosen() -> Interpreter:
    """The one that is measured. Raises: UnavailableError when the one asked for does not do."""
    asked = os.environ.get(CHOICE)
    if asked:
        path = shutil.which(asked)
        if path is None:
            raise UnavailableError(f"{CHOICE} is {asked!r}, which is not there")
        return Interpreter(path, f"{_version(path)}, by {CHOICE}")
    if "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""):
        return Interpreter(sys.executable, f"{_version(sys.executable)}, an optimised build")
    distributions = SYSTEMS / f"python{_MINOR}"
    if distributions.exists():
        return Interpreter(str(distributions), f"{_version(str(distributions))}, the system's own")
    return Interpreter(
        sys.executable,
        f"{_version(sys.executable)}, NOT an optimised build: a quarter slower than the official "
        f"images'; set {CHOICE}",
    )


def packages_of(environment: Path, *before: str) -> dict[str, str]:
    """What lets any Python of this minor version run what a virtual environment has installed.

    before: folders that go first in the module search path.
    """
    packages = environment / "lib" / f"python{_MINOR}" / "site-packages"
    return {"PYTHONPATH": os.pathsep.join((*before, str(packages)))}


def _version(path: str) -> str:
    done = subprocess.run(
        [path, "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=False,
    )
    version = done.stdout.strip()
    if done.returncode or not version.startswith(f"{_MINOR}."):
        raise UnavailableError(f"{path} is Python {version or '?'}, and {_MINOR} is needed")
    return f"CPython {version}"

"""How the sidecar starts a process of its own: never with code from the working folder.

`python -m` puts the working folder first on the path, so a user's own `ingest.py` or `json.py`
would run in place of ours. `-P` leaves it out; `PYTHONSAFEPATH` does so for what a child starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def own_python(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module of ours."""
    return (sys.executable, "-P", "-m", module, *arguments)


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of such a process."""
    safe = {**environ, "PYTHONSAFEPATH": "1"}
    # An empty entry, as `PYTHONPATH=$PYTHONPATH:/x` leaves one, means the working folder.
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    safe.pop("PYTHONPATH", None)
    return {**safe, "PYTHONPATH": os.pathsep.join(entries)} if entries else safe

"""Start the sidecar's own processes so that they never run code from the working folder.

`python -m` puts the working folder first on the path, so a user's `ingest.py` or `json.py` would be
imported instead of ours. `-P` prevents that; `PYTHONSAFEPATH` does so for grandchildren.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def own_python(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs a module of the sidecar."""
    return (sys.executable, "-P", "-m", module, *arguments)


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of the sidecar."""
    safe = {**environ, "PYTHONSAFEPATH": "1"}
    # An empty entry, as in `PYTHONPATH=$PYTHONPATH:/x`, means the working folder.
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    safe.pop("PYTHONPATH", None)
    return {**safe, "PYTHONPATH": os.pathsep.join(entries)} if entries else safe

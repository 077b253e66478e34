"""Make a verifier from its spec: a built-in class, or the entry point of an installed package."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from typing import Any

from ingest.verifiers.built_in import BUILT_IN
from ingest.verifiers.frames import Spec
from ingest.verifiers.records import ENTRY_POINTS, VERSION_CHARACTERS, Verifier


class LoadError(Exception):
    """A verifier cannot be made; the message says why."""


def load_verifier(spec: Spec) -> tuple[Verifier, str]:
    """Make a verifier. Returns: it and its version. Raises: LoadError.

    The code of an entry point is run, so this belongs into a process that can be killed.
    """
    try:
        verifier = _factory(spec)(**json.loads(spec.params))
        version = verifier.version
        verify = verifier.verify
    except LoadError:
        raise
    except Exception as error:  # a stranger's code may raise anything
        raise LoadError(f"{type(error).__name__}: {error}") from error
    if not isinstance(version, str) or not 0 < len(version) <= VERSION_CHARACTERS:
        raise LoadError(f"its version is no text of 1 to {VERSION_CHARACTERS} characters")
    if not callable(verify):
        raise LoadError("it has no method verify")
    return verifier, version


def _factory(spec: Spec) -> Any:  # Any: a stranger's class or function
    if spec.kind != "entry_point":
        return BUILT_IN[spec.kind]
    found = entry_points(group=ENTRY_POINTS, name=spec.entry_point)
    if not found:
        known = ", ".join(sorted(one.name for one in entry_points(group=ENTRY_POINTS))) or "none"
        raise LoadError(
            f"no installed package has the entry point {spec.entry_point} in {ENTRY_POINTS} "
            f"(known: {known}); install it beside the sidecar"
        )
    return next(iter(found)).load()

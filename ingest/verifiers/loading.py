"""Make a verifier from its spec: a built-in class, or the entry point of an installed package."""

from __future__ import annotations

import difflib
import json
from importlib.metadata import EntryPoint, entry_points
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
    return find_entry_point(spec.entry_point).load()


def find_entry_point(name: str) -> EntryPoint:
    """Find the entry point of an installed package, without running its code. Raises: LoadError."""
    found = entry_points(group=ENTRY_POINTS, name=name)
    if not found:
        known = sorted({one.name for one in entry_points(group=ENTRY_POINTS)})
        near = difflib.get_close_matches(name, known, 1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise LoadError(
            f"no installed package has the entry point {name} in {ENTRY_POINTS} "
            f"(known: {', '.join(known) or 'none'}{guess}); install it beside the sidecar"
        )
    return next(iter(found))

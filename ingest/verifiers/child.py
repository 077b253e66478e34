"""The process in which verifiers run, `python -m ingest.verifiers.child`.

It reads tasks from its standard input and writes replies to its standard output, which the
verifiers' own code does not get: what that prints goes nowhere. The parent kills this process when
an answer takes too long.
"""

from __future__ import annotations

import difflib
import json
import os
import resource
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any, BinaryIO

from ingest.verifiers.built_in import BUILT_IN
from ingest.verifiers.checkers import (
    AnswerSent,
    Checked,
    Loaded,
    NotLoaded,
    Reply,
    Spec,
    Task,
    encode_frame,
    read_task,
)
from ingest.verifiers.records import (
    ENTRY_POINTS,
    VERSION_CHARACTERS,
    Case,
    Failure,
    Finding,
    Verifier,
    read_result,
    shown,
)

# Make a verifier from its spec: a built-in class, or the entry point of an installed package.


class LoadError(Exception):
    """A verifier cannot be made; the message says why."""


def load_verifier(spec: Spec) -> tuple[Verifier, str]:
    """Make a verifier. Returns: it and its version. Raises: LoadError.

    The code of an entry point is run, so this belongs into a process that can be killed.
    """
    try:
        own = spec.kind == "entry_point"
        made: Any = find_entry_point(spec.entry_point).load() if own else BUILT_IN[spec.kind]
        verifier = made(**json.loads(spec.params))
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


def main(argv: list[str]) -> int:
    """Answer tasks until the parent closes the pipe. argv: bytes of address space."""
    tasks, replies = _own_pipes()
    limit = int(argv[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    made: dict[str, tuple[Verifier, str]] = {}
    while (task := read_task(tasks)) is not None:
        for reply in _answer(task, made):
            replies.write(encode_frame(reply))
            replies.flush()
    return 0


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take standard input and output away from everybody else."""
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    return tasks, replies


def _answer(task: Task, made: dict[str, tuple[Verifier, str]]) -> Any:  # Any: a generator
    try:
        if task.spec.digest not in made:
            made[task.spec.digest] = load_verifier(task.spec)
    except LoadError as error:
        yield NotLoaded(why=shown(str(error)))
        return
    verifier, version = made[task.spec.digest]
    request = _object(task.request)
    yield Loaded(version=version)
    for answer in task.answers:
        yield _check(verifier, request, task, answer)


def _check(
    verifier: Verifier, request: dict[str, Any] | None, task: Task, answer: AnswerSent
) -> Reply:
    message = _object(answer.message)
    if request is None or message is None:
        return Checked(failed="unreadable", why="a body is no JSON object")
    case = Case(
        request=request,
        message=message,
        finish_reason=answer.finish_reason,
        tokens=answer.tokens,
        project=task.project,
    )
    try:
        found = verifier.verify(case)
    except Exception as error:  # noqa: BLE001 - a stranger's code may raise anything
        return Checked(failed="error", why=shown(f"{type(error).__name__}: {error}"))
    given = (found.score, found.why) if isinstance(found, Finding) else (found,)
    result = read_result(*given)
    if isinstance(result, Failure):
        return Checked(failed=result.reason, why=result.why)
    return Checked(score=result.score, why=result.why)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

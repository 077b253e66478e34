"""The process in which verifiers run, `python -m ingest.verifiers.child`.

It reads tasks from its standard input and writes replies to its standard output, which the
verifiers' own code does not get: what that prints goes nowhere. The parent kills this process when
an answer takes too long.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any, BinaryIO

from ingest.verifiers.frames import (
    AnswerSent,
    Found,
    Loaded,
    NotLoaded,
    Reply,
    Task,
    encode_frame,
    read_task,
)
from ingest.verifiers.loading import LoadError, load_verifier
from ingest.verifiers.records import Case, Failure, Finding, Verifier, read_result, shown


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
        return Found(failed="unreadable", why="a body is no JSON object")
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
        return Found(failed="error", why=shown(f"{type(error).__name__}: {error}"))
    result = (
        read_result(found.score, found.why) if isinstance(found, Finding) else (read_result(found))
    )
    if isinstance(result, Failure):
        return Found(failed=result.reason, why=result.why)
    return Found(score=result.score, why=result.why)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

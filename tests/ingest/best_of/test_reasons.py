"""The relay knows every reason for which score declines, and no other."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ingest import best_of, errors
from ingest.errors import JudgeRefusalError, JudgeTooLongError, JudgeUnavailableError
from ingest.ruler import group
from ingest.ruler.group import GroupOutcome, SetAside, Unanswered, refusal_of
from sidecar.scoring import NO_PICK_REASONS


def reasons_given(module: ModuleType, made: str) -> Iterator[Any]:
    """The reasons with which a module's code makes records `made`, where they are constants."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == made:
            reason = next(one.value for one in node.keywords if one.arg == "reason")
            if isinstance(reason, ast.Constant | ast.Name | ast.Attribute):
                yield eval(ast.unparse(reason), dict(vars(module)))


def kinds(base: type[JudgeUnavailableError]) -> Iterator[type[JudgeUnavailableError]]:
    yield base
    for one in base.__subclasses__():
        yield from kinds(one)


def test_every_reason_of_the_scoring_process_is_known_to_the_relay_and_no_other() -> None:
    said = set(reasons_given(best_of, "NoPick"))
    set_aside = {
        *reasons_given(group, "SetAside"),
        refusal_of(JudgeRefusalError("no")),
        refusal_of(JudgeTooLongError("long")),
    }
    unanswered = {
        one.reason for one in kinds(JudgeUnavailableError) if hasattr(errors, one.__name__)
    }
    outcomes: list[GroupOutcome] = [
        *(SetAside(reason=one, detail="", asked=False) for one in set_aside),
        *(Unanswered(detail="", reason=one) for one in unanswered),
    ]
    verdicts = [best_of._verdict(one) for one in outcomes]

    assert {one.reason for one in verdicts} | said == NO_PICK_REASONS  # type: ignore[union-attr]

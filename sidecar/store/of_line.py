"""Restrict a query to what is of one line of adapters (`sidecar.lines`)."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, SQLColumnExpression, or_, true

from sidecar.lines import Line


def of_line(project: SQLColumnExpression[Any], line: Line) -> ColumnElement[bool]:
    """Return the condition that a row's project is of a line.

    project: the column; a null is of the default line.
    """
    if line.project is not None:
        return project == line.project
    if not line.others:
        return true()
    return or_(project.is_(None), project.not_in(sorted(line.others)))

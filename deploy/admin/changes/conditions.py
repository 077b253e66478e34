"""What a change requires beside its body: the ETag of what the caller saw, and a reason that says
something."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from deploy.admin.changes.bodies import NO_REASON, ReasonIn
from deploy.admin.problems import BlankReasonError, PreconditionRequiredError, StaleError

IfMatch = Annotated[str | None, Header()]


def check_match(if_match: str | None, etag: str) -> None:
    """Raises: PreconditionRequiredError, StaleError."""
    if if_match is None:
        raise PreconditionRequiredError("send If-Match with the ETag of the resource's GET")
    tags = {tag.strip() for tag in if_match.split(",")}
    if "*" not in tags and etag not in tags:
        raise StaleError(f"the ETag is {etag} now, not {if_match}; GET it again, then decide")


def reason_in(body: ReasonIn | None) -> str:
    """Raises: BlankReasonError."""
    return NO_REASON if body is None else not_blank(body.reason)


def not_blank(reason: str) -> str:
    """Raises: BlankReasonError, because the audit would not say why."""
    if not reason.strip():
        raise BlankReasonError("reason: is blank; say why, or leave it out")
    return reason

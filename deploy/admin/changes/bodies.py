"""Bodies of the changes that operators ask for, and of a rollback's reply."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from deploy.admin.out import Out
from deploy.reasons import MAX_REASON, cut_reason
from deploy.registry.rollback import RollbackResult

NO_REASON = "no reason given"
VersionRef = Annotated[str, Field(max_length=255)] | Annotated[int, Field(ge=0)]
"""The number of a version, or a name of one. What is neither is told in words (`problems`)."""


class ReasonIn(BaseModel):
    # Strict: `true` is not a version, and a number is not a reason.
    model_config = ConfigDict(extra="forbid", strict=True)

    # A blank one is a problem of its own (`not_blank`): the pattern is for the description alone.
    reason: str = Field(
        default=NO_REASON, max_length=MAX_REASON, json_schema_extra={"pattern": r"\S"}
    )


class RollbackIn(ReasonIn):
    # A rollback is never refused for what somebody pasted: of a longer reason the rest is left out.
    reason: Annotated[str, AfterValidator(cut_reason)] = Field(
        default=NO_REASON, json_schema_extra={"pattern": r"\S"}
    )
    to: VersionRef = "previous"
    """"previous", "base", a version or a full name."""


class RollbackOut(Out):
    model_config = ConfigDict(populate_by_name=True)

    source: str = Field(alias="from")
    """Adapter that was champion before, or "base"."""
    to: str
    changed: bool
    """False when the target was champion already."""
    ended_canary: str | None
    banned: list[str]
    """Versions whose files this rollback banned: the old champion, and a candidate that users had
    met. One that was still loading or at the gate is not among them."""
    learner_paused: bool
    """The learner is paused, by this rollback or before it; POST /learner/resume ends that."""
    generation: int
    """Generation of the routing table, which every proxy applies at its next poll."""
    note: str | None
    """Says who answers until vLLM has loaded the target; null when it is loaded."""

    @classmethod
    def of(cls, result: RollbackResult, note: str | None) -> RollbackOut:
        return cls(
            source=result.before,
            to=result.after,
            changed=result.changed,
            ended_canary=result.ended_canary,
            banned=list(result.banned),
            learner_paused=result.learner_paused,
            generation=result.generation,
            note=note,
        )

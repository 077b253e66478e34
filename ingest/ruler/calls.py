"""Judge calls in the store: every reply that came back, good or bad, as it came."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from ingest.ruler.ruler import JudgeCall
from sidecar.store.database import count
from sidecar.store.models import JudgeCallRow


def save_judge_calls(
    session: Session, subject: str, calls: Sequence[JudgeCall], *, rubric_hash: str, now: float
) -> None:
    """Store the calls of one judgement, and count them.

    subject: the id of the group or gate comparison that was judged.
    """
    for call in calls:
        session.add(
            JudgeCallRow(
                group_id=subject,
                at=now,
                judge_model=call.judge_model,
                rubric_hash=rubric_hash,
                order_seed=call.order_seed,
                ok=call.ok,
                error=call.error,
                reply=call.reply.text,
                prompt_tokens=call.reply.prompt_tokens,
                completion_tokens=call.reply.completion_tokens,
                cost_usd=call.reply.cost_usd,
                seconds=call.reply.seconds,
            )
        )
        count(session, "judge_calls", "good" if call.ok else "bad")

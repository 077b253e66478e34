"""Judge calls in the store: every reply, usable or not, unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from ingest.ruler.ruler import JudgeCall
from sidecar.store.contents import keyring_of
from sidecar.store.database import count
from sidecar.store.keyring import place_in
from sidecar.store.models import JudgeCallRow


def save_judge_calls(
    session: Session,
    subject: str,
    calls: Sequence[JudgeCall],
    *,
    rubric_hash: str,
    now: float,
) -> None:
    """Store the calls of one judgement, and count them.

    subject: id of the judged group or gate comparison.
    """
    keyring = keyring_of(session)
    for call in calls:
        session.add(
            JudgeCallRow(
                group_id=subject,
                at=now,
                judge_model=call.judge_model,
                rubric_hash=rubric_hash,
                order_seed=call.order_seed,
                ok=call.ok,
                cached=call.reply.cached,
                error=call.error,
                reply=keyring.seal_text(call.reply.text, place_in("judge_call", "reply", subject)),
                prompt_tokens=call.reply.prompt_tokens,
                completion_tokens=call.reply.completion_tokens,
                cost_usd=call.reply.cost_usd,
                seconds=call.reply.seconds,
            )
        )
        count_call(session, call)


def count_call(session: Session, call: JudgeCall) -> None:
    """Count one call: `good`, `bad`, or `cached` when nobody was asked."""
    asked = "good" if call.ok else "bad"
    count(session, "judge_calls", "cached" if call.reply.cached else asked)

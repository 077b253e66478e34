"""Ask the operator's approval service about a canary that waits for it.

`POST url` with `{"type": "canary.approval", "before": "ramp" | "promotion", "canary": {...},
"evidence": {...}}`; status 200 and `{"decision": "allow" | "deny" | "wait", "reason": "..."}` come
back. All else is an error: it holds the move and rejects nothing. The controller writes into the
store that a move waits, and reads the answer there: a service that hangs holds up this loop alone,
and a control that starts again asks again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import structlog

from deploy.errors import error_line
from deploy.evidence.live import Answer, Approval
from deploy.outside.http import CALL_TIMEOUT_S, OutsideError, Poster, Reply, secret_of
from deploy.records import Canary
from deploy.registry import canaries
from sidecar.settings import Approval as ApprovalSettings
from sidecar.store.database import Database, count

log = structlog.get_logger()

EVERY_S = 1.0
APPROVAL_EVERY_S = 30.0
"""Seconds between two calls while it says `wait` or does not answer, and how long an answer
holds."""
APPROVAL_MAX_WAIT_S = 86_400.0
"""A canary that got no answer by then ends inconclusive: the champion stays."""
STAGE = "approval"
"""Durable counter of answers."""
MAX_REASON = 500
"""Characters of the service's reason that are kept."""


class Approvals:
    """Asks for the canary of one model. Only a control that acts calls it."""

    def __init__(
        self,
        database: Database,
        model: str,
        settings: ApprovalSettings,
        poster: Poster,
        *,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """environment: holds the token; None takes that of the process."""
        self._database = database
        self._model = model
        self._settings = settings
        self._poster = poster
        self._environment = environment
        self._clock = clock

    async def tick(self) -> None:
        """Ask if a move waits and the last answer is old enough. Raises: StoreError."""
        if not self._settings.url:
            return
        waiting = await asyncio.to_thread(self._waiting)
        if waiting is None:
            return
        canary, approval, body = waiting
        answer, reason = await self._ask(body)
        answered = replace(
            approval, answer=answer, reason=reason, at=self._clock(), asked=approval.asked + 1
        )
        log.info("approval_answered", canary=canary.canary_id, answer=answer, reason=reason)
        await asyncio.to_thread(self._keep, canary, answered)

    def _waiting(self) -> tuple[Canary, Approval, bytes] | None:
        now = self._clock()
        with self._database.read() as session:
            row = canaries.active_row(session, self._model)
            canary = canaries.to_canary(row) if row is not None else None
            if row is None or canary is None or canary.approval is None or canary.paused:
                return None
            approval = canary.approval
            answered = approval.answer == "deny" or 0.0 <= now - approval.at < APPROVAL_EVERY_S
            if approval.at and answered:
                return None
            evidence = row.evidence
        asked = {
            "type": "canary.approval",
            "before": approval.before,
            "canary": {
                "canary_id": canary.canary_id,
                "model": canary.model,
                "candidate": canary.candidate,
                "champion": canary.champion,
                "state": canary.phase,
                "step": canary.step,
                "weight_bp": canary.weight_bp,
                "created_at": canary.created_at,
            },
            "evidence": evidence,
        }
        return canary, approval, json.dumps(asked, default=repr).encode()

    async def _ask(self, body: bytes) -> tuple[Answer, str]:
        settings = self._settings
        try:
            token = secret_of(settings.token_env, self._environment)
            reply = await self._poster.post(
                settings.url, body, timeout_s=CALL_TIMEOUT_S, token=token
            )
            return _read(reply)
        except OutsideError as error:
            return "error", error_line(error)[:MAX_REASON]

    def _keep(self, canary: Canary, answered: Approval) -> None:
        with self._database.write() as session:
            row = canaries.find_row(session, canary.canary_id)
            found = canaries.to_canary(row)
            asked = found.approval
            if not found.active or found.generation != canary.generation or asked is None:
                return  # it was ended, moved or paused meanwhile
            if (asked.before, asked.since) != (answered.before, answered.since):
                return
            canaries.add_evidence(row, approval=asdict(answered))
            count(session, STAGE, answered.answer)


def _read(reply: Reply) -> tuple[Answer, str]:
    """Raises: OutsideError."""
    if reply.status != 200:
        raise OutsideError(f"status {reply.status}; let it answer 200 with a decision")
    try:
        found: Any = json.loads(reply.body)
    except (ValueError, RecursionError):
        found = None
    decision = found.get("decision") if isinstance(found, dict) else None
    if decision not in ("allow", "deny", "wait"):
        raise OutsideError('no decision; let it answer {"decision": "allow", "deny" or "wait"}')
    reason = found.get("reason")
    told = reason if isinstance(reason, str) else ""
    shown = told if told.isprintable() else told.encode("unicode_escape").decode()
    return decision, shown[:MAX_REASON] or "it gave no reason"

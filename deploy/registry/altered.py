"""Record in the store that an adapter's files differ from the registered ones.

The aliases stay: an operator may restore the folder, and then the adapter is loaded again. Until
then the proxy serves its sessions from the champion or the base, as for any adapter that vLLM does
not have loaded. The adapter's canary ends, because it would promote files that nobody judged.
"""

from __future__ import annotations

import structlog

from deploy.records import AdapterState
from deploy.registry import audit, canaries, transitions, versions
from deploy.registry.canary_rule import Move
from sidecar.store.database import Database, count

log = structlog.get_logger()

ACTION = "adapter.altered"


def record_altered(database: Database, name: str, *, replica: str, reason: str, now: float) -> None:
    """Write the audit row and the count, and end the adapter's canary. Raises: StoreError."""
    log.error("adapter_altered", adapter=name, replica=replica, reason=reason)
    with database.write() as session:
        version = versions.find(session, name)
        count(session, "adapter", "altered")
        audit.record(
            session,
            now=now,
            actor=audit.CONTROL,
            action=ACTION,
            subject=name,
            before={"digest": version.digest},
            after={"loaded": False, "replica": replica},
            reason=reason,
        )
        canary = canaries.active(session, version.model)
        if canary is None or canary.candidate != name:
            return
        state: AdapterState = "rolled_back" if canary.phase == "ramping" else "rejected"
        move = Move(to="rolled_back", candidate_state=state, reason=f"altered: {reason}")
        transitions.apply(session, canary, move, evidence={}, now=now, ban=False)

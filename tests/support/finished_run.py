"""A training run in the store, for tests that need one and do not train."""

from __future__ import annotations

from typing import Any

from sidecar.store.models import RunRow


def finished_run(run_id: str, **changes: Any) -> RunRow:
    """A run that ended well. `changes` are columns with other values."""
    columns: dict[str, Any] = {
        "model": "m",
        "status": "finished",
        "started_at": 1.0,
        "heartbeat_at": 2.0,
        "parent": "base",
        "settings": {"steps": 3},
        "counts": {"used": 1},
        "metrics": [],
    }
    return RunRow(run_id=run_id, **{**columns, **changes})

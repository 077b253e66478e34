"""Replies of the admin API that a test changes a few fields of."""

from __future__ import annotations

from typing import Any

from deploy.admin.models import CanaryOut, EngineOut, LearnerOut, StatusOut

CHAMPION, CANDIDATE = "m--v2-0123456789ab", "m--v3-0123456789ab"


def status_out(**changes: Any) -> StatusOut:
    """A champion serves, and nothing else goes on."""
    learner = LearnerOut(
        paused=False, run_requested=False, last_run=None, allowed_actions=["pause", "run"]
    )
    fields: dict[str, Any] = {
        "model": "m",
        "champion": CHAMPION,
        "previous": "base",
        "routing": None,
        "canary": None,
        "learner": learner,
        "engine": EngineOut(away=None, loaded=[], refused={}, replicas={}),
        "adapters": {},
        "groups": {},
        "exchanges": 0,
        "feedback": {},
        "signals": {},
        "token_check": "on",
    }
    return StatusOut(**{**fields, **changes})


def canary_out(now: float, **changes: Any) -> CanaryOut:
    """In the first of two steps. now: Unix seconds, two minutes after it began."""
    fields: dict[str, Any] = {
        "canary_id": "c-1",
        "candidate": CANDIDATE,
        "champion": CHAMPION,
        "state": "ramping",
        "paused": False,
        "reason": None,
        "step": 0,
        "steps": [2_000, 5_000],
        "weight_bp": 2_000,
        "created_at": now - 300.0,
        "step_started_at": now - 120.0,
        "next_step_earliest_at": now + 60.0,
        "ended_at": None,
        "generation": 3,
        "allowed_actions": ["abort"],
    }
    return CanaryOut(**{**fields, **changes})

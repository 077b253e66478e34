"""Read `learner.cron`, as APScheduler does."""

from __future__ import annotations

from datetime import UTC, datetime

from apscheduler.triggers.cron import CronTrigger

from sidecar.errors import SettingsError


def read_cron(line: str) -> CronTrigger:
    """Parse five fields, in UTC. Raises: SettingsError, also for a day that never comes."""
    try:
        trigger = CronTrigger.from_crontab(line, timezone=UTC)
    except ValueError as error:
        raise SettingsError(f"setting learner.cron: {error}; give five fields, UTC") from error
    if trigger.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise SettingsError(
            "setting learner.cron: names a day that never comes, so no run would ever start; "
            "correct day and month"
        )
    return trigger

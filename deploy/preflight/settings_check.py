"""The checks that `sidecar config check` and `sidecar up` add to the settings' own rules.

They need libraries that the data plane must not load: the learner's scheduler and the driver of the
store.
"""

from __future__ import annotations

from pathlib import Path

from learner.runs.cron import read_cron
from sidecar.errors import SettingsError
from sidecar.settings import Settings, load_settings
from sidecar.settings.learning import ADVISED_SIZES
from sidecar.store.url import refuse_bad_arguments


def checked_settings(config: Path | None) -> Settings:
    """The settings, if every process can work with them. Raises: SettingsError."""
    settings = load_settings(config)
    read_cron(settings.learner.cron)
    try:
        refuse_bad_arguments(settings.store.url)
    except ValueError as error:
        raise SettingsError(f"setting store.url: {error}") from None
    return settings


def advice(settings: Settings) -> list[str]:
    """Return what works with these settings, but less well than it could. Pure."""
    size, (few, many) = settings.groups.size, ADVISED_SIZES
    if few <= size <= many:
        return []
    why = "so few answers differ by little" if size < few else "so many confuse a judge"
    return [f"groups.size is {size}: {why}; {few} to {many} are best"]

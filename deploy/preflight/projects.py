"""Find projects of the settings that no key names: a project is known by its keys alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from sqlalchemy import make_url

from deploy.preflight.findings import Finding, warning
from deploy.registry import api_keys
from sidecar.errors import StoreError
from sidecar.settings import Settings
from sidecar.store.database import Database, newest_revision


def check_projects(settings: Settings) -> Iterator[Finding]:
    """Yield each rubric, and each line of adapters, of a project without a key, where the sidecar's
    own keys are asked for.

    Yields nothing where there is no store of this version yet: then no project is known.
    """
    named = [
        (f"{section}.projects.{project}", project, "its rubric is not used")
        for section in ("judge", "gate_judge")
        for project in getattr(settings, section).projects
    ]
    named += [
        ("serving.own_adapters", project, "its adapters answer nobody")
        for project in settings.serving.own_adapters
    ]
    if settings.access.mode != "keys" or not named:
        return
    projects = _known(settings.store.url)
    if projects is None:
        return
    for key, project, so in named:
        if project not in projects:
            known = ", ".join(sorted(projects)) or "none"
            yield warning(
                key,
                f"no key is of project {project}, so {so}; the projects of the keys: {known}",
                "unknown_project",
            )


def _known(url: str) -> set[str] | None:
    """Return the projects of keys that are not revoked; None where they cannot be read. Makes no
    store."""
    place = make_url(url)
    if place.get_backend_name() == "sqlite" and not Path(place.database or "").exists():
        return None
    try:
        with closing(Database(url)) as database:
            if database.revision() != newest_revision():
                return None
            found, _ = api_keys.all_keys(database)
            return {one.key.project for one in found if one.revoked_at is None}
    except StoreError:  # `check_places` and `check_store` say what is wrong with the store
        return None

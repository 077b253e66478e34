"""What a tracker is told of a run besides its figures: what it was made with.

Nothing comes from the environment, and no path of this machine but the base's, which the lineage
has too.
"""

from __future__ import annotations

from collections.abc import Mapping

from learner.origin.surroundings import code_version, library_versions
from learner.records import Parent
from sidecar.settings import Settings

Fact = str | int | float | bool

NOT_SENT = frozenset({"adapters_dir", "export"})
"""Settings that say where files are."""
MOST = 100
"""Facts of a run: MLflow takes as many parameters in one call
(`mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH`)."""
LONGEST = 250
"""Characters of a value: the smallest limit that a release of MLflow had for a parameter."""


def facts_of(settings: Settings, parent: Parent) -> dict[str, Fact]:
    """Return model, base, parent, versions and the settings `[learner]`, by name."""
    learner = settings.learner.model_dump(mode="json", exclude=set(NOT_SENT))
    return bounded(
        {
            "model": settings.line.name,
            "base": settings.serving.base_model_path,
            "parent": parent.name,
            "parent_digest": parent.digest,
            "commit": code_version().commit or "",
            **{f"library.{name}": said for name, said in library_versions().items()},
            **{f"learner.{name}": value for name, value in learner.items()},
        }
    )


def bounded(found: Mapping[str, object]) -> dict[str, Fact]:
    """Return the first `MOST` facts, texts cut to `LONGEST` characters. Pure."""
    return {
        name: value if isinstance(value, bool | int | float) else str(value)[:LONGEST]
        for name, value in list(found.items())[:MOST]
    }

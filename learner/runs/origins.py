"""What a lineage tells of an adapter's origin beside its groups: base, window, code, machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import select

from ingest.records import ScoredGroup
from learner.adapter_folder import CARD, CURVES, LINEAGE
from learner.origin.base_digest import CACHE, base_digest, moments_digest
from learner.origin.fingerprint import groups_digest, ids_digest
from learner.origin.surroundings import code_version, library_versions, machine
from learner.records import TrainingOutcome
from learner.runs.lineage import build_lineage, render_card, render_lineage
from learner.runs.material import Material
from sidecar.settings import Learner, Settings
from sidecar.store.database import Database
from sidecar.store.models import ExchangeRow

log = structlog.get_logger()

FILTERS = ("max_age_versions", "min_groups", "max_groups", "min_spread", "pack_tokens")
"""Settings that decide which of the waiting groups a run takes."""


def write_documents(
    folder: Path,
    database: Database,
    settings: Settings,
    run_id: str,
    material: Material,
    outcome: TrainingOutcome,
    deaths: Sequence[Mapping[str, Any]],
    *,
    now: float,
) -> None:
    """Write the lineage and the card of a run beside the weights that it made.

    deaths: where it was killed, and resumed. Raises: OSError, StoreError.
    """
    lineage = build_lineage(
        run_id=run_id,
        created_at=now,
        model=settings.line.name,
        origin=origin_of(database, settings, material),
        groups=material.scored,
        dropped=material.left_out,
        settings=settings.learner,
        gates=material.selection.gates,
        noise=material.noise,
        outcome=outcome,
        curves=CURVES if (folder / CURVES).is_file() else None,
        resumed=deaths,
    )
    (folder / LINEAGE).write_text(render_lineage(lineage), encoding="utf-8")
    (folder / CARD).write_text(render_card(lineage), encoding="utf-8")


def origin_of(database: Database, settings: Settings, material: Material) -> dict[str, Any]:
    """Return the parts of a lineage that its caller does not have, as JSON.

    material: the groups that were trained on. It reads the base's files, unless their hashes are
    kept. Raises: OSError, StoreError.
    """
    serving, parent = settings.serving, material.parent
    base = base_digest(serving.base_model_path, settings.state_dir / CACHE)
    return {
        "base": {
            "model": serving.base_model_path,
            "revision": "" if base is None else base.revision,
            "digest": None if base is None else base.digest,
        },
        "parent": {
            "name": parent.name,
            "version": parent.version,
            "digest": parent.digest,
            "moments_sha256": moments_digest(parent),
        },
        "window": _window(database, settings.learner, material),
        "libraries": library_versions(),
        "code": asdict(code_version()),
        "hardware": {**machine(), "device": settings.learner.device},
    }


def _window(database: Database, settings: Learner, material: Material) -> dict[str, Any]:
    groups = material.selection.groups
    return {
        **_exchanges(database, material.scored),
        "groups": len(groups),
        "group_ids_sha256": ids_digest([group.group_id for group in groups]),
        "groups_sha256": groups_digest(groups),
        "filters": {name: getattr(settings, name) for name in FILTERS},
    }


def _exchanges(database: Database, scored: Sequence[ScoredGroup]) -> dict[str, Any]:
    """Name the first and the last exchange, by the time at which they started.

    One whose time is damaged is passed over (logged): it says nothing of what was trained.
    """
    ids = [one.group.exchange_id for one in scored]
    statement = select(ExchangeRow.started_at, ExchangeRow.exchange_id)
    with database.read() as session:
        rows = session.execute(statement.where(ExchangeRow.exchange_id.in_(ids))).all()
    sound = [(at, one) for at, one in rows if isinstance(at, (int, float)) and math.isfinite(at)]
    if len(sound) < len(rows):
        log.warning("exchange_times_damaged", exchanges=len(rows) - len(sound))
    found = sorted(sound)
    ends = (found[0], found[-1]) if found else ((None, None), (None, None))
    return {
        name: {"exchange_id": exchange_id, "started_at": at}
        for name, (at, exchange_id) in zip(("first_exchange", "last_exchange"), ends, strict=True)
    }

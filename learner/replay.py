"""Train a run again from its lineage, and say whether the same weights come out.

The groups come from the store, the settings, the noise and the order from `lineage.json`, and the
files go to a temporary folder. Nothing is claimed, recorded or published.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import msgspec
from pydantic import ValidationError
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from learner.adapter_folder import LINEAGE, file_digest, folder_digest, read_plain
from learner.errors import LearnerError
from learner.explain import one_line
from learner.origin import (
    CACHE,
    base_digest,
    code_version,
    differences,
    groups_digest,
    library_versions,
)
from learner.progress.watch import RunWatch
from learner.records import Parent, TrainingJob, TrainingOutcome
from learner.runs import source
from learner.runs.lineage import FORMAT
from learner.runs.material import load_groups, noise_of_json
from learner.runs.publish import document_digests
from learner.runs.runs import check_parent
from learner.runs.selection import select_by, select_tasks
from learner.runs.train import Trainer
from sidecar.records import BASE
from sidecar.settings import Learner, Settings
from sidecar.settings.removed import of_section
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, GroupDigestRow, RunRow
from sidecar.visible import counted

SAME, DIFFERENT = 0, 1
Groups = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Above it a float no longer counts them."""


class _NotPossibleError(Exception):
    """The run cannot be replayed; the message says why."""


def replay(
    settings: Settings,
    database: Database,
    reference: str,
    *,
    trainer: Callable[[Learner], Trainer],
    out: TextIO | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> int:
    """Replay a run, and print what came out.

    reference: a run's id, or a version: its number, with or without `v`, or its name.
    trainer: makes the trainer of a run with these settings, once there is something to train.
    show: prints where it is.
    Returns: 0: the same weights; 1: others, or it is not possible.
    """
    stream = sys.stdout if out is None else out
    altered = None
    try:
        with database.read() as session:
            row = _adapter(session, settings.line.name, reference)
            if (altered := _altered(session, row)) is not None:
                stream.write(f"{altered}; what follows is about the changed one\n")
            job, lineage = _recipe(session, settings, row)
        stream.write(
            f"replaying run {lineage['run_id']}, which made {row.name}: "
            f"{counted(len(job.groups), 'group')}, from {job.parent.name}\n"
        )
        with tempfile.TemporaryDirectory(prefix="sidecar-replay-") as folder:
            watch = RunWatch([], show=show)
            watch.phase("loading")
            job = replace(job, folder=Path(folder), watch=watch)
            outcome = trainer(job.settings).train(job)
            digest = folder_digest(job.folder) if outcome.metrics else ""
    except (_NotPossibleError, LearnerError, OSError) as error:
        stream.write(f"not possible: {one_line(error)}\n")
        return DIFFERENT
    if digest == row.digest:
        stream.write(f"the same weights: digest {digest}\n")
        return SAME
    stream.write(f"other weights: digest {digest or 'none'}, the version has {row.digest}\n")
    for line in _reasons(lineage, outcome, altered=altered is not None):
        stream.write(f"  {line}\n")
    return DIFFERENT


def _recipe(
    session: Session, settings: Settings, row: AdapterRow
) -> tuple[TrainingJob, Mapping[str, Any]]:
    lineage = _lineage(row)
    try:
        learner = Learner.model_validate(of_section("learner", lineage["settings"]))
        noise = noise_of_json(lineage["judge_noise"])
        run_id = str(lineage["run_id"])
        quiet = msgspec.convert(lineage["algorithm"].get("quiet_groups", 0), Groups)
        code = msgspec.convert(lineage["code"], dict[str, Any])
        of_tasks = lineage.get("task_groups", [])
        ids = [str(group["group_id"]) for group in (*lineage["groups"], *of_tasks)]
        references = {
            str(group["group_id"]): msgspec.convert(reference, float)
            for group in lineage["groups"]
            if (reference := group.get("reference_spread")) is not None
        }
        steps = {str(group["group_id"]): _steps(group["sessions"]) for group in of_tasks}
        parent = _parent(session, lineage["parent"])
        _check_base(settings, lineage["base"])
        content = lineage["window"]["groups_sha256"]
    except LearnerError:
        raise
    except ValidationError as error:
        _impossible(f"its settings are not known to this version: {error.errors()[0]['loc']}")
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        # Any JSON may stand there; msgspec's ValidationError is a ValueError too.
        _impossible(f"its {LINEAGE} is damaged ({type(error).__name__}: {error})")
    of_run = settings.model_copy(update={"learner": learner})
    scored, tasks, broken = load_groups(session, of_run, None, ids, steps)
    if broken:
        _impossible(_gone(session, broken))
    selection, unfit = select_tasks(learner, tasks, scored, select_by(learner, scored, noise))
    left_out = {**selection.dropped, **{one: fault.reason for one, fault in unfit.items()}}
    if left_out:
        group_id, why = next(iter(left_out.items()))
        _impossible(f"{len(left_out)} of its groups would be left out now; group {group_id}: {why}")
    if groups_digest(selection.groups) != content:
        _impossible("the content of its groups was changed in the store")
    names = (group.adapter for group in selection.groups)
    job = TrainingJob(
        base_model_path=str(lineage["base"]["model"]),
        parent=parent,
        groups=selection.groups,
        settings=learner,
        folder=Path(),
        check_stop=lambda: None,
        quiet=quiet,
        signals=None,
        least_spread=selection.least_spread,
        references=references,
        samplers=source.samplers(session, settings.line.name, names),
    )
    return job, {**lineage, "run_id": run_id, "code": code}


def _steps(sessions: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    return {str(one["session_id"]): msgspec.convert(one["steps"], list[str]) for one in sessions}


def _adapter(session: Session, model: str, reference: str) -> AdapterRow:
    number = reference.removeprefix("v")
    version = int(number) if number.isdecimal() and len(number) < 10 else -1
    named = or_(
        AdapterRow.run_id == reference, AdapterRow.name == reference, AdapterRow.version == version
    )
    row = session.scalar(select(AdapterRow).where(AdapterRow.model == model, named).limit(1))
    if row is not None:
        return row
    run = session.get(RunRow, reference)
    if run is None:
        _impossible(f"there is no run and no version {reference}; `sidecar runs ls` has the runs")
    if run.adapter:
        _impossible(f"run {reference} made no version: {run.reason}; replay {run.adapter}")
    _impossible(f"run {reference} is {run.status}, and made no version")


def _altered(session: Session, row: AdapterRow) -> str | None:
    said, path = document_digests(session, row.name).get(LINEAGE), Path(row.path) / LINEAGE
    if not said or not path.is_file():
        return None
    found = file_digest(path)
    if found == said:
        return None
    return (
        f"{path} was changed after {row.name} was registered (SHA-256 {found[:12]}, the audit "
        f"says {str(said)[:12]})"
    )


def _lineage(row: AdapterRow) -> dict[str, Any]:
    path = Path(row.path) / LINEAGE
    try:
        found = json.loads(read_plain(path))
    except FileNotFoundError:
        _impossible(f"{path} is gone")
    except (OSError, ValueError, RecursionError) as error:
        _impossible(f"{path} cannot be read: {error}")
    if not isinstance(found, dict) or found.get("imported"):
        _impossible(f"{row.name} was trained elsewhere")
    if found.get("format") != FORMAT:
        _impossible(f"{row.name} is of an older release, whose lineage lacks what a replay needs")
    return found


def _parent(session: Session, stored: Mapping[str, Any]) -> Parent:
    name = msgspec.convert(stored["name"], str)
    if name == BASE:
        return Parent(name=BASE)
    row = session.get(AdapterRow, name)
    if row is None:
        _impossible(f"its parent {name} is not in the store any more")
    parent = source.as_parent(row)
    check_parent(parent)
    if parent.digest != stored["digest"]:
        _impossible(f"its parent {parent.name} has other weights now")
    return parent


def _check_base(settings: Settings, stored: Mapping[str, Any]) -> None:
    found = base_digest(str(stored["model"]), settings.state_dir / CACHE)
    if found is None:
        _impossible(f"its base {stored['model']} is not there")
    if stored["digest"] not in (None, found.digest):
        _impossible(
            f"the files of its base {stored['model']} were changed (digest "
            f"{str(stored['digest'])[:12]}, now {found.digest[:12]})"
        )


def _gone(session: Session, broken: Mapping[str, Any]) -> str:
    deleted = session.scalars(
        select(GroupDigestRow.forgotten).where(GroupDigestRow.group_id.in_(list(broken)))
    ).all()
    forgotten = sum(map(bool, deleted))
    parts = [
        f"{len(deleted) - forgotten} deleted by retention" if len(deleted) > forgotten else "",
        f"{forgotten} forgotten" if forgotten else "",
    ]
    how = ", ".join(part for part in parts if part)
    if not how:
        group_id, fault = next(iter(broken.items()))
        how = f"group {group_id}: {fault.text}"
    return f"{len(broken)} of its groups cannot be read any more ({how})"


def _reasons(
    lineage: Mapping[str, Any], outcome: TrainingOutcome, *, altered: bool
) -> Sequence[str]:
    code = lineage["code"]
    before = {"libraries": lineage.get("libraries"), "commit": code.get("commit")}
    now = {"libraries": library_versions(), "commit": code_version().commit}
    found = differences(before, now)
    if code.get("dirty") or code_version().dirty:
        found.append("the learner's code has changes that its commit does not tell of")
    for group_id, fault in outcome.faults.items():
        found.append(f"group {group_id} is left out now: {fault.text}")
    if altered and not found:
        return ["its lineage was changed; nothing else that is recorded differs"]
    return found or ["nothing that is recorded differs; another processor rounds otherwise"]


def _impossible(why: str) -> NoReturn:
    raise _NotPossibleError(why)

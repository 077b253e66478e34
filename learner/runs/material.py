"""The groups of a run: which it claims, and what the trainer gets of them.

A run that is resumed gathers the groups that it claimed before, with the noise of the judges as it
was measured then: otherwise the groups that pass the gate might be others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import structlog
from sqlalchemy.orm import Session

from ingest.grouping.selection import rules_now, rules_of
from ingest.judge_noise import MeasuredNoise, measured_noise
from ingest.records import ScoredGroup
from ingest.store.groups import CLAIMED as CLAIMED_STATUS, SCORED
from ingest.tasks.keys import PREFIX
from ingest.tasks.material import TaskGroup
from learner.errors import NotResumedError
from learner.origin import (
    CACHE,
    base_digest,
    code_version,
    differences,
    fingerprint,
    library_versions,
    settings_of_result,
)
from learner.records import Fault, Parent
from learner.resume import CLAIMED, RUN, WorkFolder
from learner.runs import source
from learner.runs.runs import last_failed
from learner.runs.selection import Noise, Selection, select_by, select_tasks
from learner.runs.source import FAILED_RUNS, blame
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import RunRow

log = structlog.get_logger()

T = TypeVar("T")

DROPPED_AT_ONCE = 200
"""Groups dropped in one transaction: others wait for the write lock."""

MOST_DIFFERENCES = 5
"""Differences that a run's reason names: more say no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What a run took, before it looked at it."""

    group_ids: tuple[str, ...]
    """In the order of training."""
    unclaimed: Mapping[str, str]
    """Group id -> reason, for groups that the run dropped and did not claim."""
    fresh: int = 0
    """Groups that waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """The groups of a run, after selection."""

    parent: Parent
    scored: tuple[ScoredGroup, ...]
    tasks: tuple[TaskGroup, ...]
    """Groups of whole sessions."""
    selection: Selection
    claimed: Claimed
    dropped: Mapping[str, str]
    """Group id -> reason, for claimed groups that the run left out."""
    texts: Mapping[str, str]
    """Group id -> details of the reason, if any."""
    samplers: Mapping[str, Parent]
    """Registered adapters that sampled the groups, by name."""
    noise: Noise
    """Measured noise of the judges that scored the groups."""

    @property
    def counts(self) -> dict[str, int]:
        return {"used": len(self.selection.groups), **Counter(self.left_out.values())}

    @property
    def left_out(self) -> Mapping[str, str]:
        """Group id -> reason, for every group that the run left out."""
        return {**self.claimed.unclaimed, **self.dropped}

    @property
    def told(self) -> dict[str, Any]:
        """What the log has beside the counts."""
        noise = self.noise.items()
        return {
            "masked_answers": dict(self.selection.masked_answers),
            "judge_noise": {f"{m} {r[:12]} x{n}": round(of.sd, 4) for (m, r, n), of in noise},
        }

    @property
    def drops(self) -> str:
        """How many groups were dropped, by reason, in words; empty when none was."""
        return ", ".join(f"{n} {why}" for why, n in sorted(Counter(self.left_out.values()).items()))

    def why_nothing(self, fresh: int | None, needed: int) -> str:
        """Return why a run learns nothing. fresh: groups that wait, when there may be too few."""
        reason = (
            f"{fresh} fresh scored groups wait, learner.min_groups is {needed}"
            if fresh is not None and fresh < needed
            else "no group was usable"
        )
        return f"{reason}; dropped: {self.drops}" if self.drops else reason

    def without(self, faults: Mapping[str, Fault]) -> Material:
        """Return the material without the groups that the trainer left out."""
        groups = tuple(g for g in self.selection.groups if g.group_id not in faults)
        return replace(
            self,
            scored=tuple(g for g in self.scored if g.group.group_id not in faults),
            tasks=tuple(one for one in self.tasks if one.group_id not in faults),
            selection=replace(self.selection, groups=groups),
            dropped={**self.dropped, **{g: fault.reason for g, fault in faults.items()}},
            texts={**self.texts, **{g: fault.text for g, fault in faults.items()}},
        )


class WhenUnlocked(Protocol):
    def __call__(self, work: Callable[[], T], doing: str) -> T:
        """Do a transaction; again, while another program has locked the store."""


def claim(
    database: Database,
    settings: Settings,
    run_id: str,
    parent: Parent,
    *,
    when_unlocked: WhenUnlocked,
) -> Claimed:
    """Choose among the waiting groups, claim those, and drop what no run will learn from."""
    learner, line = settings.learner, settings.line
    # Read before the write lock is taken: many groups may wait. What leaves `scored` meanwhile is
    # neither dropped nor claimed.
    with database.read() as session:
        waiting = source.waiting_groups(
            session, line=line, parent=parent.name, max_age=learner.max_age_versions
        )
        chosen, given_up = source.choose(
            waiting.fresh,
            waiting.failures,
            least=learner.min_groups,
            most=learner.max_groups,
            after_failure=last_failed(session, line.name),
        )
    left = {**waiting.stale, **dict.fromkeys(given_up, FAILED_RUNS)}
    dropping = partial(_drop_unclaimed, database, run_id, left, given_up)
    when_unlocked(dropping, "stale groups")
    taken = when_unlocked(partial(_claim, database, run_id, chosen), "the groups")
    return Claimed(group_ids=tuple(taken), unclaimed=left, fresh=len(waiting.fresh))


def load_groups(
    session: Session,
    settings: Settings,
    run_id: str | None,
    group_ids: Sequence[str],
    known: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> tuple[list[ScoredGroup], list[TaskGroup], dict[str, Fault]]:
    """Load groups of answers and groups of sessions.

    run_id: the run that has claimed them; None: a replay. known: group id -> session
        id -> the steps that were trained on, where a lineage says so.
    Returns: both, and group id -> fault for those that cannot be read.
    """
    of_tasks = [one for one in group_ids if one.startswith(PREFIX)]
    of_answers = [one for one in group_ids if not one.startswith(PREFIX)]
    pack_tokens = settings.learner.pack_tokens
    scored, broken = source.load(session, of_answers, pack_tokens=pack_tokens)
    if not of_tasks:
        return scored, [], broken
    rules = rules_now(session, rules_of(settings))
    tasks, of_broken = source.load_tasks(session, run_id, of_tasks, rules, known or {})
    return scored, tasks, broken | of_broken


def gather(
    database: Database,
    settings: Settings,
    run_id: str,
    claimed: Claimed,
    parent: Parent,
    noise: Noise | None = None,
) -> Material:
    """Load the claimed groups, and select those that can be trained on.

    noise: as it was measured when the run began; None: it begins now.
    """
    learner = settings.learner
    with database.read() as session:
        scored, tasks, broken = load_groups(session, settings, run_id, claimed.group_ids)
        adapters = {*(g.group.adapter for g in scored), *(one.adapter for one in tasks)}
        samplers = source.samplers(session, settings.line.name, adapters)
        if noise is None:
            noise = measured_noise(session, (g.judged_by for g in scored))
    selection = select_by(learner, scored, noise)
    selection, unfit = select_tasks(learner, tasks, scored, selection)
    broken |= unfit
    useless = {**{g: f.reason for g, f in broken.items()}, **selection.dropped}
    return Material(
        parent=parent,
        scored=tuple(g for g in scored if g.group.group_id not in useless),
        tasks=tuple(one for one in tasks if one.group_id not in useless),
        selection=selection,
        claimed=claimed,
        dropped=useless,
        texts={**{g: fault.text for g, fault in broken.items()}, **selection.texts},
        samplers=samplers,
        noise=noise,
    )


def gather_again(
    database: Database, settings: Settings, dead: RunRow, parent: Parent, work: WorkFolder
) -> Material:
    """Gather what a killed run had. parent: what a run starts from now. Raises: NotResumedError,
    when anything that its weights depend on has changed."""
    stored, began = work.read(CLAIMED), work.read(RUN)
    if stored is None:
        raise NotResumedError("what it had claimed cannot be read")
    if dead.parent != parent.name:
        raise NotResumedError(f"the champion was {dead.parent} and is {parent.name}")
    try:
        claimed = msgspec.convert(stored, Claimed)
        noise = noise_of_json(began["noise"]) if began is not None else None
        before = _settings_of(dead)
        if began is not None:
            before = msgspec.convert(began["fingerprint"], dict[str, Any])
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise NotResumedError(f"what it had written is damaged: {error}") from error
    material = gather(database, settings, dead.run_id, claimed, parent, noise)
    if changed := differences(before, prints(settings, material)["fingerprint"]):
        raise NotResumedError("; ".join(changed[:MOST_DIFFERENCES]))
    return material


def prints(settings: Settings, material: Material) -> dict[str, Any]:
    """Return what the result of a run depends on, as JSON. It reads the base's files."""
    parent, serving = material.parent, settings.serving
    base = base_digest(serving.base_model_path, settings.state_dir / CACHE)
    return {
        "noise": noise_json(material.noise),
        "fingerprint": fingerprint(
            settings=settings.learner,
            base=serving.base_model_path,
            base_digest=None if base is None else base.digest,
            parent=parent,
            groups=material.selection.groups,
            quiet=material.selection.quiet,
            samplers=material.samplers,
            libraries=library_versions(),
            commit=code_version().commit,
        ),
    }


def _settings_of(run: RunRow) -> dict[str, Any]:
    return {"settings": settings_of_result(run.settings)}


def noise_json(noise: Noise) -> list[dict[str, Any]]:
    """Return measured noise as JSON, in a fixed order."""
    return [asdict(one) for _, one in sorted(noise.items())]


def noise_of_json(stored: Sequence[Mapping[str, Any]]) -> Noise:
    """Read what `noise_json` made. Raises: msgspec.MsgspecError."""
    found = msgspec.convert(stored, list[MeasuredNoise])
    return {(one.judge_model, one.rubric_hash, one.passes): one for one in found}


def _claim(database: Database, run_id: str, chosen: Sequence[str]) -> list[str]:
    with database.write() as session:
        return source.claim(session, run_id, chosen)


def _drop_unclaimed(
    database: Database, run_id: str, left: Mapping[str, str], given_up: Collection[str]
) -> None:
    texts = dict.fromkeys(given_up, "too many newer groups of failed runs wait")
    reasons = list(left.items())
    for at in range(0, len(reasons), DROPPED_AT_ONCE):
        with database.write() as session:
            some = dict(reasons[at : at + DROPPED_AT_ONCE])
            source.drop(session, run_id, some, before=SCORED, texts=texts)


def leave_out(session: Session, run_id: str, material: Material) -> None:
    """Drop the claimed groups that were not trained on, or give them back for another attempt;
    those that are dropped already stay unchanged. In the caller's write transaction."""
    again = {
        group_id: Fault(why, material.texts[group_id])
        for group_id, why in material.dropped.items()
        if why in source.TRIED_AGAIN
    }
    most = len(again) > len(material.selection.groups)  # another process may use the memory
    for culprits in [again] if most else [{g: fault} for g, fault in again.items()]:
        blame(session, run_id, culprits)
    source.give_back(session, run_id, again)
    final = {g: why for g, why in material.dropped.items() if g not in again}
    source.drop(session, run_id, final, before=CLAIMED_STATUS, texts=material.texts)

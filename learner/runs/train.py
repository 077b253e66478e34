"""One training run, from the champion to a registered candidate. Only the trainer imports torch.

The run's row is written first and holds the lease; all permanent changes (versions, groups, counts,
the run's own end) are one transaction at its end. A group that cannot be read or trained on is left
out with its reason, and the others are trained on. After any other error the groups are given back,
the row records the reason, and the failure counts against the groups that may have caused it
(`learner.runs.blame`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import structlog
from opentelemetry import trace
from sqlalchemy.orm import Session

from ingest.noise.measured import measured_noise
from ingest.records import ScoredGroup
from ingest.store.groups import CLAIMED, SCORED
from learner.adapter_folder import CARD, LINEAGE
from learner.errors import AlteredParentError, NothingToLearnError, RunStoppedError
from learner.explain import explain
from learner.progress.keepers import observe
from learner.records import Candidate, Fault, Parent, TrainingJob, TrainingOutcome
from learner.runs import retry, source
from learner.runs.blame import FAILED_RUNS, blame, blame_for_error
from learner.runs.hold import check_hold
from learner.runs.lineage import build_lineage, render_card, render_lineage
from learner.runs.publish import find_published, place, register, remove_folder, seal
from learner.runs.runs import (
    HEARTBEAT_S,
    Heartbeat,
    abandon,
    check_parent,
    end_run,
    find_parent,
    last_failed,
    open_run,
    report_place,
    running_ids,
)
from learner.runs.selection import Selection, select_groups
from learner.runs.spread_gate import Noise
from sidecar.errors import StoreError
from sidecar.settings import Settings
from sidecar.store.database import Database, count

log = structlog.get_logger()
tracer = trace.get_tracer("learner")

LIBRARIES = ("learning-sidecar", "torch", "transformers", "peft", "safetensors")
DROPPED_AT_ONCE = 200
"""Groups dropped in one transaction: others wait for the write lock."""
WORK_PREFIX = ".run-"
"""Prefix of the folder that a run writes into, beside the published ones."""


class Trainer(Protocol):
    def train(self, job: TrainingJob) -> TrainingOutcome:
        """Write a PEFT folder into `job.folder`. Raises: LearnerError, OSError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Material:
    """The groups of a run, after selection."""

    parent: Parent
    scored: tuple[ScoredGroup, ...]
    selection: Selection
    unclaimed: Mapping[str, str]
    """Group id -> reason, for groups that the run dropped and did not claim."""
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
        return {**self.unclaimed, **self.dropped}

    def without(self, faults: Mapping[str, Fault]) -> _Material:
        """Return the material without the groups that the trainer left out."""
        groups = tuple(g for g in self.selection.groups if g.group_id not in faults)
        return replace(
            self,
            scored=tuple(g for g in self.scored if g.group.group_id not in faults),
            selection=replace(self.selection, groups=groups),
            dropped={**self.dropped, **{g: fault.reason for g, fault in faults.items()}},
            texts={**self.texts, **{g: fault.text for g, fault in faults.items()}},
        )


class Run:
    """One run. Call `start()` once, `stop()` from any thread or signal handler."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        trainer: Callable[[], Trainer],
        *,
        run_id: str,
        clock: Callable[[], float],
        heartbeat_s: float = HEARTBEAT_S,
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        """trainer: called only when there is something to learn (torch loads slowly).
        show: prints where the run is."""
        self.run_id = run_id
        self._settings = settings
        self._database = database
        self._trainer = trainer
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._show = show
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ask the run to end at the next pack; `start` then raises RunStoppedError."""
        self._stopping.set()

    def start(self) -> Candidate:
        """Train once.

        Returns: the new version; or the one that had exactly these weights before.
        Raises: HeldError when the reward watch holds the learner (row: held; no group is taken);
            RunInProgressError when another run is alive (nothing is changed);
            NothingToLearnError when too few groups wait or none is usable (row: skipped);
            any other LearnerError, StoreError or OSError (row: failed, groups given back).
        """
        settings = self._settings.learner
        check_hold(self._database, self._settings, self.run_id, now=self._clock())
        with self._database.write() as session:
            parent = find_parent(session, self._settings.serving.model)
            open_run(
                session,
                run_id=self.run_id,
                model=self._settings.serving.model,
                parent=parent.name,
                settings=settings.model_dump(mode="json"),
                now=self._clock(),
            )
        log.info("run_started", run_id=self.run_id, parent=parent.name)
        heartbeat = Heartbeat(
            self._database, self.run_id, clock=self._clock, period_s=self._heartbeat_s
        )
        with heartbeat, tracer.start_as_current_span("training run") as span:
            span.set_attributes({"run_id": self.run_id, "parent": parent.name})
            try:
                candidate = self._learn(parent, heartbeat)
            except NothingToLearnError:
                raise
            except BaseException as error:
                self._fail(error)
                raise
            span.set_attribute("adapter", candidate.adapter)
        log.info("run_finished", run_id=self.run_id, adapter=candidate.adapter)
        return candidate

    def _learn(self, parent: Parent, heartbeat: Heartbeat) -> Candidate:
        check_parent(parent)
        material = self._claim(parent)
        folder = self._work_folder()
        try:
            job = TrainingJob(
                base_model_path=self._settings.serving.base_model_path,
                parent=parent,
                groups=material.selection.groups,
                settings=self._settings.learner,
                folder=folder,
                check_stop=lambda: self._check_stop(heartbeat),
                quiet=material.selection.quiet,
                samplers=material.samplers,
                report=lambda place: report_place(self._database, self.run_id, place),
                watch=observe(self._settings, self._database, self.run_id, self._clock, self._show),
            )
            outcome = self._trainer().train(job)
            self._check_stop(heartbeat)
            check_parent(parent)  # the trainer read the files after the first check
            material = material.without(outcome.faults)
            if not outcome.metrics:
                self._skip(material)
            return self._publish(material, outcome, folder)
        finally:
            if folder.exists():
                remove_folder(folder)

    def _claim(self, parent: Parent) -> _Material:
        settings, model = self._settings.learner, self._settings.serving.model
        # Read before the write lock is taken: many groups may wait. What leaves `scored` meanwhile
        # is neither dropped nor claimed.
        with self._database.read() as session:
            waiting = source.waiting_groups(
                session, model=model, parent=parent.name, max_age=settings.max_age_versions
            )
            chosen, given_up = retry.choose(
                waiting.fresh,
                waiting.failures,
                least=settings.min_groups,
                most=settings.max_groups,
                after_failure=last_failed(session, model),
            )
        left = {**waiting.stale, **dict.fromkeys(given_up, FAILED_RUNS)}
        self._drop_unclaimed(left, given_up)
        with self._database.write() as session:
            taken = source.claim(session, self.run_id, chosen)
        with self._database.read() as session:
            scored, broken = source.load(session, taken, pack_tokens=settings.pack_tokens)
            samplers = source.samplers(session, model, (g.group.adapter for g in scored))
            noise = measured_noise(session, (g.judged_by for g in scored))
        selection = select_groups(
            scored,
            min_spread=settings.min_spread,
            pack_tokens=settings.pack_tokens,
            noise=noise,
            advantage=settings.advantage,
            recompute=settings.missing_logprobs != "drop",
        )
        useless = {**{g: f.reason for g, f in broken.items()}, **selection.dropped}
        material = _Material(
            parent=parent,
            scored=tuple(g for g in scored if g.group.group_id not in useless),
            selection=selection,
            unclaimed=left,
            dropped=useless,
            texts={
                **{g: fault.text for g, fault in broken.items()},
                **{g: gate.words for g, gate in selection.gates.items() if g in useless},
            },
            samplers=samplers,
            noise=noise,
        )
        log.info(
            "groups_claimed",
            run_id=self.run_id,
            **material.counts,
            masked_answers=dict(selection.masked_answers),
            judge_noise={f"{m} {r[:12]} x{n}": round(of.sd, 4) for (m, r, n), of in noise.items()},
        )
        if not selection.groups:
            self._skip(material, fresh=len(waiting.fresh))
        return material

    def _drop_unclaimed(self, left: Mapping[str, str], given_up: Collection[str]) -> None:
        """Drop waiting groups that no run will learn from, a few at a time."""
        texts = dict.fromkeys(given_up, "too many newer groups of failed runs wait")
        reasons = list(left.items())
        for at in range(0, len(reasons), DROPPED_AT_ONCE):
            with self._database.write() as session:
                some = dict(reasons[at : at + DROPPED_AT_ONCE])
                source.drop(session, self.run_id, some, before=SCORED, texts=texts)

    def _skip(self, material: _Material, *, fresh: int | None = None) -> None:
        """End the run without a result. Raises: NothingToLearnError, always.

        fresh: number of waiting groups, when there may be too few.
        """
        needed = self._settings.learner.min_groups
        reason = (
            f"{fresh} fresh scored groups wait, learner.min_groups is {needed}"
            if fresh is not None and fresh < needed
            else "no group was usable"
        )
        drops = Counter(material.left_out.values())
        if drops:
            reason += "; dropped: " + ", ".join(f"{n} {why}" for why, n in sorted(drops.items()))
        with self._database.write() as session:
            self._leave_out(session, material)
            end_run(
                session,
                self.run_id,
                "skipped",
                now=self._clock(),
                reason=reason,
                counts=material.counts,
            )
        log.info("run_skipped", run_id=self.run_id, reason=reason)
        raise NothingToLearnError(reason)

    def _leave_out(self, session: Session, material: _Material) -> None:
        """Drop the claimed groups that were not trained on, or give them back for another attempt.

        Groups that are dropped already are no longer claimed, and stay unchanged.
        """
        again = {
            group_id: Fault(why, material.texts[group_id])
            for group_id, why in material.dropped.items()
            if why in retry.TRIED_AGAIN
        }
        most = len(again) > len(material.selection.groups)  # another process may use the memory
        for culprits in [again] if most else [{g: fault} for g, fault in again.items()]:
            blame(session, self.run_id, culprits)
        source.give_back(session, self.run_id, again)
        final = {g: why for g, why in material.dropped.items() if g not in again}
        source.drop(session, self.run_id, final, before=CLAIMED, texts=material.texts)

    def _publish(self, material: _Material, outcome: TrainingOutcome, folder: Path) -> Candidate:
        now = self._clock()
        lineage = build_lineage(
            run_id=self.run_id,
            created_at=now,
            model=self._settings.serving.model,
            base_model_path=self._settings.serving.base_model_path,
            parent=material.parent,
            groups=material.scored,
            dropped=material.left_out,
            settings=self._settings.learner,
            gates=material.selection.gates,
            noise=material.noise,
            outcome=outcome,
            libraries={name: version(name) for name in LIBRARIES},
        )
        (folder / LINEAGE).write_text(render_lineage(lineage), encoding="utf-8")
        (folder / CARD).write_text(render_card(lineage), encoding="utf-8")
        model = self._settings.serving.model
        sealed = seal(folder)
        with self._database.write() as session:
            # The write lock prevents a second publication of the same files while they move.
            candidate = find_published(session, model, sealed.digest)
            reason = None
            if candidate is not None:
                reason = f"the weights are those of {candidate.adapter}: not registered again"
                log.warning("adapter_known", run_id=self.run_id, adapter=candidate.adapter)
            else:
                path = place(sealed, self._settings.learner.adapters_dir)
                candidate = register(
                    session,
                    model=model,
                    parent=material.parent.name,
                    run_id=self.run_id,
                    sealed=sealed,
                    path=path,
                    now=now,
                )
            source.mark_trained(session, [g.group_id for g in material.selection.groups])
            self._leave_out(session, material)
            masked = material.selection.masked_answers
            tokens = source.count_answers(session, material.scored, masked, outcome.answers)
            end_run(
                session,
                self.run_id,
                "finished",
                now=self._clock(),
                reason=reason,
                counts={**material.counts, **tokens},
                metrics=[asdict(step) for step in outcome.metrics],
                adapter=candidate.adapter,
            )
        return candidate

    def _fail(self, error: BaseException) -> None:
        adapters_dir = self._settings.learner.adapters_dir
        reason = f"{type(error).__name__}: {explain(error, adapters_dir=adapters_dir)}"
        log.error("run_failed", run_id=self.run_id, reason=reason)
        try:
            with self._database.write() as session:
                culprits = blame_for_error(session, self.run_id, error)
                abandon(session, self.run_id, reason, now=self._clock(), culprits=culprits)
                if isinstance(error, AlteredParentError):
                    count(session, source.STAGE, "parent_altered")
        except StoreError as store_error:
            # The lease runs out by itself, and the next run gives the groups back.
            log.error("run_end_not_recorded", run_id=self.run_id, error=str(store_error))

    def _work_folder(self) -> Path:
        """Create an empty folder beside the published ones; remove those of dead runs."""
        adapters_dir = self._settings.learner.adapters_dir.resolve()
        adapters_dir.mkdir(parents=True, exist_ok=True)
        with self._database.read() as session:
            alive = running_ids(session)
        for leftover in adapters_dir.glob(f"{WORK_PREFIX}*"):
            if leftover.name.removeprefix(WORK_PREFIX) not in alive:
                remove_folder(leftover)
        folder = adapters_dir / f"{WORK_PREFIX}{self.run_id}"
        folder.mkdir()
        return folder

    def _check_stop(self, heartbeat: Heartbeat) -> None:
        if self._stopping.is_set():
            raise RunStoppedError("asked to stop")
        if heartbeat.lost.is_set():
            raise RunStoppedError("another run took over the lease")

"""One training run, from the champion to a registered candidate. Only the trainer imports torch.

The run's row is written first and holds the lease; all permanent changes (versions, groups, counts,
the run's own end) are one transaction at its end. A group that cannot be read or trained on is left
out with its reason, and the others are trained on. After any other error the groups are given back,
the row records the reason, and the failure counts against the groups that may have caused it
(`learner.runs.source`). A run that is asked to stop leaves its work (`learner.runs.interrupted`),
and one that is killed records nothing: the next start takes either over, and goes on from its
newest checkpoint if nothing has changed that the weights depend on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, TypeVar

import structlog
from opentelemetry import trace

from ingest.grouping.selection import UNTOLD_TOKENS
from learner.errors import AlteredParentError, NothingToLearnError, NotResumedError, RunStoppedError
from learner.explain import explain
from learner.patience import when_unlocked
from learner.progress.export import Observed
from learner.records import Candidate, Parent, TrainingJob, TrainingOutcome
from learner.resume import (
    CLAIMED,
    PLACING,
    RUN,
    Released,
    WorkFolder,
    present_holder,
    resumed_words,
    was_stopped,
)
from learner.runs import source
from learner.runs.interrupted import begin_again, check_hold, keeping_steps, leave, sweep, take_back
from learner.runs.lineage import write_documents
from learner.runs.material import Material, claim, gather, gather_again, leave_out, prints
from learner.runs.publish import Sealed, find_published, place_or_share, register, seal, when_free
from learner.runs.runs import (
    HEARTBEAT_S,
    Heartbeat,
    abandon,
    check_parent,
    earlier_signals,
    end_dead,
    end_run,
    find_parent,
    holds,
    open_run,
    report_place,
    take_over,
)
from learner.runs.source import blame_for_error
from learner.shared_folders import on_this_machine, share
from sidecar.errors import StoreError
from sidecar.settings import Settings
from sidecar.store.database import Database, count
from sidecar.store.models import RunRow

log = structlog.get_logger()
tracer = trace.get_tracer("learner")

T = TypeVar("T")


class Trainer(Protocol):
    def train(self, job: TrainingJob) -> TrainingOutcome:
        """Write a PEFT folder into `job.folder`. Raises: LearnerError, OSError."""


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
        """settings: `learner.pack_tokens` as found by `learner.once.with_pack_tokens`; `auto`
        counts as what ingest takes until it is told.
        trainer: called only when there is something to learn (torch loads slowly).
        show: prints where the run is."""
        self.run_id = run_id
        """Id of the run; where a killed run is resumed, the id of that one."""
        self.deaths: list[dict[str, Any]] = []
        """Where it was killed, and resumed; empty: it was not (`learner.resume.Death`)."""
        self.counts: Mapping[str, int] = {}
        """Groups of a run that trained: `used`, and those left out by reason."""
        self.left: Released | None = None
        """How it left its work to the next start; None: it did not."""
        tokens = settings.learner.pack_tokens or UNTOLD_TOKENS
        learner = settings.learner.model_copy(update={"pack_tokens": tokens})
        self._settings = settings.model_copy(update={"learner": learner})
        self._database = database
        self._trainer = trainer
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._show = show
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ask the run to end at the next pack; `start` then raises RunStoppedError.

        The next start goes on with it from its last step.
        """
        self._stopping.set()

    def start(self) -> Candidate:
        """Train once.

        Returns: the new version; or the one that had exactly these weights before.
        Raises: HeldError when the reward watch holds the learner (row: held; no group is taken);
            RunInProgressError when another run is alive (nothing is changed);
            NothingToLearnError when too few groups wait or none is usable (row: skipped);
            RunStoppedError after `stop`, RankLostError, FullDiskError, UnpublishedError (row: as it
                was, if `left`);
            any other LearnerError, StoreError or OSError (row: failed, groups given back).
        """
        asked = partial(check_hold, self._database, self._settings, self.run_id, now=self._clock())
        self._when_unlocked(asked, "the hold")
        new_id, (parent, dead) = self.run_id, self._when_unlocked(self._open, "the lease")
        if dead is not None:
            try:
                return self._run(parent, dead)
            except NotResumedError as error:
                self._bury(dead, error)
                self.run_id, self.deaths = new_id, []
                parent, _ = self._open()
        return self._run(parent, None)

    def _open(self) -> tuple[Parent, RunRow | None]:
        model, learner = self._settings.line.name, self._settings.learner
        self._holder = present_holder()
        with self._database.write() as session:
            parent = find_parent(session, model)
            dead = take_over(
                session,
                model=model,
                adapters_dir=learner.adapters_dir,
                holder=self._holder,
                now=self._clock(),
                beside=[line.name for line in self._settings.lines if line.name != model],
            )
            if dead is None:
                open_run(
                    session,
                    run_id=self.run_id,
                    model=model,
                    parent=parent.name,
                    settings=learner.model_dump(mode="json"),
                    now=self._clock(),
                    holder=self._holder,
                )
        if dead is None:
            log.info("run_started", run_id=self.run_id, parent=parent.name)
        else:
            self.run_id, self.deaths = dead.run_id, list(dead.deaths or [])
            how = resumed_words(self.deaths)
            log.info("run_resumed", run_id=self.run_id, parent=parent.name, how=how)
            self._show(f"run {self.run_id} is {how}")
        return parent, dead

    def _run(self, parent: Parent, dead: RunRow | None) -> Candidate:
        heartbeat = Heartbeat(
            self._database,
            self.run_id,
            clock=self._clock,
            period_s=self._heartbeat_s,
            token=self._holder.token,
        )
        observed = Observed(self._settings, self._database, self._clock, self._show)
        with observed, heartbeat, tracer.start_as_current_span("training run") as span:
            span.set_attributes({"run_id": self.run_id, "parent": parent.name})
            try:
                candidate = self._learn(parent, heartbeat, dead, observed)
            except (NothingToLearnError, NotResumedError):
                raise
            except BaseException as error:
                observed.left = self.left is not None
                if not observed.left:
                    self._fail(error)
                raise
            observed.adapter = candidate.adapter
            span.set_attribute("adapter", candidate.adapter)
        log.info("run_finished", run_id=self.run_id, adapter=candidate.adapter)
        return candidate

    def _bury(self, dead: RunRow, error: NotResumedError) -> None:
        was = "stopped" if was_stopped(dead.deaths) else "killed"
        reason = f"it was {was}, and not resumed: {error}"
        log.warning("run_not_resumed", run_id=dead.run_id, why=str(error))
        with self._database.write() as session:
            row = session.get_one(RunRow, dead.run_id, with_for_update=True)
            row.place = dead.deaths[-1]["place"] if dead.deaths else row.place
            row.deaths = (dead.deaths or [])[:-1] or None
            end_dead(session, row, reason, now=self._clock())

    def _learn(
        self, parent: Parent, heartbeat: Heartbeat, dead: RunRow | None, observed: Observed
    ) -> Candidate:
        parent = on_this_machine(self._settings, parent)
        check_parent(parent)
        work = self._work_folder(heartbeat)
        published = False
        database, run_id, token = self._database, self.run_id, self._holder.token
        try:
            material = self._material(parent, work, dead)
            job = TrainingJob(
                base_model_path=self._settings.serving.base_model_path,
                parent=parent,
                groups=material.selection.groups,
                settings=self._settings.learner,
                folder=work.empty_adapter(),
                check_stop=lambda: self._check_stop(heartbeat),
                quiet=material.selection.quiet,
                signals=self._signals() if material.tasks else (),
                least_spread=material.selection.least_spread,
                references=material.selection.references,
                samplers=material.samplers,
                masked=material.selection.masks,
                report=lambda place: report_place(database, run_id, place, token=token),
                watch=observed.watch(run_id, parent, lambda s: holds(s, run_id, token)),
                checkpoints=work,
            )
            report_place(database, run_id, None, token=token)
            with keeping_steps(work):
                outcome = self._trainer().train(job)
                self._check_stop(heartbeat)
                check_parent(parent)  # the trainer read the files after the first check
                material = material.without(outcome.faults)
                if not outcome.metrics:
                    self._skip(material, signal=outcome.signal)
                candidate = self._publish(material, outcome, work, heartbeat)
            published, self.counts = True, material.counts
            return candidate
        except BaseException as error:
            asked = self._stopping.is_set()
            self.left = leave(self._database, work, error, asked=asked, token=token)
            raise
        finally:
            if published or (self.left is None and take_back(self._database, work, token=token)):
                work.remove()

    def _material(self, parent: Parent, work: WorkFolder, dead: RunRow | None) -> Material:
        if dead is None:
            claiming = partial(claim, self._database, self._settings, self.run_id, parent)
            claimed = claiming(when_unlocked=self._when_unlocked)
            work.write(CLAIMED, asdict(claimed))
            material = gather(self._database, self._settings, self.run_id, claimed, parent)
        else:
            material = gather_again(self._database, self._settings, dead, parent, work)
        log.info("groups_claimed", run_id=self.run_id, **material.counts, **material.told)
        if not material.selection.groups:
            self._skip(material, fresh=material.claimed.fresh)
        work.write(RUN, prints(self._settings, material))
        return material

    def _signals(self) -> tuple[float, ...]:
        with self._database.read() as session:
            return earlier_signals(session, self._settings.line.name)

    def _skip(
        self, material: Material, *, fresh: int | None = None, signal: float | None = None
    ) -> None:
        """End the run without a result. Raises: NothingToLearnError, always."""
        reason = material.why_nothing(fresh, self._settings.learner.min_groups)

        def end() -> None:
            with self._database.write() as session:
                leave_out(session, self.run_id, material)
                end_run(
                    session,
                    self.run_id,
                    "skipped",
                    now=self._clock(),
                    reason=reason,
                    counts=material.counts,
                    signal=signal,
                    token=self._holder.token,
                )

        self._when_unlocked(end, "the end of the run")
        log.info("run_skipped", run_id=self.run_id, reason=reason)
        raise NothingToLearnError(reason)

    def _publish(
        self, material: Material, outcome: TrainingOutcome, work: WorkFolder, heartbeat: Heartbeat
    ) -> Candidate:
        def pause(seconds: float) -> None:
            self._stopping.wait(seconds)
            self._check_stop(heartbeat)

        def describe() -> Sealed:
            now, deaths = self._clock(), self.deaths
            described = (self._database, self._settings, self.run_id, material, outcome, deaths)
            write_documents(work.adapter, *described, now=now)
            return seal(work.adapter)

        run_id, files = self.run_id, work.adapter
        sealed = when_free(describe, run_id=run_id, files=files, pause=pause)
        work.write(PLACING, sealed.digest)
        share(self._settings, sealed.folder, sealed.digest)
        publish = partial(self._register, material, outcome, sealed)
        return when_free(publish, run_id=run_id, files=files, pause=pause)

    def _register(self, material: Material, outcome: TrainingOutcome, sealed: Sealed) -> Candidate:
        model = self._settings.line.name
        with self._database.write() as session:
            # The write lock prevents a second publication of the same files while they move.
            candidate = find_published(session, model, sealed.digest)
            reason = None
            if candidate is not None:
                reason = f"the weights are those of {candidate.adapter}: not registered again"
                log.warning("adapter_known", run_id=self.run_id, adapter=candidate.adapter)
            else:
                adapters_dir = self._settings.learner.adapters_dir
                sealed, path = place_or_share(session, sealed, adapters_dir)
                candidate = register(
                    session,
                    model=model,
                    parent=material.parent.name,
                    run_id=self.run_id,
                    sealed=sealed,
                    path=path,
                    now=self._clock(),
                )
            source.mark_trained(session, [g.group_id for g in material.selection.groups])
            source.drop_answers_of(session, self.run_id, material.tasks)
            leave_out(session, self.run_id, material)
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
                signal=outcome.signal,
                token=self._holder.token,
            )
        return candidate

    def _fail(self, error: BaseException) -> None:
        adapters_dir = self._settings.learner.adapters_dir
        reason = f"{type(error).__name__}: {explain(error, adapters_dir=adapters_dir)}"
        log.error("run_failed", run_id=self.run_id, reason=reason)
        try:
            with self._database.write() as session:
                culprits = blame_for_error(session, self.run_id, error)
                now, token = self._clock(), self._holder.token
                abandon(session, self.run_id, reason, now=now, culprits=culprits, token=token)
                if isinstance(error, AlteredParentError):
                    count(session, source.STAGE, "parent_altered")
        except StoreError as store_error:
            # The lease runs out by itself, and the next run gives the groups back.
            log.error("run_end_not_recorded", run_id=self.run_id, error=str(store_error))

    def _work_folder(self, heartbeat: Heartbeat) -> WorkFolder:
        line, adapters_dir = self._settings.line.name, self._settings.learner.adapters_dir
        sweep(self._database, adapters_dir.resolve(), line, now=self._clock())
        run_id, deaths, token = self.run_id, self.deaths, self._holder.token
        work = WorkFolder(
            adapters_dir,
            run_id,
            token=token,
            check=lambda: _check_lease(heartbeat),  # a stop costs no step that is done
            discarded=lambda: begin_again(self._database, run_id, deaths, token=token),
        )
        work.make()
        take_back(self._database, work)
        return work

    def _when_unlocked(self, work: Callable[[], T], doing: str) -> T:
        return when_unlocked(work, stopping=self._stopping, doing=doing)

    def _check_stop(self, heartbeat: Heartbeat) -> None:
        if self._stopping.is_set():
            raise RunStoppedError("asked to stop")
        _check_lease(heartbeat)


def _check_lease(heartbeat: Heartbeat) -> None:
    if heartbeat.lost.is_set():
        raise RunStoppedError("another run took over the lease")

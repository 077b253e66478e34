"""Loops that control runs for one line of adapters: its canary, guards, checks and approvals.

What all lines share (vLLM's adapters, the lease, hooks, old folders) is `deploy.process`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from deploy.canary.controller import Controller
from deploy.canary.exam import TaskExam
from deploy.canary.gate import EVERY_S as SHADOW_S, Gate, Shadow
from deploy.engine.reconcile import CHECK_S, ChampionGuard, Fleet, registered_path
from deploy.engine.validation import ServingLimits
from deploy.engine.vllm_control import AdapterControl
from deploy.examiner import examiner_of
from deploy.outside import approval, checking
from deploy.outside.approval import Approvals
from deploy.outside.checking import MetricChecks
from deploy.outside.http import Caller, HttpMetrics
from deploy.registry.leases import Lease
from deploy.supervise import Loop
from ingest.privacy.screen import Screen
from ingest.privacy.texts import JudgeView
from ingest.ruler.judge import Judge
from ingest.vllm.watch import ReplicaSampler
from learner.shared_folders import shared_folders
from sidecar.settings import Serving, Settings
from sidecar.store.database import Database

POLL_S = 0.5  # how often the controller polls the canary


class LineLoops:
    """What control does for one line of adapters."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        controls: Mapping[str, AdapterControl],
        sampler: ReplicaSampler,
        judge: Judge,
        fleet: Fleet,
        outside: Caller,
        on_change: Callable[[], None],
        *,
        acts: Callable[[], bool] = lambda: True,
    ) -> None:
        """settings: of the line. acts: False once another control may act."""
        line = settings.line
        self._of = "" if line.project is None else f" {line.project}"
        gate = make_gate(settings, database, sampler, judge, acts=acts)
        self.controller = make_controller(settings, database, controls, gate, on_change)
        self._shadow = Shadow(database, gate, line.name)
        self._guard = ChampionGuard(database, line.name, fleet.view, on_change=on_change)
        self._checks = MetricChecks(
            database, line.name, HttpMetrics(outside), settings.canary, on_change=on_change
        )
        self._approvals = Approvals(database, line.name, settings.approval, outside)

    def loops(self, lease: Lease) -> list[Loop]:
        """Return the loops; those of a project's line have its name."""
        return [
            Loop(f"tick{self._of}", lease.only_acting(self.controller.tick), lambda: POLL_S),
            Loop(f"guard{self._of}", lease.only_acting(self._guard.check), lambda: CHECK_S),
            Loop(
                f"metrics{self._of}", lease.only_acting(self._checks.tick), lambda: checking.EVERY_S
            ),
            Loop(
                f"approval{self._of}",
                lease.only_acting(self._approvals.tick),
                lambda: approval.EVERY_S,
            ),
            Loop(f"shadow{self._of}", lease.only_acting(self._shadow.tick), lambda: SHADOW_S),
        ]


def comparisons_at_once(settings: Settings) -> int:
    """Return how many prompts are compared at once: the lines share what vLLM has to spare."""
    answers = 3 * settings.canary.gate_answers
    return max(1, settings.groups.concurrency // (answers * len(settings.lines)))


def make_gate(
    settings: Settings,
    database: Database,
    sampler: ReplicaSampler,
    judge: Judge,
    *,
    acts: Callable[[], bool] = lambda: True,
) -> Gate:
    """Build the gate of a line, which also judges beside the ramp, from the line's settings."""
    rules = settings.canary
    return Gate(
        database=database,
        sampler=sampler,
        judge=judge,
        rules=rules,
        judging=settings.judge_of_gate,
        room=sampler,
        parallel=comparisons_at_once(settings),
        view=JudgeView(settings.privacy),
        screen=Screen(settings.privacy),
        exam=TaskExam(database, settings, sampler) if settings.tasks_are_examined else None,
        judge_gives_reward=bool(examiner_of(settings).warning),
        line=settings.line,
        acts=acts,
    )


def make_folder_of(settings: Settings) -> Callable[[str, str], str]:
    """Return what finds a version's folder on this machine: it may have to be fetched."""
    shared = shared_folders(settings)
    if shared is None:
        return registered_path
    return lambda digest, path: str(shared.local(digest, path))


def serving_limits(serving: Serving) -> ServingLimits:
    """Return what an adapter folder must fit."""
    base = serving.base_model_path
    return ServingLimits(
        max_rank=serving.max_lora_rank,
        bases=frozenset({base, serving.model} if base else ()),
        base_model_path=base,
    )


def make_controller(
    settings: Settings,
    database: Database,
    replicas: Mapping[str, AdapterControl],
    gate: Gate,
    on_change: Callable[[], None],
) -> Controller:
    """Build the controller of a line from the line's settings."""
    return Controller(
        database=database,
        replicas=replicas,
        gate=gate,
        rules=settings.canary,
        limits=serving_limits(settings.serving),
        line=settings.line,
        approval=settings.approval,
        on_change=on_change,
        folder_of=make_folder_of(settings),
    )

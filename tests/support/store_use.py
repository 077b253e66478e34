"""Every way in which the processes use the store, each run once over a large one.

Nothing is asserted here: `tests/rooms/test_query_plans.py` looks at the statements.
"""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest
from sqlalchemy import func, select, update

from deploy.adapters.prune import FolderRule, Pruner, put_back
from deploy.admin.app import create_app
from deploy.admin.context import AdminContext
from deploy.canary import gate_store
from deploy.canary.controller import Controller
from deploy.canary.exam import TaskExam
from deploy.canary.gate import Gate
from deploy.canary.gate_answers import Drawing
from deploy.canary.gate_store import HeldOutPrompt
from deploy.cli.main import main
from deploy.doctor.collect import collect
from deploy.engine.reconcile import Fleet, Reconciler
from deploy.engine.validation import ServingLimits
from deploy.outside.checking import MetricChecks
from deploy.outside.http import Caller
from deploy.outside.telling import Hooks, Sender
from deploy.page import changing
from deploy.page.mount import PAGES, with_page
from deploy.registry import canaries, candidates, routing_writer
from deploy.registry.leases import Lease
from ingest.best_of import BestOfJudge, BestOfScores, answers_digest, save_scores
from ingest.errors import (
    AdapterGoneError,
    EngineDownError,
    JudgeRejectedError,
    JudgeUnavailableError,
    SamplingError,
)
from ingest.grouping.request import EngineFacts
from ingest.grouping.selection import rules_of
from ingest.intake.loop import Intake
from ingest.judge_noise import DAY_S, NoiseWatch, accept_now, add_judgement, measured_noise
from ingest.judge_watch import JudgeState, why_sampling_holds, write_judge_state
from ingest.judges.replies import CachedJudge, ContentSeeds, KeptReplies, ReplyStore
from ingest.judges.spending import Amount, Ledger
from ingest.retention.deletion import delete_exchanges
from ingest.retention.sweep import Sweeper
from ingest.reward_watch.traits import Profile, RateOf, write_body
from ingest.ruler.judging import JudgingWorker
from ingest.ruler.prompt import hash_of
from ingest.sampling.worker import SamplingWorker
from ingest.store.bases import encode_children, store_children
from ingest.store.exchanges import dead_letter
from ingest.store.groups import keep_scores, set_aside
from ingest.store.sessions import save_forgotten
from ingest.tasks.enrol import IDLE, SEEN
from ingest.tasks.judging import TaskJudging
from ingest.tasks.keys import IDLE_S, group_id_of as task_group_id
from ingest.tasks.material import load_task_group
from ingest.tasks.rehearsals import RehearsalWorker, rehearsals_status, rehearsed_tasks
from ingest.trajectories.recorded import load_trajectory
from ingest.verifiers.records import Finding
from ingest.verifiers.rewarding import Rewarding
from ingest.verifiers.state import VerifierSeen, waiting_for, write_verifiers
from ingest.vllm.watch import EngineWatch
from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest
from learner.errors import HeldError, LearnerError, RunStoppedError
from learner.records import Candidate, StepMetrics, TrainingJob, TrainingOutcome
from learner.replay import replay
from learner.resume import CLAIMED, PLACING, WorkFolder, present_holder
from learner.runs.interrupted import begin_again, check_hold, leave
from learner.runs.publish import Sealed
from learner.runs.runs import can_go_on, earlier_signals, open_run
from learner.runs.source import blame_for_death, drop_answers_of
from learner.runs.train import Run
from learner.schedule.loop import Schedule
from sidecar.feedback import Feedback, TargetKind, encode_feedback
from sidecar.lines import Line, lines_of
from sidecar.records import BASE, IMPORTED, Choice, Exchange, encode_exchange
from sidecar.scoring import Material
from sidecar.settings import (
    Groups,
    Judge as JudgeSettings,
    Learner as LearnerSettings,
    Metric,
    Notify,
    Retention,
    Reward,
    Serving,
    Settings,
    Store,
)
from sidecar.settings.judge import LengthVerifier
from sidecar.settings.learning import Rehearsals, Tasks
from sidecar.store.database import Database, set_flag
from sidecar.store.disk import space_of
from sidecar.store.models import (
    AdapterProfileRow,
    AdapterRow,
    AliasRow,
    AnswerRow,
    BreakerTripRow,
    CanaryRow,
    ExchangeRow,
    FeedbackRow,
    GroupRow,
    JudgeCallRow,
    RunRow,
    TaskGroupRow,
)
from support.clock import Clock
from support.fake_checker import FakeChecker
from support.fake_control import FakeControl
from support.fake_judge import FakeJudge, Reply, score_by_content
from support.fake_load import FakeRoom
from support.fake_metrics import FakeMetrics
from support.fake_sampler import FakeSampler
from support.ingest_kit import MemoryBus, make_choice, make_exchange
from support.large_store import EXCHANGES, MODEL, NOW, RUBRIC, SPAN_S, adapter, exchange_id
from support.task_kit import TaskKit
from support.trajectory_judge import RankingJudge

VERSIONS = EXCHANGES // 2_000
CHAMPION, CANDIDATE = adapter(VERSIONS - 1), adapter(VERSIONS)
OLD = adapter(1)
GROUP_EXCHANGE = exchange_id(160 * 8)
"""An exchange that has a group."""
CANARY = f"canary-{VERSIONS}"


class _Use:
    """A store, its settings, and a clock that the processes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/store.db"
        self.database = Database(self.url)
        self.clock = Clock(NOW + 1.0)
        self.settings = Settings(
            serving=Serving(model=MODEL, sampling_defaults={}, grammar="as_asked"),
            store=Store(url=self.url),
            groups=Groups(
                size=4,
                rate=1.0,
                choose="prefer",
                max_groups_per_near_prompt=10_000,
            ),
            judge=JudgeSettings(model="scripted", rubric=RUBRIC, concurrency=4),
            learner=LearnerSettings(min_groups=2, max_groups=150, adapters_dir=folder / "adapters"),
        )

    def change(self, row: type[Any], values: Mapping[str, Any], *where: Any) -> None:
        with self.database.write() as session:
            session.execute(update(row).where(*where).values(**values))

    def close(self) -> None:
        self.database.close()


def use_store(folder: Path) -> None:
    """Run all processes over `folder`/store.db, which `make_large_store` wrote."""
    use = _Use(folder)
    try:
        use.database.upgrade()
        _retention(use)
        with use.database.write() as session:
            routing_writer.initialise(session, MODEL, now=NOW, actor="control")
        _ingest(use)
        asyncio.run(_score(use))
        _draw_tasks(use)
        asyncio.run(_rehearse(use))
        _learn(use)
        asyncio.run(_control(use))
        _commands(use)
    finally:
        use.close()


# --- ingest


def _ingest(use: _Use) -> None:
    retried, unreadable = _of_turns(use.folder)
    with use.database.write() as session:
        save_forgotten(session, "exchange", ["forgotten"], now=NOW, until=None)
        save_scores(session, _scores("best-of"))
    use.change(ExchangeRow, {"request_body": b"?"}, ExchangeRow.exchange_id == unreadable)
    late, early = _conversation("late", 1), _conversation("early", 0)
    *moved, mover = _moved("moved")
    exchanges = [
        *(_exchange(f"new-{number}") for number in range(16)),
        _exchange("imported", origin=IMPORTED, untrainable_reason=IMPORTED),
        _exchange("forgotten"),
        *(_long("talk", turns) for turns in (0, 1)),
        _exchange("retry", turn_id=retried, retry_count=1),
        _exchange(exchange_id(5)),
        _exchange("best-of", choices=(make_choice("good"), make_choice("bad", index=1))),
        late,
        early,
        msgspec.structs.replace(early, exchange_id="early-again", turn_id="again"),
        *_tool_failed(),
        *moved,
    ]
    told = [
        _feedback("exchange", exchange_id(EXCHANGES - 1_001)),
        _feedback("exchange", "never-comes"),
        _feedback("session", exchange_id(EXCHANGES - 1_000)),
        _feedback("session", "early"),
        _feedback("session", "h:named"),
        _feedback("session", "h:never-comes"),
        _feedback("trace", f"{8:032x}"),
        _feedback("task", "refund"),
    ]
    at_once = use.settings.groups.model_copy(update={"settle_s": 0.0})
    for groups in (at_once, use.settings.groups):
        settings = use.settings.model_copy(update={"groups": groups})
        bus = MemoryBus([b"\xc1", *map(encode_feedback, told), *map(encode_exchange, exchanges)])
        watch = EngineWatch(
            settings.serving,
            ask=lambda *_: EngineFacts(defaults=frozenset(), grammar="as_asked"),
            start=lambda work: work(),
        )
        intake = Intake(bus, use.database, settings, now=use.clock, engine=watch, batch=20)
        for _ in range(5):
            intake.step()
            use.clock.now += 30.0
        exchanges = [
            *(_exchange(f"then-{number}") for number in range(20)),
            *exchanges[-8:-2],
            mover,
        ]
    with use.database.write() as session:
        rebased = encode_children(session, ["talk-0"], {}, limit=2)
        assert store_children(session, rebased, ["talk-0"]) == 1


def _retention(use: _Use) -> None:
    """Delete the oldest hours of the month, each kind by its age, and some more by size."""
    days = {name: 29.9 for name in Retention.model_fields if name.endswith("_days")}
    use.change(FeedbackRow, {"exchange_id": None}, FeedbackRow.seq <= 10)
    use.change(JudgeCallRow, {"at": 0.0}, JudgeCallRow.seq <= 200)
    by_age = Sweeper(use.database, Retention(**days))
    while by_age.step(NOW):
        continue
    with use.database.read() as session:
        used = space_of(session).used
    by_size = Sweeper(use.database, Retention(max_bytes=used - 50_000))
    with use.database.write() as session:
        dead_letter(session, b"?", where="1", reason="r", now=0.0)
    while by_size.step(NOW):
        continue


def _feedback(kind: TargetKind, target: str) -> Feedback:
    return Feedback(
        feedback_id=f"fb_{kind}_{target}",
        kind="feedback",
        target_kind=kind,
        target=target,
        project="default",
        received_at=NOW,
        score=1.0 if kind == "exchange" else -1.0,
    )


def _tool_failed() -> list[Exchange]:
    """A call whose tool fails, and the request that says so, which arrives first."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = [{"role": "user", "content": "Look for the parcel of the customer"}]
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "Error: no such parcel"}
    answer = Choice(index=0, message=json.dumps(reply).encode(), finish_reason="tool_calls")
    return [
        _exchange("after-call", request={"messages": [*asked, reply, result]}),
        _exchange("call", request={"messages": asked}, choices=(answer,)),
    ]


def _moved(name: str) -> list[Exchange]:
    """The first and the third turn of a conversation, and the second, after which a tool failed: it
    comes late, and takes the third turn and its signal from the first."""
    call = {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": name, "content": "Error: no such parcel"}
    first, second = _conversation(f"{name}-0", 0), _conversation(f"{name}-1", 1)
    answer = Choice(index=0, message=json.dumps(reply).encode(), finish_reason="tool_calls")
    between = msgspec.structs.replace(second, choices=(answer,))
    messages = [*json.loads(second.request)["messages"], reply, result]
    return [first, _exchange(f"{name}-2", request={"messages": messages}), between]


def _of_turns(folder: Path) -> tuple[str, str]:
    """Return a turn that waits in the backlog, and an exchange that selection has not seen."""
    with sqlite3.connect(folder / "store.db") as connection:
        (turn,) = connection.execute(
            "SELECT turn_id FROM exchange WHERE turn_id LIKE 'try-%' AND selection = 'backlog'"
        ).fetchone()
        (new,) = connection.execute(
            "SELECT exchange_id FROM exchange WHERE selection = 'new' ORDER BY seq"
        ).fetchone()
    connection.close()
    return turn, new


def _learned_from(folder: Path) -> str:
    """Return an exchange that an adapter learned from."""
    with sqlite3.connect(folder / "store.db") as connection:
        (found,) = connection.execute(
            "SELECT g.exchange_id FROM answer_group g JOIN training_run r USING (run_id) "
            "WHERE g.status = 'trained' AND r.adapter IS NOT NULL ORDER BY g.seq DESC"
        ).fetchone()
    connection.close()
    return str(found)


def _exchange(name: str, **changes: Any) -> Exchange:
    return make_exchange(name, public_model=MODEL, adapter=CHAMPION, **{"turn_id": name, **changes})


def _conversation(name: str, turns: int) -> Exchange:
    messages = []
    for number in range(turns):
        messages.append({"role": "user", "content": f"Question {number} of a conversation"})
        messages.append({"role": "assistant", "content": f"Answer {number} of a conversation"})
    messages.append({"role": "user", "content": f"Question {turns} of a conversation"})
    reply = {"role": "assistant", "content": f"Answer {turns} of a conversation"}
    return _exchange(
        name,
        request={"model": MODEL, "messages": messages},
        choices=(Choice(index=0, message=json.dumps(reply).encode()),),
    )


def _long(name: str, turns: int) -> Exchange:
    """A turn of a conversation whose requests are stored as differences."""
    rng = Random(name)
    texts = [f"{rng.getrandbits(4_000):x}" for _ in range(turns + 1)]
    messages = [{"role": "user", "content": text} for text in texts]
    prompt = tuple(Random(name).choices(range(49_000), k=500 + 10 * turns))
    request = {"model": MODEL, "messages": messages}
    return _exchange(f"{name}-{turns}", request=request, prompt_token_ids=prompt)


def _scores(name: str) -> BestOfScores:
    shown = [{"role": "assistant", "content": text} for text in ("good", "bad")]
    return BestOfScores(
        exchange_id=name,
        at=NOW,
        answers_digest=answers_digest(shown),
        scores=(0.9, 0.1),
        explanations=("", ""),
        judge_model="scripted",
        rubric_hash="rubric",
    )


# --- score


async def _score(use: _Use) -> None:
    errors = EngineDownError("away"), AdapterGoneError("404"), SamplingError("broken")
    for sampler in (*map(FakeSampler, errors), FakeSampler()):
        sampling = SamplingWorker(
            use.database,
            sampler,
            FakeRoom(),
            use.settings.groups,
            model=MODEL,
            now=use.clock,
        )
        await sampling.step()
        use.clock.now += 600.0
    use.change(
        GroupRow,
        {"judging_since": NOW},
        GroupRow.seq == GroupRow.seq,
        GroupRow.status == "sampled",
        GroupRow.created_at > NOW - 60.0,
    )
    scores = score_by_content({}, otherwise=0.5)
    away, rejected = JudgeUnavailableError("away"), JudgeRejectedError("no")
    scripts: list[tuple[Reply, ...]] = [(scores,), (away,), (rejected, scores), ("rubbish",)]
    for script in scripts:
        judge = FakeJudge(*script, model="scripted")
        kept = KeptReplies(ReplyStore(use.database, max_bytes=3_000, max_age_s=1e5))
        worker = JudgingWorker(
            use.database,
            CachedJudge(judge, use.settings.judge, kept),
            use.settings.judge,
            clock=use.clock,
            draw_seed=ContentSeeds(kept.store),
            on_scored=add_judgement,
        )
        if script == (scores,):
            await worker.begin()
        for _ in range(2 if script == (scores,) else 3):
            await worker.step()
            use.clock.now += 400.0
    reward = Reward(verifiers={"v": LengthVerifier(kind="length", max_tokens=9)})
    checker = FakeChecker(lambda _: Finding(score=1.0))
    rewarding = Rewarding(use.database, reward, {"v": checker})
    judge = FakeJudge(scores, model="scripted")
    verifying = JudgingWorker(
        use.database, judge, use.settings.judge, clock=use.clock, rewarding=rewarding
    )
    await verifying.step()
    await _watch_noise(use)
    with use.database.write() as session:
        name = session.scalars(select(GroupRow.group_id).where(GroupRow.status == "scored")).first()
        assert name is not None
        answers = session.scalar(
            select(func.count()).select_from(AnswerRow).where(AnswerRow.group_id == name)
        )
        keep_scores(session, name, [0.5] * (answers or 0), [""] * (answers or 0), "j", "r")
        set_aside(session, "of_nobody", "judge_rubbish")
        write_judge_state(session, JudgeState(state="away", since=NOW), now=NOW)
        why_sampling_holds(session)
        write_verifiers(session, [VerifierSeen(name="v", kind="http")], now=NOW)
        waiting_for(session)
    budget = {"budget": 1.0}
    ledger = Ledger(use.database, use.settings.judge.model_copy(update=budget), clock=use.clock)
    await ledger.reserve(Amount(nano_usd=10, tokens=5), begun=False)
    ledger.spend(Amount(nano_usd=10, tokens=5))
    await ledger.aclose()
    await _best_of(use)


def _draw_tasks(use: _Use) -> None:
    """Sessions of which some are told become groups; one goes on afterwards."""
    with use.database.write() as session:
        for mark in (SEEN, IDLE):
            set_flag(session, mark, str(EXCHANGES - 20), now=NOW)
    tasks = TaskKit(use.database, size=2, key="template")
    tasks.now = use.clock.now
    tasks.session("task-none")
    bodies = [{"messages": [{"role": "user", "content": f"Order {one}?"}]} for one in (1, 2, 2)]
    for number, body in enumerate(bodies):
        prompt = (number,) * 4
        told = tasks.turn(f"task-t{number}", task="", request=body, prompt_token_ids=prompt)
        tasks.told(told, success=True)
    first = tasks.session("task-a", success=True)
    tasks.session("task-b", success=False)
    assert tasks.follow() == 2
    with use.database.read() as session:
        drawn = task_group_id(["task-a", "task-b"])
        rules = rules_of(use.settings)
        read = load_task_group(session, drawn, rules, run_id="r", most_tokens=10_000)
    assert read is not None
    with use.database.write() as session:
        drop_answers_of(session, "r", [read])
    tasks.turn("task-a")
    tasks.follow(after_s=IDLE_S)
    with use.database.write() as session:
        write_judge_state(session, JudgeState(state="works", since=NOW), now=NOW)
        run = session.scalar(select(RunRow.run_id).where(RunRow.adapter.is_not(None)).limit(1))
        learned = update(TaskGroupRow).where(TaskGroupRow.key_kind == "header")
        session.execute(learned.values(status="trained", run_id=run))
    ranked = TaskKit(use.database, size=2, learn="ruler")
    ranked.now = tasks.now
    for name in ("task-c", "task-d"):
        ranked.told(ranked.turn(name, choices=(make_choice(name),)), done=True)
    assert ranked.follow() == 1
    judging = TaskJudging(
        use.database, RankingJudge({"task-c": 1.0, "task-d": 0.0}), use.settings.judge
    )
    assert asyncio.run(judging.step())
    assert delete_exchanges(use.database, first, why="forgotten", now=NOW).runs == {run}


class _Room:
    async def is_open(self) -> bool:
        return True


async def _rehearse(use: _Use) -> None:
    """Two attempts at a recorded task, of which one fails; what is shown of them."""
    tasks, failing = TaskKit(use.database), [False, True]

    async def play(request: httpx.Request) -> httpx.Response:
        ask = msgspec.json.decode(request.content)
        name = f"h:{ask['session_id']}"
        tasks.turn(name, at=use.clock.now, origin="rehearsal", task=ask["task_id"])
        return httpx.Response(500 if failing.pop(0) else 200, json={"success": True})

    own = Rehearsals(runner="http://runner", tokens_per_day=10**12)
    changes = {"rehearsals": own, "tasks": Tasks(size=2), "state_dir": use.folder}
    settings = use.settings.model_copy(update=changes)
    transport = httpx.MockTransport(play)
    worker = RehearsalWorker(use.database, _Room(), settings, now=use.clock, transport=transport)
    await worker.step()
    assert not failing
    await _examine(use, settings, transport, failing)
    with use.database.read() as session:
        assert rehearsed_tasks(session)
        assert earlier_signals(session, MODEL) == ()
        assert rehearsals_status(session, own, now=use.clock.now)


async def _examine(
    use: _Use, settings: Settings, transport: httpx.MockTransport, failing: list[bool]
) -> None:
    """An adapter attempts a held-out task."""
    canary: Any = None  # the prompt and the adapter say what is asked
    with use.database.read() as session:
        task = str(rehearsed_tasks(session)[0]["task"])
    prompt = HeldOutPrompt(
        exchange_id=task, session_id="s", request={"messages": []}, project="default"
    )
    failing.append(False)
    exam = TaskExam(use.database, settings, _Room(), now=use.clock, transport=transport)
    assert (await exam.ask(canary, prompt, "base", 0)).reward == 1.0


async def _watch_noise(use: _Use) -> None:
    with use.database.write() as session:
        write_judge_state(session, JudgeState(state="works", since=NOW), now=NOW)
    judge, settings = FakeJudge(model="scripted"), use.settings.judge
    watch = NoiseWatch(use.database, judge, settings, clock=use.clock)
    for _ in range(2):
        await watch.step()
        use.clock.now += DAY_S
    assert accept_now(use.database, settings, now=use.clock.now) is not None
    with use.database.read() as session:
        assert measured_noise(session, [("scripted", hash_of(settings), settings.passes)])


async def _best_of(use: _Use) -> None:
    best_of = BestOfJudge(use.database, FakeJudge(model="scripted"), use.settings, clock=use.clock)
    for name in ("asked", exchange_id(EXCHANGES - 60)):
        answers = tuple(
            json.dumps({"role": "assistant", "content": text}).encode() for text in ("a", "b")
        )
        request = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
        await best_of.decide(
            Material(exchange_id=name, request=request, answers=answers, keep=True)
        )
        await best_of.settled()
    with use.database.write() as session:
        for name in (exchange_id(EXCHANGES - 61), "never-came"):
            save_scores(session, _scores(name))
    use.clock.now += 86_400.0
    await best_of.sweep()


# --- learn


class _Trainer:
    """Writes a folder, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def train(self, job: TrainingJob) -> TrainingOutcome:
        job.report(job.groups[0].group_id)
        if self._error is not None:
            raise self._error
        (job.folder / CONFIG).write_text("{}")
        (job.folder / WEIGHTS).write_bytes(b"weights")
        ones = dict.fromkeys(StepMetrics.__dataclass_fields__, 1)
        numbers: dict[str, Any] = {**ones, "left_out": {}}
        job.watch.begin_steps(())
        job.watch.step(StepMetrics(**numbers))
        return TrainingOutcome(
            metrics=(StepMetrics(**numbers),), drift=None, algorithm={"loss": "none"}
        )


class _Child:
    def exit_code(self) -> int | None:
        return 1

    def stop(self) -> None:
        """It has ended."""


def _learn(use: _Use) -> None:
    _give_folder(use, CHAMPION)
    learner = use.settings.learner.model_copy(
        update={"idle_below": 1e9, "schedule": "interval", "interval_s": 3_600.0}
    )
    timed = use.settings.model_copy(update={"learner": learner})
    for settings in (use.settings, timed):
        schedule = Schedule(settings, use.database, lambda _: _Child(), clock=use.clock)
        for _ in range(3):
            schedule.poll()
            use.clock.now += 3_600.0
    holder = present_holder()
    with use.database.write() as session:
        open_run(
            session,
            run_id="dead",
            model=MODEL,
            parent=CHAMPION,
            settings={},
            now=NOW,
            holder=holder,
        )
    _killed(use, holder.token)
    settings = _with_base(use)
    use.clock.now += 3_600.0
    for number, error in enumerate((ValueError("broken"), None, None)):
        run = Run(
            settings,
            use.database,
            lambda error=error: _Trainer(error),  # type: ignore[misc]  # bound at once
            run_id=f"own-{number}",
            clock=use.clock,
            heartbeat_s=0.01,
        )
        try:
            run.start()
        except (LearnerError, ValueError):
            continue
    _replay(use, settings)
    _hold(use)


def _killed(use: _Use, token: str) -> None:
    """A run that was stopped and cannot go on, and what another one left that placed an adapter."""
    adapters_dir = use.settings.learner.adapters_dir
    for run_id, name, text in (("dead", CLAIMED, "{}"), ("left", PLACING, "0" * 64)):
        folder = WorkFolder(adapters_dir, run_id)
        folder.make()
        folder.write(name, text)
    with use.database.write() as session:
        assert can_go_on(session, "dead", adapters_dir)
    with use.database.write() as session:
        blame_for_death(session, "dead", "it was killed")
    begin_again(use.database, "dead", [{"step": 1, "steps": 3}], token=token)
    stopped = RunStoppedError("asked to stop")
    folder = WorkFolder(adapters_dir, "dead")
    assert leave(use.database, folder, stopped, asked=True, token=token) == "stopped"


def _with_base(use: _Use) -> Settings:
    """The settings with a base model whose files are there."""
    base = use.folder / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    serving = use.settings.serving.model_copy(update={"base_model_path": str(base)})
    return use.settings.model_copy(update={"serving": serving, "state_dir": use.folder})


def _replay(use: _Use, settings: Settings) -> None:
    """Replay a run, and again after a group is damaged; one that made no version is refused."""

    def printed(run_id: str) -> str:
        out = io.StringIO()
        replay(settings, use.database, run_id, trainer=lambda _: _Trainer(), out=out)
        return out.getvalue()

    said = printed("own-1")
    assert "the same weights" in said, said
    trained = select(GroupRow.group_id).where(
        GroupRow.run_id == "own-1", GroupRow.status == "trained"
    )
    use.change(AnswerRow, {"token_ids": b"?"}, AnswerRow.group_id.in_(trained.limit(1)))
    assert "cannot be read any more" in (told := printed("own-1")), told
    assert "made no version" in printed("dead")


def _hold(use: _Use) -> None:
    """The reward watch holds two runs: of the champion that refuses, little else is known."""
    known = Profile(
        answers=5_000,
        sessions=5_000,
        newest=10 * EXCHANGES,
        rates={"refusal": RateOf(n=5_000, hits=4_900, weight=5_000.0, sessions=5_000)},
    )
    with use.database.write() as session:
        row = AdapterProfileRow(model=MODEL, adapter=CHAMPION, at=NOW, body=write_body(known))
        session.merge(row)
        session.merge(AdapterProfileRow(model=MODEL, adapter="base", at=NOW, body="{"))
    for number in range(2):
        with pytest.raises(HeldError):
            check_hold(use.database, use.settings, f"held-{number}", now=use.clock())


def _give_folder(use: _Use, name: str) -> None:
    folder = use.folder / name
    folder.mkdir()
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(name.encode())
    values = {"path": str(folder), "digest": folder_digest(folder)}
    use.change(AdapterRow, values, AdapterRow.name == name)


# --- control


async def _control(use: _Use) -> None:
    control = FakeControl()
    reconciler = Reconciler(
        database=use.database, control=control, model=MODEL, max_loras=4, clock=use.clock
    )
    await reconciler.reconcile()
    controller = _controller(use, control)
    _shadow(use)
    ramp = {"steps": [2000, 5000], "ramp": {"after_told": EXCHANGES - 500}}  # users tell of it
    use.change(CanaryRow, {"evidence": ramp}, CanaryRow.canary_id == CANARY)
    await controller.tick()  # it ramps
    await _outside(use)
    for state in ("gating", "loading"):
        use.change(CanaryRow, {"state": state}, CanaryRow.canary_id == CANARY)
        await controller.tick()
    await _admin(use, Fleet({"http://vllm": reconciler}))
    _trip(use)
    await controller.tick()
    use.change(CanaryRow, {"state": "inconclusive"}, CanaryRow.canary_id == CANARY)
    for _ in range(2):  # the learner's adapter begins its canary
        await controller.tick()
    await reconciler.reconcile()
    _by_hand(use)
    _lease(use)
    _prune(use)


def _prune(use: _Use) -> None:
    """Remove the folder of an old version, and put it back."""
    adapters_dir = use.settings.learner.adapters_dir.resolve()
    folder = adapters_dir / "made"
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_bytes(b"old")
    digest = folder_digest(folder)
    path = folder.rename(adapters_dir / digest)
    use.change(AdapterRow, {"path": str(path), "digest": digest}, AdapterRow.name == OLD)
    rule = FolderRule(folder_days=1, keep_champions=10)
    pruner = Pruner(database=use.database, adapters_dir=adapters_dir, rule=rule)
    for _ in range(2):
        pruner.prune(now=use.clock() + 2 * SPAN_S, actor="control")
    assert not path.exists()
    again = adapters_dir / "again"
    again.mkdir()
    (again / CONFIG).write_text("{}")
    (again / WEIGHTS).write_bytes(b"old")
    with use.database.write() as session:
        known = Candidate(adapter=OLD, parent=BASE, version=1, digest=digest, path=path)
        sealed = Sealed(folder=again, digest=digest, lineage_sha256="", card_sha256="")
        assert put_back(session, known, sealed, adapters_dir, now=use.clock())


async def _outside(use: _Use) -> None:
    """What control asks and tells beside the ramp; the receiver is away."""
    metric = {"kind": "http_json", "url": "http://127.0.0.1:9", "max": 1.0}
    rules = use.settings.canary.model_copy(update={"metrics": {"m": Metric.model_validate(metric)}})
    source = FakeMetrics({"http://127.0.0.1:9": 0.5})
    await MetricChecks(use.database, MODEL, source, rules, clock=use.clock).tick()
    hook = {"url": "http://127.0.0.1:9", "secret_env": "NOT_SET", "events": ["*"]}
    caller = Caller()
    sender = Sender(MODEL, caller, environment={}, clock=use.clock)
    hooks = Hooks(
        use.database, Notify.model_validate({"hooks": {"h": hook}}), sender, clock=use.clock
    )
    for _ in range(2):
        await hooks.tick()
    await caller.aclose()


def _shadow(use: _Use) -> None:
    """What the ramp asks candidate and champion beside the users."""
    drawing = Drawing(
        use.database, use.settings.canary, parallel=2, clock=use.clock, line=Line(name=MODEL)
    )
    with use.database.read() as session:
        canary = canaries.active(session, MODEL)
        assert canary is not None
        assert gate_store.live_prompts(
            session,
            canary,
            Line(name=canary.model),
            after=0.0,
            until=use.clock.now,
            limit=50,
            known=(),
        )
    drawing.for_shadow(canary)


def _by_hand(use: _Use) -> None:
    """An operator has an old version tried again."""
    with use.database.write() as session:
        assert canaries.active(session, MODEL) is None
        candidates.start(
            session, MODEL, adapter(5), steps=(1,), now=use.clock.now, actor="me", reason="r"
        )


def _lease(use: _Use) -> None:
    lease = Lease(use.database, "own")
    assert lease.beat()
    assert lease.beat()
    lease.give_back()


def _controller(use: _Use, control: FakeControl) -> Controller:
    rules = use.settings.canary
    gate = Gate(
        database=use.database,
        sampler=FakeSampler(),
        judge=FakeJudge(model="scripted"),
        rules=rules,
        judging=use.settings.judge,
        room=FakeRoom(),
        parallel=2,
        clock=use.clock,
        line=Line(name=MODEL),
    )
    return Controller(
        database=use.database,
        replicas={"http://vllm": control},
        gate=gate,
        rules=rules,
        limits=ServingLimits(max_rank=8, bases=frozenset()),
        line=Line(name=MODEL),
        clock=use.clock,
    )


def _trip(use: _Use) -> None:
    use.change(CanaryRow, {"state": "ramping", "ended_at": None}, CanaryRow.canary_id == CANARY)
    with use.database.write() as session:
        session.add(
            BreakerTripRow(model=MODEL, canary=CANDIDATE, salt="salt", at=NOW, reason="failures")
        )


PATH = {
    "group_id": f"g-{GROUP_EXCHANGE}",
    "task_group_id": task_group_id(["task-a", "task-b"]),
    "exchange_id": GROUP_EXCHANGE,
    "session_id": "early",
    "version": str(VERSIONS - 1),
    "canary_id": CANARY,
    "run_id": "own-1",
    "name": "champion",
}
"""A value for each parameter in a path of the admin API."""
QUERY = {
    "project": "support",
    "status": "set_aside",
    "state": "retired",
    "reason": "unreadable",
    "limit": "200",
    "at": str(NOW),
}
"""A value for each parameter in a query; `cursor` is taken from the page before."""
STREAM = "/admin/v1/events"
"""It ends when `for_s` says so, and is read after the first change too."""
BODIES = {"/admin/v1/groups/retry": {"of_reason": "judge_rubbish"}}
ACTIONS = {
    "canary_id": ("pause", "skip-step", "resume", "promote", "abort"),
    "": ("pause", "resume", "run", "override"),
}


async def _admin(use: _Use, fleet: Fleet) -> None:
    """Send each request that the admin API knows. A new one is met by a KeyError above."""
    context = AdminContext(
        database=use.database,
        model=MODEL,
        lines=lines_of(MODEL, ["support"]),
        rules=use.settings.canary,
        fleet=fleet,
        clock=use.clock,
    )
    app = create_app(context)
    paths: dict[str, dict[str, Any]] = app.openapi()["paths"]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8081") as client:
        for after in ({}, {"last-event-id": "1"}):
            reply = await client.get(STREAM, params={"for_s": 0}, headers=after)
            assert reply.status_code == 200, reply.text
        for path, methods in paths.items():
            if "get" in methods and path != STREAM:
                await _get(client, path, methods["get"].get("parameters", []))
        for path, methods in paths.items():
            for posted in _posted(path) if "post" in methods else ():
                headers = {"if-match": "*"}
                body = {"reason": "r", **BODIES.get(posted, {})}
                reply = await client.post(posted, json=body, headers=headers)
                assert reply.status_code < 500, (posted, reply.text)
    await _pages(context)


async def _pages(context: AdminContext) -> None:
    """Look at every page."""
    transport = httpx.ASGITransport(app=with_page(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8081") as client:
        for method, path, _, _ in PAGES:
            if method == "GET" and path != "/login":
                with mock.patch.object(changing, "MAX_S", 0.0):  # else it streams for a minute
                    await _ok(client, path.format(**PATH))


async def _get(
    client: httpx.AsyncClient, path: str, parameters: Sequence[Mapping[str, Any]]
) -> None:
    path, template = path.format(**PATH), path
    names = [one["name"] for one in parameters if one["in"] == "query"]
    if "{" in template and "{name}" not in template and "project" in names:
        names.remove("project")  # the record is of the default line
    page = await _ok(client, path)
    for name in names:
        if name != "cursor":
            await _ok(client, path, **{name: QUERY[name]})
        elif (cursor := page.json()["next_cursor"]) is not None:
            await _ok(client, path, cursor=cursor)
    if {"status", "reason"} <= set(names):
        await _ok(client, path, status=QUERY["status"], reason=QUERY["reason"])


async def _ok(client: httpx.AsyncClient, path: str, **query: str) -> httpx.Response:
    reply = await client.get(path, params=query)
    assert reply.status_code == 200, (path, query, reply.text)
    return reply


def _posted(path: str) -> list[str]:
    if "{action}" not in path:
        return [path]
    actions = ACTIONS["canary_id" if "{canary_id}" in path else ""]
    return [path.format(**PATH, action=action) for action in actions]


# --- commands that open the store themselves


def _commands(use: _Use) -> None:
    config = use.folder / "sidecar.toml"
    config.write_text(
        f'state_dir = "{use.folder}"\n[serving]\nmodel = "{MODEL}"\n[store]\nurl = "{use.url}"\n'
        f'[access]\nmode = "keys"\n[bus]\nurl = "sqlite:///{use.folder}/outbox.db"\n'
    )

    def command(*words: str, codes: Sequence[int | None] = (0, None)) -> str:
        out = io.StringIO()
        with redirect_stdout(out):
            code = main(["--config", str(config), *words])
        assert code in codes, (words, code)
        return out.getvalue()

    assert collect(use.settings, online=False, limit_s=600.0).store is not None
    command("lineage", str(VERSIONS - 1))
    command("exchanges", "ls", "--user", "nobody")
    command("exchanges", "ls", "--session", "nobody")
    command("exchanges", "show", GROUP_EXCHANGE)
    command(
        "exchanges", "export", "--form", "art", "--limit", "5", "--out", str(use.folder / "out")
    )
    with use.database.read() as session:
        newest = select(ExchangeRow.session_id).order_by(ExchangeRow.seq.desc()).limit(1)
        known = session.scalars(newest).one()
        assert load_trajectory(session, known).messages
    large = (0, 1)  # the file may be too large to be rewritten unasked
    for target, name in (("--user", "nobody"), ("--session", known)):
        command("forget", target, name, "--yes", codes=large)
    use.change(AliasRow, {"adapter": CHAMPION}, AliasRow.alias == "champion")
    use.change(AdapterRow, {"forgotten_at": NOW}, AdapterRow.name == CHAMPION)
    command("forget", "--exchange", _learned_from(use.folder), "--yes", "--retire", codes=large)
    command("keys", "create", "--project", "p")
    made = json.loads(command("keys", "ls", "-o", "json"))
    command("keys", "revoke", made["items"][0]["key_id"])
    command("audit", "verify", codes=(1,))  # the large store's moves have no hashes
    # A version that no canary promoted is refused, with those that were.
    command("rollback", "--offline", "--to", CANDIDATE, "--reason", "r", codes=(1,))
    command("rollback", "--offline", "--to", "base", "--reason", "r")

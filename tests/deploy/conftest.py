"""Fakes of deploy's edges and a store to work on, shared by its tests."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy.orm import Session

from deploy.admin.app import create_app
from deploy.admin.context import AdminContext
from deploy.admin.reception import Refusals
from deploy.canary.controller import Controller
from deploy.canary.gate import Gate
from deploy.canary.gate_store import SETTLED_S
from deploy.engine.reconcile import Fleet, Reconciler
from deploy.engine.validation import ServingLimits
from deploy.records import AdapterVersion, Canary
from deploy.registry import audit, canaries, candidates, routing_writer, transitions, versions
from deploy.registry.canary_rule import Move
from deploy.supervise import LoopView
from ingest.privacy.screen import Screen
from ingest.privacy.texts import JudgeView
from learner.adapter_folder import folder_digest
from sidecar.lines import Line
from sidecar.records import BASE
from sidecar.routing.table import RoutingTable
from sidecar.settings import Approval, Canary as CanarySettings, Judge as JudgeSettings, Privacy
from sidecar.store.database import Database, compress, count
from sidecar.store.models import (
    AdapterRow,
    AuditRow,
    CanaryRow,
    ChoiceRow,
    ExchangeRow,
    GateComparisonRow,
)
from support.adapter_endpoints import MODEL
from support.clock import Clock
from support.fake_control import FakeControl
from support.fake_judge import FakeJudge
from support.fake_load import FakeRoom
from support.fake_sampler import FakeSampler
from support.stores import NewStore

Row = TypeVar("Row")


def write_adapter(
    folder: Path,
    *,
    rank: int = 4,
    values: Sequence[float] = (0.5, -0.5),
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
) -> str:
    """Write a small PEFT folder of the given numbers. Returns: its digest."""
    folder.mkdir(parents=True)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "base_model_name_or_path": "/models/m",
        "bias": "none",
        "target_modules": ["q_proj"],
        **(config or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    shapes = {
        "base_model.model.layers.0.q_proj.lora_A.weight": [rank, 2],
        "base_model.model.layers.0.q_proj.lora_B.weight": [2, rank],
    }
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes.items():
        count = shape[0] * shape[1]
        block = b"".join(pack(values[i % len(values)], dtype) for i in range(count))
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(block)],
        }
        data += block
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder_digest(folder)


def pack(value: float, dtype: str) -> bytes:
    """One number in a safetensors dtype; bf16 is the upper half of float32."""
    if dtype == "BF16":
        return struct.pack("<f", value)[2:]
    return struct.pack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], value)


PASSING = (
    Move(to="gating", candidate_state="gating", reason="gating"),
    Move(to="ramping", candidate_state="ramping", reason="ramping"),
    Move(to="promoted", candidate_state="champion", reason="good"),
)
"""Moves of a canary that passes."""


@dataclass
class World:
    """A store, the fakes around it, and the few things that other rooms would do."""

    database: Database
    folder: Path
    rules: CanarySettings
    clock: Clock = field(default_factory=Clock)
    control: FakeControl = field(default_factory=FakeControl)
    others: dict[str, FakeControl] = field(default_factory=dict)
    """Further replicas, by base URL."""
    sampler: FakeSampler = field(
        default_factory=lambda: FakeSampler(lambda request: f"says {request.upstream_model}")
    )
    judge: FakeJudge = field(default_factory=lambda: FakeJudge(model="fake-judge"))
    room: FakeRoom = field(default_factory=FakeRoom)
    privacy: Privacy = field(default_factory=Privacy)
    judging: JudgeSettings = field(default_factory=lambda: JudgeSettings(rubric="the better one"))
    """Settings of the gate's judge."""
    judge_gives_reward: bool = False
    approval: Approval = field(default_factory=Approval)
    """Settings of the approval service."""
    acts: Callable[[], bool] = lambda: True
    """False once another control has the lease."""
    exchanges: int = 0
    _batch: Session | None = None
    line: Line = field(default_factory=lambda: Line(name=MODEL))
    """Whose adapters and canaries it is about."""

    def gate(self) -> Gate:
        """A new gate on the same store, as after a restart."""
        return Gate(
            database=self.database,
            sampler=self.sampler,
            judge=self.judge,
            rules=self.rules,
            judging=self.judging,
            room=self.room,
            parallel=2,
            clock=self.clock,
            view=JudgeView(self.privacy),
            screen=Screen(self.privacy),
            judge_gives_reward=self.judge_gives_reward,
            line=self.line,
            acts=lambda: self.acts(),
        )

    def controller(
        self, on_change: Callable[[], None] = lambda: None, gate: Gate | None = None
    ) -> Controller:
        """A new controller on the same store, as after a restart."""
        return Controller(
            database=self.database,
            replicas={"http://vllm": self.control, **self.others},
            gate=gate or self.gate(),
            rules=self.rules,
            limits=ServingLimits(max_rank=8, bases=frozenset({"/models/m"})),
            line=self.line,
            approval=self.approval,
            on_change=on_change,
            clock=self.clock,
        )

    def keeper(
        self, control: FakeControl | None = None, replica: str = "", **more: Any
    ) -> Reconciler:
        """A new reconciler of one vLLM, the world's own by default."""
        return Reconciler(
            database=self.database,
            control=control or self.control,
            replica=replica,
            **{"model": "m", "max_loras": 4, "clock": self.clock, **more},
        )

    def fleet(self, controls: Mapping[str, FakeControl]) -> Fleet:
        return Fleet({url: self.keeper(control, url) for url, control in controls.items()})

    def serve_five(self) -> list[str]:
        """Five versions, promoted one after the other and all loaded: one is too many."""
        names = [self.register(version) for version in range(1, 6)]
        for name in names:
            self.promote(name)
            self.control.adapters[name] = self.adapter(name).path
        return names

    def register(self, version: int, *, parent: str = BASE, **folder: Any) -> str:
        """What a training run does at its end. Returns: the adapter's name."""
        path = self.folder / f"adapter-{version}"
        digest = write_adapter(path, **folder)
        name = f"{self.line.name}--v{version}-{digest[:8]}{version:04d}"
        self.add_version(name, version, path, digest, parent=parent)
        return name

    def add_version(
        self,
        name: str,
        version: int,
        path: Path,
        digest: str,
        *,
        parent: str = BASE,
        state: str = "registered",
    ) -> None:
        """The row of a version whose folder is there."""
        with self.database.write() as session:
            session.add(
                AdapterRow(
                    name=name,
                    model=self.line.name,
                    version=version,
                    digest=digest,
                    path=str(path),
                    parent=parent,
                    run_id=None,
                    state=state,
                    reason=None,
                    created_at=self.clock.now,
                )
            )

    def told_at_registration(self, name: str, after: dict[str, Any]) -> None:
        """The audit row of a training run."""
        with self.database.write() as session:
            audit.record(
                session,
                now=self.clock.now,
                actor="learner",
                action="adapter.registered",
                subject=name,
                before={},
                after=after,
                reason="trained",
            )

    def serve(
        self,
        session_key: str,
        *,
        adapter: str = BASE,
        arm: str = "champion",
        held_out: bool = False,
        outcome: str = "ok",
        status: int = 200,
        content: str | None = "An answer.",
        finish_reason: str = "stop",
        max_tokens: int | None = None,
        surface: str = "chat",
        turn_id: str = "",
        fallback_from: str = "",
        propensity: float | None = None,
        project: str = "default",
        origin: str = "user",
        **fields: Any,
    ) -> str:
        """What ingest does with a captured exchange. Returns: its id.

        propensity: None: of a weight of 20%. fields: further fields of the request.
        """
        self.exchanges += 1
        exchange_id = f"x{self.line.project or ''}{self.exchanges}"
        request: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"ask {exchange_id}"}],
            **fields,
        }
        if max_tokens is not None:
            request["max_tokens"] = max_tokens
        row = ExchangeRow(
            exchange_id=exchange_id,
            stored_at=self.clock.now,
            started_at=self.clock.now,
            surface=surface,
            public_model=MODEL,
            adapter=adapter,
            arm=arm,
            propensity=(0.2 if arm == "canary" else 0.8) if propensity is None else propensity,
            replica="http://vllm",
            session_key=session_key,
            session_id=session_key,
            held_out=held_out,
            request_body=compress(json.dumps(request).encode()),
            prompt_token_ids=b"",
            sampling={},
            timings={},
            stream=False,
            status=status,
            outcome=outcome,
            untrainable_reason=None,
            completion_tokens=None,
            trace_id="",
            project=project,
            user="",
            turn_id=turn_id,
            origin=origin,
            fallback_from=fallback_from,
            selection="held_out" if held_out else "new",
        )
        with self._writing() as session:
            session.add(row)
            session.flush()
            count(session, "consume", "stored")
            if held_out:
                count(session, "selection", "held_out")
            if content is not None:
                message = {"role": "assistant", "content": content}
                session.add(
                    ChoiceRow(
                        exchange_id=exchange_id,
                        index=0,
                        message_body=compress(json.dumps(message).encode()),
                        finish_reason=finish_reason,
                        token_ids=b"",
                        logprobs=b"",
                    )
                )
        return exchange_id

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is served meanwhile is stored in one transaction, as ingest stores a batch."""
        with self.database.write() as session:
            self._batch = session
            try:
                yield
            finally:
                self._batch = None

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        if self._batch is not None:
            yield self._batch
            return
        with self.database.write() as session:
            yield session

    def hold_out(self, sessions: int) -> None:
        """Record held-out sessions that have ended."""
        self.clock.now -= SETTLED_S
        with self.together():
            for number in range(sessions):
                self.serve(f"held-{number}", held_out=True)
        self.clock.now += SETTLED_S

    def promote(self, name: str) -> None:
        """Take a registered adapter through a canary that passes, without the controller."""
        self.begin(name, PASSING)

    def ramp(self, name: str) -> None:
        """Take a registered adapter to the first step of its ramp, without the controller."""
        self.begin(name, PASSING[:2])

    async def to_ramp(self, name: str = "") -> str:
        """Tick until this candidate, or a new one, ramps. Returns: its name.

        One tick loads it, two judge four prompts, two at a time.
        """
        found = name or self.register(1)
        self.hold_out(4)
        self.clock.now += 1.0
        for _ in range(3):
            await self.controller().tick()
        assert self.canary(found).phase == "ramping"
        return found

    def start(self, reference: str, *, steps: tuple[int, ...] | None = None) -> Canary:
        """What an operator does to have a version tried."""
        with self.database.write() as session:
            return candidates.start(
                session,
                self.line.name,
                reference,
                steps=steps or self.rules.steps,
                now=self.clock.now,
                actor="me",
                reason="try it",
            )

    def act(self, action: str, name: str) -> Canary:
        """What an operator does to a candidate's canary: "pause", "abort", ..."""
        with self.database.write() as session:
            verb = getattr(transitions, action)
            row = self.canary_row(session, name)
            after: Canary = verb(session, row, reason="by hand", now=self.clock.now, actor="me")
        return after

    def move(self, name: str, *moves: Move) -> None:
        """Make these moves of a candidate's canary, without the controller."""
        for move in moves:
            with self.database.write() as session:
                canary = canaries.to_canary(self.canary_row(session, name))
                assert transitions.apply(session, canary, move, evidence={}, now=self.clock.now)

    def begin(
        self, name: str, moves: Sequence[Move] = (), steps: tuple[int, ...] = (5_000,)
    ) -> None:
        """Begin a registered adapter's canary, and make these moves, without the controller."""
        with self.database.write() as session:
            transitions.begin(
                session,
                model=self.line.name,
                candidate=name,
                steps=steps,
                now=self.clock.now,
                actor="t",
            )
        self.move(name, *moves)

    @staticmethod
    def canary_row(session: Session, candidate: str) -> CanaryRow:
        """Return the row of this adapter's canary. Fails when it has none."""
        row = canaries.canary_of(session, candidate)
        assert row is not None
        return row

    def canary(self, candidate: str) -> Canary:
        with self.database.read() as session:
            return canaries.to_canary(self.canary_row(session, candidate))

    def evidence(self, candidate: str) -> dict[str, Any]:
        with self.database.read() as session:
            return self.canary_row(session, candidate).evidence

    def adapter(self, name: str) -> AdapterVersion:
        with self.database.read() as session:
            return versions.find(session, name)

    def aliases(self) -> dict[str, str]:
        with self.database.read() as session:
            return versions.aliases_of(session, self.line.name)

    def table(self) -> RoutingTable:
        with self.database.read() as session:
            found = routing_writer.current(session, self.line.name)
            assert found is not None
            return found

    def actions(self) -> list[str]:
        """The audit trail's actions in order."""
        with self.database.read() as session:
            return [row.action for row in session.query(AuditRow).order_by(AuditRow.seq)]

    def comparisons(self) -> list[GateComparisonRow]:
        with self.database.read() as session:
            return session.query(GateComparisonRow).all()

    def rows(self, kind: type[Row]) -> list[Row]:
        with self.database.read() as session:
            return session.query(kind).all()


@pytest.fixture
def database(new_store: NewStore) -> Database:
    """A store as control's first start leaves it."""
    opened = new_store()
    with opened.write() as session:
        routing_writer.initialise(session, MODEL, now=0.0, actor=audit.CONTROL)
    return opened


@pytest.fixture
def rules() -> CanarySettings:
    """Those of a small canary that needs no proof: tests of the proof have rules of their own."""
    return CanarySettings(
        promote_on="quick",
        gate_prompts=4,
        gate_answers=1,
        gate_min_prompts=2,
        steps=(2_000, 5_000),
        step_min_s=10.0,
        turn_wait_s=0.0,
        step_min_exchanges=3,
        step_min_sessions=1,
        step_max_s=1_000.0,
    )


@pytest.fixture
def world(database: Database, rules: CanarySettings, tmp_path: Path) -> World:
    return World(database=database, folder=tmp_path, rules=rules)


MakeFolder = Callable[..., tuple[Path, str]]


@pytest.fixture
def adapter_folder(tmp_path: Path) -> MakeFolder:
    """Write a PEFT folder: (path, digest). Arguments as `write_adapter`."""

    def write(name: str = "adapter", **settings: Any) -> tuple[Path, str]:
        return tmp_path / name, write_adapter(tmp_path / name, **settings)

    return write


@pytest.fixture
def fake_control() -> FakeControl:
    return FakeControl()


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass
class Api:
    client: httpx.AsyncClient
    app: FastAPI
    refusals: Refusals
    reconciler: Reconciler
    changes: list[int]
    loops: dict[str, LoopView]

    async def get(self, path: str, **params: Any) -> httpx.Response:
        return await self.client.get(f"/admin/v1{path}", params=params)

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(f"/admin/v1{path}", json=body, headers=names)


MakeApi = Callable[..., Api]
"""make_api(*tokens, host=, scopes=): the admin API over the world's store, behind these tokens; a
space in the scopes lists each token again. Other keywords are fields of the context."""


@pytest.fixture(autouse=True)
def no_wait_for_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.admin.reception.GUESS_S", 0.0)


@pytest.fixture
def make_api(world: World) -> MakeApi:
    def make(
        *tokens: str,
        host: str = "127.0.0.1:8081",
        scopes: str = "",
        lines: tuple[Line, ...] = (),
        **more: Any,
    ) -> Api:
        reconciler = world.keeper()
        changes: list[int] = []
        loops: dict[str, LoopView] = {"tick": LoopView()}
        entries = [f":{words}" if words else "" for words in scopes.split()] or [""]
        digests = tuple(token_digest(token) + words for token in tokens for words in entries)
        context = AdminContext(
            database=world.database,
            model="m",
            lines=lines,
            rules=world.rules,
            fleet=Fleet({"http://vllm": reconciler}),
            tokens=digests,
            on_change=lambda: changes.append(1),
            clock=world.clock,
            loops=lambda: loops,
            **more,
        )
        app = create_app(context)
        transport = httpx.ASGITransport(
            app=app, raise_app_exceptions=False, client=("127.0.0.9", 4711)
        )
        client = httpx.AsyncClient(transport=transport, base_url=f"http://{host}")
        return Api(
            client=client,
            app=app,
            refusals=context.refusals,
            reconciler=reconciler,
            changes=changes,
            loops=loops,
        )

    return make


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    return make_api()

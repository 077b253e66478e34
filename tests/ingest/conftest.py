"""A judge to script, a server to script, and a store to judge from; shared by ingest's tests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from sqlalchemy import select

from ingest.judge_watch import JudgeState, read_judge_state
from ingest.records import Answer, Group, ScoredGroup
from ingest.ruler.judge import Judge, LiteLlmJudge
from ingest.ruler.judging import JudgingWorker
from ingest.store.exchanges import save_exchange
from ingest.store.groups import load_scored_group, mark_sampled, save_group
from sidecar.records import Choice, Exchange, Sampling, Timings
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database
from sidecar.store.models import CounterRow, GroupRow, JudgeCallRow
from support.clock import Clock
from support.fake_judge import FakeJudge, Shown, score_by_content, shown_answers
from support.ingest_kit import filled_bus, kit
from support.stores import NewStore

__all__ = ["filled_bus", "kit"]  # fixtures of the tests below this folder

Step = tuple[Any, ...] | Callable[[dict[str, Any]], tuple[Any, ...]]
"""(status, JSON or bytes, then headers as pairs), or what makes it of the request."""


class ScriptedServer:
    """An HTTP server that plays a script, the last step again and again."""

    def __init__(self, *script: Step) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.release = threading.Event()
        """A reply with status 0 waits for this, and is never sent; with a body, it drips."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                server.requests.append(json.loads(body))
                server.headers.append({k.lower(): v for k, v in self.headers.items()})
                step = server.script.pop(0) if len(server.script) > 1 else server.script[0]
                status, reply, *headers = step(server.requests[-1]) if callable(step) else step
                if status == 0:
                    self._hang(drip=reply is not None)
                    return
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def _hang(self, *, drip: bool) -> None:
                if drip:
                    self.send_response(200)
                    self.send_header("content-length", "100000")
                    self.end_headers()
                for _ in range(200):
                    if server.release.wait(0.05):
                        return
                    if drip:
                        try:
                            self.wfile.write(b" ")
                        except OSError:  # the client has given up, as it should
                            return

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self.release.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def completion(text: str | None) -> dict[str, Any]:
    """An OpenAI chat completion, 12 prompt and 3 completion tokens."""
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": text},
            }
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15},
    }


def answer_with(reply: Callable[[Shown], str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A step of a `ScriptedServer` that reads the prompt and answers as a judge."""
    return lambda request: (200, completion(reply(shown_answers(request["messages"]))))


REQUEST = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()


@pytest.fixture
def database(new_store: NewStore) -> Database:
    return new_store()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def put_group(
    database: Database,
    name: str,
    *texts: str,
    request: bytes = REQUEST,
    messages: Sequence[bytes] | None = None,
    project: str = "default",
) -> None:
    """Store a sampled group `name` with one answer per text."""
    bodies = messages or [
        json.dumps({"role": "assistant", "content": text}).encode() for text in texts
    ]
    exchange = Exchange(
        exchange_id=f"x-{name}",
        surface="chat",
        public_model="m",
        adapter="base",
        arm="champion",
        propensity=1.0,
        replica="http://127.0.0.1:1",
        session_key="m:1",
        project=project,
        request=request,
        choices=(Choice(index=0, message=bodies[0]),),
        prompt_token_ids=(1, 2),
        sampling=Sampling(),
        stream=False,
        status=200,
        outcome="ok",
        timings=Timings(started_at=1.0),
    )
    group = Group(
        group_id=name,
        exchange_id=exchange.exchange_id,
        session_key="m:1",
        adapter="base",
        request=request,
        prompt_token_ids=(1, 2),
        answers=tuple(
            Answer(index=i, origin="sampled", message=body, token_ids=(3 + i,), logprobs=(-0.5,))
            for i, body in enumerate(bodies)
        ),
    )
    with database.write() as session:
        assert save_exchange(session, exchange, held_out=False, now=1.0)
        assert save_group(session, group, now=1.0)
        assert mark_sampled(session, name)


def status(database: Database, name: str) -> tuple[str, str | None]:
    with database.read() as session:
        row = session.scalars(select(GroupRow).where(GroupRow.group_id == name)).one()
        return row.status, row.reason


def group_row(database: Database, name: str) -> GroupRow:
    with database.read() as session:
        return session.scalars(select(GroupRow).where(GroupRow.group_id == name)).one()


def counts(database: Database, stage: str) -> dict[str, int]:
    with database.read() as session:
        rows = session.scalars(select(CounterRow).where(CounterRow.stage == stage))
        return {row.reason: row.count for row in rows}


def calls(database: Database) -> list[JudgeCallRow]:
    with database.read() as session:
        return list(session.scalars(select(JudgeCallRow).order_by(JudgeCallRow.seq)))


def worker(database: Database, judge: Judge, clock: Clock, **settings: Any) -> JudgingWorker:
    values = {"model": "scripted", "rubric": "Be good.", "passes": 1, **settings}
    seeds = iter(range(100, 10_000))
    return JudgingWorker(
        database, judge, JudgeSettings(**values), clock=clock, draw_seed=lambda _: next(seeds)
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


class JudgeKit:
    """What the tests of RULER and of the judges use."""

    FakeJudge = FakeJudge
    score_by_content = staticmethod(score_by_content)
    completion = staticmethod(completion)
    answer_with = staticmethod(answer_with)
    status = staticmethod(status)
    group_row = staticmethod(group_row)
    counts = staticmethod(counts)
    worker = staticmethod(worker)

    def __init__(self) -> None:
        self.servers: list[ScriptedServer] = []
        self.judges: list[LiteLlmJudge] = []

    def serve(self, *script: Step) -> ScriptedServer:
        """Start a server for this test."""
        self.servers.append(ScriptedServer(*script))
        return self.servers[-1]

    def litellm_judge(self, server_url: str, **settings: Any) -> LiteLlmJudge:
        """A real LiteLLM judge against a local server; closed after the test."""
        values: dict[str, Any] = {
            "model": "openai/local-judge",
            "api_key": "sk-test-key-1",
            "timeout_s": 60.0,  # the first call imports LiteLLM, which takes long on a busy machine
        }
        self.judges.append(
            LiteLlmJudge(JudgeSettings(**{**values, "api_base": server_url, **settings}))
        )
        return self.judges[-1]


@dataclass
class Bench:
    """A store with groups, a clock, and the judging worker between them."""

    kit: JudgeKit
    database: Database
    clock: Clock

    def put(self, name: str, *texts: str, **changes: Any) -> None:
        put_group(self.database, name, *texts, **changes)

    def status(self, name: str) -> tuple[str, str | None]:
        return status(self.database, name)

    def row(self, name: str) -> GroupRow:
        return group_row(self.database, name)

    def counts(self, stage: str) -> dict[str, int]:
        return counts(self.database, stage)

    def calls(self) -> list[JudgeCallRow]:
        return calls(self.database)

    def worker(self, judge: Judge, **settings: Any) -> JudgingWorker:
        return worker(self.database, judge, self.clock, **settings)

    def scored(self, name: str = "g1") -> ScoredGroup:
        with self.database.read() as session:
            found = load_scored_group(session, name)
        assert found is not None
        return found

    @property
    def state(self) -> JudgeState:
        """What is known of the judge."""
        with self.database.read() as session:
            found = read_judge_state(session)
        assert found is not None
        return found


@pytest.fixture
def bench(judge_kit: JudgeKit, database: Database, clock: Clock) -> Bench:
    return Bench(judge_kit, database, clock)


@pytest.fixture
async def judge_kit() -> AsyncIterator[JudgeKit]:
    made = JudgeKit()
    yield made
    for judge in made.judges:
        await judge.aclose()
    for server in made.servers:
        server.close()

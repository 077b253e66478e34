"""Two projects with adapters of their own, from their exchanges to their users, and back.

The prompts and answers of each project have token ids of their own, so that the trainer sees whose
they are. Proxy, intake, score, learner and registry are the real ones; vLLM, judge and trainer are
stand-ins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import select

from deploy.funnel import read_funnel, read_pile_up
from deploy.registry import audit, canaries, flags, routing_writer, transitions, versions
from deploy.registry.canary_rule import Move
from ingest.grouping.request import EngineFacts
from ingest.grouping.selection import BACKLOG, STAGE as SELECTION
from ingest.intake.bus import open_bus
from ingest.intake.loop import Intake
from ingest.ruler.judging import JudgingWorker
from ingest.sampling.worker import SamplingWorker
from ingest.vllm.sampler import SampledAnswer, SampleRequest
from ingest.vllm.watch import EngineWatch
from learner.runs.train import Run
from sidecar.capture.outbox import Outbox
from sidecar.records import Timings
from sidecar.settings import Settings
from sidecar.store.database import Database, count
from sidecar.store.models import AdapterRow, ExchangeRow, GroupRow
from support.fake_judge import FakeJudge, score_by_content
from support.fake_load import FakeRoom
from support.fake_sampler import FakeSampler
from support.ingest_kit import make_choice, make_exchange
from support.stores import NewStore
from tests.learner.conftest import FakeTrainer

MODEL: Final = "m"
LINES: Final = {"north": "m@@north", "south": "m@@south", "shop": MODEL}
"""Project -> the line that answers it; `shop` has none of its own."""
FIRST_ID: Final = {"north": 100, "south": 200, "shop": 300}
"""Project -> the first token id of its prompts; an exchange adds its number."""
EXCHANGES: Final = 4


class Sampler(FakeSampler):
    """Answers each prompt with the prompt's own token ids, as vLLM does."""

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        project, number = request.chat["messages"][-1]["content"].split()
        answer = await super().sample(request)
        return replace(answer, prompt_token_ids=(FIRST_ID[project] + int(number), 9))


@dataclass
class Two:
    """The store, the settings and the processes as far as a test moves them."""

    database: Database
    settings: Settings
    folder: Path
    served: int = 0

    def serve(self, **adapters: str) -> None:
        """Take exchanges of every project through the outbox, intake, sampling and the judge.

        adapters: project -> what answered it; the others got the base.
        """
        exchanges = []
        for project, first in FIRST_ID.items():
            for number in range(self.served, self.served + EXCHANGES):
                exchanges.append(
                    make_exchange(
                        f"{project}-{number}",
                        public_model=MODEL,
                        project=project,
                        adapter=adapters.get(project, "base"),
                        request={
                            "model": MODEL,
                            "messages": [{"role": "user", "content": f"{project} {number}"}],
                        },
                        prompt_token_ids=(first + number, 9),
                        choices=(make_choice("served"),),
                        timings=Timings(started_at=time.time()),
                    )
                )
        self.served += EXCHANGES
        outbox = Outbox(self.folder / "outbox.db", max_rows=100)
        outbox.write(exchanges)
        outbox.close()
        facts = EngineFacts(defaults=frozenset(), grammar="as_asked")
        watch = EngineWatch(self.settings.serving, ask=lambda *_: facts, start=lambda work: work())
        with closing(open_bus(self.settings.bus.url)) as bus:
            intake = Intake(bus, self.database, self.settings, engine=watch)
            for _ in range(3):
                intake.step()
        sampling = SamplingWorker(
            self.database,
            Sampler(lambda _: "other"),
            FakeRoom(),
            self.settings.groups,
            model=MODEL,
        )
        judge = FakeJudge(score_by_content({"served": 1.0, "other": 0.0}), model="scripted")
        judging = JudgingWorker(self.database, judge, self.settings.judge, clock=time.time)

        async def work() -> None:
            for _ in range(2 * len(exchanges)):
                await sampling.step()
                await judging.step()

        asyncio.run(work())

    def train(self, project: str, weights: bytes) -> tuple[str, frozenset[str]]:
        """Run the learner of a project's line. Returns: the adapter, and whose prompts it saw."""
        trainer = FakeTrainer(weights=weights)
        own = next(line for line in self.settings.lines if line.name == LINES[project])
        run = Run(
            self.settings.of_line(own),
            self.database,
            lambda: trainer,
            run_id=f"run-{project}-{self.served}",
            clock=time.time,
        )
        made = run.start().adapter
        [job] = trainer.jobs
        seen = {
            next(p for p, first in FIRST_ID.items() if 0 <= one.prompt_token_ids[0] - first < 100)
            for one in job.groups
        }
        return made, frozenset(seen)

    def promote(self, project: str, name: str) -> None:
        """Take a version through a canary that passes."""
        now = time.time()
        with self.database.write() as session:
            begun = transitions.begin(
                session, model=LINES[project], candidate=name, steps=(5000,), now=now, actor="t"
            )
            for to, state in (("gating",) * 2, ("ramping",) * 2, ("promoted", "champion")):
                canary = canaries.to_canary(canaries.find_row(session, begun.canary_id))
                move = Move(to=to, candidate_state=state, reason=to)  # type: ignore[arg-type]
                transitions.apply(session, canary, move, evidence={}, now=now)

    def state(self, project: str) -> tuple[object, ...]:
        """What its line has."""
        with self.database.read() as session:
            line = LINES[project]
            return (
                versions.aliases_of(session, line),
                routing_writer.current(session, line),
                flags.read(session, line),
            )


@pytest.fixture
def two(tmp_path: Path, new_store: NewStore) -> Iterator[Two]:
    database = new_store()
    settings = Settings(
        state_dir=tmp_path,
        serving={
            "model": MODEL,
            "base_model_path": f"{tmp_path}/weights",
            "own_adapters": ("north", "south"),
            "max_loras": 9,
        },
        access={"mode": "keys"},
        bus={"url": f"sqlite:///{tmp_path}/outbox.db"},
        store={"url": database.url},
        groups={"settle_s": 0.0, "held_out_rate": 0.0, "size": 2},
        judge={"model": "openai/judge"},
        learner={"min_groups": 2, "adapters_dir": tmp_path / "adapters"},
    )
    with database.write() as session:
        for line in settings.lines:
            routing_writer.initialise(session, line.name, now=0.0, actor=audit.CONTROL)
    yield Two(database=database, settings=settings, folder=tmp_path)
    database.close()


@pytest.mark.both_stores
def test_no_line_learns_from_the_prompts_of_another_project(two: Two) -> None:
    two.serve()

    seen = {}
    for number, project in enumerate(LINES):
        name, seen[project] = two.train(project, b"weights %d" % number)
        assert name.startswith(f"{LINES[project]}--v1-")

    assert seen == {project: {project} for project in LINES}
    with two.database.read() as session:
        trained = session.execute(
            select(GroupRow.run_id, ExchangeRow.project)
            .join(ExchangeRow, ExchangeRow.exchange_id == GroupRow.exchange_id)
            .where(GroupRow.status == "trained")
        ).all()
        made = {row.model: row.parent for row in session.scalars(select(AdapterRow))}
    assert {(str(run).split("-")[1], project) for run, project in trained} == {
        (p, p) for p in LINES
    }
    assert made == dict.fromkeys(LINES.values(), "base")


@pytest.mark.both_stores
def test_a_second_run_of_a_line_continues_its_own_champion(two: Two) -> None:
    two.serve()
    first = {}
    for number, project in enumerate(LINES):
        first[project], _ = two.train(project, b"weights %d" % number)
        two.promote(project, first[project])
    two.serve(**first)

    second, seen = two.train("south", b"more")

    assert seen == {"south"}
    with two.database.read() as session:
        assert versions.find(session, second).parent == first["south"]


def test_the_groups_of_every_line_fill_the_places_that_they_share(two: Two) -> None:
    two.serve()
    first, _ = two.train("north", b"weights")
    two.promote("north", first)
    two.serve(north=first)
    with two.database.write() as session:
        count(session, SELECTION, BACKLOG)

    with two.database.read() as session:
        funnel = read_funnel(session, MODEL)
        piles = {
            most: read_pile_up(session, LINES.values(), funnel, most=most) for most in (20, 21)
        }

    assert piles[21] is None, "one more may begin"
    assert piles[20] is not None
    assert piles[20].learning == 20, "8 each of south and shop, and 4 of north's champion"

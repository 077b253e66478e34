"""Ten planted faults: the doctor names the stage at which records stop, and the cause.

Each is planted through the code of the real processes; only vLLM and the judge are stand-ins.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from demo.ports import free_port
from deploy.cli.main import main
from deploy.engine.vllm_control import VllmControl
from deploy.registry.tallies import MENDED
from ingest.grouping.request import EngineFacts
from ingest.intake.bus import open_bus
from ingest.intake.loop import Intake
from ingest.judge_noise import NoiseState, write_noise_state
from ingest.ruler.judging import JudgingWorker
from ingest.ruler.prompt import rubric_hash
from ingest.sampling.worker import SamplingWorker
from ingest.vllm.watch import EngineWatch
from learner.errors import NothingToLearnError
from learner.runs.train import Run
from learner.schedule.loop import PAUSED_FLAG
from sidecar.capture.outbox import Outbox
from sidecar.lines import flag_of
from sidecar.records import Exchange, Sampling, Timings
from sidecar.settings import Settings, load_settings
from sidecar.store.database import Database, set_flag
from sidecar.store.models import AdapterRow, GroupRow
from sidecar.store.tables import add_counts
from support.adapter_endpoints import MODEL, AdapterEndpoints, sound_vllm
from support.fake_judge import FakeJudge, score_by_content
from support.fake_load import FakeRoom
from support.fake_sampler import FakeSampler
from support.ingest_kit import make_choice, make_exchange
from support.kafka_broker import unclosed_sockets
from support.migrated_store import open_migrated
from tests.ingest.conftest import ScriptedServer, answer_with

KEY = "right-key"
Found = tuple[int, dict[str, Any]]


@pytest.fixture
def judge_url() -> Iterator[str]:
    """A judge behind a key, as an API of OpenAI's form."""
    scores = answer_with(score_by_content({}, otherwise=0.5))

    def answer(body: dict[str, Any]) -> tuple[Any, ...]:
        if server.headers[-1]["authorization"] == f"Bearer {KEY}":
            return scores(body)
        return 401, {"error": {"message": "Incorrect API key provided", "code": "x"}}

    with closing(ScriptedServer(answer)) as server:
        yield server.url


@pytest.fixture
def vllm() -> Iterator[tuple[str, AdapterEndpoints]]:
    with sound_vllm() as served:
        yield served


@dataclass
class Sidecar:
    """A folder with settings and a store, and the processes as far as a test moves them."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def configure(self, **sections: dict[str, Any]) -> None:
        for name, values in sections.items():
            self.sections.setdefault(name, {}).update(values)
        lines = [f'state_dir = "{self.folder}"']
        for name, values in self.sections.items():
            lines += [
                f"[{name}]",
                *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
            ]
        self.config.write_text("\n".join(lines))

    @property
    def config(self) -> Path:
        return self.folder / "sidecar.toml"

    @property
    def settings(self) -> Settings:
        return load_settings(self.config)

    def open(self) -> Database:
        path = self.folder / "store.db"
        return Database(f"sqlite:///{path}") if path.exists() else open_migrated(path)

    def serve(self, *exchanges: Exchange) -> None:
        """Through the outbox and ingest."""
        outbox = Outbox(self.folder / "outbox.db", max_rows=100)
        outbox.write(exchanges)
        outbox.close()
        with closing(self.open()) as database, closing(open_bus(self.settings.bus.url)) as bus:
            facts = EngineFacts(defaults=frozenset(), grammar="as_asked")
            watch = EngineWatch(
                self.settings.serving, ask=lambda *_: facts, start=lambda work: work()
            )
            intake = Intake(bus, database, self.settings, engine=watch)
            for _ in range(3):
                intake.step()

    def score(self, *scores: float) -> None:
        """Through the workers of score. scores: of the served and the sampled answers."""
        with closing(self.open()) as database:
            table = {"served": scores[0], "other": scores[-1]}
            sampling = SamplingWorker(
                database,
                FakeSampler(lambda _: "other"),
                FakeRoom(),
                self.settings.groups,
                model=MODEL,
            )
            judge = FakeJudge(score_by_content(table), model="scripted")
            judging = JudgingWorker(database, judge, self.settings.judge, clock=time.time)

            async def work() -> None:
                for _ in range(4):
                    await sampling.step()
                    await judging.step()

            asyncio.run(work())

    def doctor(self, *options: str) -> Found:
        self.capsys.readouterr()
        # A slow machine needs long to load the libraries of judge and learner.
        asked = ["--config", str(self.config), "doctor", "-o", "json", "--limit", "600", *options]
        code = main(asked)
        said = self.capsys.readouterr()
        assert said.out, said.err
        return code, json.loads(said.out)


@pytest.fixture
def sidecar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sidecar:
    made = Sidecar(tmp_path, capsys)
    made.configure(
        serving={"model": MODEL, "base_model_path": f"{tmp_path}/weights"},
        proxy={"port": free_port()},
        admin={"port": free_port()},
        store={"url": f"sqlite:///{tmp_path}/store.db"},
        bus={"url": f"sqlite:///{tmp_path}/outbox.db"},
        groups={"settle_s": 0.0, "held_out_rate": 0.0, "size": 2},
        judge={"model": "openai/judge"},
        learner={"min_groups": 2, "adapters_dir": f"{tmp_path}/adapters"},
    )
    return made


@pytest.fixture
def online(sidecar: Sidecar, vllm: tuple[str, AdapterEndpoints], judge_url: str) -> Sidecar:
    """All that it needs is there."""
    sidecar.configure(
        serving={"upstreams": [vllm[0]], "base_model_path": str(base_of(sidecar.folder))},
        judge={"api_base": judge_url, "api_key": KEY},
    )
    return sidecar


def base_of(folder: Path) -> Path:
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama"}')
    (base / "model.safetensors").touch()
    return base


def exchange(number: int, **changes: Any) -> Exchange:
    now = Timings(started_at=time.time())
    return make_exchange(f"e{number}", **{"public_model": MODEL, "timings": now, **changes})


def stop_of(found: Found) -> tuple[int, str, str]:
    return found[0], found[1]["stops_at"], found[1]["cause"]


def test_a_fresh_sound_system_waits_for_its_start(online: Sidecar) -> None:
    code, found = online.doctor()

    assert (code, found["diagnoses"]) == (0, []), found
    assert found["waits_for"] == "the proxy: start it with `sidecar up`"
    assert not (online.folder / "store.db").exists()


def test_a_system_whose_records_come_to_the_learner_has_no_stop(
    sidecar: Sidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.serve(*(exchange(number) for number in range(5)))
    sidecar.score(1.0, 0.0)

    code, found = sidecar.doctor("--offline")
    text = main(["--config", str(sidecar.config), "doctor", "--offline"])

    assert (code, found["diagnoses"], text) == (0, [], 0)
    learning = found["stages"][5]
    assert (learning["entered"], learning["waiting"]) == (5, {"scored": 5})
    assert "Nothing stops records." in capsys.readouterr().out


def test_groups_that_fill_the_places_before_the_learner_stop_new_ones(sidecar: Sidecar) -> None:
    """One run takes two groups, so two wait; three of the five exchanges stay unchosen."""
    sidecar.configure(learner={"min_groups": 2, "max_groups": 2})
    sidecar.serve(*(exchange(number) for number in range(5)))
    sidecar.score(1.0, 0.0)

    found = sidecar.doctor("--offline")

    assert stop_of(found) == (1, "selection", "pile_up")
    (only,) = found[1]["diagnoses"]
    assert "2 wait (2 for the learner)" in only["text"]
    assert "3 suitable exchanges are not chosen" in only["text"]
    assert "learner.max_groups" in only["to_do"]


def test_groups_that_the_next_run_takes_are_waited_for_and_no_fault(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the test before, with a learner that runs and has a time."""
    monkeypatch.setattr("deploy.doctor.collect.is_held", lambda _, name: name == "learn")
    sidecar.configure(
        learner={"min_groups": 2, "max_groups": 2, "schedule": "cron", "cron": "0 3 * * *"}
    )
    sidecar.serve(*(exchange(number) for number in range(5)))
    sidecar.score(1.0, 0.0)

    code, found = sidecar.doctor("--offline")

    assert (code, found["diagnoses"]) == (0, [])
    assert "03:00 UTC, which makes room: no new group begins" in found["waits_for"]


def test_a_pile_up_whose_cause_is_named_is_not_named_again(sidecar: Sidecar) -> None:
    sidecar.configure(learner={"min_groups": 2, "max_groups": 2})
    sidecar.serve(*(exchange(number) for number in range(5)))
    sidecar.score(1.0, 0.0)
    with closing(Database(sidecar.settings.store.url)) as store, store.write() as session:
        set_flag(session, PAUSED_FLAG, "1", now=time.time())

    found = sidecar.doctor("--offline")

    assert [one["cause"] for one in found[1]["diagnoses"]] == ["paused"]


def test_a_fault_of_a_projects_line_is_told_with_the_project(sidecar: Sidecar) -> None:
    sidecar.configure(
        serving={"own_adapters": ["support"], "max_loras": 6}, access={"mode": "keys"}
    )
    sidecar.serve(*(exchange(number) for number in range(5)))
    sidecar.score(1.0, 0.0)
    own = f"{MODEL}@@support"
    with closing(Database(sidecar.settings.store.url)) as store, store.write() as session:
        set_flag(session, flag_of(PAUSED_FLAG, own), "1", now=time.time())
        session.add(
            AdapterRow(
                name=f"{own}--v1-0123456789ab",
                model=own,
                version=1,
                digest="d",
                path="/nowhere",
                parent="base",
                state="rejected",
                reason="too short",
                created_at=1.0,
            )
        )

    code, found = sidecar.doctor("--offline")

    told = [(one["cause"], one["project"]) for one in found["diagnoses"]]
    assert (code, told) == (1, [("paused", "support"), ("adapter_refused", "support")])
    assert "the learner of support" in found["diagnoses"][0]["text"]
    assert "--project support" in found["diagnoses"][0]["to_do"]
    serving = next(one for one in found["stages"] if one["name"] == "serving")
    assert serving["ended"] == {"rejected": 1}, "the adapters of all lines"


def test_a_wrong_key_of_the_judge(online: Sidecar) -> None:
    online.configure(judge={"api_key": "wrong-key"})

    found = online.doctor()

    assert stop_of(found) == (1, "judging", "judge_key")
    assert "Incorrect API key" in found[1]["diagnoses"][0]["text"]
    assert "wrong-key" not in json.dumps(found[1])


@pytest.mark.parametrize(
    ("path", "reply", "stage", "cause"),
    [
        ("/metrics", b"# HELP other\n", "serving", "no_lora"),
        ("/v1/chat/completions", b'{"choices": [{}]}', "selection", "no_token_ids"),
    ],
)
def test_a_vllm_that_lacks_what_learning_needs(
    online: Sidecar,
    vllm: tuple[str, AdapterEndpoints],
    path: str,
    reply: bytes,
    stage: str,
    cause: str,
) -> None:
    vllm[1].overrides[path] = (200, reply)

    assert stop_of(online.doctor()) == (1, stage, cause)


def test_a_vllm_that_fails_when_it_is_asked_for_log_probabilities(
    online: Sidecar, vllm: tuple[str, AdapterEndpoints]
) -> None:
    vllm[1].fails_on_logprobs = True

    found = online.doctor()

    assert stop_of(found) == (1, "selection", "fields_refused")
    assert "500: " in found[1]["diagnoses"][0]["text"]
    assert "list index out of range" in found[1]["diagnoses"][0]["text"]


@pytest.mark.parametrize(("refused", "stops"), [(2, False), (3, True)])
def test_exchanges_without_our_fields_show_in_the_store_by_their_vllm(
    sidecar: Sidecar, refused: int, stops: bool
) -> None:
    """One of several vLLMs may refuse: its records stop, whatever their share."""
    fields = {"untrainable_reason": "fields_refused", "replica": "http://one:8000"}
    sidecar.serve(*(exchange(number, **fields) for number in range(refused)))
    sidecar.serve(*(exchange(number + 10, replica="http://two:8000") for number in range(6)))
    mended = fields | {"replica": "http://mended:8000"}
    sidecar.serve(*(exchange(number + 20, **mended) for number in range(5)))
    well = (exchange(number + 30, replica="http://mended:8000") for number in range(MENDED))
    sidecar.serve(*well)

    code, found = sidecar.doctor("--offline")

    texts = [one["text"] for one in found["diagnoses"] if one["cause"] == "fields_refused"]
    assert len(texts) == stops
    if stops:
        assert "vLLM at http://one:8000 fails" in texts[0]
        assert f"; {refused} of the newest 200 exchanges" in texts[0]
        assert stop_of((code, found))[:2] == (1, "selection")


def test_agents_that_name_another_model(sidecar: Sidecar) -> None:
    with closing(sidecar.open()) as database, database.engine.begin() as connection:
        add_counts(connection, {("requests", "refused_unknown_model"): 3})

    code, found = sidecar.doctor("--offline")

    assert stop_of((code, found)) == (1, "requests", "refused_unknown_model")
    assert found["stages"][0]["ended"] == {"refused_unknown_model": 3}
    assert "`serving.model`" in found["diagnoses"][0]["to_do"]


def test_replies_without_token_ids_show_in_the_store_too(sidecar: Sidecar) -> None:
    without = {"choices": (make_choice(token_ids=()),), "untrainable_reason": "ids_missing"}
    sidecar.serve(*(exchange(number, **without) for number in range(4)))

    assert stop_of(sidecar.doctor("--offline")) == (1, "selection", "no_token_ids")


def test_a_kafka_where_nobody_listens(online: Sidecar) -> None:
    online.configure(bus={"url": f"kafka://127.0.0.1:{free_port()}/exchanges"})

    with unclosed_sockets():
        assert stop_of(online.doctor()) == (1, "bus", "kafka_away")


def test_temperature_0_everywhere(sidecar: Sidecar) -> None:
    greedy = Sampling(temperature=0.0, max_tokens=16)
    sidecar.serve(*(exchange(number, sampling=greedy) for number in range(4)))

    assert stop_of(sidecar.doctor("--offline")) == (1, "sampling", "temperature_zero")


def test_all_groups_tied(sidecar: Sidecar) -> None:
    sidecar.serve(*(exchange(number) for number in range(4)))
    sidecar.score(0.5, 0.5)
    with closing(sidecar.open()) as database, pytest.raises(NothingToLearnError):
        Run(
            sidecar.settings,
            database,
            lambda: pytest.fail("nothing to train"),
            run_id="r",
            clock=time.time,
        ).start()

    assert stop_of(sidecar.doctor("--offline")) == (1, "learning", "tied")


def test_groups_that_were_set_aside_before_most_were_scored_are_no_fault_of_now(
    sidecar: Sidecar,
) -> None:
    sidecar.serve(*(exchange(number) for number in range(12)))
    sidecar.score(1.0, 0.0)

    def set_aside(number: int) -> None:
        with closing(sidecar.open()) as database, database.write() as session:
            groups = session.scalars(select(GroupRow.group_id).order_by(GroupRow.seq)).all()
            old = update(GroupRow).where(GroupRow.group_id.in_(groups[:number]))
            session.execute(old.values(status="set_aside", reason="judge_rubbish"))

    set_aside(4)
    before = sidecar.doctor("--offline")
    set_aside(8)
    now = sidecar.doctor("--offline")

    assert (before[0], before[1]["diagnoses"]) == (0, [])
    assert stop_of(now) == (1, "judging", "judge_rubbish")
    assert "8 of the newest 12 groups that ended or were scored" in now[1]["diagnoses"][0]["text"]


def test_the_budget_is_spent(sidecar: Sidecar) -> None:
    sidecar.configure(groups={"tokens_per_day": 1, "concurrency": 1})
    sidecar.serve(*(exchange(number) for number in range(12)))
    sidecar.score(1.0, 0.0)

    found = sidecar.doctor("--offline")

    assert stop_of(found) == (1, "sampling", "budget_spent")
    assert found[1]["stages"][3]["waiting"]["sampling"] > 0


def test_a_proxy_whose_clock_is_an_hour_ahead(sidecar: Sidecar) -> None:
    ahead = Timings(started_at=time.time() + 3_600.0)
    sidecar.serve(*(exchange(number, timings=ahead) for number in range(3)))

    found = sidecar.doctor("--offline")

    assert stop_of(found) == (1, "bus", "clock_skew")
    assert "the clock of the proxy (against ingest)" in found[1]["diagnoses"][0]["text"]


def test_a_vllm_on_a_machine_whose_clock_is_behind(
    online: Sidecar, vllm: tuple[str, AdapterEndpoints]
) -> None:
    vllm[1].ahead_s = -7_200.0

    found = online.doctor()

    assert stop_of(found) == (1, "bus", "clock_skew")
    assert "behind" in found[1]["diagnoses"][0]["text"]


def test_a_schedule_that_never_comes(sidecar: Sidecar) -> None:
    sidecar.configure(learner={"schedule": "cron", "cron": "0 0 30 2 *"})

    assert stop_of(sidecar.doctor("--offline")) == (1, "learning", "schedule_never_due")


@pytest.mark.parametrize(
    ("section", "name", "stage", "cause"),
    [
        ("judge", "model", "sampling", "no_judge"),
        ("serving", "base_model_path", "learning", "base_model"),
    ],
)
def test_a_setting_that_is_empty_is_named_without_asking_anybody(
    sidecar: Sidecar, section: str, name: str, stage: str, cause: str
) -> None:
    sidecar.configure(**{section: {name: ""}})

    found = sidecar.doctor("--offline")

    assert stop_of(found) == (1, stage, cause)
    assert found[1]["diagnoses"][0]["text"].startswith(f"{section}.{name}: ")


HOOK = {"kind": "http", "url": "http://127.0.0.1:9/check", "on_error": "hold"}


def test_a_verifier_where_nobody_listens(online: Sidecar) -> None:
    online.configure(**{"reward.verifiers.policy": HOOK})

    found = online.doctor()

    assert stop_of(found) == (1, "judging", "verifier_fails"), found
    assert found[1]["diagnoses"][0]["text"] == (
        "reward.verifiers.policy.url: the verifier gives no finding (unreachable: ConnectError), "
        "so groups wait for it"
    )


def test_a_judge_that_is_not_as_it_was(sidecar: Sidecar) -> None:
    sidecar.serve(*(exchange(number) for number in range(5)))
    sidecar.score(1.0, 0.0)
    known = NoiseState(
        at=5.0, judge_model="openai/judge", rubric_hash=rubric_hash(sidecar.settings.judge.rubric),
        passes=2, groups=50, sd=0.04, drift="changed by 0.107",
    )  # fmt: skip
    with closing(sidecar.open()) as database, database.write() as session:
        write_noise_state(session, known)

    drifted = sidecar.doctor("--offline")
    sidecar.configure(judge={"model": "openai/another"})
    another = sidecar.doctor("--offline")

    assert stop_of(drifted) == (1, "judging", "judge_drift")
    (found,) = drifted[1]["diagnoses"]
    assert "changed by 0.107" in found["text"]
    assert "`sidecar judge noise` has the figures, and with `--accept`" in found["to_do"]
    assert another[1]["diagnoses"] == []


async def test_an_adapter_rank_above_what_vllm_takes(
    world: Any, sidecar: Sidecar, vllm: tuple[str, AdapterEndpoints]
) -> None:
    url, endpoints = vllm
    del endpoints.overrides["/v1/load_lora_adapter"]
    name = world.register(1)
    path = str(world.folder / "adapter-1")
    endpoints.bad_paths[path] = (400, "LoRA rank 4 is greater than max_lora_rank 2.")
    sidecar.configure(store={"url": world.database.url})
    async with httpx.AsyncClient(base_url=url) as client:
        world.control = VllmControl(client)
        await world.controller().tick()
        waits = await asyncio.to_thread(sidecar.doctor, "--offline")
        while world.canary(name).active:
            world.clock.now += 128.0
            await world.controller().tick()

    ended = await asyncio.to_thread(sidecar.doctor, "--offline")

    for found in (waits, ended):
        assert stop_of(found) == (1, "serving", "rank_too_high")
        assert name in found[1]["diagnoses"][0]["text"]


async def test_an_adapter_that_vllm_has_no_memory_for(world: Any, sidecar: Sidecar) -> None:
    name = world.register(1)
    world.control.fails_to_load = 1_000
    sidecar.configure(store={"url": world.database.url})
    for _ in range(8):
        await world.controller().tick()
        world.clock.now += 128.0

    found = await asyncio.to_thread(sidecar.doctor, "--offline")

    assert stop_of(found) == (1, "serving", "adapter_refused")
    assert "vLLM failed to load it 8 times" in found[1]["diagnoses"][0]["text"]
    assert f"then `sidecar canary start {name}`" in found[1]["diagnoses"][0]["to_do"]


def test_a_file_that_is_no_store_is_named(sidecar: Sidecar) -> None:
    (sidecar.folder / "store.db").write_bytes(b"no database" * 100)

    assert stop_of(sidecar.doctor("--offline")) == (1, "bus", "store_away")


def test_bad_use_and_unsound_settings_are_2(
    sidecar: Sidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    sidecar.configure(learner={"rank": 512})

    assert main(["--config", str(sidecar.config), "doctor"]) == 2
    assert "learner.rank" in capsys.readouterr().err
    assert main(["doctor", "--loud"]) == 2

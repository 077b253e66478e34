"""One run over the store: what it takes, what it leaves, and what each failure does."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from learner.adapter_folder import CARD, CONFIG, LINEAGE, WEIGHTS, folder_digest
from learner.errors import (
    AlteredParentError,
    DriftError,
    FullDiskError,
    NothingToLearnError,
    ParentError,
    RankLostError,
    RunStoppedError,
    UnpublishedError,
)
from learner.records import CheckedAnswers, Fault, TrainingJob
from learner.resume import CLAIMED, WorkFolder
from learner.runs import publish, train
from learner.runs.runs import abandon
from sidecar.errors import StoreError
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, GroupRow, RunRow
from support.clock import Clock
from tests.learner.conftest import (
    FakeTrainer,
    NewRun,
    PutGroup,
    PutVersion,
    counters,
    group_outcomes,
    make_answer,
    make_scored_group,
    put_noise,
)


def run_row(database: Database, run_id: str = "r1") -> RunRow:
    with database.read() as session:
        return session.get_one(RunRow, run_id)


def versions(database: Database) -> list[AdapterRow]:
    with database.read() as session:
        return list(session.scalars(select(AdapterRow).order_by(AdapterRow.version)))


def adapter_folders(settings: Settings) -> list[str]:
    folder = settings.learner.adapters_dir
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


@pytest.mark.usefixtures("two_groups")
def test_a_run_registers_a_version_and_closes_its_books(
    new_run: NewRun,
    database: Database,
    settings: Settings,
    fake_trainer: FakeTrainer,
    put_group: PutGroup,
) -> None:
    put_group(make_scored_group([0.5, 0.5], group_id="flat"))

    candidate = new_run().start()

    assert (candidate.version, candidate.parent) == (1, "base")
    assert candidate.adapter == f"m--v1-{candidate.digest[:12]}"
    (version,) = versions(database)
    assert (version.state, version.run_id) == ("registered", "r1")
    assert folder_digest(Path(version.path)) == version.digest
    assert {entry.name for entry in Path(version.path).iterdir()} == {
        CARD,
        CONFIG,
        LINEAGE,
        WEIGHTS,
    }
    assert adapter_folders(settings) == [candidate.digest]
    assert group_outcomes(database) == {
        "a": ("trained", None),
        "b": ("trained", None),
        "flat": ("dropped", "no_spread"),
    }
    assert counters(database) == {"trained": 2, "no_spread": 1}
    row = run_row(database)
    assert (row.status, row.adapter, row.parent) == ("finished", candidate.adapter, "base")
    assert row.counts == {"used": 2, "no_spread": 1}
    assert fake_trainer.jobs[0].quiet == 1
    assert [step["loss"] for step in row.metrics] == [0.1]


@pytest.mark.usefixtures("two_groups")
def test_the_lineage_tells_what_it_was_made_from(new_run: NewRun, tiny_base: Path) -> None:
    candidate = new_run().start()

    lineage = json.loads((candidate.path / LINEAGE).read_text())
    assert lineage["run_id"] == "r1"
    assert lineage["base_model"] == str(tiny_base)
    assert lineage["parent"] == {"name": "base", "version": 0, "digest": ""}
    assert [group["group_id"] for group in lineage["groups"]] == ["b", "a"]
    assert lineage["groups"][1]["exchange_id"] == "x-a"
    assert lineage["groups"][1]["scores"] == lineage["groups"][1]["rewards"] == [0.0, 1.0]
    assert lineage["groups"][1]["independent_rewards"] == []
    assert lineage["groups"][1]["reward_rule"] is None
    assert lineage["judges"] == [["judge", "rubric"]]
    assert lineage["settings"]["rank"] == 4
    assert lineage["libraries"].keys() >= {"torch", "peft", "transformers"}
    assert lineage["drift"]["mean_abs"] == 0.01
    assert lineage["algorithm"] == {"loss": "fake"}
    assert "base_model:" in (candidate.path / CARD).read_text()


@pytest.mark.both_stores
@pytest.mark.usefixtures("two_groups")
def test_a_group_within_the_judges_noise_is_left_out_and_the_lineage_has_the_figure(
    new_run: NewRun, database: Database, put_group: PutGroup
) -> None:
    put_group(make_scored_group([0.50, 0.60], group_id="noise"))  # spread 0.05, under 0.0693
    put_noise(database, 0.05)

    candidate = new_run().start()

    assert group_outcomes(database)["noise"] == ("dropped", "within_noise")
    assert counters(database) == {"trained": 2, "within_noise": 1}
    with database.read() as session:
        row = session.scalars(select(GroupRow).where(GroupRow.group_id == "noise")).one()
    assert row.detail == "least 0.0693, by judge noise of sd 0.0500"
    lineage = json.loads((candidate.path / LINEAGE).read_text())
    assert [one["least_spread"] for one in lineage["groups"]] == pytest.approx(
        [0.0693] * 2, abs=1e-4
    )
    assert [one["noise_sd"] for one in lineage["groups"]] == pytest.approx([0.05, 0.05])
    assert len({one["reference_spread"] for one in lineage["groups"]}) == 1
    assert lineage["groups"][0]["reference_spread"] <= 0.25
    (noise,) = lineage["judge_noise"]
    assert (noise["sd"], noise["groups"], noise["passes"]) == (pytest.approx(0.05), 50, 1)
    assert (noise["judge_model"], noise["rubric_hash"]) == ("judge", "rubric")


@pytest.mark.usefixtures("two_groups")
def test_the_next_run_starts_from_the_champion(
    new_run: NewRun, put_version: PutVersion, fake_trainer: FakeTrainer, tmp_path: Path
) -> None:
    champion = put_version(4, champion=True)

    candidate = new_run().start()

    assert fake_trainer.jobs[0].parent.name == champion
    assert fake_trainer.jobs[0].parent.path == tmp_path / "adapter-4"
    assert (candidate.parent, candidate.version) == (champion, 5)
    parent = json.loads((candidate.path / LINEAGE).read_text())["parent"]
    assert (parent["name"], parent["version"]) == (champion, 4)
    assert parent["digest"] == folder_digest(tmp_path / "adapter-4")


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("when", ["before the run", "while it trains"])
def test_a_parent_that_was_changed_gives_no_version(
    new_run: NewRun,
    put_version: PutVersion,
    database: Database,
    fake_trainer: FakeTrainer,
    tmp_path: Path,
    when: str,
) -> None:
    champion = put_version(4, champion=True)
    weights = tmp_path / "adapter-4" / WEIGHTS
    if when == "before the run":
        flip_a_bit(weights)
    else:
        fake_trainer.on_train = lambda job: flip_a_bit(weights)

    with pytest.raises(AlteredParentError, match=f"parent {champion}: .* was changed"):
        new_run().start()

    assert len(fake_trainer.jobs) == (when != "before the run")
    assert [row.name for row in versions(database)] == [champion]
    assert group_outcomes(database) == {"a": ("scored", None), "b": ("scored", None)}
    assert counters(database) == {"parent_altered": 1}
    assert run_row(database).status == "failed"
    assert "restore the folder from a backup" in str(run_row(database).reason)


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("what", [CONFIG, WEIGHTS, "."])
def test_a_parent_behind_a_link_is_not_trained_on(
    new_run: NewRun,
    put_version: PutVersion,
    fake_trainer: FakeTrainer,
    tmp_path: Path,
    what: str,
) -> None:
    put_version(4, champion=True)
    real = tmp_path / "adapter-4" / what
    moved = tmp_path / "moved"
    real.resolve().rename(moved)
    (tmp_path / "adapter-4" / what if what != "." else tmp_path / "adapter-4").symlink_to(moved)

    with pytest.raises(ParentError, match="is a symbolic link"):
        new_run().start()

    assert fake_trainer.jobs == []


def test_masked_answers_are_counted_by_reason(
    new_run: NewRun, database: Database, put_group: PutGroup, fake_trainer: FakeTrainer
) -> None:
    answers = [make_answer(0, untrainable_reason="top_p"), make_answer(1), make_answer(2)]
    put_group(make_scored_group([0.0, 1.0, 0.5], group_id="a", answers=answers))
    put_group(make_scored_group([0.0, 1.0, 0.5], group_id="b"))
    put_group(make_scored_group([0.0, 1.0, math.inf], group_id="c"))

    candidate = new_run().start()

    assert counters(database) == {
        "trained": 3,
        "answer_masked_top_p": 1,
        "answer_masked_non_finite_score": 1,
    }
    groups = json.loads((candidate.path / LINEAGE).read_text(), parse_constant=pytest.fail)[
        "groups"
    ]
    (damaged,) = (group for group in groups if group["group_id"] == "c")
    assert damaged["scores"] == [0.0, 1.0, None]
    assert damaged["masked"] == [None, None, "non_finite_score"]
    (job,) = fake_trainer.jobs
    assert job.masked == {"a": {0: "top_p"}, "b": {}, "c": {2: "non_finite_score"}}


def test_what_the_check_decided_is_counted_and_in_the_lineage(
    new_run: NewRun,
    database: Database,
    settings: Settings,
    put_group: PutGroup,
    fake_trainer: FakeTrainer,
) -> None:
    """Free and masked tokens are those of the restricted group alone."""
    answers = [
        make_answer(0, untrainable_reason="lengths_differ", logprobs=()),
        make_answer(1),
        make_answer(2),
    ]
    put_group(make_scored_group([0.0, 1.0, 0.5], group_id="a", answers=answers))
    put_group(make_scored_group([0.0, 1.0, 0.5], group_id="b", masked_by="masked_by_tool_choice"))
    fake_trainer.answers = {
        "a": CheckedAnswers(recomputed=(0,), tokens=9),
        "b": CheckedAnswers(
            left_out={0: "all_tokens_masked"}, masked_tokens={1: 2, 2: 1}, tokens=3
        ),
    }

    new_run().start()

    assert fake_trainer.jobs[0].groups[0].masked_by == "masked_by_tool_choice"
    assert counters(database) == {
        "trained": 2,
        "answer_masked_all_tokens_masked": 1,
        "free_tokens": 3,
        "masked_tokens": 3,
    }
    assert run_row(database).counts == {"used": 2, "free_tokens": 3, "masked_tokens": 3}
    (folder,) = adapter_folders(settings)
    lineage = json.loads((settings.learner.adapters_dir / folder / "lineage.json").read_text())
    of = {one["group_id"]: one for one in lineage["groups"]}
    assert of["a"]["masked"] == [None, None, None]
    assert of["a"]["recomputed"] == [0]
    assert of["a"]["masked_by"] is None
    assert of["b"]["masked_by"] == "masked_by_tool_choice"
    assert of["b"]["masked"] == ["all_tokens_masked", None, None]
    assert of["b"]["masked_tokens"] == [0, 2, 1]


def test_too_few_groups_are_nothing_to_learn(
    new_run: NewRun, database: Database, put_group: PutGroup, fake_trainer: FakeTrainer
) -> None:
    put_group(make_scored_group([0.0, 1.0]))

    with pytest.raises(NothingToLearnError, match=r"1 fresh scored groups wait.*min_groups is 2"):
        new_run().start()

    assert run_row(database).status == "skipped"
    assert group_outcomes(database) == {"g": ("scored", None)}
    assert not fake_trainer.jobs


def test_useless_groups_are_dropped_though_nothing_is_learned(
    new_run: NewRun, database: Database, settings: Settings, put_group: PutGroup
) -> None:
    for group_id in ("a", "b"):
        put_group(make_scored_group([0.5, 0.5], group_id=group_id))

    with pytest.raises(NothingToLearnError, match="no group was usable; dropped: 2 no_spread"):
        new_run().start()

    assert group_outcomes(database) == {
        "a": ("dropped", "no_spread"),
        "b": ("dropped", "no_spread"),
    }
    assert counters(database) == {"no_spread": 2}
    assert run_row(database).counts == {"used": 0, "no_spread": 2}
    assert adapter_folders(settings) == []


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DriftError("0.3 nats"), "DriftError: 0.3 nats"),
        (MemoryError("none left"), "MemoryError: out of memory (none left); lower learner.pack"),
    ],
)
def test_whatever_goes_wrong_the_groups_go_back_and_nothing_is_registered(
    new_run: NewRun,
    database: Database,
    settings: Settings,
    fake_trainer: FakeTrainer,
    error: Exception,
    reason: str,
) -> None:
    fake_trainer.error = error

    with pytest.raises(type(error)):
        new_run().start()

    row = run_row(database)
    assert row.status == "failed"
    assert (row.reason or "").startswith(reason)
    assert group_outcomes(database) == {"a": ("scored", None), "b": ("scored", None)}
    assert versions(database) == []
    assert adapter_folders(settings) == []
    assert counters(database) == {}


@pytest.mark.usefixtures("two_groups")
def test_a_run_that_lost_one_of_its_processes_goes_on_and_names_the_group(
    new_run: NewRun, database: Database, fake_trainer: FakeTrainer
) -> None:
    fake_trainer.error = RankLostError("process 1 is gone", {"b": Fault("failed_runs", "killed")})
    for number in range(3):
        run = new_run(f"r{number}")
        with pytest.raises(RankLostError):
            run.start()
        assert (run.run_id, run.left) == ("r0", "broken")
    row = run_row(database, "r0")
    assert (row.status, row.place) == ("running", "b")
    assert row.reason == "RankLostError: process 1 is gone; the next start goes on with it"

    fake_trainer.error = None
    with pytest.raises(NothingToLearnError):  # one group is left of two
        new_run("r9").start()

    assert group_outcomes(database)["b"] == ("dropped", "failed_runs")


@pytest.mark.usefixtures("two_groups")
def test_a_run_that_lost_its_lease_registers_nothing(
    new_run: NewRun,
    database: Database,
    settings: Settings,
    fake_trainer: FakeTrainer,
    clock: Clock,
) -> None:
    def lose(job: TrainingJob) -> None:
        with database.write() as session:
            abandon(session, "r1", "taken over", now=clock.now)
        pause = threading.Event()
        while not pause.wait(0.005):
            job.check_stop()

    fake_trainer.on_train = lose

    with pytest.raises(RunStoppedError, match="took over"):
        new_run().start()

    assert run_row(database).reason == "taken over"
    assert versions(database) == []
    assert adapter_folders(settings) == []


def test_the_same_weights_are_not_registered_twice(
    new_run: NewRun, database: Database, settings: Settings, put_group: PutGroup
) -> None:
    for number in range(4):
        put_group(make_scored_group([0.0, 1.0], group_id=str(number)))
    first = new_run("r1", max_groups=2).start()

    second = new_run("r2", max_groups=2).start()

    assert second == first
    assert len(versions(database)) == 1
    assert adapter_folders(settings) == [first.digest]
    assert json.loads((first.path / LINEAGE).read_text())["run_id"] == "r1"
    row = run_row(database, "r2")
    assert (row.status, row.adapter) == ("finished", first.adapter)
    assert "not registered again" in (row.reason or "")


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("stays", [True, False], ids=["full", "full for a moment"])
def test_a_store_that_fails_at_the_publishing_commit_leaves_the_run_to_be_resumed(
    new_run: NewRun,
    database: Database,
    settings: Settings,
    clock: Clock,
    fake_trainer: FakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    stays: bool,
) -> None:
    """stays: the store cannot be written afterwards either, so the lease is not given back."""
    digests: list[str] = []

    def step(job: TrainingJob) -> None:
        assert job.checkpoints is not None
        job.checkpoints.keep(lambda folder: None)

    def full(*_: object, **__: object) -> None:
        raise StoreError("database or disk is full")

    def place(*given: Any) -> Path:
        path = publish_place(*given)
        digests.append(path.name)
        patch.setattr(train, "end_run", full)
        if stays:
            patch.setattr("learner.runs.interrupted.holds", full)
        return path

    publish_place = publish.place
    fake_trainer.on_train = step
    with monkeypatch.context() as patch:
        patch.setattr(publish, "place", place)
        run = new_run("r1")
        with pytest.raises(UnpublishedError, match=r"disk is full; .*goes on with it"):
            run.start()

    assert run.left == "stopped"
    assert (run_row(database).status, versions(database)) == ("running", [])
    assert group_outcomes(database) == {"a": ("claimed", None), "b": ("claimed", None)}
    newest = WorkFolder(settings.learner.adapters_dir, "r1").newest()
    assert newest is not None

    fake_trainer.on_train = lambda job: None
    clock.now += 3600
    resumed = new_run("r2")
    candidate = resumed.start()

    assert (resumed.run_id, [candidate.digest]) == ("r1", digests)
    assert adapter_folders(settings) == digests
    assert [row.name for row in versions(database)] == [candidate.adapter]
    assert group_outcomes(database) == {"a": ("trained", None), "b": ("trained", None)}


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize("where", ["in the trainer", "in the lineage"])
def test_a_disk_that_is_full_behind_a_step_leaves_the_run_to_be_resumed(
    new_run: NewRun,
    database: Database,
    settings: Settings,
    fake_trainer: FakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    def step(job: TrainingJob) -> None:
        assert job.checkpoints is not None
        job.checkpoints.keep(lambda folder: None)
        (job.folder / "half").write_text("x")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    adapters_dir = settings.learner.adapters_dir
    fake_trainer.on_train = step
    with monkeypatch.context() as patch:
        patch.setattr(
            *(
                (fake_trainer, "error", OSError(28, "No space left on device"))
                if where == "in the trainer"
                else (train, "write_documents", full)
            )
        )
        with pytest.raises(FullDiskError) as caught:
            new_run("r1").start()

    said = f"{adapters_dir} cannot be written: no space left on device; free space there"
    assert str(caught.value) == said
    assert run_row(database).reason == f"{said}; the next start goes on with it"
    assert group_outcomes(database) == {"a": ("claimed", None), "b": ("claimed", None)}
    work = WorkFolder(adapters_dir, "r1")
    assert sorted(one.name for one in work.path.iterdir()) == ["000001", CLAIMED, "run.json"]

    fake_trainer.on_train = lambda job: None
    resumed = new_run("r2")
    candidate = resumed.start()

    assert (resumed.run_id, adapter_folders(settings)) == ("r1", [candidate.digest])
    assert group_outcomes(database) == {"a": ("trained", None), "b": ("trained", None)}


@pytest.mark.usefixtures("two_groups")
@pytest.mark.parametrize(
    ("name", "text", "goes_on"),
    [
        ("run.json", '{"noise": [], "fingerprint": null}', False),
        ("run.json", '{"noise": [], "fingerprint": [1]}', False),
        ("run.json", '{"noise": [], "fingerprint": {"settings": 1}}', False),
        (CLAIMED, '{"fresh": 1}', False),
        (CLAIMED, '{"group_ids": ["a"], "fresh": 1, "unclaimed": {}}', True),
    ],
)
def test_a_damaged_work_folder_leaves_no_group_behind(
    name: str,
    text: str,
    goes_on: bool,
    new_run: NewRun,
    database: Database,
    settings: Settings,
    fake_trainer: FakeTrainer,
    put_group: PutGroup,
) -> None:
    run = new_run("r1", min_groups=1)
    fake_trainer.on_train = lambda job: run.stop()
    with pytest.raises(RunStoppedError):
        run.start()
    fake_trainer.on_train = lambda job: None
    work = WorkFolder(settings.learner.adapters_dir, "r1").path
    (work / name).write_text(text)
    if goes_on:
        (work / "run.json").unlink()
    with database.write() as session:
        session.get_one(RunRow, "r1").deaths = [1]

    after = new_run("r2", min_groups=1)
    after.start()

    assert after.run_id == ("r1" if goes_on else "r2")
    assert len(run_row(database).deaths or []) == goes_on
    left = {"b": ("scored", None)} if goes_on else {"b": ("trained", None)}
    assert group_outcomes(database) == {"a": ("trained", None), **left}


@pytest.mark.usefixtures("two_groups")
def test_a_run_that_waits_for_the_store_can_be_stopped(
    new_run: NewRun, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> None:
        raise StoreError("database is locked")

    monkeypatch.setattr(train, "find_published", locked)
    monkeypatch.setattr(publish, "PUBLISH_PAUSE_S", 0.01)
    run = new_run()
    threading.Timer(0.1, run.stop).start()

    with pytest.raises(RunStoppedError):
        run.start()

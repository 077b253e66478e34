"""Retention of adapter folders: what stays whatever its age, what goes, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from sqlalchemy import update

from deploy.adapters import prune as pruning
from deploy.adapters.prune import DAY_S, DEAD_FETCH_S, REMOVED, TRASH, FolderRule, Pruner
from deploy.canary.controller import Controller
from deploy.cli.adapters import import_adapter
from deploy.engine.validation import ServingLimits
from deploy.errors import TransitionError
from deploy.forgetting import retire_adapters
from deploy.line_loops import make_folder_of
from deploy.registry import bans, transitions, versions
from deploy.registry.rollback import RollbackResult, rollback
from learner.adapter_folder import CARD, LINEAGE, WEIGHTS, folder_digest
from learner.resume import remove_folder
from learner.shared_folders import FETCHING, MANIFEST, shared_folders
from sidecar.lines import Line
from sidecar.records import BASE
from sidecar.settings import Learner, Serving, Settings, Store
from sidecar.settings.training import Adapters
from sidecar.store.models import AdapterRow, AuditRow, RoutingRow, UnwantedAdapterRow
from support.adapter_endpoints import MODEL
from support.finished_run import finished_run
from tests.deploy.conftest import World, write_adapter

LONG = 1_000 * DAY_S
"""Far beyond any number of days of these tests."""
RULE = FolderRule(folder_days=30, keep_champions=2)


@dataclass
class Folders:
    """Published versions with folders as a run leaves them."""

    world: World
    adapters_dir: Path

    def publish(self, version: int, *, parent: str = BASE, state: str = "rejected") -> str:
        work = self.adapters_dir / f"work-{version}"
        digest = write_adapter(work, values=(version, -0.5))
        (work / LINEAGE).write_text(json.dumps({"run_id": f"run-{version}"}))
        (work / CARD).write_text("# card")
        for file in work.iterdir():
            file.chmod(0o444)
        path = self.adapters_dir / digest
        work.rename(path)
        path.chmod(0o555)
        name = f"{MODEL}--v{version}-{digest[:12]}"
        self.world.add_version(name, version, path, digest, parent=parent, state=state)
        return name

    def promote(self, name: str) -> None:
        now = self.world.clock.now
        with self.world.database.write() as session:
            begun = transitions.begin(
                session, model=MODEL, candidate=name, steps=(10_000,), now=now, actor="t"
            )
            row = self.world.canary_row(session, name)
            row.state = "ramping"
            session.flush()
            transitions.promote(session, row, reason="good", now=now, actor=begun.canary_id)

    def point(self, alias: str, name: str) -> None:
        with self.world.database.write() as session:
            versions.move_alias(
                session, model=MODEL, alias=alias, to=name, now=0.0, actor="t", reason="r"
            )

    def roll_back(self, to: str) -> RollbackResult:
        world = self.world
        return rollback(world.database, MODEL, to=to, reason="r", actor="t", now=world.clock.now)

    def pruner(self, rule: FolderRule = RULE) -> Pruner:
        return Pruner(database=self.world.database, adapters_dir=self.adapters_dir, rule=rule)

    def prune(self, rule: FolderRule = RULE, *, loaded: tuple[str, ...] = ()) -> set[str]:
        """Prune after a long time. Returns: versions whose folders are there."""
        self.pruner(rule).prune(now=self.world.clock.now + LONG, actor="t", loaded=loaded)
        return self.there()

    def there(self) -> set[str]:
        return {row.name for row in self.world.rows(AdapterRow) if Path(row.path).is_dir()}

    def kept_because(self, name: str) -> str:
        found = self.pruner().plan(now=self.world.clock.now + LONG)
        return next(one.why for one in found.fates if one.version.name == name and not one.goes)


@pytest.fixture
def folders(world: World, tmp_path: Path) -> Folders:
    (tmp_path / "adapters").mkdir()
    return Folders(world, tmp_path / "adapters")


def test_what_nothing_needs_goes_and_its_documents_manifest_and_row_stay(folders: Folders) -> None:
    name = folders.publish(1)
    folder = Path(folders.world.adapter(name).path)
    size = sum(one.stat().st_size for one in folder.iterdir())

    done = folders.pruner().prune(now=folders.world.clock.now + LONG, actor="t")

    version = folders.world.adapter(name)
    assert not folder.exists()
    assert done.freed_bytes == size
    assert version.removed_at == folders.world.clock.now + LONG
    kept = folders.adapters_dir / REMOVED / version.digest
    assert sorted(one.name for one in kept.iterdir()) == [CARD, "adapter_config.json", LINEAGE]
    assert {one.name for one in folders.adapters_dir.iterdir()} == {REMOVED}
    (told,) = [row for row in folders.world.rows(AuditRow) if row.action == pruning.ACTION]
    assert told.subject == name
    assert [one["path"] for one in told.after["files"]] == [
        CARD, "adapter_config.json", WEIGHTS, LINEAGE
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["registered", "gating", "ramping", "champion"])
def test_a_version_that_waits_or_serves_stays(folders: Folders, state: str) -> None:
    name = folders.publish(1, state=state)

    assert folders.prune() == {name}


@pytest.mark.parametrize("alias", ["champion", "previous", "anchor", "canary"])
def test_what_an_alias_names_stays_and_its_parent(folders: Folders, alias: str) -> None:
    grandparent = folders.publish(1)
    parent = folders.publish(2, parent=grandparent)
    name = folders.publish(3, parent=parent)
    folders.point(alias, name)

    assert folders.prune() == {name, parent}


def test_the_last_champions_stay_and_older_ones_go(folders: Folders) -> None:
    names = [folders.publish(version) for version in (1, 2, 3, 4)]
    for name in names:
        folders.promote(name)
        folders.world.clock.now += 1.0
    folders.roll_back(BASE)

    assert folders.prune(FolderRule(folder_days=30, keep_champions=3)) == set(names[1:])
    assert folders.prune() == set(names[2:])


def test_what_a_run_continues_stays(folders: Folders) -> None:
    parent, other = folders.publish(1), folders.publish(2)
    with folders.world.database.write() as session:
        session.add(finished_run("r", model=MODEL, status="running", parent=parent))

    assert folders.kept_because(parent) == "the run r needs it"
    assert folders.prune() == {parent}
    assert other not in folders.there()


@pytest.mark.parametrize("phase", ["queued", "ramping"])
def test_what_a_canary_tries_and_compares_with_stays(folders: Folders, phase: str) -> None:
    names = [folders.publish(version) for version in (1, 2, 3)]
    with folders.world.database.write() as session:
        transitions.begin(
            session, model=MODEL, candidate=names[0], steps=(10_000,), now=0.0, actor="t"
        )
        row = folders.world.canary_row(session, names[0])
        row.state, row.champion = phase, names[1]
        versions.drop_alias(
            session, model=MODEL, alias="canary", now=0.0, actor="t", reason="of this test"
        )
        session.get_one(AdapterRow, names[0]).state = "retired"

    assert folders.prune() == set(names[:2])


def test_what_a_vllm_has_loaded_stays(folders: Folders) -> None:
    draining, loaded, other = (folders.publish(version) for version in (1, 2, 3))
    with folders.world.database.write() as session:
        session.add(UnwantedAdapterRow(replica="x", adapter=draining, since=0.0))

    assert folders.prune(loaded=(loaded,)) == {draining, loaded}
    assert other not in folders.there()


def test_what_the_routing_table_names_stays(folders: Folders) -> None:
    name = folders.publish(1)
    folders.promote(name)
    with folders.world.database.write() as session:
        session.query(RoutingRow).one()
        session.execute(update(AdapterRow).values(state="retired"))
    for alias in ("champion", "previous"):
        folders.point(alias, BASE)

    assert "routing table" in folders.kept_because(name)


@pytest.mark.parametrize(
    ("days", "goes", "why"),
    [
        (29.6, False, "used 29 days ago, adapters.folder_days is 30"),
        (30.0, True, "unused for 30 days"),
        (0.99, False, "used 23 h ago, adapters.folder_days is 30"),
    ],
)
def test_an_age_below_the_rule_does_not_look_as_if_it_had_reached_it(
    folders: Folders, days: float, goes: bool, why: str
) -> None:
    folders.publish(1)

    done = folders.pruner().prune(now=folders.world.clock.now + days * DAY_S, actor="t")

    [fate] = done.fates
    assert (fate.goes, fate.why) == (goes, why)
    assert len(folders.there()) == (not goes)


def test_days_count_from_when_it_lost_its_alias(folders: Folders) -> None:
    names = [folders.publish(version) for version in (1, 2, 3)]
    for name in names:
        folders.world.clock.now += 100 * DAY_S
        folders.promote(name)
    folders.roll_back(BASE)
    lost_at = folders.world.clock.now - 100 * DAY_S  # v2 took its place

    folders.pruner(FolderRule(folder_days=150, keep_champions=1)).prune(
        now=lost_at + 149 * DAY_S, actor="t"
    )

    assert names[1] in folders.there()


def test_nothing_goes_when_it_is_off(folders: Folders) -> None:
    name = folders.publish(1)

    assert folders.prune(FolderRule(folder_days=0, keep_champions=1)) == {name}


def test_a_dry_run_changes_nothing(folders: Folders) -> None:
    name = folders.publish(1)

    found = folders.pruner().plan(now=folders.world.clock.now + LONG)

    assert [(one.version.name, one.goes) for one in found.fates] == [(name, True)]
    assert found.freed_bytes > 0
    assert folders.there() == {name}
    assert folders.world.adapter(name).removed_at is None


def test_another_versions_same_files_keep_them(folders: Folders) -> None:
    name = folders.publish(1)
    found = folders.world.adapter(name)
    other = replace(folders.world, line=Line(name="other"))
    other.add_version("other--v1-x", 1, Path(found.path), found.digest, state="champion")

    assert "has the files of other--v1-x" in folders.kept_because(name)
    assert name in folders.prune()


def test_changed_files_stay_for_whoever_looks_into_it(folders: Folders) -> None:
    name = folders.publish(1)
    weights = Path(folders.world.adapter(name).path) / WEIGHTS
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")

    assert folders.prune() == {name}
    assert folders.world.adapter(name).removed_at is None


@pytest.mark.parametrize("change", ["path", "link", "digest"])
def test_a_row_that_names_another_place_removes_nothing(
    folders: Folders, tmp_path: Path, change: str
) -> None:
    name = folders.publish(1)
    found = folders.world.adapter(name)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with folders.world.database.write() as session:
        row = session.get_one(AdapterRow, name)
        if change == "path":
            row.path = str(mine)
        elif change == "digest":
            row.digest, row.path = "../mine", str(mine)
        else:
            Path(found.path).rename(tmp_path / "real")
            Path(found.path).symlink_to(mine)

    folders.prune()

    assert (mine / "thesis.txt").read_text() == "years of work"
    assert folders.world.adapter(name).removed_at is None


def test_a_removed_version_begins_nothing_again(folders: Folders) -> None:
    old, middle, last = (folders.publish(version) for version in (1, 2, 3))
    for name in (old, middle, last):
        folders.promote(name)
        folders.world.clock.now += 1.0
    folders.prune(FolderRule(folder_days=30, keep_champions=1))
    assert old not in folders.there()

    with pytest.raises(TransitionError, match=r"adapters\.folder_days"):
        folders.roll_back(old)
    with pytest.raises(TransitionError, match="was removed"):
        folders.world.start(old)
    assert folders.roll_back(middle).after == middle


def test_forgetting_passes_over_a_removed_version_and_its_ban_holds(folders: Folders) -> None:
    old, last = folders.publish(1), folders.publish(2)
    folders.promote(old)
    folders.world.clock.now += 1.0
    folders.promote(last)
    with folders.world.database.write() as session:
        bans.ban(session, old, now=0.0, actor="t", reason="bad")
        session.get_one(AdapterRow, last).forgotten_at = 1.0
    folders.point("previous", last)
    folders.prune(FolderRule(folder_days=30, keep_champions=1))
    assert old not in folders.there()
    Path(folders.world.adapter(old).path).mkdir()  # somebody's empty folder brings nothing back

    done, _ = retire_adapters(folders.world.database, MODEL, now=folders.world.clock.now)

    assert done is not None
    assert done.after == BASE
    with folders.world.database.read() as session:
        assert bans.find(session, MODEL, folders.world.adapter(old).digest) is not None


KILLED = """
import os, signal, sys
from pathlib import Path
from deploy.adapters import prune as pruning
from deploy.adapters.prune import FolderRule
from sidecar.store.database import Database

database = Database(sys.argv[1])
at = sys.argv[3]

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

original = getattr(pruning.Pruner, at, None) or getattr(pruning, at)

def dies_after(*given, **named):
    original(*given, **named)
    die()

def dies_before(*given, **named):
    die()

where = pruning.Pruner if hasattr(pruning.Pruner, at) else pruning
setattr(where, at, dies_before if sys.argv[4] == "before" else dies_after)
rule = FolderRule(folder_days=30, keep_champions=1)
pruner = pruning.Pruner(database=database, adapters_dir=Path(sys.argv[2]), rule=rule)
pruner.prune(now=float(sys.argv[5]), actor="t")
"""


@pytest.mark.tier_2
@pytest.mark.parametrize(
    ("at", "when", "usable"),
    [
        ("_keep_documents", "before", True),
        ("_keep_documents", "after", True),
        ("_mark", "after", False),
        ("_move_out", "after", False),
    ],
)
def test_a_kill_leaves_a_whole_folder_or_none_and_the_next_pass_ends_it(
    folders: Folders, at: str, when: str, usable: bool
) -> None:
    name = folders.publish(1)
    world = folders.world
    until = world.clock.now + LONG

    arguments = [world.database.url, str(folders.adapters_dir), at, when, str(until)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)

    assert done.returncode == -signal.SIGKILL
    found = world.adapter(name)
    assert (found.removed_at is None) is usable
    if usable:
        assert folder_digest(Path(found.path)) == found.digest

    folders.pruner(FolderRule(folder_days=30, keep_champions=1)).prune(now=until, actor="t")

    assert {one.name for one in folders.adapters_dir.iterdir()} == {REMOVED}
    assert world.adapter(name).removed_at == until
    told = [row for row in world.rows(AuditRow) if row.action == pruning.ACTION]
    assert len(told) == 1


def test_what_a_kill_left_of_a_deletion_goes_with_the_next_pass(folders: Folders) -> None:
    (folders.adapters_dir / f"{TRASH}{'a' * 64}").mkdir()
    (folders.adapters_dir / f"{TRASH}{'a' * 64}" / WEIGHTS).write_bytes(b"x")

    folders.prune()

    assert list(folders.adapters_dir.iterdir()) == []


def test_a_fetch_that_was_killed_goes_and_one_that_goes_on_stays(
    folders: Folders,
) -> None:
    work = folders.adapters_dir / f"{FETCHING}abc"
    work.mkdir()
    (work / WEIGHTS).write_bytes(b"half")
    began = (work / WEIGHTS).stat().st_mtime

    folders.pruner().prune(now=began + 60.0, actor="t")
    assert work.is_dir()
    folders.pruner().prune(now=began + DEAD_FETCH_S + 60.0, actor="t")
    assert not work.exists()


def test_what_becomes_needed_while_it_is_hashed_stays(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = folders.publish(1)
    original: Callable[[Path], str] = folder_digest

    def meanwhile(folder: Path) -> str:
        folders.point("anchor", name)
        return original(folder)

    monkeypatch.setattr(pruning, "folder_digest", meanwhile)

    assert folders.prune() == {name}
    assert folders.world.adapter(name).removed_at is None


# `adapters.url`: an import on one machine is loaded by control on another.


def settings_of(world: World, adapters_dir: Path, bucket: Path) -> Settings:
    return Settings(
        serving=Serving(model="m", base_model_path="/models/m", max_lora_rank=8),
        store=Store(url=world.database.url),
        learner=Learner(adapters_dir=adapters_dir, rank=4, alpha=8),
        adapters=Adapters(url=f"file://{bucket}"),
    )


def controller(world: World, settings: Settings) -> Controller:
    return Controller(
        database=world.database,
        replicas={"http://vllm": world.control},
        gate=world.gate(),
        rules=world.rules,
        limits=ServingLimits(max_rank=8, bases=frozenset({"/models/m"})),
        line=world.line,
        clock=world.clock,
        folder_of=make_folder_of(settings),
    )


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


async def test_control_fetches_verifies_and_loads_what_another_machine_made(
    world: World, tmp_path: Path, bucket: Path
) -> None:
    write_adapter(tmp_path / "mine")
    there = settings_of(world, tmp_path / "there", bucket)
    made = import_adapter(there, world.database, tmp_path / "mine", reason="r", now=5.0)
    remove_folder(made.path)  # this machine never had it
    here = settings_of(world, tmp_path / "here", bucket)

    await controller(world, here).tick()

    assert world.canary(made.adapter).phase == "gating"
    assert folder_digest(tmp_path / "here" / made.digest) == made.digest


async def test_a_candidate_waits_while_the_url_cannot_be_reached(
    world: World, tmp_path: Path, bucket: Path
) -> None:
    write_adapter(tmp_path / "mine")
    settings = settings_of(world, tmp_path / "there", bucket)
    made = import_adapter(settings, world.database, tmp_path / "mine", reason="r", now=5.0)
    remove_folder(made.path)
    (bucket / made.digest / MANIFEST).rename(bucket / "away")
    control = controller(world, settings)

    await control.tick()

    assert world.canary(made.adapter).phase == "loading"
    assert "not complete there" in str(world.canary(made.adapter).reason)
    (bucket / "away").rename(bucket / made.digest / MANIFEST)

    await control.tick()

    assert world.canary(made.adapter).phase == "gating"


def test_retention_removes_the_copy_too(world: World, tmp_path: Path, bucket: Path) -> None:
    write_adapter(tmp_path / "mine")
    settings = settings_of(world, tmp_path / "there", bucket)
    made = import_adapter(settings, world.database, tmp_path / "mine", reason="r", now=5.0)
    with world.database.write() as session:
        session.get_one(AdapterRow, made.adapter).state = "rejected"
    folders = settings.learner.adapters_dir
    pruner = Pruner(
        database=world.database,
        adapters_dir=folders,
        rule=FolderRule(folder_days=1, keep_champions=1),
        shared=shared_folders(settings),
    )

    pruner.prune(now=world.clock.now + 10 * DAY_S, actor="t")

    assert not made.path.exists()
    assert list((bucket / made.digest).iterdir()) == []

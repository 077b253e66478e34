"""`sidecar adapters import`: a LoRA from elsewhere becomes a version, or is refused in words."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.cli.adapters import IMPORT_ACTOR, import_adapter
from deploy.cli.main import main
from deploy.errors import InvalidAdapterError
from deploy.registry.lineage import render_lineage, trace_lineage
from learner.adapter_folder import CARD, CONFIG, LINEAGE, WEIGHTS, folder_digest
from sidecar.settings import Learner, Serving, Settings, Store
from sidecar.store.models import AdapterRow, AuditRow
from tests.deploy.conftest import write_adapter

if TYPE_CHECKING:
    from tests.deploy.conftest import World


@pytest.fixture
def settings(world: World, tmp_path: Path) -> Settings:
    return Settings(
        serving=Serving(model="m", base_model_path="/models/m", max_lora_rank=8),
        store=Store(url=world.database.url),
        learner=Learner(adapters_dir=tmp_path / "adapters", rank=4, alpha=8),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "mine")
    (tmp_path / "mine" / "training_args.bin").write_bytes(b"pickled")
    return tmp_path / "mine"


async def test_an_import_is_a_version_with_lineage_audit_and_canary(
    world: World, settings: Settings, folder: Path
) -> None:
    made = import_adapter(settings, world.database, folder, reason="our SFT", now=5.0)

    assert made.adapter == f"m--v1-{made.digest[:12]}"
    assert {entry.name for entry in made.path.iterdir()} == {CONFIG, WEIGHTS, LINEAGE, CARD}
    assert folder_digest(made.path) == folder_digest(folder) == made.digest
    assert made.path.stat().st_mode & 0o777 == 0o555
    lineage = json.loads((made.path / LINEAGE).read_text())
    assert lineage["imported"] == {"from": str(folder), "reason": "our SFT"}
    assert lineage["algorithm"] == {"rank": 4, "alpha": 8}
    (row,) = world.rows(AdapterRow)
    assert (row.state, row.parent, row.run_id) == ("registered", "base", None)
    (audit,) = [one for one in world.rows(AuditRow) if one.action == "adapter.registered"]
    assert (audit.actor, audit.reason) == (IMPORT_ACTOR, f"imported from {folder}: our SFT")
    assert [one.name for one in (made.path.parent).iterdir()] == [made.digest]

    await world.controller().tick()

    assert world.canary(made.adapter).phase == "gating"
    with world.database.read() as session:
        shown = render_lineage(trace_lineage(session, "m", "1"))
    assert made.adapter in shown
    assert f"  no training run recorded; imported from {folder}: our SFT" in shown.split("\n")


@pytest.mark.parametrize("before", ["", "./", "mine/", "./mine/"])
def test_a_tar_is_imported_as_its_folder_is(
    world: World, settings: Settings, folder: Path, tmp_path: Path, before: str
) -> None:
    tar = tmp_path / "mine.tar"
    with tarfile.open(tar, "x") as archive:
        for name in ("training_args.bin", CONFIG, WEIGHTS):
            archive.add(folder / name, before + name)

    made = import_adapter(settings, world.database, tar, reason="our SFT", now=5.0)

    assert made.digest == folder_digest(folder)
    assert {entry.name for entry in made.path.iterdir()} == {CONFIG, WEIGHTS, LINEAGE, CARD}


@pytest.mark.parametrize(
    "kind", ["text", "compressed", "lacks", "link", "elsewhere", "cut", "sparse", "two"]
)
def test_a_tar_that_is_none_or_lacks_a_file_is_refused_and_leaves_nothing(
    world: World, settings: Settings, folder: Path, tmp_path: Path, kind: str
) -> None:
    tar = tmp_path / "mine.tar"
    if kind == "text":
        tar.write_text("no tar")
    else:
        with tarfile.open(tar, "x:gz" if kind == "compressed" else "x") as archive:
            archive.add(folder / CONFIG, CONFIG)
            if kind == "link":
                link = tarfile.TarInfo(WEIGHTS)
                link.type, link.linkname = tarfile.SYMTYPE, str(folder / WEIGHTS)
                archive.addfile(link)
            elif kind == "two":
                archive.add(folder / CONFIG, f"other/{CONFIG}")
                archive.add(folder / WEIGHTS, WEIGHTS)
            elif kind == "sparse":
                sparse = tarfile.TarInfo(WEIGHTS)
                sparse.pax_headers = {
                    "GNU.sparse.major": "0",
                    "GNU.sparse.minor": "1",
                    "GNU.sparse.size": str(2**50),
                    "GNU.sparse.map": "0,0",
                }
                archive.addfile(sparse)
            elif kind == "elsewhere":
                archive.add(folder / WEIGHTS, f"../{WEIGHTS}")
            elif kind in ("compressed", "cut"):
                archive.add(folder / WEIGHTS, WEIGHTS)
    if kind == "cut":
        with tarfile.open(tar) as archive:
            middle = archive.getmember(WEIGHTS).offset_data + 8
        os.truncate(tar, middle)

    with pytest.raises(InvalidAdapterError, match=r"mine\.tar"):
        import_adapter(settings, world.database, tar, reason="x", now=5.0)

    assert world.rows(AdapterRow) == []
    assert list(settings.learner.adapters_dir.iterdir()) == []


def test_ranks_and_alphas_of_single_layers_are_in_the_lineage(
    world: World, settings: Settings, tmp_path: Path
) -> None:
    patterns: dict[str, Any] = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 2}}
    write_adapter(tmp_path / "mine", config=patterns)

    made = import_adapter(settings, world.database, tmp_path / "mine", reason="r", now=5.0)

    lineage = json.loads((made.path / LINEAGE).read_text())
    assert lineage["algorithm"] == {"rank": 4, "alpha": 8, **patterns}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 16}, "max_lora_rank|rank"),
        ({"config": {"base_model_name_or_path": "/models/other"}}, "/models/other"),
        ({"config": {"lora_alpha": -1}}, "lora_alpha"),
        ({"config": {"target_modules": "all"}}, "target_modules"),
        ({"values": (float("inf"),)}, "infinity"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_and_leaves_nothing(
    world: World, settings: Settings, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_adapter(tmp_path / "bad", **changes)

    with pytest.raises(InvalidAdapterError, match=words):
        import_adapter(settings, world.database, tmp_path / "bad", reason="r", now=5.0)

    assert world.rows(AdapterRow) == []
    assert list(settings.learner.adapters_dir.iterdir()) == []


def test_the_same_weights_are_not_imported_twice(
    world: World, settings: Settings, folder: Path
) -> None:
    import_adapter(settings, world.database, folder, reason="r", now=5.0)

    with pytest.raises(InvalidAdapterError, match=r"are m--v1-\w+ already"):
        import_adapter(settings, world.database, folder, reason="r", now=6.0)

    assert len(world.rows(AdapterRow)) == 1


@pytest.mark.parametrize(("age_s", "left"), [(3590, True), (3610, False)])
def test_what_a_killed_import_left_is_removed_by_the_next_one_and_a_live_one_is_not(
    world: World, settings: Settings, folder: Path, age_s: int, left: bool
) -> None:
    """Alive is what wrote to a file within the hour, however old its folder is."""
    other = settings.learner.adapters_dir / ".import-0a"
    other.mkdir(parents=True)
    (other / WEIGHTS).write_bytes(b"half")
    os.utime(other / WEIGHTS, (10_000 - age_s, 10_000 - age_s))
    os.utime(other, (0, 0))
    other.chmod(0o555)

    made = import_adapter(settings, world.database, folder, reason="r", now=10_000.0)

    kept = {one.name for one in settings.learner.adapters_dir.iterdir()}
    assert kept == ({made.digest, ".import-0a"} if left else {made.digest})


def test_a_link_to_weights_is_refused(world: World, settings: Settings, folder: Path) -> None:
    weights = folder / WEIGHTS
    weights.rename(folder / "elsewhere")
    weights.symlink_to(folder / "elsewhere")

    with pytest.raises(InvalidAdapterError, match="symbolic link"):
        import_adapter(settings, world.database, folder, reason="r", now=5.0)


def test_a_folder_that_is_not_there_is_refused_in_words(world: World, settings: Settings) -> None:
    with pytest.raises(InvalidAdapterError, match="name a PEFT folder with adapter_config"):
        import_adapter(settings, world.database, Path("/nowhere"), reason="r", now=5.0)


@pytest.mark.parametrize("place", ["the copy", "the lineage"])
def test_a_full_disk_is_said_of_the_folder_that_is_written_to(
    world: World,
    settings: Settings,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def fail(*_: object, **__: object) -> int:
        raise full

    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise full

    real = Path.open
    if place == "the lineage":
        monkeypatch.setattr(Path, "write_text", fail)
    else:
        monkeypatch.setattr(
            Path,
            "open",
            lambda path, mode="r", *more, **named: (
                Full() if mode == "wb" else real(path, mode, *more, **named)
            ),
        )

    with pytest.raises(OSError, match="No space left on device") as found:
        import_adapter(settings, world.database, folder, reason="r", now=5.0)

    assert str(found.value.filename).startswith(str(settings.learner.adapters_dir / ".import-"))
    assert list(settings.learner.adapters_dir.iterdir()) == []


def test_a_disk_that_fails_while_the_adapter_is_read_is_said_of_the_adapter(
    world: World, settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    class Broken(io.BytesIO):
        read = fail

    @contextmanager
    def open_file(*_: object) -> Iterator[io.BytesIO]:
        yield Broken()

    monkeypatch.setattr("learner.adapter_folder.open_file", open_file)

    with pytest.raises(InvalidAdapterError, match=f"{folder}: .*Input/output error"):
        import_adapter(settings, world.database, folder, reason="r", now=5.0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), "/a/b: Read-only file system"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_a_disk_that_fails_is_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: OSError,
    words: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("deploy.cli.app.whole_command", lambda: fail)

    assert main(["status"]) == 1
    assert capsys.readouterr().err == f"sidecar: {words}\n"


def test_the_command_says_what_the_learner_would_refuse(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sidecar.store.database import Database

    url = f"sqlite:///{tmp_path}/own.db"
    database = Database(url)
    database.upgrade()
    database.close()
    config = tmp_path / "sidecar.toml"
    config.write_text(
        f'[serving]\nmodel = "m"\n[store]\nurl = "{url}"\n'
        f'[learner]\nadapters_dir = "{tmp_path}/adapters"\n'
    )

    code = main(["--config", str(config), "adapters", "import", str(folder), "--reason", "our SFT"])

    said = capsys.readouterr()
    assert code == 0, said.err
    assert "adapter: m--v1-" in said.out
    assert "runs refuse it as their parent until learner.rank = 4 (now 8)" in said.err


@pytest.mark.tier_2
def test_logs_of_a_command_go_to_stderr_so_that_its_json_can_be_read(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "empty\x1b[31m"
    base.mkdir()
    write_adapter(tmp_path / "mine", config={"base_model_name_or_path": "m"})
    config = tmp_path / "sidecar.toml"
    config.write_text(
        f'[serving]\nmodel = "m"\nbase_model_path = {json.dumps(str(base))}\n'
        f'[store]\nurl = "{world.database.url}"\n'
        f'[learner]\nadapters_dir = "{tmp_path}/adapters"\n'
    )
    words = ("adapters", "import", str(tmp_path / "mine"), "--reason", "x", "-o", "json")
    command = ["--config", str(config), *words]

    # In a process of its own, too: structlog is loaded after the command has begun.
    code = "import sys; from deploy.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False
    )
    again = main(command)

    said = capsys.readouterr()
    assert (done.returncode, again) == (0, 1), done.stderr
    assert json.loads(done.stdout)["version"] == 1
    assert said.out == ""
    for err in (done.stderr, said.err):
        assert "base_not_readable" in err
        assert "\x1b" not in err

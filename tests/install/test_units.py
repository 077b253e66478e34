"""install/systemd: units that systemd accepts and calls hardened, and a backup that can be read."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "install" / "systemd"
INSTANCES = ("proxy", "ingest", "score", "learn", "control", "up", "backup")
MOST_EXPOSED = 3.0
"""systemd's scale is 0 to 10. A unit without hardening has 8.4 (systemd 252)."""
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze (apt-get install systemd)"
)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with programs that are there: `verify` asks for them."""
    folder = tmp_path / "units"
    shutil.copytree(UNITS, folder)
    for path in (one for one in folder.rglob("*") if one.suffix in (".service", ".conf")):
        text = re.sub(r"^ExecStart=/\S+", "ExecStart=/bin/true", path.read_text(), flags=re.M)
        path.write_text(text)
    return folder


def analyze(verb: str, *arguments: str) -> str:
    """What systemd-analyze prints. `verify` ends with 0 when it ignores a key."""
    done = subprocess.run(
        ["systemd-analyze", verb, *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@needs_systemd
@pytest.mark.parametrize("name", [f"learning-sidecar@{one}.service" for one in INSTANCES])
def test_systemd_finds_no_fault_in_a_unit(units: Path, name: str) -> None:
    assert analyze("verify", "--man=no", str(units / name)) == ""


@needs_systemd
def test_systemd_finds_no_fault_in_the_timer(units: Path) -> None:
    assert analyze("verify", "--man=no", str(units / "learning-sidecar-backup.timer")) == ""


@needs_systemd
def test_an_unknown_key_is_a_fault(units: Path) -> None:
    (units / "learning-sidecar@up.service.d" / "odd.conf").write_text("[Service]\nProtectSystm=1\n")

    said = analyze("verify", "--man=no", str(units / "learning-sidecar@up.service"))

    assert "Unknown key 'ProtectSystm'" in said


@needs_systemd
@pytest.mark.parametrize("instance", INSTANCES)
def test_a_unit_is_hardened(units: Path, instance: str) -> None:
    unit = units / f"learning-sidecar@{instance}.service"
    shutil.copy(units / "learning-sidecar@.service", unit)  # `security` takes no template

    said = analyze("security", "--offline=yes", "--no-pager", str(unit))

    (score,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert float(score) < MOST_EXPOSED


needs_sqlite3 = pytest.mark.skipif(
    shutil.which("sqlite3") is None, reason="no sqlite3 (apt-get install sqlite3)"
)


def back_up(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [UNITS / "learning-sidecar-backup", *(folder / one for one in ("state", "adapters", "to"))],
        capture_output=True,
        text=True,
        check=False,
    )


@needs_sqlite3
def test_a_backup_has_the_store_as_it_is_and_every_adapter_once(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    store = sqlite3.connect(tmp_path / "state" / "store.db", isolation_level=None)
    store.execute("PRAGMA journal_mode = WAL")
    store.execute("CREATE TABLE alias (name TEXT) STRICT")
    store.execute("INSERT INTO alias VALUES ('champion')")  # in the WAL, with the store open
    adapter = tmp_path / "adapters" / "d1"
    adapter.mkdir(parents=True)
    (adapter / "weights").write_text("1")
    adapter.chmod(0o555)
    (tmp_path / "adapters" / ".run-1").mkdir()
    (tmp_path / "to" / "adapters" / "d1.part").mkdir(parents=True)  # of a backup that was killed
    for day in range(1, 9):
        (tmp_path / "to" / f"store-2026010{day}T000000Z.db").touch()

    done = back_up(tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    kept = sorted((tmp_path / "to").glob("store-*"))
    assert len(kept) == 7
    assert "20260101" not in kept[0].name
    with sqlite3.connect(kept[-1]) as copy:
        assert copy.execute("SELECT name FROM alias").fetchall() == [("champion",)]
    assert kept[-1].stat().st_mode & 0o777 == 0o600
    assert [one.name for one in (tmp_path / "to" / "adapters").iterdir()] == ["d1"]
    assert (tmp_path / "to" / "adapters" / "d1" / "weights").read_text() == "1"
    store.close()


@needs_sqlite3
def test_a_backup_without_a_store_fails_and_makes_none(tmp_path: Path) -> None:
    done = back_up(tmp_path)

    assert done.returncode == 1
    assert "no store" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_log_files_of_up_are_rotated() -> None:
    text = (UNITS / "logrotate.conf").read_text()
    unit = (UNITS / "learning-sidecar@.service").read_text()
    (folder,) = re.findall(r"^WorkingDirectory=(\S+)$", unit, flags=re.M)

    assert f"\n{folder}/.sidecar/logs/*.log {{" in text
    assert "copytruncate" in text  # the children keep their files open

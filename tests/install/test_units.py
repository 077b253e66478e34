"""install/systemd: units that systemd accepts and calls hardened, and a backup that can be read."""

from __future__ import annotations

import re
import shutil
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


def back_up(folder: Path, sidecar: str) -> subprocess.CompletedProcess[str]:
    """Run the unit's script. sidecar: what `sidecar store backup FOLDER` does, in sh."""
    command = folder / "sidecar"
    command.write_text(f'#!/bin/sh\n[ "$1 $2" = "store backup" ] && {sidecar}\n')
    command.chmod(0o755)
    script = [UNITS / "learning-sidecar-backup", command, folder / "to"]
    return subprocess.run(script, capture_output=True, text=True, check=False)


def test_the_newest_seven_whole_backups_are_kept(tmp_path: Path) -> None:
    for day in range(1, 10):
        made = tmp_path / "to" / f"2026010{day}T000000Z"
        (made / "adapters" / "d1").mkdir(parents=True)
        (made / "adapters" / "d1" / "weights").touch()
        if day != 5:  # that one was killed
            (made / "backup.json").touch()
        (made / "adapters" / "d1").chmod(0o555)
    others = ["2025-12-31", "keys", "lost+found"]  # by hand, and a disk's own
    for name in others:
        (tmp_path / "to" / name).mkdir()
    kept_elsewhere = tmp_path / "elsewhere" / "backup.json"
    kept_elsewhere.parent.mkdir()
    kept_elsewhere.touch()
    for name in ("20250101T000000Z", "20250102T000000Z"):
        (tmp_path / "to" / name).symlink_to(kept_elsewhere.parent)
    others += ["20250101T000000Z", "20250102T000000Z"]

    done = back_up(tmp_path, 'mkdir "$3" && touch "$3/backup.json"')

    assert (done.returncode, done.stderr) == (0, "")
    there = {one.name for one in (tmp_path / "to").iterdir()}
    assert there.issuperset(others)
    assert kept_elsewhere.exists()
    kept = sorted(there.difference(others))
    assert [name[6:8] for name in kept[:6]] == ["03", "04", "06", "07", "08", "09"]
    assert len(kept) == 7


def test_a_backup_that_fails_makes_the_unit_fail(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()

    assert back_up(tmp_path, "exit 1").returncode == 1


def test_the_log_files_of_up_are_rotated() -> None:
    text = (UNITS / "logrotate.conf").read_text()
    unit = (UNITS / "learning-sidecar@.service").read_text()
    (folder,) = re.findall(r"^WorkingDirectory=(\S+)$", unit, flags=re.M)

    assert f"\n{folder}/.sidecar/logs/*.log {{" in text
    assert "copytruncate" in text  # the children keep their files open

"""Breakages for the tests of this folder: a full disk, few open files, a store of one table."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.fake_vllm import FakeVllm
from support.proxy_kit import Recorded, Wire
from support.traffic import Faults


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def answering(fake_vllm: FakeVllm, recorded: Recorded, wire: Wire) -> FakeVllm:
    """A vLLM that answers every request with a recorded reply."""
    reply = wire.whole_reply(recorded("whole_reply_asked.json"))
    fake_vllm.script = lambda _: [reply]
    return fake_vllm


@pytest.fixture
def small_disk(state_dir: Path) -> Iterator[Path | None]:
    """A file system of 256 kB; None where this user may not mount one."""
    place = state_dir / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0777", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        yield None
        return
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def raise_open_files(limit: int) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, hard), hard))


@pytest.fixture
def many_files() -> int:
    """How many files this process may have open, raised as far as it may."""
    import resource

    raise_open_files(16_384)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.fixture
def room_env() -> dict[str, str]:
    root = Path(__file__).resolve().parents[3]
    return {
        **os.environ,
        "PYTHONPATH": os.environ.get("PYTHONPATH") or str(root),
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture
def routing_store(state_dir: Path) -> Callable[..., Path]:
    """Write a store that holds a routing table and nothing else."""

    def write(**table: Any) -> Path:
        path = state_dir / "store.db"
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS routing_table(model TEXT PRIMARY KEY, body TEXT)"
            )
            connection.execute(
                "INSERT OR REPLACE INTO routing_table VALUES (?, ?)",
                ("smollm2-135m", json.dumps({"model": "smollm2-135m", **table})),
            )
        return path

    return write

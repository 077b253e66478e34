from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select, text

from ingest.intake import choose
from ingest.intake.loop import POLL_INTERVAL_S, Intake
from sidecar.capture.outbox import Outbox
from sidecar.errors import StoreError, StoreNewerError, StoreOlderError
from sidecar.records import encode_exchange
from sidecar.settings import Groups, Learner, Serving, Settings
from sidecar.store.database import Database, get_flag
from sidecar.store.models import GroupRow
from support.ingest_kit import Kit

SETTINGS = Settings(
    serving=Serving(model="smollm", sampling_defaults={}, grammar="as_asked"),
    groups=Groups(held_out_rate=0.0, size=4, settle_s=0.0),
    learner=Learner(min_groups=1, max_groups=1),
)


def make_intake(
    kit: Kit,
    payloads: list[bytes],
    database: Database | None = None,
    now: Callable[[], float] = lambda: 10.0,
) -> Intake:
    bus = kit.MemoryBus(payloads)
    return Intake(bus, database or kit.database, SETTINGS, now=now, batch=2)


def test_a_step_takes_a_batch_and_decides_it(kit: Kit) -> None:
    intake = make_intake(kit, [encode_exchange(kit.exchange(name)) for name in ("a", "b", "c")])

    assert intake.step() == 4  # two consumed, two decided
    assert intake.step() == 2
    assert intake.step() == 0

    assert kit.counts("consume") == {"stored": 3}
    assert kit.counts("selection") == {"chosen": 1, "backlog": 2}


def test_a_batch_is_decided_without_being_read_again(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("read from the store")

    monkeypatch.setattr(choose, "load_by_selection", refuse)
    names = [f"e{number}" for number in range(2)]
    intake = make_intake(kit, [encode_exchange(kit.exchange(name)) for name in names])

    intake.step()

    assert kit.counts("selection") == {"chosen": 1, "backlog": 1}
    assert kit.group_count() == 1


def test_a_decision_waits_until_the_exchange_has_settled_also_over_a_restart(kit: Kit) -> None:
    groups = SETTINGS.groups.model_copy(update={"settle_s": 5.0})
    settings = SETTINGS.model_copy(update={"groups": groups})
    bus = kit.MemoryBus([encode_exchange(kit.exchange("a"))])

    for now, chosen in ((10.0, {}), (14.9, {}), (15.0, {"chosen": 1})):
        Intake(bus, kit.database, settings, now=partial(float, now)).step()
        assert kit.counts("selection") == chosen


def test_an_exchange_that_its_own_batch_moves_is_decided_in_its_new_session(kit: Kit) -> None:
    first = {"role": "user", "content": "What is a sidecar, and what is it for?"}
    reply = {"role": "assistant", "content": "A process beside another one."}
    more = {"role": "user", "content": "Which other one?"}
    said = (kit.choice(message=json.dumps(reply).encode()),)
    late = kit.exchange("first", request={"messages": [first]}, choices=said)
    early = kit.exchange("second", request={"messages": [first, reply, more]})
    intake = make_intake(kit, [encode_exchange(early), encode_exchange(late)])

    intake.step()

    with kit.database.read() as session:
        groups = select(GroupRow.exchange_id, GroupRow.session_id)
        assert session.execute(groups).all() == [("second", "first")]


@pytest.mark.parametrize(
    ("revision", "error"), [("9999_future", StoreNewerError), ("0001", StoreOlderError)]
)
def test_a_store_of_another_release_ends_it(
    kit: Kit, revision: str, error: type[StoreError]
) -> None:
    with kit.database.write() as session:
        session.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))

    with pytest.raises(error):
        make_intake(kit, []).attempt()


def test_a_full_disk_makes_it_wait_and_loses_nothing(kit: Kit, tmp_path: Path) -> None:
    """SQLite refuses to let the file grow, as it does on a full disk, and then may again."""
    database = Database(f"sqlite:///{tmp_path}/store.db")
    limit = [1]

    @event.listens_for(database.engine, "checkout")
    def _limit(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count={limit[0]}")

    payloads = [
        encode_exchange(kit.exchange(f"e{number}", request=os.urandom(20_000)))
        for number in range(2)
    ]
    intake = make_intake(kit, payloads, database)

    assert [intake.attempt() for _ in range(2)] == [0.5, 1.0]
    assert kit.counts("consume") == {}
    limit[0] = 2**30
    assert intake.attempt() == 0.0

    assert kit.counts("consume") == {"stored": 2}
    assert sum(kit.counts("selection").values()) == 2
    database.close()


def test_without_a_tokenizer_it_says_so_in_the_store_and_counts(kit: Kit) -> None:
    intake = make_intake(kit, [encode_exchange(kit.exchange("a"))])

    intake.step()

    assert kit.counts("token_check") == {"off": 1}
    with kit.database.read() as session:
        assert get_flag(session, "token_check") == (
            "off: serving.base_model_path is empty; name the weights that vLLM serves"
        )


def test_the_backlog_is_looked_at_every_two_seconds(kit: Kit) -> None:
    times = iter([10.0, 11.9, 12.0])
    payloads = [encode_exchange(kit.exchange(name)) for name in ("a", "b")]
    intake = make_intake(kit, payloads, now=lambda: next(times))
    intake.step()
    path = kit.database.engine.url.database
    assert path is not None
    with sqlite3.connect(path) as other:
        other.execute("UPDATE answer_group SET status = 'trained'")
    other.close()

    intake.step()
    assert kit.counts("selection") == {"chosen": 1, "backlog": 1}
    intake.step()
    assert kit.counts("selection") == {"chosen": 2}


def test_it_waits_at_once_when_there_is_nothing_and_not_at_all_when_there_is(kit: Kit) -> None:
    intake = make_intake(kit, [encode_exchange(kit.exchange("a"))])

    assert intake.attempt() == 0.0
    assert intake.attempt() == POLL_INTERVAL_S


async def test_a_stop_ends_the_loop(kit: Kit) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(make_intake(kit, []).run(stop))
    await asyncio.sleep(0)

    stop.set()

    await asyncio.wait_for(running, timeout=60)


def write_config(folder: Path, bus: str) -> Path:
    config = folder / "sidecar.toml"
    config.write_text(
        f'[serving]\nmodel = "smollm"\n[bus]\nurl = "{bus}"\n'
        f'[store]\nurl = "sqlite:///{folder}/store.db"\n'
        "[groups]\nheld_out_rate = 0.0\nsettle_s = 0.0\n"
    )
    return config


@pytest.mark.tier_2
def test_the_process_makes_the_store_consumes_and_ends_cleanly(kit: Kit, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    outbox = Outbox(folder / "outbox.db", max_rows=10)
    outbox.write([kit.exchange("a"), kit.exchange("b")])
    outbox.close()
    config = write_config(folder, f"sqlite:///{folder}/outbox.db")
    command = [sys.executable, "-m", "ingest", "--config", str(config)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    database = Database(f"sqlite:///{folder}/store.db")
    other = type(kit)(database)
    deadline = time.monotonic() + 60
    try:
        database.upgrade()  # whoever comes first makes it
        while other.counts("selection") != {"chosen": 2}:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        database.close()

    assert process.returncode == 0
    assert b"ingest_stopped" in errors
    assert b"Traceback" not in errors


def test_the_process_refuses_a_bus_without_a_topic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ingest.__main__ import main

    config = write_config(tmp_path, "kafka://127.0.0.1:9092")

    assert main(["--config", str(config)]) == 2
    assert "names no topic; give kafka://" in capsys.readouterr().err
    assert not (tmp_path / "store.db").exists()

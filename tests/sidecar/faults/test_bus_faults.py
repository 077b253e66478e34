"""The bus locked, taken away, read-only, full: no request fails for it, and every capture is
accounted for.

Each with a real proxy process, a real outbox and traffic that never stops.
"""

from __future__ import annotations

import asyncio
import resource
import shutil
import sqlite3
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from support.fake_vllm import FakeVllm
from support.proxy_kit import StartProcess
from support.traffic import Faults


async def test_an_outbox_that_is_deleted_is_made_again(
    start_process: StartProcess, answering: FakeVllm, faults: Faults, state_dir: Path
) -> None:
    """What was in it is gone with it; that is whoever deleted it's doing, and none of it twice."""
    child = await start_process(bus={"url": f"sqlite:///{state_dir}/bus/outbox.db"})
    path = state_dir / "bus" / "outbox.db"
    with ExitStack() as stack:
        async with faults.traffic(child) as traffic:
            await traffic.more(50)
            await kept_some(faults, child)
            old = stack.enter_context(closing(sqlite3.connect(path)))
            old.execute("SELECT COUNT(*) FROM outbox").fetchone()  # holds the file open
            # In one step: file by file, the deletion could take a part of the new outbox with it.
            path.parent.rename(state_dir / "deleted")
            shutil.rmtree(state_dir / "deleted")
            await traffic.more(100)
        accounts = await faults.accounts(child, traffic.sent)
        # Not before: a batch that was being written as the file went is committed to the old one.
        in_old = [name for (name,) in old.execute("SELECT exchange_id FROM outbox")]

    assert set(traffic.statuses) == {"200"}
    assert (await faults.scrape(child))["sidecar_outbox_rows_gone_total"] == len(in_old)
    in_new = faults.rows(path)
    assert not set(in_old) & set(in_new)
    assert len(in_old) + len(in_new) == accounts.kept
    assert in_new


async def test_an_outbox_without_a_place_to_be_comes_back_with_the_place(
    start_process: StartProcess, answering: FakeVllm, faults: Faults, state_dir: Path
) -> None:
    """Its folder is a file for a while, as a mount that failed: the bus is gone, then back.

    A link is put there, because that takes one step: in between a proxy would make a new folder.
    """
    folder, there, gone = state_dir / "bus", state_dir / "there", state_dir / "gone"
    there.mkdir()
    gone.write_bytes(b"")

    def mount(what: Path) -> None:
        (state_dir / "link").symlink_to(what)
        (state_dir / "link").replace(folder)

    mount(there)
    child = await start_process(bus={"url": f"sqlite:///{folder}/outbox.db"})
    async with faults.traffic(child) as traffic:
        await traffic.more(50)
        await kept_some(faults, child)
        mount(gone)
        await traffic.more(50)
        await lost_some(faults, child)
        mount(there)
        before = len(faults.rows(folder / "outbox.db"))
        await traffic.more(100)

    accounts = await faults.accounts(child, traffic.sent)
    assert set(traffic.statuses) == {"200"}
    assert accounts.all_lost > 0
    assert accounts.skipped == {}
    found = faults.rows(folder / "outbox.db")
    assert len(found) == len(set(found)) == accounts.kept
    assert len(found) > before


async def test_a_read_only_outbox_costs_captures_only(
    start_process: StartProcess, answering: FakeVllm, faults: Faults, state_dir: Path
) -> None:
    """Its folder comes back read-only, as after an error of the disk below it."""
    folder = state_dir / "bus"
    child = await start_process(bus={"url": f"sqlite:///{folder}/outbox.db"})
    async with faults.traffic(child) as traffic:
        await traffic.more(20)
        await kept_some(faults, child)
        mounted = mount_read_only_copy(folder)
        if not mounted:  # this user may not: then a place where nobody can make a file
            folder.rename(state_dir / "aside")
            folder.symlink_to("/proc")
        await traffic.more(50)
        await lost_some(faults, child)
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        else:
            folder.unlink()
            (state_dir / "aside").rename(folder)
        await traffic.more(50)

    accounts = await faults.accounts(child, traffic.sent)
    assert set(traffic.statuses) == {"200"}
    assert set(accounts.lost) <= {"read_only", "unreachable"}
    found = faults.rows(folder / "outbox.db")
    assert len(found) == len(set(found)) == accounts.kept


def mount_read_only_copy(folder: Path) -> bool:
    """Put a read-only copy in the folder's place, at once: the proxy must not open it before it is
    read-only. False: this user may not mount."""
    copy = folder.parent / "copy"
    copy.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(copy)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        return False
    for command in (
        ["cp", "-r", f"{folder}/.", str(copy)],
        ["mount", "-o", "remount,ro", str(copy)],
        ["mount", "--bind", str(copy), str(folder)],
        ["umount", "--lazy", str(copy)],
    ):
        subprocess.run(command, check=True)
    return True


async def test_a_full_disk_costs_captures_only(
    start_process: StartProcess,
    answering: FakeVllm,
    faults: Faults,
    small_disk: Path | None,
    state_dir: Path,
) -> None:
    folder = small_disk or state_dir
    child = await start_process(bus={"url": f"sqlite:///{folder}/outbox.db"})
    if small_disk is None:  # the same for one process: no file of its may grow further
        resource.prlimit(child.worker, resource.RLIMIT_FSIZE, (200_000, 200_000))
    async with faults.traffic(child) as traffic:
        await traffic.more(200)  # about 2 kB each
        await lost_some(faults, child)
        await traffic.more(50)

    accounts = await faults.accounts(child, traffic.sent)
    assert set(traffic.statuses) == {"200"}
    assert set(accounts.lost) <= {"disk_full", "failed"}
    found = faults.rows(folder / "outbox.db")
    assert len(found) == len(set(found)) == accounts.kept


async def test_a_store_that_goes_away_leaves_the_last_routing(
    start_process: StartProcess,
    answering: FakeVllm,
    faults: Faults,
    state_dir: Path,
    routing_store: Any,
) -> None:
    """Locked, then deleted, then rubbish, then back with a newer table."""
    path = routing_store(champion="smollm2-135m--v1", generation=1)
    child = await start_process()
    async with faults.traffic(child) as traffic:
        await adapter_is(child, b"smollm2-135m--v1")
        with closing(sqlite3.connect(path, isolation_level=None)) as locker:
            locker.execute("BEGIN EXCLUSIVE")
            await traffic.more(50)
            await adapter_is(child, b"smollm2-135m--v1")
            locker.execute("ROLLBACK")
        path.unlink()
        await traffic.more(50)
        path.write_bytes(b"this is no database, whatever its name says" * 100)
        await traffic.more(50)
        await adapter_is(child, b"smollm2-135m--v1")
        path.unlink()
        routing_store(champion="smollm2-135m--v2", generation=2)
        async with asyncio.timeout(60):
            while await adapter_of(child) != b"smollm2-135m--v2":
                await asyncio.sleep(0.02)

    assert set(traffic.statuses) == {"200"}


async def adapter_of(child: Any) -> bytes:
    body = b'{"model":"smollm2-135m","messages":[]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-sidecar-capture: off\r\n"
    sent = head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    reply: bytes = await child.send(sent)
    return reply.partition(b"x-sidecar-adapter: ")[2].partition(b"\r\n")[0]


async def adapter_is(child: Any, name: bytes) -> None:
    async with asyncio.timeout(60):
        while await adapter_of(child) != name:
            await asyncio.sleep(0.02)


async def lost_some(faults: Faults, child: Any) -> None:
    async with asyncio.timeout(60):
        while not any("captures_lost_total{" in name for name in await faults.scrape(child)):
            await asyncio.sleep(0.02)


async def kept_some(faults: Faults, child: Any) -> None:
    async with asyncio.timeout(60):
        while not (await faults.scrape(child)).get("sidecar_captures_kept_total"):
            await asyncio.sleep(0.02)

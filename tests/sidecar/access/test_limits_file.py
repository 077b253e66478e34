"""The file of limits: a restart renews no allowance, and a damaged file costs only what it held."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from sidecar.access import limits
from sidecar.access.limits import (
    DAY_S,
    MAX_BYTES,
    Allowance,
    LimitsFile,
    MemoryLimiter,
    TableLimiter,
    Usage,
    open_limits,
)
from sidecar.metrics.families import shared_memory
from sidecar.metrics.proxy import Metrics
from sidecar.settings import Settings

NOON = 20_000 * float(DAY_S) + 43_200.0
ALLOWANCE = Allowance(requests_per_minute=2, tokens_per_day=100)
SPENT = Usage(NOON, 1.0, 20_000, 60)


def unexpected(reason: str) -> None:
    raise AssertionError(reason)


def table() -> TableLimiter:
    return TableLimiter(shared_memory(1), unchecked=unexpected, lost=unexpected)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "limits.jsonl"


@pytest.fixture
def lost() -> Counter[str]:
    return Counter()


async def kept(
    path: Path, limiter: MemoryLimiter | TableLimiter, lost: Counter[str], now: float = NOON
) -> LimitsFile:
    """A file that is read, and written whenever it is stopped."""
    file = LimitsFile(path, limiter, lost=lambda reason: lost.update([reason]), clock=lambda: now)
    file.start()
    await asyncio.sleep(0)
    return file


@pytest.mark.parametrize("make", [MemoryLimiter, table])
async def test_a_restart_renews_nothing(
    make: Callable[[], MemoryLimiter | TableLimiter], path: Path, lost: Counter[str]
) -> None:
    first, second = make(), make()
    file = await kept(path, first, lost)
    first.take("k", ALLOWANCE, NOON)
    first.charge("k", ALLOWANCE, 60, NOON)
    await file.stop()
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]

    await (await kept(path, second, lost)).stop()

    standing = second.take("k", ALLOWANCE, NOON)
    assert (standing.refused, standing.requests_left, standing.tokens_left) == (None, 0, 40)
    assert lost == {}


async def test_a_proxy_that_is_killed_forgets_only_what_it_used_since_the_last_interval(
    path: Path, lost: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.access.limits.SAVE_S", 0.01)
    limiter = MemoryLimiter()
    file = await kept(path, limiter, lost)
    limiter.restore([("k", SPENT)])
    async with asyncio.timeout(60):
        while not path.exists():
            await asyncio.sleep(0.005)
    read = path.read_bytes()  # before `stop` wrote anything
    await file.stop()

    assert read == b'["k",1728043200.0,1.0,20000,60]\n'


async def test_a_key_whose_usage_says_nothing_any_more_is_not_kept(
    path: Path, lost: Counter[str]
) -> None:
    limiter = MemoryLimiter()
    file = await kept(path, limiter, lost, now=NOON + DAY_S)
    limiter.restore([("old", SPENT), ("new", SPENT._replace(day=20_001))])
    await file.stop()

    assert [line.split(b'"')[1] for line in path.read_bytes().splitlines()] == [b"new"]


BAD = rb"""rubbish
\xff
["k",1.0]
["K!",1728043200.0,1.0,20000,60]
["k",1728043200.0,-1.0,20000,60]
["k",1728043200.0,1.0,20000,-60]
["k",1728043200.0,1.0,20000,1e400]
["k",1728043200.0,1.0,20000,99999999999999999999]
["01234567890123456",1728043200.0,1.0,20000,60]
"""


async def test_a_line_that_cannot_be_read_costs_only_itself(path: Path, lost: Counter[str]) -> None:
    path.parent.mkdir()
    bad = BAD.replace(rb"\xff", b"\xff\xff")
    path.write_bytes(bad + b'["good",1728043200.0,1.0,20000,60]\n')
    limiter = table()

    await (await kept(path, limiter, lost)).stop()

    assert limiter.records() == [("good", SPENT)]
    assert lost == {"line": 9}


async def test_a_file_that_cannot_be_read_is_counted_and_requests_go_on(
    path: Path, lost: Counter[str]
) -> None:
    path.mkdir(parents=True)
    limiter = MemoryLimiter()
    with capture_logs() as lines:
        file = await kept(path, limiter, lost)

    assert limiter.take("k", ALLOWANCE, NOON).refused is None
    assert lost == {"unreadable": 1}
    assert [line["event"] for line in lines] == ["limits_unreadable"]
    await file.stop()


async def test_a_file_that_cannot_be_written_is_counted_and_written_later(
    path: Path, lost: Counter[str]
) -> None:
    path.parent.write_text("a file where the folder should be")
    limiter = MemoryLimiter()
    file = LimitsFile(path, limiter, lost=lambda reason: lost.update([reason]), clock=lambda: NOON)
    limiter.restore([("k", SPENT)])
    await file.save()
    path.parent.unlink()
    await file.save()

    assert lost == {"not_saved": 1}
    assert path.read_bytes().startswith(b'["k",')


# As the settings ask


def opened(
    state_dir: Path, metrics: Metrics, mode: str, table: int | None = None
) -> LimitsFile | None:
    settings = Settings(state_dir=state_dir, access={"mode": mode})
    return open_limits(settings, metrics, table, lambda: NOON)[1]


def test_only_one_proxy_with_keys_keeps_a_file_of_its_own(tmp_path: Path) -> None:
    metrics = Metrics()

    assert opened(tmp_path, metrics, "keys") is not None
    assert opened(tmp_path, metrics, "open") is None
    # The parent of several workers keeps the file for them all.
    assert opened(tmp_path, metrics, "keys", shared_memory(1)) is None


async def test_what_is_lost_is_a_metric_and_logged_once_for_each_reason(tmp_path: Path) -> None:
    metrics = Metrics()
    (tmp_path / "limits-8080.jsonl").write_bytes(b"rubbish\nmore\n")
    file = opened(tmp_path, metrics, "keys")
    assert file is not None
    with capture_logs() as lines:
        file.start()
        await file.stop()

    value = metrics.registry.get_sample_value
    assert value("sidecar_limits_lost_total", {"reason": "line"}) == 2
    assert [(line["event"], line["reason"]) for line in lines] == [("limits_lost", "line")]


async def test_a_file_that_is_too_large_is_refused_unread_and_in_one_line(
    path: Path, lost: Counter[str]
) -> None:
    path.parent.mkdir()
    path.write_bytes(b'["key",1.0,1.0,20000,60]\n'.ljust(MAX_BYTES + 1, b"\n"))
    limiter = MemoryLimiter()

    with capture_logs() as logs:
        file = await kept(path, limiter, lost)
        await file.stop()

    assert limiter.records() == []
    assert lost == {"unreadable": 1}
    assert [(one["event"], one["max_bytes"]) for one in logs] == [("limits_too_large", 4 * 2**20)]


async def test_a_file_holds_no_more_than_is_read_again(
    path: Path, lost: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES", 100)
    limiter = MemoryLimiter()
    limiter.restore([(f"key{number}", SPENT) for number in range(9)])
    file = await kept(path, limiter, lost)
    await file.stop()
    after = MemoryLimiter()
    await (await kept(path, after, Counter())).stop()

    assert lost == {"not_saved": 1}
    assert 0 < len(after.records()) < 9

"""A page that is open is told at once that something changed, and of nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import func, select

from deploy.page import changing
from sidecar.store.models import AuditRow

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser, MakeBrowser


def events(text: str) -> list[dict[str, str]]:
    blocks = [one for one in text.split("\n\n") if one.startswith("id: ")]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


def newest(world: World) -> int:
    with world.database.read() as session:
        return session.scalar(select(func.max(AuditRow.seq))) or 0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that end after one look."""
    monkeypatch.setattr(changing, "MAX_S", 0.0)


@pytest.mark.usefixtures("short")
async def test_a_browser_is_told_what_it_has_not_shown_as_one_change(
    world: World, browser: Browser
) -> None:
    world.promote(world.register(1))
    before = newest(world)
    world.promote(world.register(2))

    assert f'data-seq="{newest(world)}"' in (await browser.get("/")).text
    loaded = await browser.get(f"/changed?after={before}")
    again = await browser.get("/changed?after=0", last_event_id=str(before))
    nothing = await browser.get(f"/changed?after={newest(world)}")
    hostile = await browser.get("/changed", last_event_id="9" * 18)
    unread = await browser.get("/changed?after=-1", last_event_id="x")

    assert loaded.headers["content-type"].startswith("text/event-stream")
    assert loaded.headers["cache-control"] == "no-store"
    place = str(newest(world))
    told = [{"id": place, "event": "changed", "data": place}]
    assert [events(one.text) for one in (loaded, again, unread)] == [told, told, told]
    assert events(nothing.text) == events(hostile.text) == []


async def test_a_change_while_the_stream_is_open_is_told(
    world: World, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "POLL_S", 0.02)
    monkeypatch.setattr(changing, "MAX_S", 1.5)

    stream = asyncio.create_task(browser.get(f"/changed?after={newest(world)}"))
    await asyncio.sleep(0.5)
    world.promote(world.register(1))

    told = events((await stream).text)
    assert told[-1] == {"id": str(newest(world)), "event": "changed", "data": str(newest(world))}


@pytest.mark.usefixtures("short")
async def test_streams_end_are_bounded_and_leave_no_count_behind(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "MAX_STREAMS", 1)
    first, second = await browser.get("/changed"), await browser.get("/changed")
    monkeypatch.setattr(changing, "MAX_STREAMS", 0)
    refused = await browser.get("/changed")

    head = await browser.client.head("/changed")

    assert (first.status_code, second.status_code) == (200, 200)
    assert head.status_code == 204
    assert (refused.status_code, refused.text) == (204, "")


async def test_a_burst_gets_no_more_streams_than_there_are(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "MAX_S", 0.5)
    monkeypatch.setattr(changing, "MAX_STREAMS", 3)

    replies = await asyncio.gather(*(browser.get("/changed") for _ in range(12)))

    assert sorted(one.status_code for one in replies) == [200] * 3 + [204] * 9


@pytest.mark.usefixtures("short")
async def test_nobody_is_told_before_the_login(make_browser: MakeBrowser) -> None:
    browser = make_browser("secret:read")

    before = await browser.get("/changed")
    await browser.log_in("secret")
    after = await browser.get("/changed")

    assert (before.status_code, before.headers["location"]) == (303, "/login")
    assert after.status_code == 200

"""The parts of a page that renew themselves: what has not changed stays the same element, so that
the keyboard focus stays and a screen reader is told of nothing new. In a real browser."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deploy.registry import flags
from sidecar.store.database import count
from sidecar.store.models import TableTakenRow
from support import page_history
from support.chromium import Chromium

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser

WATCH = (
    "window.kept = document.querySelector(arguments[0]); kept.focus();"
    "window.seen = []; new MutationObserver((all) => all.forEach((one) => seen.push(one)))"
    ".observe(document.querySelector('[role=status]'),"
    " {childList: true, characterData: true, subtree: true});"
    "return document.activeElement === kept"
)
STILL = (
    "return kept.isConnected && document.activeElement === kept"
    " && document.querySelector(arguments[0]) === kept"
)
ASKED = (
    "return performance.getEntriesByType('resource')"
    ".filter((one) => one.name.includes(arguments[0])).length"
)


def request_more(world: World, number: int) -> None:
    """Change a figure of the first screen, and nothing else."""
    with world.database.write() as session:
        count(session, "capture", "kept", number)
        count(session, "requests", "ok", number)


def test_the_first_screen_keeps_the_focus_under_traffic(
    world: World, window: Chromium, url: str
) -> None:
    page_history.tell(world)
    with world.database.write() as session:
        flags.set_paused(session, "m", True, now=world.clock.now, actor="me", reason="a sale")
    window.open(url)
    for place in ("#needs ~ .cards a", "#arms"):
        assert window.run(WATCH, place)
        figure = (
            "return [...document.querySelectorAll('#serves ~ dl dt')]"
            ".find(one => one.innerText.startsWith('Captured')).nextElementSibling.innerText"
        )
        for _ in range(2):
            before = window.run(figure)
            request_more(world, 1_000)
            window.until(f"{figure} !== arguments[0]", before)
            assert window.run(STILL, place), place
        assert window.run("return seen.length") == 0, "the headline was said again"
    assert window.messages() == []


def test_the_page_after_a_rollback_keeps_the_focus_and_asks_once_a_second(
    world: World, window: Chromium, url: str
) -> None:
    page_history.tell(world)
    page_history.roll_back(world, "worse")
    generation = world.table().generation
    with world.database.write() as session:
        for proxy in ("a:8080", "b:8080"):
            session.add(TableTakenRow(proxy=proxy, model="m", generation=generation, taken_at=0.0))
    window.open(f"{url}/rollback/last")
    first = world.aliases()["champion"]
    assert window.run(WATCH, "#by-proxy")

    for proxy in ("c:8080", "d:8080"):
        with world.database.write() as session:
            session.add(TableTakenRow(proxy=proxy, model="m", generation=1, taken_at=1.0))
        window.until("return kept.innerText.includes(arguments[0])", proxy)
        assert window.run(STILL, "#by-proxy")
    quiet = window.run("return seen.length")
    asked = window.run(ASKED, "/rollback/last?")
    window.run("window.began = performance.now()")
    window.until("return performance.now() - began > 4000")
    more = window.run(ASKED, "/rollback/last?") - asked
    world.serve("s", adapter=first)
    window.until("return document.getElementById('first-reply').innerText.includes('came in')")

    assert quiet == 0, "the sentence was replaced though it says the same"
    assert 2 <= more <= 5, "a swap began a second clock, or ended the only one"
    assert window.run("return seen.length") > 0
    assert window.run(STILL, "#by-proxy")
    assert window.messages() == []


def test_the_focus_goes_to_the_content_when_what_had_it_is_gone(
    world: World, window: Chromium, url: str
) -> None:
    page_history.tell(world)
    window.open(url)
    assert window.run(WATCH, "#arms")

    page_history.roll_back(world, "worse")
    window.until("return document.querySelector('#arms') === null")

    assert window.run("return document.activeElement.id") == "main"


def test_parts_are_found_again_by_their_ids_wherever_they_stand(
    world: World, window: Chromium, url: str
) -> None:
    window.open(url)
    became = window.run(
        """
        const part = (html) => new DOMParser().parseFromString(html, "text/html").body.firstChild;
        const old = part('<ul><li id=a>1<li>2<li id=c><a id=l href=#>3</a><li id=d>4</ul>');
        document.getElementById("main").append(old);
        const link = old.querySelector("#l");
        link.focus();
        const next = '<ul class=x><li id=b>0</li><li id=c><a id=l href=#y>33</a></li>' +
          '<li id=a>1</li>text<li>5</li></ul>';
        morph(old, part(next));
        return [old.outerHTML === part(next).outerHTML, document.activeElement === link,
          old.querySelector("#l") === link];
        """
    )

    assert became == [True, True, True]


async def test_the_part_after_a_rollback_is_sent_again_only_when_it_changed(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)
    page_history.roll_back(world, "worse")
    first = re.search(r"/rollback/last\?tag=(\w+)", (await browser.get("/rollback/last")).text)
    assert first is not None
    part = f"/rollback/last?tag={first[1]}"

    same = await browser.get(part, hx_request="true")
    whole = await browser.get(part)
    world.serve("s", adapter=world.aliases()["champion"])
    changed = await browser.get(part, hx_request="true")

    assert (same.status_code, same.content) == (204, b"")
    assert whole.status_code == changed.status_code == 200
    assert "came in" in changed.text


async def test_a_page_without_javascript_loads_itself_again_and_says_that_a_drawing_lacks(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)
    page_history.roll_back(world, "worse")

    first, last, run = [
        (await browser.get(path)).text for path in ("/", "/rollback/last", "/runs/run-2")
    ]

    assert '<noscript><meta http-equiv="refresh" content="15"></noscript>' in first
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in last
    assert run.count("<noscript>") == run.count('class="chart"') == 6
    assert "refresh" not in run

"""The pages in a real browser: how they look, by keyboard, live, and with hostile texts.

The screenshots stay in `.cache/page/`, for a person to look at.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from deploy.admin.context import AdminContext
from deploy.page.rendering import FOLDER
from deploy.registry import transitions
from sidecar.store.models import CanaryRow
from support import chromium, page_history
from support.chromium import ENTER, SPACE, TAB, Chromium

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import MakeBrowser

needs_browser = pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing() or "-")

SHOTS = Path(__file__).resolve().parents[3] / ".cache" / "page"
Serve = Callable[[AdminContext], str]
PATHS = {
    "status": "/",
    "canaries": "/canaries",
    "canary": "/canaries/{canary}",
    "funnel": "/funnel",
    "groups": "/groups",
    "group": "/groups/group-1",
    "runs": "/runs",
    "run": "/runs/run-2",
    "adapters": "/adapters",
    "audit": "/audit",
    "rollback": "/rollback",
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def window(browser: Chromium) -> Chromium:
    """The browser, away from the page of the test before, whose server is gone: a page that is left
    open asks it what has changed, and complains of the silence in the next test."""
    browser.open("about:blank")
    browser.messages()
    return browser


@pytest.fixture
def told(world: World, make_browser: MakeBrowser, serve: Serve) -> str:
    """URL of the page over a history."""
    world.rules = world.rules.model_copy(update={"step_min_exchanges": 20, "step_min_s": 22_800.0})
    page_history.tell(world)
    visitor = make_browser()
    asyncio.run(visitor.reconciler.reconcile())
    return serve(visitor.context)


def on_trial(world: World) -> str:
    return next(row.canary_id for row in world.rows(CanaryRow) if row.state == "ramping")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_fits_its_window_without_a_complaint_of_the_browser(
    world: World, window: Chromium, told: str, width: int, scheme: Literal["light", "dark"]
) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    window.look(width=width, scheme=scheme)
    window.messages()
    for name, path in PATHS.items():
        window.open(told + path.format(canary=on_trial(world)))
        window.screenshot(SHOTS / f"{name}-{width}-{scheme}.png")
        assert window.messages() == [], name
        assert window.run("return document.documentElement.scrollWidth") <= width, name
        assert len(window.find_all("h1")) == 1, name
        assert window.find("main").role == "main", name


@needs_browser
def test_the_first_page_is_readable_on_a_phone(window: Chromium, told: str) -> None:
    window.look(width=390, scheme="dark")
    window.open(f"{told}/")

    scale = window.run(
        "const one = document.querySelector('svg.curve');"
        "return one.getBoundingClientRect().width / one.viewBox.baseVal.width"
    )
    tallest = window.run(
        "return Math.max(...[...document.querySelectorAll('#arms tbody th')]"
        ".map((one) => one.getBoundingClientRect().height))"
    )

    assert scale >= 0.98, "the letters of the curve have the size that the style gives them"
    assert tallest < 70.0, "a name of the table has two lines, not one for each word"


@needs_browser
def test_charts_are_drawn_with_their_thresholds_and_have_their_numbers_beside_them(
    world: World, window: Chromium, told: str
) -> None:
    window.look(width=1280, scheme="light")
    window.open(f"{told}/canaries/{on_trial(world)}")

    painted = window.run(
        "const one = document.querySelector('#proof canvas');"
        "const all = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;"
        "return all.filter((value, i) => i % 4 === 3 && value > 0).length / (all.length / 4)"
    )
    rows = [one.text for one in window.find_all("#proof tbody tr")]

    assert painted > 0.05
    assert rows == [
        "1: no worse than the champion 8.166 20",
        "2: no worse than the anchor 29.96 20",
        "3: worse than the champion 0.3012 20",
        "4: guard: more failed replies than the champion 0.6703 100",
        "5: guard: more replies cut by the client 1.35 100",
    ]
    assert "the numbers are in the table below" in window.find("#proof .plot").label


@needs_browser
def test_names_of_thresholds_that_are_close_do_not_cover_each_other(
    world: World, window: Chromium, told: str
) -> None:
    with world.database.write() as session:
        row = next(one for one in session.query(CanaryRow) if one.state == "ramping")
        guards = {
            **row.evidence["guards"],
            "short": {"nats": 0.0, "threshold": 200.0},
            "invalid": {"nats": 0.0, "threshold": 220.0},
        }
        row.evidence = {**row.evidence, "guards": guards}
    window.look(width=1280, scheme="light")
    window.open(f"{told}/canaries/{on_trial(world)}")

    boxes = window.run(
        "const boxes = [], draw = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        "  const width = this.measureText(text).width;"
        "  if (text.startsWith('proven')) boxes.push([text, x - width, x, y]);"
        "  draw.apply(this, arguments);"
        "};"
        "drawCharts(); return new Promise((done) => setTimeout(() => done(boxes), 300))"
    )

    assert [one[0] for one in boxes] == [f"proven at {n}" for n in (20, 100, 200, 220)]
    covered = [
        (one[0], other[0])
        for i, one in enumerate(boxes)
        for other in boxes[:i]
        if one[1] < other[2] and other[1] < one[2] and abs(one[3] - other[3]) < 12
    ]
    assert covered == []


@needs_browser
def test_on_a_phone_no_word_is_broken_and_no_version_is_cut_off(
    world: World, window: Chromium, told: str
) -> None:
    check = {"at": world.clock.now, "outcome": "ok", "value": 1.0, "why": ""}
    metric = {"mode": "signal", "max": 20.0, "history": [check], "known_at": world.clock.now}
    with world.database.write() as session:
        row = next(one for one in session.query(CanaryRow) if one.state == "ramping")
        row.evidence = {**row.evidence, "metrics": {"error_share": metric}}
    window.look(width=390, scheme="light")

    window.open(f"{told}/canaries/{on_trial(world)}")
    lines = window.run(
        "const range = document.createRange();"
        "range.selectNodeContents(document.querySelector('#outside ~ .wide tbody th'));"
        "return range.getClientRects().length"
    )
    window.open(f"{told}/rollback")
    room = window.run(
        "const select = document.getElementById('to'), text = document.createElement('span');"
        "text.style.font = getComputedStyle(select).font; text.style.whiteSpace = 'nowrap';"
        "document.body.append(text);"
        "return [...select.options].map((one) => {"
        "  text.textContent = one.text; return select.clientWidth - 40 - text.offsetWidth })"
    )
    said = window.run("return document.getElementById('to').getAttribute('aria-describedby')")
    shown = window.find("#loaded").text

    assert lines == 1
    assert min(room[:2]) > 0, "without what was taken away"
    assert "v1, the one before: loaded on" in shown
    assert said == "loaded"


@needs_browser
def test_a_rollback_is_made_by_keyboard_alone(world: World, window: Chromium, told: str) -> None:
    window.look(width=1280, scheme="light")
    window.open(f"{told}/rollback")
    first = world.aliases()["previous"]
    window.press(TAB)
    skip = window.focused.text
    window.press(ENTER)
    inside = window.run("return document.activeElement.id")
    window.press(TAB)
    target = window.focused
    said = (target.role, target.label)
    window.press(TAB + "replies got worse")
    reason = window.focused.label
    window.press(TAB + SPACE)
    confirm = window.focused.label
    window.press(TAB)
    button = window.focused.text
    window.press(ENTER)
    window.until("return location.pathname === '/rollback/last'")

    assert (skip, inside) == ("Skip to the content", "main")
    assert said == ("combobox", "To")
    assert (reason, confirm, button) == ("Reason", "Give all users this version now", "Roll back")
    assert world.aliases()["champion"] == first
    world.clock.now += 0.25
    world.serve("s", adapter=first)
    window.until("return document.getElementById('first-reply').innerText.includes('250 ms')")
    window.screenshot(SHOTS / "rolled-back-1280-light.png")
    assert window.messages() == []


@needs_browser
def test_an_open_page_follows_what_happens_and_says_when_control_is_gone(
    world: World, window: Chromium, make_browser: MakeBrowser, serve: Serve
) -> None:
    page_history.tell(world)
    context = make_browser().context
    window.look(width=1280, scheme="light")
    window.open(serve(context))
    before = window.find("#headline").text
    with world.database.write() as session:
        row = session.get(CanaryRow, on_trial(world))
        assert row is not None
        transitions.pause(session, row, reason="lunch", now=world.clock.now, actor="me")

    window.until("return document.getElementById('headline').innerText.includes('paused')")

    assert "v5 gets 20%" in before
    assert window.find("#headline").role == "status"
    hidden = window.run("return document.getElementById('offline').hidden")
    window.devtools("Network.enable")
    window.devtools(
        "Network.emulateNetworkConditions",
        offline=True, latency=0, downloadThroughput=0, uploadThroughput=0,
    )  # fmt: skip
    window.until("return !document.getElementById('offline').hidden")
    window.devtools(
        "Network.emulateNetworkConditions",
        offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1,
    )  # fmt: skip
    window.until("return document.getElementById('offline').hidden")
    window.messages()
    assert hidden


@needs_browser
def test_hostile_texts_run_nothing(
    world: World, window: Chromium, make_browser: MakeBrowser, serve: Serve
) -> None:
    code = (
        "<script>window.hit=1</script><img src=x onerror='window.hit=1'>\"' onfocus=window.hit=1 "
    )
    page_history.tell(world, lambda text: text + code)
    url = serve(make_browser().context)
    window.look(width=1280, scheme="light")
    window.messages()

    for name, path in PATHS.items():
        window.open(url + path.format(canary=on_trial(world)))
        window.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert window.run("return window.hit === undefined"), name
        assert window.messages() == [], name
    window.open(f"{url}/groups/group-1")
    assert code.strip() in window.find(".answer pre").text


@needs_browser
def test_a_visitor_logs_in_and_out(
    world: World, window: Chromium, make_browser: MakeBrowser, serve: Serve
) -> None:
    page_history.tell(world)
    url = serve(make_browser("secret:read").context)
    window.look(width=1280, scheme="light")

    window.open(url)
    assert window.url == f"{url}/login"
    assert window.focused.label == "Token"
    window.press("secret" + ENTER)
    window.until("return location.pathname === '/'")
    text = window.find("body").text
    cookies = window.run("return document.cookie")
    window.find("form[action='/logout'] button").click()
    window.until("return location.pathname === '/login'")

    assert "may look but not change anything" in text
    assert "Roll back" not in text
    assert cookies == "", "scripts do not see the session"


def test_texts_stand_out_from_what_they_are_written_on() -> None:
    """At least 4.5 to 1, as WCAG 2.2 asks for (1.4.3), in both schemes."""
    style = (FOLDER / "static" / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    )
    pairs = [
        (ink, paper)
        for ink in ("ink", "soft", "blue")
        for paper in ("paper", "panel", "red-paper", "orange-paper")
    ]
    pairs += [(one, "paper") for one in ("red", "green", "orange", "purple")]
    pairs += [("on-color", one) for one in ("blue", "red")]

    poor = {
        (name, *pair): round(ratio, 2)
        for name, colors in (("light", light), ("dark", dark))
        for pair in pairs
        if (ratio := contrast(colors[pair[0]], colors[pair[1]])) < 4.5
    }

    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert poor == {}


def contrast(one: str, other: str) -> float:
    """The ratio of relative luminances of two colours, by WCAG 2.2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

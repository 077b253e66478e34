"""The pages in a real browser: how they look, by keyboard, live, and with hostile texts.

The screenshots stay in `.cache/page/`, for a person to look at.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from deploy.admin.context import AdminContext
from deploy.page.rendering import FOLDER
from deploy.registry import transitions
from sidecar.store.models import CanaryRow
from support import page_history
from support.chromium import ENTER, SPACE, TAB, Chromium

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import MakeBrowser

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


def test_an_open_page_follows_what_happens_and_says_when_control_is_gone(
    world: World, window: Chromium, url: str
) -> None:
    page_history.tell(world)
    window.look(width=1280, scheme="light")
    window.open(url)
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


def test_hostile_texts_run_nothing(world: World, window: Chromium, url: str) -> None:
    code = (
        "<script>window.hit=1</script><img src=x onerror='window.hit=1'>\"' onfocus=window.hit=1 "
    )
    page_history.tell(world, lambda text: text + code)
    window.look(width=1280, scheme="light")
    window.messages()

    for name, path in PATHS.items():
        window.open(url + path.format(canary=on_trial(world)))
        window.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        assert window.run("return window.hit === undefined"), name
        assert window.messages() == [], name
    window.open(f"{url}/groups/group-1")
    assert code.strip() in window.find(".answer pre").text


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

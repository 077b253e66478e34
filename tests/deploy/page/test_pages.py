"""What the pages say: of nothing, of a fortnight, of faults, of texts that are code."""

from __future__ import annotations

import re
import sqlite3
from html import unescape
from typing import TYPE_CHECKING

import pytest

from deploy.page.rendering import FOLDER, HEADERS, POLICY, commands_as_code
from deploy.registry import transitions
from learner.progress.watch import Missing, write_missing
from sidecar.conditions import Condition, write
from sidecar.errors import StoreError
from sidecar.settings import Learner
from sidecar.store.models import CanaryRow
from support import page_history

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser, MakeBrowser

PAGES = ("/", "/canaries", "/funnel", "/groups", "/runs", "/adapters", "/audit", "/rollback")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{7*7}}</td>"


def pages_of(world: World) -> list[str]:
    """Every page of the history."""
    canaries = [f"/canaries/{row.canary_id}" for row in world.rows(CanaryRow)]
    groups = [f"/groups/group-{number}" for number in range(3)]
    return [*PAGES, *canaries, *groups, "/runs/run-1", "/runs/run-2", "/live", "/login"]


def words_of(html: str) -> str:
    """The text of a page, its white space made single."""
    text = re.sub(r"<[^>]+>", " ", html)
    return re.sub(r"\s+", " ", unescape(text)).replace(" .", ".").replace(" ;", ";")


FRESH = {
    "/": "The base model serves since 1 Jan 00:00 UTC. No candidate is being tried.",
    "/live": "Nothing has come yet",
    "/canaries": "No candidate has been tried yet.",
    "/funnel": "0 of 0 requests captured",
    "/groups": "There is none.",
    "/runs": "It has not run yet.",
    "/adapters": "No adapter has been made yet: the base model answers everybody.",
    "/audit": "first start",
    "/rollback": "There is nothing to go back to: the base model serves.",
}


async def test_a_fresh_installation_has_a_page_that_says_what_is_not_there_yet(
    world: World, browser: Browser
) -> None:
    world.clock.now = 1_767_225_600.0 + 86_400.0
    with sqlite3.connect(world.database.engine.url.database or "") as store:
        store.execute("UPDATE audit SET at = 1767225600.0")

    for path, says in FRESH.items():
        reply = await browser.get(path)
        assert reply.status_code == 200, path
        assert says in words_of(reply.text), path


async def test_the_runs_page_says_when_the_learner_runs_and_what_holds_it(
    world: World, browser: Browser
) -> None:
    follows = words_of((await browser.get("/runs")).text)
    object.__setattr__(browser.context, "learner", Learner(schedule="manual"))
    now = world.clock()
    told = Condition(
        kind="schedule", line="m", code="no_room", message="a run needs about 16.4 GB",
        until=now + 600.0,
    )  # fmt: skip
    with world.database.write() as session:
        write(session, told, now=now)
        write_missing(session, [Missing("learner.device", "it cannot be used")], now=now)

    by_hand = words_of((await browser.get("/runs")).text)

    assert "The learner follows its schedule." in follows
    assert "No run now" not in follows
    assert "The learner runs when it is asked to." in by_hand
    assert "No run now: a run needs about 16.4 GB. It is tried again" in by_hand
    assert "The learner found at its start: learner.device: it cannot be used." in by_hand


async def test_the_first_screen_says_in_words_what_users_get(
    world: World, make_browser: MakeBrowser
) -> None:
    world.rules = world.rules.model_copy(update={"step_min_exchanges": 20, "step_min_s": 22_800.0})
    page_history.tell(world)
    browser = make_browser()
    await browser.reconciler.reconcile()

    found = words_of((await browser.get("/")).text)

    assert (
        "v3 serves since 22 Sep 15:14 UTC; v5 gets 20%, next step 09:39 UTC at the earliest, "
        "waits for 7 replies." in found
    )
    assert "v4 was rolled back at 20% : 9% of the canary's 210 replies failed, 1% before" in found
    assert "v2 was rejected : worse than the champion on 12 prompts: -0.081" in found
    assert "v3 was promoted" in found
    assert "The judge gives no scores: 503 from the judge" in found
    assert "Since 03:14; again at 03:19" in found
    assert "; 300 groups wait for it" in found
    assert "99.9% of 96,134 requests 14 lost, 0 left out on purpose" in found
    assert "3 records wait on the bus" in found
    assert "cut by the client 1 (7.7%) 2 (3.3%)" in found
    assert "answers; 3 adapters loaded" in found


async def test_a_visitor_who_was_away_sees_what_happened_meanwhile_and_no_more(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)
    await browser.get("/")
    await browser.submit("/", "/seen")
    world.clock.now += 3_600.0
    quiet = words_of((await browser.get("/")).text)
    page_history.roll_back(world, "replies got worse")
    world.clock.now += 60.0

    found = words_of((await browser.get("/")).text)

    assert "Nothing was promoted, rolled back or rejected." in quiet
    assert "v2 was rejected" not in found
    assert "rollback from v3 to v1 : replies got worse (token:0badcafe)" in found
    assert "the trial of v5 at 20% was ended by the rollback : rollback: replies got worse" in found


async def test_no_text_of_the_store_becomes_markup(world: World, browser: Browser) -> None:
    page_history.tell(world, lambda text: text + HOSTILE)
    world.clock.now += 1.0
    page_history.roll_back(world, HOSTILE)

    shown = 0
    for path in pages_of(world):
        html = (await browser.get(path)).text
        shown += html.count("&lt;script&gt;alert(1)")
        assert "<script>alert" not in html, path
        assert "<img" not in html, path
        assert "49</td>" not in html, path
        assert not re.search(r"<[^>]*\son\w+=", html), path
    assert shown > 30


async def test_a_name_from_the_address_does_not_become_markup(browser: Browser) -> None:
    for path in ("/canaries/", "/runs/", "/groups/", "/nothing/"):
        reply = await browser.get(path + "%3Cscript%3Ealert(1)%3C%2Fscript%3E")
        assert reply.status_code in (404, 405), path
        assert "<script>alert" not in reply.text


async def test_every_reply_forbids_what_is_inline_or_from_elsewhere(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)
    paths = [*pages_of(world), "/nothing", "/static/page.js", "/static/nothing"]

    assert POLICY == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )
    for path in paths:
        reply = await browser.get(path)
        assert {name: reply.headers.get(name) for name in HEADERS} == dict(HEADERS), path
        kept = path == "/static/page.js"
        assert ("no-store" in reply.headers["cache-control"]) is not kept, path
        if not path.startswith("/static/"):
            assert not re.search(r"<style|style=|<script(?![^>]* src=\"/static/)", reply.text), path
            assert not re.search(r"(src|href)=\"(?!/)(?!#)", reply.text), path


def test_no_template_marks_anything_as_safe() -> None:
    for template in (FOLDER / "templates").iterdir():
        text = template.read_text(encoding="utf-8")
        assert not re.search(r"\|\s*safe|autoescape|Markup", text), template.name


async def test_only_static_files_are_served_and_no_others(browser: Browser) -> None:
    for name in ("..%2Fmount.py", "%2e%2e/mount.py", "THIRD_PARTY.txt", "page.css%00"):
        assert (await browser.get(f"/static/{name}")).status_code in (400, 404), name


async def test_a_listing_goes_on_where_it_stopped(world: World, browser: Browser) -> None:
    for version in range(1, 56):
        world.register(version)

    first = (await browser.get("/adapters")).text
    older = re.search(r'href="(/adapters\?cursor=[^"]+)"', first)
    assert older is not None
    second = (await browser.get(unescape(older[1]))).text

    assert (first.count("<li class="), second.count("<li class=")) == (50, 5)


async def test_adapters_say_which_are_banned_and_groups_their_scores(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)

    group = words_of((await browser.get("/groups/group-1")).text)
    found = words_of((await browser.get("/adapters")).text)

    assert "score 0.850" in group
    assert "worse than the champion on 12 prompts: -0.081 Banned. No canary tries its" in found


async def test_a_store_that_is_away_is_said_with_what_works_all_the_same(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise StoreError("database is locked")

    monkeypatch.setattr(browser.context.database, "read", away)

    for path in ("/", "/canaries", "/runs", "/audit", "/rollback/last"):
        reply = await browser.get(path)
        assert reply.status_code == 503, path
        assert "database is locked" in reply.text
        assert "sidecar rollback --offline" in reply.text


async def test_vllm_away_and_a_failing_loop_need_somebody(world: World, browser: Browser) -> None:
    world.control.away = True
    await browser.reconciler.reconcile()

    found = words_of((await browser.get("/")).text)

    assert "vLLM at http://vllm does not answer" in found
    assert "a rollback works all the same" in found


async def test_the_live_part_is_sent_again_only_when_it_changed(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)
    first = re.search(r"/live\?tag=(\w+)", (await browser.get("/")).text)
    assert first is not None

    same = await browser.get(f"/live?tag={first[1]}")
    canary = world.canary(next(r.candidate for r in world.rows(CanaryRow) if "v5" in r.candidate))
    with world.database.write() as session:
        row = session.get(CanaryRow, canary.canary_id)
        assert row is not None
        transitions.pause(session, row, reason="lunch", now=world.clock.now, actor="me")
    changed = await browser.get(f"/live?tag={first[1]}")

    assert (same.status_code, same.content) == (204, b"")
    assert changed.status_code == 200
    assert "The trial of v5 is paused at 20%" in words_of(changed.text)


async def test_the_api_and_the_probes_answer_as_without_the_page(make_browser: MakeBrowser) -> None:
    browser = make_browser("secret")

    assert (await browser.get("/healthz")).json() == {"status": "ok"}
    refused = await browser.get("/admin/v1/status")
    given = await browser.get("/admin/v1/status", authorization="Bearer secret")

    assert (refused.status_code, given.status_code) == (401, 200)
    assert refused.headers["content-type"] == "application/problem+json"
    assert (await browser.get("/metrics")).status_code == 401


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("run `sidecar doctor` now", "run <code>sidecar doctor</code> now"),
        ("`a` and `<b>`", "<code>a</code> and <code>&lt;b&gt;</code>"),
        ("<script>`", "&lt;script&gt;`"),
        ("nothing", "nothing"),
    ],
)
def test_what_stands_between_backticks_is_code_and_all_is_escaped(text: str, shown: str) -> None:
    assert commands_as_code(text) == shown

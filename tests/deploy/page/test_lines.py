"""The pages about the line of a project: each line is shown, and is steered alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from deploy.admin.context import AdminContext
from deploy.engine.reconcile import Fleet, Reconciler
from deploy.page.mount import with_page
from deploy.page.rendering import first_reply
from deploy.registry import audit, canaries, flags, routing_writer, transitions
from deploy.registry.rollback import rollback
from sidecar.lines import lines_of
from sidecar.records import BASE
from sidecar.store.models import GroupRow
from tests.deploy.page.conftest import HOST, Browser
from tests.deploy.page.test_pages import words_of

if TYPE_CHECKING:
    from tests.deploy.conftest import World

DEFAULT, OWN = lines_of("m", ["support"])
PLACE = "/project/support"


@pytest.fixture
def own(world: World) -> World:
    """The line of the project `support`; its champion is v2, the one before v1."""
    with world.database.write() as session:
        routing_writer.initialise(session, OWN.name, now=0.0, actor=audit.CONTROL)
    folder = world.folder / "own"
    folder.mkdir()
    own = replace(world, line=OWN, folder=folder)
    for version in (1, 2):
        own.promote(own.register(version, values=(0.1 * version, 0.9)))
    return own


@pytest.fixture
def shared(world: World) -> World:
    """The default line; its champion is v4, the one before v3."""
    for version in (3, 4):
        world.promote(world.register(version, values=(0.1 * version, 0.9)))
    return world


@pytest.fixture
def browser(world: World) -> Browser:
    reconciler = Reconciler(
        database=world.database, control=world.control, model="m", max_loras=9, own=[OWN.name]
    )
    context = AdminContext(
        database=world.database,
        model="m",
        lines=(DEFAULT, OWN),
        rules=world.rules,
        fleet=Fleet({"http://vllm": reconciler}),
        clock=world.clock,
    )
    transport = httpx.ASGITransport(app=with_page(context), client=("127.0.0.9", 4711))
    client = httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}")
    return Browser(client=client, context=context, reconciler=reconciler)


async def test_every_line_is_shown_with_a_link_to_its_pages(
    shared: World, own: World, browser: Browser
) -> None:
    theirs = words_of((await browser.get("/")).text)
    page = (await browser.get(f"{PLACE}/")).text

    assert "All other projects : v4 answers" in theirs
    assert "support : v2 answers" in theirs
    assert theirs.count("v4 serves") == 1
    assert "project support" in words_of(page)
    assert "v2 serves" in words_of(page)
    assert f'href="{PLACE}/adapters"' in page
    assert f'href="{PLACE}/" aria-current="true"' in page
    assert 'href="/"' in page, "back to the default line"
    assert (await browser.get("/project/other/")).status_code == 404


async def test_each_page_of_a_line_is_about_that_line(
    shared: World, own: World, browser: Browser
) -> None:
    mine, other = own.aliases()["champion"], shared.aliases()["champion"]

    for place in ("/adapters", "/canaries", "/rollback", "/runs", "/funnel"):
        assert (await browser.get(f"{PLACE}{place}")).status_code == 200

    adapters = (await browser.get(f"{PLACE}/adapters")).text
    assert mine in adapters
    assert other not in adapters
    assert mine not in (await browser.get("/adapters")).text
    form = (await browser.get(f"{PLACE}/rollback")).text
    assert f'action="{PLACE}/rollback"' in form
    assert "Roll back the adapters of support" in words_of(form)


async def test_groups_and_audit_name_the_project_and_groups_of_a_line_are_its_own(
    shared: World, own: World, browser: Browser
) -> None:
    """A group of a best-of-N request has no project; its exchange has."""
    candidate = own.register(3, values=(0.7, 0.8))
    with own.database.write() as session:
        transitions.begin(
            session, model=OWN.name, candidate=candidate, steps=(5000,), now=1.0, actor="t"
        )
        flags.set_paused(session, OWN.name, True, now=1.0, actor="t", reason="wait")
        audit.record(
            session,
            now=1.0,
            actor="t",
            action="adapter.pushed",
            subject=candidate,
            before={},
            after={},
            reason="",
        )
    for project, known in (("support", "support"), ("support", None), ("shop", "shop")):
        add_group(own, f"{project}-{known}", own.serve("s", project=project), known)

    theirs = words_of((await browser.get("/groups")).text)
    mine = words_of((await browser.get(f"{PLACE}/groups")).text)
    audited = (await browser.get("/audit")).text

    assert all(name in theirs for name in ("support-support", "support-None", "shop-shop"))
    assert "Project" in theirs
    assert "support-support" in mine
    assert "support-None" in mine
    assert "shop-shop" not in mine
    for action in ("alias.champion", "adapter.pushed", "canary.gating", "learner.pause"):
        rows = [one for one in audited.split("<tr>") if f"<td>{action}</td>" in one]
        assert any("<td>support</td>" in one for one in rows), action
    assert "<td>–</td>" in audited, "rows of the default line"


def add_group(world: World, group_id: str, exchange_id: str, project: str | None) -> None:
    with world.database.write() as session:
        session.add(
            GroupRow(
                group_id=group_id,
                exchange_id=exchange_id,
                session_key="k",
                adapter=BASE,
                status="scored",
                created_at=1.0,
                project=project,
            )
        )


async def test_a_rollback_on_the_page_of_a_line_leaves_the_others_alone(
    shared: World, own: World, browser: Browser
) -> None:
    before = (shared.aliases(), shared.table())

    done = await browser.submit(
        f"{PLACE}/rollback", f"{PLACE}/rollback", to="previous", reason="worse", confirm="yes"
    )

    assert (done.status_code, done.headers["location"]) == (303, f"{PLACE}/rollback/last")
    assert own.aliases()["champion"] == own.aliases()["previous"]
    assert own.aliases()["champion"].startswith("m@@support--v1-")
    assert (shared.aliases(), shared.table()) == before
    seen = words_of((await browser.get(f"{PLACE}/rollback/last")).text)
    assert "From v2" in seen
    assert (await browser.get("/rollback/last")).status_code == 404, "of the default line"


async def test_the_learner_of_a_line_is_paused_alone(
    shared: World, own: World, browser: Browser
) -> None:
    etag = await _etag(browser, f"{PLACE}/runs")

    done = await browser.submit(f"{PLACE}/runs", f"{PLACE}/learner/pause", reason="wait", etag=etag)

    assert (done.status_code, done.headers["location"]) == (303, f"{PLACE}/runs")
    with own.database.read() as session:
        assert flags.read(session, OWN.name).paused
        assert not flags.read(session, DEFAULT.name).paused
    assert "its learner is paused" in words_of((await browser.get("/")).text)


async def test_the_paused_trial_of_another_line_needs_somebody(
    shared: World, own: World, browser: Browser
) -> None:
    candidate = own.register(3, values=(0.7, 0.8))
    with own.database.write() as session:
        begun = transitions.begin(
            session, model=OWN.name, candidate=candidate, steps=(5000,), now=1.0, actor="t"
        )
        canaries.find_row(session, begun.canary_id).paused = True

    page = (await browser.get("/")).text

    assert "The trial of v3 of support is paused at 0%" in words_of(page)
    assert f'href="{PLACE}/canaries/{begun.canary_id}">Look at it' in page


async def test_what_happened_in_one_line_is_not_told_on_the_page_of_the_other(
    shared: World, own: World, browser: Browser
) -> None:
    rollback(own.database, OWN.name, reason="rude", actor="me", now=own.clock())

    assert "rollback from v2 to v1" in words_of((await browser.get(f"{PLACE}/")).text)
    assert "rollback from" not in words_of((await browser.get("/")).text)


async def test_the_first_reply_of_a_line_is_by_the_base_to_its_own_project(own: World) -> None:
    own.clock.now = 1_000.0
    own.serve("theirs", adapter=BASE, project="shop")
    own.clock.now = 1_001.0
    own.serve("mine", adapter=BASE, project="support")

    with own.database.read() as session:
        found = first_reply(session, line=OWN, to=BASE, left="m@@support--v2-0", at=999.5)
        shared = first_reply(session, line=DEFAULT, to=BASE, left="m--v2-0", at=999.5)

    assert (found.after_s, shared.after_s) == (1.5, 0.5)


async def _etag(browser: Browser, page: str) -> str:
    text = (await browser.get(page)).text
    return text.partition('name="etag" value="')[2].partition('"')[0].replace("&#34;", '"')

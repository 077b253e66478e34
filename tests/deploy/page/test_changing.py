"""The forms: a rollback and what is seen of it, canaries, the learner."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import update

from deploy.page.rendering import LOOKED_AT, FirstReply, first_reply
from deploy.registry import bans, canaries
from deploy.registry.rollback import rollback
from sidecar.lines import Line
from sidecar.records import BASE
from sidecar.store.models import AuditRow, CanaryRow, ExchangeRow, TableTakenRow
from support import page_history
from tests.deploy.page.test_pages import words_of

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser, MakeBrowser


async def test_a_rollback_takes_target_reason_and_confirmation_and_names_the_visitor(
    world: World, make_browser: MakeBrowser
) -> None:
    page_history.tell(world)
    browser = make_browser("boss:operate")
    await browser.log_in("boss")
    first = world.aliases()["previous"]

    unsaid = await browser.submit("/rollback", "/rollback", to="previous", confirm="yes")
    blank = await browser.submit("/rollback", "/rollback", to="previous", reason=" ", confirm="yes")
    unsure = await browser.submit("/rollback", "/rollback", to="previous", reason="worse")
    before = world.aliases()["champion"]
    done = await browser.submit(
        "/rollback", "/rollback", to="previous", reason="worse", confirm="yes"
    )

    assert (unsaid.status_code, blank.status_code, unsure.status_code) == (422, 422, 422)
    assert ">worse</textarea>" in unsure.text, "what was written is not lost"
    assert before != first
    assert (done.status_code, done.headers["location"]) == (303, "/rollback/last")
    assert world.aliases()["champion"] == first
    row = next(one for one in reversed(world.rows(AuditRow)) if one.action == "rollback")
    assert row.actor.startswith("token:")
    assert (row.source, row.reason) == ("127.0.0.9", "worse")
    assert len(row.request_id) == 32


async def test_a_target_that_never_was_champion_is_refused_in_words(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)

    reply = await browser.submit("/rollback", "/rollback", to="v5", reason="x", confirm="yes")

    assert reply.status_code == 409
    assert "has never been champion" in reply.text


async def test_the_targets_say_where_they_are_loaded(world: World, browser: Browser) -> None:
    page_history.tell(world)
    await browser.reconciler.reconcile()

    found = words_of((await browser.get("/rollback")).text)

    assert "v1, the one before: loaded on 1 of 1 replica" in found
    assert "the base model: always loaded" in found


def options(html: str) -> list[tuple[str, bool, str]]:
    """Value, whether it is chosen, and text of each option of the form, in order."""
    found = re.findall(r'<option value="([^"]*)"( selected)?>([^<]*)</option>', html)
    return [(value, bool(chosen), text) for value, chosen, text in found]


def promoted(world: World, *numbers: int) -> list[str]:
    names = []
    for number in numbers:
        names.append(world.register(number, values=(0.5, float(number))))
        world.promote(names[-1])
    return names


async def test_what_was_just_taken_away_is_not_chosen_and_its_ban_is_lifted_on_purpose_only(
    world: World, browser: Browser
) -> None:
    first, second, third = promoted(world, 1, 2, 3)
    fields = {"reason": "worse", "confirm": "yes"}
    await browser.submit("/rollback", "/rollback", to="previous", **fields)
    assert world.aliases() == {"champion": second, "previous": second}

    found = options((await browser.get("/rollback")).text)
    empty = await browser.submit("/rollback", "/rollback", to="", **fields)
    absent = await browser.submit("/rollback", "/rollback", **fields)
    unsure = await browser.submit("/rollback", "/rollback", to=third, **fields)
    by_number = await browser.submit("/rollback", "/rollback", to="v3", **fields)
    before = world.aliases()
    done = await browser.submit("/rollback", "/rollback", to=third, lift="yes", **fields)

    assert [value for value, _, _ in found] == ["", first, "base", third]
    assert [text for _, chosen, text in found if chosen] == ["choose: nothing is left to undo"]
    assert "rolled back" in found[-1][2]
    assert "banned; choosing it lifts the ban" in found[-1][2]
    refused = (empty, absent, unsure, by_number)
    assert [one.status_code for one in refused] == [422, 422, 422, 422]
    assert "Choose what to go back to" in empty.text
    assert "This version is banned" in unsure.text
    assert before["champion"] == second
    assert done.status_code == 303
    assert world.aliases()["champion"] == third


async def test_a_previous_champion_that_was_banned_since_is_last_and_not_chosen(
    world: World, browser: Browser
) -> None:
    first, second, _ = promoted(world, 1, 2, 3)
    with world.database.write() as session:
        bans.ban(session, second, now=world.clock.now, actor="control", reason="it is worse")

    found = options((await browser.get("/rollback")).text)

    assert [value for value, _, _ in found] == ["", first, "base", "previous"]
    assert found[0] == ("", True, "choose: the one before was taken away")


async def test_each_former_champion_is_listed_once_however_many_canaries_failed_since(
    world: World, browser: Browser
) -> None:
    first, second = promoted(world, 1, 2)
    third = world.register(3, values=(0.5, 3.0))
    world.promote(third)
    rollback(world.database, "m", reason="x", actor="me", now=world.clock.now)
    rollback(world.database, "m", to=third, reason="x", actor="me", now=world.clock.now)
    with world.database.write() as session:
        session.add_all(
            canaries.new_row(model="m", candidate=f"m--v{number}-0123456789ab", now=number)
            for number in range(100, 350)
        )
        session.flush()
        session.execute(
            update(CanaryRow).where(CanaryRow.state != "promoted").values(state="inconclusive")
        )

    found = [value for value, _, _ in options((await browser.get("/rollback")).text)]

    assert found == ["", first, "base", second]


async def test_after_a_rollback_the_page_shows_when_users_got_it(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)
    await browser.reconciler.reconcile()
    old, new = world.aliases()["previous"], world.aliases()["champion"]
    await browser.submit("/rollback", "/rollback", to="previous", reason="worse", confirm="yes")
    at = world.clock.now
    waits = words_of((await browser.get("/rollback/last")).text)
    for after_s, adapter in ((0.125, new), (0.25, old), (0.5, old)):
        world.clock.now = at + after_s
        world.serve("s", adapter=adapter)

    found = words_of((await browser.get("/rollback/last", hx_request="true")).text)

    assert "No recorded request has been answered by v1 yet." in waits
    assert "has v1 loaded" in waits
    assert "Banned v3, v5" in waits, "the champion, and the candidate that users had met"
    assert "The first request that v1 answered came in 250 ms after the rollback." in found
    assert "1 request that came in later still got v3, the last one 125 ms after" in found


async def test_a_second_rollback_says_that_there_is_nothing_to_undo(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)
    fields = {"to": "base", "reason": "worse", "confirm": "yes"}
    await browser.submit("/rollback", "/rollback", **fields)
    token = (await browser.get("/runs")).text

    assert "There is nothing to go back to" not in token
    reply = await browser.submit("/runs", "/rollback", **fields)

    assert reply.status_code == 200
    assert "the base model is the champion already" in words_of(reply.text)


def test_the_first_reply_is_found_among_many_and_not_mistaken_for_one_in_flight(
    world: World,
) -> None:
    for number in range(40):
        world.clock.now = 100.0 + number
        world.serve("s", adapter="m--v1-00000000000a")
    world.clock.now = 200.0
    world.serve("s", adapter=BASE)  # it came in before the rollback, at 190
    with world.database.write() as session:
        newest = session.query(ExchangeRow).order_by(ExchangeRow.seq.desc()).first()
        assert newest is not None
        newest.started_at = 190.0
    world.clock.now = 203.0
    world.serve("s", adapter=BASE)
    with world.database.write() as session:
        newest = session.query(ExchangeRow).order_by(ExchangeRow.seq.desc()).first()
        assert newest is not None
        newest.started_at, newest.timings = 202.5, {"first_byte_s": 0.25}
        expected = newest.exchange_id
    for number in range(LOOKED_AT + 5):
        world.clock.now = 210.0 + number
        world.serve("s", adapter=BASE)

    with world.database.read() as session:
        found = first_reply(
            session, line=Line(name="m"), to=BASE, left="m--v1-00000000000a", at=200.0
        )
        never = first_reply(session, line=Line(name="m"), to=BASE, left="other", at=9_000.0)

    assert found == FirstReply(exchange_id=expected, after_s=2.5, first_byte_s=2.75, late_s=())
    assert never == FirstReply(exchange_id=None, after_s=None, first_byte_s=None, late_s=())


async def test_each_proxy_is_shown_with_the_time_until_it_took_the_rollback(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)
    before = world.table().generation
    await browser.submit("/rollback", "/rollback", to="previous", reason="worse", confirm="yes")
    at, after = world.clock.now, world.table().generation
    told = [("a:8080", after, 0.14), ("b:8080", after + 1, 9.0), ("c:8080", before, -60.0)]
    with world.database.write() as session:
        for proxy, generation, seconds in told:
            session.add(
                TableTakenRow(proxy=proxy, model="m", generation=generation, taken_at=at + seconds)
            )

    found = words_of((await browser.get("/rollback/last")).text)

    assert after > before
    assert "a:8080 140 ms after the rollback" in found
    assert "b:8080 has taken a later table since" in found
    assert "c:8080 has not told so" in found


async def test_a_canary_is_steered_from_its_page(world: World, browser: Browser) -> None:
    page_history.tell(world)
    canary = next(row.canary_id for row in world.rows(CanaryRow) if row.state == "ramping")
    page = f"/canaries/{canary}"

    paused = await browser.submit(page, f"{page}/pause", reason="lunch")

    assert (paused.status_code, paused.headers["location"]) == (303, page)
    html = (await browser.get(page)).text
    assert "Resume" in html
    assert "paused: lunch" in html


@pytest.mark.parametrize(("etag", "status"), [('"g1"', 412), ("", 428)])
async def test_a_promotion_names_the_state_that_the_visitor_saw(
    world: World, browser: Browser, etag: str, status: int
) -> None:
    page_history.tell(world)
    canary = next(row.canary_id for row in world.rows(CanaryRow) if row.state == "ramping")
    champion = world.aliases()["champion"]

    reply = await browser.submit(
        f"/canaries/{canary}", f"/canaries/{canary}/promote", etag=etag, reason="x"
    )

    assert reply.status_code == status
    assert world.aliases()["champion"] == champion


async def test_the_learner_is_paused_and_resumed_from_the_page_of_runs(
    world: World, browser: Browser
) -> None:
    page_history.tell(world)

    await browser.submit("/runs", "/learner/pause", reason="holidays")
    html = (await browser.get("/runs")).text

    assert "is paused" in html
    assert 'formaction="/learner/resume"' in html
    assert "learner.pause" in world.actions()

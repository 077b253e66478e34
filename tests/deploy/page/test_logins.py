"""Who gets in, what a visitor may do, and that no other page acts in a visitor's name."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import pytest

from deploy.page import sessions
from deploy.page.sessions import FORM, SESSION, SESSION_S, Logins, Session
from sidecar.store.models import AuditRow, CanaryRow
from support import page_history
from tests.deploy.page.conftest import HOST, form_token

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser, MakeBrowser

KEY = bytes(range(32))
READS = ("/", "/canaries", "/funnel", "/groups", "/runs", "/adapters", "/audit")


async def test_a_visitor_without_a_session_is_sent_to_the_login(make_browser: MakeBrowser) -> None:
    browser = make_browser("secret")

    for path in (*READS, "/rollback", "/groups/g"):
        reply = await browser.get(path)
        assert (reply.status_code, reply.headers["location"]) == (303, "/login"), path
    part = await browser.get("/live", hx_request="true")
    assert (part.status_code, part.headers["hx-redirect"]) == (401, "/login")


async def test_a_token_opens_a_session_and_is_not_in_its_cookie(make_browser: MakeBrowser) -> None:
    browser = make_browser("secret")

    reply = await browser.log_in("secret")

    assert (reply.status_code, reply.headers["location"]) == (303, "/")
    cookie = next(one for one in reply.headers.get_list("set-cookie") if one.startswith(SESSION))
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/" in cookie
    assert f"Max-Age={int(SESSION_S)}" in cookie
    digest = hashlib.sha256(b"secret").hexdigest()
    assert "secret" not in cookie
    assert digest[:8] not in cookie
    assert (await browser.get("/")).status_code == 200


async def test_a_wrong_token_opens_nothing_and_is_counted(make_browser: MakeBrowser) -> None:
    browser = make_browser("secret")

    reply = await browser.log_in("Secret")

    assert reply.status_code == 401
    assert "This token is not known." in reply.text
    assert browser.context.refusals.counts["unknown_token"] == 1
    assert (await browser.get("/")).status_code == 303


async def test_a_token_of_a_project_opens_nothing(make_browser: MakeBrowser) -> None:
    browser = make_browser("secret:read@shop")

    reply = await browser.log_in("secret")

    assert reply.status_code == 401
    assert browser.context.refusals.counts["no_scope"] == 1
    assert (await browser.get("/")).status_code == 303


async def test_a_session_ends_after_twelve_hours(world: World, make_browser: MakeBrowser) -> None:
    browser = make_browser("secret")
    await browser.log_in("secret")

    world.clock.now += SESSION_S - 1.0
    before = await browser.get("/")
    world.clock.now += 1.0
    after = await browser.get("/")

    assert (before.status_code, after.status_code) == (200, 303)


async def test_a_session_that_was_logged_out_is_not_taken_again(make_browser: MakeBrowser) -> None:
    browser = make_browser("secret")
    await browser.log_in("secret")
    kept = browser.client.cookies[SESSION]

    await browser.submit("/", "/logout")
    browser.client.cookies.set(SESSION, kept, domain="127.0.0.1", path="/")

    assert (await browser.get("/")).status_code == 303


async def test_strangers_who_log_out_take_no_memory(make_browser: MakeBrowser) -> None:
    logins = Logins(make_browser("secret").context)

    for number in range(3):
        logins.log_out(Session(name=f"n{number}", who="", ends_at=9e9))
    logins.log_out(Session(name="n", who="somebody", ends_at=9e9))

    assert logins.ended == 1


async def test_a_session_of_another_process_is_not_taken(make_browser: MakeBrowser) -> None:
    first, second = make_browser("secret"), make_browser("secret")
    await first.log_in("secret")

    second.client.cookies = first.client.cookies

    assert (await second.get("/")).status_code == 303


def test_a_cookie_that_was_changed_in_any_character_is_not_taken() -> None:
    value = sessions.seal(KEY, Session(name="n", who="w", ends_at=10.0))

    assert sessions.unseal(KEY, value, 9.0) == Session(name="n", who="w", ends_at=10.0)
    assert sessions.unseal(KEY, value, 10.0) is None
    assert sessions.unseal(bytes(32), value, 9.0) is None
    for place in range(len(value)):
        changed = value[:place] + ("A" if value[place] != "A" else "B") + value[place + 1 :]
        assert sessions.unseal(KEY, changed, 9.0) is None, place
    for odd in ("", ".", "é.é", "x" * 5_000, value + "é"):
        assert sessions.unseal(KEY, odd, 9.0) is None


async def test_a_reader_has_no_buttons_and_no_rights(
    world: World, make_browser: MakeBrowser
) -> None:
    page_history.tell(world)
    browser = make_browser("reader:read", "boss")
    await browser.log_in("reader")
    champion, rows = world.aliases()["champion"], len(world.rows(AuditRow))
    canary = next(row.canary_id for row in world.rows(CanaryRow) if row.state == "ramping")
    token = form_token((await browser.get("/")).text)

    for path in (*READS, f"/canaries/{canary}"):
        html = (await browser.get(path)).text
        assert "/rollback" not in html, path
        posts = set(re.findall(r'(?:form)?action="([^"]+)"', html))
        assert posts <= {"/logout", "/seen"}, path
    forged = [
        await browser.post("/rollback", form_token=token, to="base", reason="x", confirm="yes"),
        await browser.post(f"/canaries/{canary}/abort", form_token=token, reason="x"),
        await browser.post(f"/canaries/{canary}/promote", form_token=token, etag="*", reason="x"),
        await browser.post("/learner/pause", form_token=token, reason="x"),
    ]

    assert [reply.status_code for reply in forged] == [403] * 4
    assert (await browser.get("/rollback")).status_code == 403
    assert browser.context.refusals.counts["no_scope"] == 5
    assert world.aliases()["champion"] == champion
    assert len(world.rows(AuditRow)) == rows


async def test_what_was_said_needs_the_scope_content(
    world: World, make_browser: MakeBrowser
) -> None:
    page_history.tell(world)
    canary = next(row.canary_id for row in world.rows(CanaryRow) if row.state == "ramping")
    said = ("Your parcel comes tomorrow", "Sends away.", "ask x")
    reader, auditor = make_browser("r:operate+train"), make_browser("a:content")
    await reader.log_in("r")
    await auditor.log_in("a")

    refused = await reader.get("/groups/group-1")
    for path in (*READS, f"/canaries/{canary}"):
        html = (await reader.get(path)).text
        assert [one for one in said if one in html] == [], path
    shown = await auditor.get("/groups/group-1")

    assert refused.status_code == 403
    assert [one for one in said if one in shown.text] == list(said)
    assert "/groups/group-1" in (await auditor.get("/groups")).text
    assert "/groups/group-1" not in (await reader.get("/groups")).text


@pytest.mark.parametrize("forged", ["", "0" * 64, "é" * 64])
async def test_a_change_needs_the_form_token_of_the_session(
    world: World, browser: Browser, forged: str
) -> None:
    page_history.tell(world)
    await browser.get("/rollback")
    champion = world.aliases()["champion"]

    reply = await browser.post("/rollback", form_token=forged, to="base", reason="x", confirm="yes")

    assert reply.status_code == 403
    assert world.aliases()["champion"] == champion


async def test_a_form_token_of_another_session_is_refused(
    world: World, make_browser: MakeBrowser
) -> None:
    page_history.tell(world)
    browser = make_browser("one", "two")
    await browser.log_in("one")
    other = form_token((await browser.get("/rollback")).text)
    browser.client.cookies.clear()
    await browser.log_in("two")

    reply = await browser.post("/rollback", form_token=other, to="base", reason="x", confirm="yes")

    assert reply.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
    ],
)
@pytest.mark.parametrize("tokens", [(), ("secret",)])
async def test_a_form_that_another_page_sends_is_refused(
    world: World, make_browser: MakeBrowser, headers: dict[str, str], tokens: tuple[str, ...]
) -> None:
    page_history.tell(world)
    browser = make_browser(*tokens)
    if tokens:
        await browser.log_in("secret")
    token = form_token((await browser.get("/rollback")).text)
    champion = world.aliases()["champion"]

    fields = {"form_token": token, "to": "base", "reason": "x", "confirm": "yes"}
    reply = await browser.client.post("/rollback", data=fields, headers=headers)

    assert reply.status_code == 403
    assert world.aliases()["champion"] == champion


async def test_without_tokens_a_foreign_host_gets_no_page(make_browser: MakeBrowser) -> None:
    browser = make_browser(host="evil.example")

    assert (await browser.get("/")).status_code == 403


async def test_a_login_that_another_site_links_to_does_not_end_the_session(
    make_browser: MakeBrowser,
) -> None:
    """A link from elsewhere brings no Strict cookie along: the answer must not replace it."""
    browser = make_browser("secret")
    await browser.log_in("secret")
    kept = browser.client.cookies[SESSION]

    browser.client.cookies.delete(SESSION)
    reply = await browser.get("/")

    assert reply.status_code == 303
    assert all(one.startswith(FORM) for one in reply.headers.get_list("set-cookie"))
    browser.client.cookies.set(SESSION, kept, domain="127.0.0.1", path="/")
    assert (await browser.get("/")).status_code == 200


async def test_no_page_has_a_token_or_its_digest(world: World, make_browser: MakeBrowser) -> None:
    page_history.tell(world)
    browser = make_browser("secret-of-the-boss", "another-secret:read")
    await browser.log_in("secret-of-the-boss")

    for path in (*READS, "/rollback", "/login"):
        html = (await browser.get(path)).text
        assert "secret-of" not in html, path
        assert "another-secret" not in html, path
        for listed in browser.context.tokens:
            assert listed.partition(":")[0][:12] not in html, path


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"a=1&a=2", "application/x-www-form-urlencoded", 400),
        (b"a=\xff", "application/x-www-form-urlencoded", 400),
        (b"a=%00", "application/x-www-form-urlencoded", 400),
        (b"&".join(b"f%d=1" % n for n in range(30)), "application/x-www-form-urlencoded", 400),
        (b"a=" + b"x" * 70_000, "application/x-www-form-urlencoded", 413),
        (b'{"to": "base"}', "application/json", 400),
        (b"to=base", "text/plain", 400),
    ],
)
async def test_a_body_that_is_no_form_of_ours_is_refused(
    browser: Browser, body: bytes, kind: str, status: int
) -> None:
    headers = {"content-type": kind, "origin": f"http://{HOST}"}

    reply = await browser.client.post("/rollback", content=body, headers=headers)

    assert reply.status_code == status

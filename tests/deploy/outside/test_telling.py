"""Web hooks: signed, at least once over a kill, in order, bounded in tries and age."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.outside import telling
from deploy.outside.http import Caller, OutsideError, Reply
from deploy.outside.telling import (
    FLAG,
    SETTLE_S,
    Event,
    Hooks,
    HookState,
    Sender,
    key_of,
    read_state,
    signed_headers,
)
from deploy.registry import audit
from sidecar.lines import Line
from sidecar.settings import Hook, Notify
from sidecar.store.database import set_flag
from sidecar.store.models import CounterRow
from support.outside_server import OutsideServer, outside_server
from tests.deploy.conftest import World

SECRETS = {"HOOK_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
URL = "http://hook"
EVENT = Event(
    seq=7, at=1.0, type="rollback", subject="m", actor="me", reason="r", before={}, after={}
)


@dataclass
class FakePoster:
    """Takes an event, or fails as it is told to."""

    fails: bool = False
    status: int = 204
    hangs: dict[str, asyncio.Event] = field(default_factory=dict)
    """URL -> until when it does not answer."""
    posts: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        timeout_s: float,
        token: str = "",
        headers: Mapping[str, str] = {},
    ) -> Reply:
        self.posts.append((url, json.loads(body), dict(headers)))
        if url in self.hangs:
            await self.hangs[url].wait()
        if self.fails:
            raise OutsideError("it cannot be reached (ConnectError); check the URL")
        return Reply(status=self.status, body=b"")

    def told_to(self, url: str) -> list[str]:
        return [body["type"] for to, body, _ in self.posts if to == url]

    @property
    def told(self) -> list[str]:
        return [body["type"] for _, body, _ in self.posts]


@dataclass
class Told:
    """One hook over the world's store; each turn is of a control of its own."""

    world: World
    poster: FakePoster
    settings: Notify

    async def turn(self, later_s: float = 10.0) -> None:
        self.world.clock.now += later_s
        clock = self.world.clock
        sender = Sender("m", self.poster, environment=SECRETS, clock=clock)
        hooks = Hooks(self.world.database, self.settings, sender, clock=clock)
        await hooks.tick()
        while hooks.busy:  # on a machine that is slow
            await hooks.tick()

    def happen(self, *actions: str) -> None:
        with self.world.database.write() as session:
            for action in actions:
                audit.record(
                    session,
                    now=self.world.clock(),
                    actor="control",
                    action=action,
                    subject="c1",
                    before={"phase": "gating"},
                    after={"phase": "ramping"},
                    reason="it is good",
                )

    @property
    def state(self) -> HookState:
        with self.world.database.read() as session:
            found = read_state(session, "ops")
        assert found is not None
        return found


def notify(url: str = URL, **more: Any) -> Notify:
    hook = {"url": url, "secret_env": "HOOK_SECRET", **more.pop("hook", {})}
    return Notify.model_validate({"hooks": {"ops": hook}, **more})


@pytest.fixture
async def told(world: World, monkeypatch: pytest.MonkeyPatch) -> Told:
    """A hook that knows all that has happened before."""
    monkeypatch.setattr(telling, "RETRIES", 2)
    monkeypatch.setattr(telling, "MAX_AGE_S", 1_000.0)
    found = Told(world, FakePoster(), notify())
    await found.turn()
    assert found.poster.posts == []
    return found


def test_a_signature_is_that_of_the_specification() -> None:
    headers = signed_headers(
        key_of(SECRETS["HOOK_SECRET"]),
        message_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        at=1614265330,
        body=b'{"test": 2432232314}',
    )

    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_%%%"])
def test_a_secret_that_signs_nothing_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="secret"):
        key_of(secret)


@pytest.mark.both_stores
async def test_each_event_is_told_once_in_order_with_its_reason(told: Told) -> None:
    told.happen("canary.ramping", "learner.pause", "keys.made", "rollback")

    await told.turn()
    await told.turn()

    assert told.poster.told == ["canary.ramping", "learner.pause", "rollback"]
    url, body, headers = told.poster.posts[0]
    assert url == URL
    assert body["data"] == {
        "seq": body["data"]["seq"],
        "model": "m",
        "at": 1_010.0,
        "subject": "c1",
        "project": None,
        "candidate": None,
        "actor": "control",
        "reason": "it is good",
        "before": {"phase": "gating"},
        "after": {"phase": "ramping"},
    }
    assert body["timestamp"] == "1970-01-01T00:16:50.000Z"
    assert re.fullmatch(f"ops-{body['data']['seq']}-[0-9a-f]{{12}}", headers["webhook-id"])
    assert headers["webhook-timestamp"] == "1020"
    assert (told.state.delivered, told.state.dead, told.state.error) == (3, 0, "")


@pytest.mark.both_stores
async def test_an_event_says_whose_line_it_is_of_and_which_adapter_a_canary_tries(
    told: Told, world: World
) -> None:
    world.line = Line(name="m@@shop")
    name = world.register(1)
    world.ramp(name)

    await told.turn()

    found = [(one["type"], one["data"]) for _, one, _ in told.poster.posts]
    assert [type_ for type_, _ in found if type_ == "canary.ramping"] == ["canary.ramping"]
    about = {(one["project"], one["candidate"]) for type_, one in found if "canary." in type_}
    assert about == {("shop", name)}


async def test_a_kill_between_the_delivery_and_the_cursor_tells_it_again_by_the_same_id(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.happen("canary.promoted", "rollback")

    def die(*_: Any) -> None:
        raise RuntimeError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(Hooks, "_keep", die)
        with pytest.raises(RuntimeError, match="killed here"):
            await told.turn()
    await told.turn()

    assert told.poster.told == ["canary.promoted", "canary.promoted", "rollback"]
    ids = [headers["webhook-id"] for *_, headers in told.poster.posts]
    assert ids[0] == ids[1] != ids[2]


async def test_a_receiver_that_is_away_is_tried_again_later_and_later_events_wait(
    told: Told,
) -> None:
    told.happen("canary.ramping", "rollback")
    told.poster.fails = True

    await told.turn(2.0)
    await told.turn(4.9)
    state = told.state
    told.poster.fails = False
    await told.turn(0.2)

    assert (state.tries, state.error.startswith("it cannot be reached")) == (1, True)
    assert told.poster.told == ["canary.ramping", "canary.ramping", "rollback"]
    assert (told.state.tries, told.state.delivered) == (0, 2)


async def test_after_its_last_retry_an_event_is_dead_and_the_next_one_is_told(
    told: Told, world: World
) -> None:
    told.happen("canary.ramping")
    told.poster.status = 500

    for _ in range(3):
        await told.turn(30.0)
    dead = told.state
    told.happen("rollback")
    told.poster.status = 200
    await told.turn()

    assert (dead.dead, dead.tries, dead.error[:10]) == (1, 0, "status 500")
    assert told.poster.told == ["canary.ramping"] * 3 + ["rollback"]
    counted = {row.reason: row.count for row in world.rows(CounterRow) if row.stage == "hook"}
    assert counted == {"failed": 2, "dead": 1, "delivered": 1}


async def test_news_that_are_too_old_are_given_up_without_a_try(told: Told) -> None:
    told.happen("canary.ramping")

    await told.turn(1_001.0)

    assert (told.poster.posts, told.state.dead) == ([], 1)


async def test_events_of_two_stores_with_one_number_have_ids_of_their_own(told: Told) -> None:
    sender = Sender("m", told.poster, environment=SECRETS, clock=lambda: 1.0)
    hook = next(iter(told.settings.hooks.values()))

    for one in (EVENT, EVENT, replace(EVENT, at=2.0)):
        await sender.post("ops", hook, one)

    first, again, other = (headers["webhook-id"] for *_, headers in told.poster.posts)
    assert first == again != other


async def test_a_clock_that_is_set_back_holds_up_no_news(told: Told) -> None:
    told.happen("canary.ramping")

    await told.turn(-86_400.0)

    assert told.poster.told == ["canary.ramping"]


async def test_a_row_is_told_only_when_no_older_one_can_still_be_committed(told: Told) -> None:
    told.happen("canary.ramping")

    await told.turn(SETTLE_S / 2)
    early = list(told.poster.told)
    await told.turn(SETTLE_S)

    assert (early, told.poster.told) == ([], ["canary.ramping"])


async def test_one_hook_that_fails_holds_up_no_other(told: Told) -> None:
    bad = {"url": "http://bad", "secret_env": "NOT_SET"}
    both = {"ops": told.settings.hooks["ops"].model_dump(), "bad": bad}
    told.settings = Notify.model_validate({"hooks": both})
    await told.turn()
    told.happen("rollback")

    await told.turn()

    assert told.poster.told == ["rollback"]
    with told.world.database.read() as session:
        state = read_state(session, "bad")
    assert state is not None
    assert "NOT_SET is not set" in state.error


async def test_one_hook_that_hangs_holds_up_no_other(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "EVERY_S", 0.2)
    slow = "http://slow"
    told.poster.hangs[slow] = asyncio.Event()
    both = {"ops": told.settings.hooks["ops"], "slow": {"url": slow, "secret_env": "HOOK_SECRET"}}
    told.settings = Notify.model_validate({"hooks": both})
    await told.turn()
    sender = Sender("m", told.poster, environment=SECRETS, clock=told.world.clock)
    hooks = Hooks(told.world.database, told.settings, sender, clock=told.world.clock)

    for action in ("rollback", "canary.ramping"):
        told.happen(action)
        told.world.clock.now += 10.0
        while told.poster.told_to(URL)[-1:] != [action]:
            await hooks.tick()

    assert told.poster.told_to(slow) == ["rollback"]
    told.poster.hangs[slow].set()
    while told.poster.told_to(slow) != ["rollback", "canary.ramping"] or hooks.busy:
        await hooks.tick()
    assert told.poster.told_to(URL) == ["rollback", "canary.ramping"]


async def test_a_damaged_cursor_begins_with_what_happens_from_now_on(told: Told) -> None:
    told.happen("canary.ramping")
    with told.world.database.write() as session:
        set_flag(session, FLAG + "ops", '{"after": "x"}', now=1.0)

    await told.turn()
    told.happen("rollback")
    await told.turn()

    assert told.poster.told == ["rollback"]


@pytest.mark.parametrize(
    "hook",
    [
        {"url": "ftp://x/y"},
        {"url": "file:///etc/passwd"},
        {"secret_env": ""},
        {"secret_file": "/x"},
        {"events": []},
        {"secret_env": "SIDECAR_HOOK"},
    ],
)
def test_a_hook_that_could_not_work_is_refused(hook: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        notify(hook=hook)


@pytest.fixture
def server() -> Iterator[OutsideServer]:
    with outside_server() as found:
        yield found


async def test_over_http_the_receiver_can_verify_what_it_got(
    world: World, server: OutsideServer, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("plain text\n")
    hook = Hook.model_validate({"url": server.url + "/in", "secret_file": str(secret)})
    caller = Caller()
    hooks = Sender("m", caller, environment={}, clock=world.clock)

    await hooks.post("ops", hook, EVENT)
    server.status = 302
    with pytest.raises(OutsideError, match=r"redirects|status 302"):
        await hooks.post("ops", hook, EVENT)
    await caller.aclose()

    got = server.asked[0]
    assert (got.method, got.path) == ("POST", "/in")
    message_id = got.headers["webhook-id"]
    expected = signed_headers(b"plain text", message_id=message_id, at=1_000, body=got.body)
    assert {name: got.headers[name] for name in expected} == expected

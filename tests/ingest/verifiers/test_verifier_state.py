"""What is known of each verifier reaches the store: tried at the start, last good, last error, and
the groups that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import msgspec
import pytest
from structlog.testing import capture_logs

from ingest.ruler.blame import Failed
from ingest.ruler.judging import Judgements
from ingest.verifiers.records import UNVERIFIED, Failure, Finding, Result
from ingest.verifiers.rewarding import Rewarding, open_rewarding
from ingest.verifiers.state import VerifierSeen, held_groups, waiting_for
from sidecar.conditions import read_all
from sidecar.settings import HttpVerifier, Reward, Settings
from sidecar.settings.judge import LengthVerifier
from sidecar.store.database import Database
from support.clock import Clock
from support.fake_checker import FakeChecker
from tests.ingest.conftest import put_group
from tests.ingest.verifiers.test_rewarding import group

NOW = 1_000.0
NOBODY = "http://127.0.0.1:9/check"


class Hook(BaseHTTPRequestHandler):
    asked: ClassVar[list[bytes]] = []
    reply = b'{"score": null}'

    def do_POST(self) -> None:
        Hook.asked.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", str(len(Hook.reply)))
        self.end_headers()
        self.wfile.write(Hook.reply)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[str]:
    Hook.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/check"
        server.shutdown()
        thread.join()


def seen(database: Database) -> dict[str, VerifierSeen]:
    with database.read() as session:
        found = [msgspec.convert(one.data, VerifierSeen) for one in read_all(session)]
    return {one.name: one for one in found}


async def begin(database: Database, url: str, told: list[str]) -> None:
    reward = Reward(verifiers={"v": HttpVerifier(kind="http", url=url, on_error="hold")})
    made = open_rewarding(Settings(reward=reward), database, announce=told.append)
    assert made is not None
    await made.begin()
    await made.aclose()


async def test_a_hook_where_nobody_listens_is_not_ready(database: Database) -> None:
    told: list[str] = []

    with capture_logs() as logs:
        await begin(database, NOBODY, told)

    assert [one["event"] for one in logs if "verifier" in one] == ["verifier_failed"]
    assert told == ["verifier v fails (unreachable: ConnectError): groups wait for it"]
    one = seen(database)["v"]
    assert (one.kind, one.fails, one.good_at) == ("http", True, None)
    assert one.error == "unreachable: ConnectError"


async def test_a_hook_that_answers_is_asked_once_about_a_sum(database: Database, hook: str) -> None:
    told: list[str] = []

    with capture_logs() as logs:
        await begin(database, hook, told)

    assert [one["event"] for one in logs if "verifier" in one] == ["verifier_ready"]
    assert told == []
    assert len(Hook.asked) == 1
    assert b"What is 2 + 3?" in Hook.asked[0]
    one = seen(database)["v"]
    assert (one.fails, one.error) == (False, "")
    assert one.good_at is not None


def rewarding(database: Database, checker: FakeChecker, clock: Clock, said: list[str]) -> Rewarding:
    reward = Reward(verifiers={"v": LengthVerifier(kind="length", max_tokens=9)})
    return Rewarding(database, reward, {"v": checker}, clock=clock, announce=said.append)


@pytest.mark.both_stores
async def test_last_good_and_last_error_are_kept_and_its_end_is_said(database: Database) -> None:
    put_group(database, "g1", "good", "bad")
    clock, said = Clock(NOW), list[str]()
    checker = FakeChecker(lambda _: Failure(reason="unreachable", why="ConnectError"))
    made = rewarding(database, checker, clock, said)

    await made.verify(group("good"))
    failed = seen(database)["v"]
    clock.now = NOW + 5
    checker.find = lambda _: Finding(score=1.0)
    await made.verify(group("good"))
    worked = seen(database)["v"]

    assert (failed.fails, failed.good_at, failed.error_at) == (True, None, NOW)
    assert (worked.fails, worked.good_at, worked.error_at) == (False, NOW + 5, NOW)
    assert worked.error == "unreachable: ConnectError"
    assert said == [
        "verifier v fails (unreachable: ConnectError): groups are judged without it",
        "verifier v works again",
    ]


async def test_one_slow_answer_and_kept_findings_are_no_news(database: Database) -> None:
    put_group(database, "g1", "good", "bad")

    def find(content: str) -> Result:
        return Failure(reason="error", why="a word") if content == "bad" else Finding(score=1.0)

    clock = Clock(NOW)
    made = rewarding(database, FakeChecker(find), clock, [])
    await made.verify(group("good", "bad"))
    clock.now = NOW + 500
    await made.verify(group("good"))

    one = seen(database)["v"]
    assert (one.fails, one.good_at, one.error) == (False, NOW, "error"), "its words quote an answer"


def test_the_groups_that_wait_for_a_verifier_are_counted(database: Database) -> None:
    for name in ("g1", "g2", "g3"):
        put_group(database, name, "good", "bad")
    judgements = Judgements(database, Clock(NOW), judge_model="j", lease_s=60.0)
    for name, why in (("g1", "v: unreachable"), ("g2", "w: timeout; v: unreachable")):
        judgements.charge([Failed(group_id=name, reason=UNVERIFIED, detail=why)], proven=True)

    with database.read() as session:
        assert waiting_for(session) == {"v": 2, "w": 1}
        assert held_groups(session) == 2, "the third waits for the judge"

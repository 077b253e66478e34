"""One contract for every checker: the fake, a process, and a service over HTTP; then hostile ones.

The code of the process's package and of the service is that of docs/verifiers.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ingest.privacy.texts import JudgeView
from ingest.records import Answer
from ingest.verifiers.checkers import Checker, NotLoadedError, ProcessChecker, Processes
from ingest.verifiers.hook import HttpChecker
from ingest.verifiers.records import Failure, Finding, Result
from ingest.verifiers.rewarding import spec_of
from sidecar.settings import EntryPointVerifier, HttpVerifier, Privacy
from sidecar.settings.judge import ToolCallsVerifier
from support.fake_checker import FakeChecker
from support.processes import is_alive
from support.verifier_package import install

PAGE = Path(__file__).resolve().parents[3] / "docs" / "verifiers.md"
REQUEST = json.dumps({"messages": [{"role": "user", "content": "Refund me"}]}).encode()
MEMORY = 2**30
LIMIT_S = 4.0
"""Long enough for a quick answer on a machine with much else to do."""


def code_of(title: str) -> str:
    """The Python of a section of the page."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return str(re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0])


def answer(content: object, **changes: Any) -> Answer:
    message = json.dumps({"role": "assistant", "content": content}).encode()
    return Answer(**{"index": 0, "origin": "sampled", "message": message, **changes})


@asynccontextmanager
async def process_checker(settings: Any, *, timeout_s: float) -> AsyncIterator[ProcessChecker]:
    running = Processes(1, MEMORY)
    try:
        yield ProcessChecker(spec_of("v", settings), running, timeout_s=timeout_s)
    finally:
        await running.aclose()


def entry(name: str = "v", **params: Any) -> EntryPointVerifier:
    return EntryPointVerifier(kind="entry_point", entry_point=name, params=params)


Serve = Callable[[str], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Run a service; its code has `serve(port)`. Returns: its URL."""
    running = []

    def start(code: str) -> str:
        names: dict[str, Any] = {}
        exec(compile(code, "service", "exec"), names)
        names["Check"].log_message = lambda *_: None
        server = names["serve"](0)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}/check"

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


SCRIPTED = """
import time

class Scripted:
    version = "1"
    def verify(self, case):
        word = case.content
        if word == "slow":
            time.sleep(60)
        if word == "raise":
            raise ValueError("no")
        if word == "odd":
            return 7.0
        if word == "none":
            return None
        return word == "good"
"""
SERVICE = """
import json, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Check(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        word = asked["answer"]["message"]["content"]
        if word == "slow":
            time.sleep(12)
        if word == "raise":
            self.send_response(500)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        score = {"odd": 7.0, "none": None}.get(word, word == "good")
        reply = json.dumps({"score": score}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        try:
            self.wfile.write(reply)
        except OSError:
            pass

def serve(port):
    return ThreadingHTTPServer(("127.0.0.1", port), Check)
"""


def scripted(content: str) -> Result:
    """What the fake finds."""
    failures: dict[str, Result] = {
        "slow": Failure(reason="timeout"),
        "raise": Failure(reason="error"),
        "odd": Failure(reason="bad_finding"),
        "none": Finding(score=None),
    }
    return failures.get(content, Finding(score=float(content == "good")))


@pytest.fixture(params=["fake", "process", "http"])
async def checker(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, serve: Serve
) -> AsyncIterator[Checker]:
    if request.param == "fake":
        yield FakeChecker(scripted)
    elif request.param == "http":
        settings = HttpVerifier(kind="http", url=serve(SERVICE), timeout_s=LIMIT_S)
        made = HttpChecker("v", settings, JudgeView(Privacy()))
        yield made
        await made.aclose()
    else:
        install(monkeypatch, tmp_path, SCRIPTED, scripted="Scripted")
        async with process_checker(entry("scripted"), timeout_s=LIMIT_S) as made_here:
            yield made_here


async def test_it_finds_each_answer_by_itself(checker: Checker) -> None:
    words = ("good", "bad", "raise", "none", "odd", "slow", "good")

    found = await checker.check(REQUEST, [answer(word) for word in words], "default")

    assert await checker.version() == "1"
    scores = [one.score for one in found if isinstance(one, Finding)]
    assert scores == [1.0, 0.0, None, 1.0]
    reasons = [one.reason for one in found if isinstance(one, Failure)]
    assert reasons in (
        ["error", "bad_finding", "timeout"],
        ["refused", "bad_finding", "timeout"],  # a service says why by its status
    )
    assert [isinstance(one, Failure) for one in found] == [
        False, False, True, False, True, True, False,
    ]  # fmt: skip


async def test_nothing_to_check_is_nothing_found(checker: Checker) -> None:
    assert await checker.check(REQUEST, [], "default") == []


# --- the page's own examples


async def test_the_entry_point_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, code_of("Your own code"), refund_policy="RefundPolicy")
    settings = entry("refund_policy", max_cents=5000)
    async with process_checker(settings, timeout_s=20.0) as checker:
        texts = ("You get 12.50 EUR.", "You get 12.50 EUR and 99.00 EUR.", "Hello")

        found = await checker.check(REQUEST, [answer(text) for text in texts], "shop")

    assert found == [
        Finding(score=1.0, why="promises 1250 cents"),
        Finding(score=0.0, why="promises 9900 cents"),
        Finding(score=None, why="no amount is promised"),
    ]


async def test_the_service_of_the_page(serve: Serve) -> None:
    settings = HttpVerifier(kind="http", url=serve(code_of("Your own service")), timeout_s=20.0)
    checker = HttpChecker("policy", settings, JudgeView(Privacy()))

    found = await checker.check(REQUEST, [answer("Please wait"), answer("Wait")], "shop")
    await checker.aclose()

    assert found == [Finding(score=1.0, why="polite"), Finding(score=0.0, why="curt")]


# --- code that does harm


Check = Callable[..., Awaitable[list[Result]]]


@pytest.fixture
def run_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """Check answers with the body of a `verify` method, in a process."""

    async def check(body: str, *contents: str, timeout_s: float = LIMIT_S, **params: Any) -> Any:
        lines = "\n".join(f"        {line}" for line in body.splitlines())
        head = "import os, sys, time\nclass V:\n    version = '1'\n    def verify(self, case):"
        code = f"{head}\n{lines}\n"
        install(monkeypatch, tmp_path, code, v="V")
        async with process_checker(entry(**params), timeout_s=timeout_s) as checker:
            return await checker.check(REQUEST, [answer(one) for one in contents], "default")

    return check


async def test_what_catches_every_exception_is_ended_too(run_code: Check) -> None:
    body = (
        "import signal\nfor number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):\n"
        "    signal.signal(number, signal.SIG_IGN)\nwhile True:\n    try:\n        time.sleep(9)\n"
        "    except BaseException:\n        pass"
    )

    (found,) = await run_code(body, "x", timeout_s=0.3)

    assert isinstance(found, Failure)
    assert found.reason == "timeout"


async def test_a_process_that_ends_costs_its_answer_alone(run_code: Check) -> None:
    found = await run_code("return os._exit(3) if case.content == 'x' else 1", "y", "x", "y")

    assert [isinstance(one, Failure) and one.reason for one in found] == [False, "crashed", False]


async def test_memory_is_bounded(run_code: Check) -> None:
    found = await run_code("return len(bytearray(4 * 2**30)) > 0", "x", timeout_s=20.0)

    assert found == [Failure(reason="error", why="MemoryError:")]


async def test_what_it_starts_is_killed_with_it(run_code: Check, tmp_path: Path) -> None:
    place = tmp_path / "pid"
    body = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(place)!r}, 'w').write(str(child.pid))\ntime.sleep(60)"
    )

    await run_code(body, "x", timeout_s=3.0)

    async with asyncio.timeout(30):
        while is_alive(int(place.read_text())):
            await asyncio.sleep(0.02)


async def test_it_cannot_speak_to_the_sidecar_by_printing(run_code: Check) -> None:
    body = "os.write(1, b'x' * 100_000)\nprint('y' * 100_000)\nsys.stdout.flush()\nreturn 1"

    assert await run_code(body, "a", "b") == [Finding(score=1.0), Finding(score=1.0)]


async def test_it_does_not_see_keys(run_code: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("SIDECAR_STORE__URL", "postgresql://u:p@h/d")
    monkeypatch.setenv("SHOP_REGION", "eu")

    found = await run_code(
        "return 'SHOP_REGION' in os.environ and 'OPENAI_API_KEY' not in os.environ and "
        "'SIDECAR_STORE__URL' not in os.environ",
        "x",
    )

    assert found == [Finding(score=1.0)]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("class V:\n    def verify(self, case): return 1", "has no attribute 'version'"),
        ("class V:\n    version = ''\n    def verify(self, case): return 1", "is no text of 1 to"),
        ("class V:\n    version = '1'\n    def __init__(self, must): pass", "missing 1 required"),
    ],
)
async def test_code_that_cannot_be_loaded_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, why: str
) -> None:
    install(monkeypatch, tmp_path, code, v="V")
    async with process_checker(entry(), timeout_s=1.0) as checker:
        with pytest.raises(NotLoadedError, match=re.escape(why)):
            await checker.version()
        found = await checker.check(REQUEST, [answer("x"), answer("y")], "default")

    assert [isinstance(one, Failure) and one.reason for one in found] == ["not_loaded"] * 2


async def test_a_package_that_is_not_installed_is_named() -> None:
    async with process_checker(entry("nobody"), timeout_s=1.0) as checker:
        with pytest.raises(NotLoadedError, match="no installed package has the entry point nobody"):
            await checker.version()


async def test_a_body_that_is_no_json_object_is_told_apart() -> None:
    async with process_checker(ToolCallsVerifier(kind="tool_calls"), timeout_s=20.0) as checker:
        found = await checker.check(b"junk", [answer("x")], "default")
        other = await checker.check(REQUEST, [answer("x", message=b"[]"), answer("y")], "default")

    assert found == [Failure(reason="unreadable", why="a body is no JSON object")]
    assert [isinstance(one, Failure) for one in other] == [True, False]


async def test_a_stop_in_the_middle_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    code = (
        "import os, time\nclass V:\n    version = '1'\n    def verify(self, case):\n"
        f"        open({str(mark)!r}, 'w').write(str(os.getpid()))\n        time.sleep(60)\n"
    )
    install(monkeypatch, tmp_path, code, v="V")
    async with process_checker(entry(), timeout_s=60.0) as checker:
        task = asyncio.create_task(checker.check(REQUEST, [answer("x")], "default"))
        async with asyncio.timeout(30):
            while not (mark.exists() and mark.read_text()):
                await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


# --- services that do harm


async def ask(serve: Serve, body: str, content: str = "x", **settings: Any) -> Result:
    code = SERVICE.replace("        word = asked", f"{body}\n        word = asked", 1)
    found = HttpVerifier(kind="http", url=serve(code), **{"timeout_s": 20.0, **settings})
    checker = HttpChecker("v", found, JudgeView(Privacy()))
    try:
        return (await checker.check(REQUEST, [answer(content)], "default"))[0]
    finally:
        await checker.aclose()


def respond(status: int, body: str, headers: str = "") -> str:
    return (
        f"        body = {body}\n        self.send_response({status})\n{headers}"
        "        self.send_header('content-length', str(len(body)))\n        self.end_headers()\n"
        "        self.close_connection = True\n"
        "        try:\n            self.wfile.write(body)\n        except OSError:\n"
        "            pass\n        return\n"
    )


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, "b'{\"score\": 1}' + b' ' * 10**6", "bad_finding"),
        (200, "b'<html>'", "bad_finding"),
        (200, "b'{}'", "bad_finding"),
        (200, 'b\'{"score": 1, "score": 0}\'', "bad_finding"),
        (200, "b'[' * 60_000", "bad_finding"),
        (503, "b'away'", "refused"),
        (302, "b''", "refused"),
    ],
)
async def test_a_reply_of_a_service_is_not_believed(
    serve: Serve, status: int, body: str, reason: str
) -> None:
    moved = "        self.send_header('location', 'http://127.0.0.1:9/')\n"
    found = await ask(serve, respond(status, body, moved if status == 302 else ""))

    assert isinstance(found, Failure)
    assert found.reason == reason


async def test_a_packed_reply_is_not_unpacked(serve: Serve) -> None:
    """64 kB of it may be 64 MB."""
    bomb = "__import__('gzip').compress(b'{\"score\": 1}' + b' ' * 50_000_000)"
    packed = "        self.send_header('content-encoding', 'gzip')\n"

    found = await ask(serve, respond(200, bomb, packed))

    assert found == Failure(reason="bad_finding", why="the reply is packed, and was not to be")


async def test_a_service_that_drips_is_left_in_time(serve: Serve) -> None:
    drip = (
        "        self.send_response(200)\n        self.send_header('content-length', '1000000')\n"
        "        self.end_headers()\n        while True:\n            time.sleep(0.1)\n"
        "            try:\n                self.wfile.write(b' ')\n"
        "            except OSError:\n                return\n        return\n"
    )

    found = await ask(serve, drip, timeout_s=0.5)

    assert found == Failure(reason="timeout", why="no whole reply in 0.5 s")


async def test_a_service_that_is_not_there_is_unreachable_and_its_url_is_not_told() -> None:
    settings = HttpVerifier(kind="http", url="http://user:s3cret@127.0.0.1:9/check")
    checker = HttpChecker("v", settings, JudgeView(Privacy()))

    found = await checker.check(REQUEST, [answer("x")], "default")
    await checker.aclose()

    assert found == [Failure(reason="unreachable", why="ConnectError")]


SECRETIVE = """        said = json.dumps(asked)
        self.headers_seen = dict(self.headers)
        asked["answer"]["message"]["content"] = (
            "good" if "jane@example.org" not in said and "<EMAIL_1>" in said else "bad"
        )
        if self.headers.get("authorization") != "Bearer tok-12345":
            asked["answer"]["message"]["content"] = "raise"
"""


async def test_a_service_sees_placeholders_and_the_token(serve: Serve) -> None:
    found = await ask(serve, SECRETIVE, "write to jane@example.org", token="tok-12345")
    plain = await ask(
        serve, SECRETIVE, "write to jane@example.org", token="tok-12345", redact=False
    )

    assert found == Finding(score=1.0)
    assert plain == Finding(score=0.0)


async def test_no_web_proxy_of_the_environment_is_used(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)

    assert await ask(serve, "", "good") == Finding(score=1.0)

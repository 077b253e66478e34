"""The supervisor with real child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from deploy.supervise import Child, Supervisor, _waiting_line
from deploy.supervisor_rules import ProcessSpec
from sidecar.settings import Serving, Settings
from sidecar.upstreams import Upstreams
from support.processes import is_alive, until

MakeChild = Callable[..., Child]
SLEEPER = "import time; print('up', flush=True); time.sleep(60)"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeChild]:
    """make(*command, **spec): a child whose log is x.log; it is ended with the test."""
    made: list[Child] = []

    def make(*command: str, **spec: Any) -> Child:
        made.append(Child(ProcessSpec(name="x", command=command, **spec), tmp_path / "x.log"))
        return made[-1]

    yield make
    for child in made:
        child.terminate()
        child.join(time.monotonic() + 60)


def died(child: Child) -> int:
    """Start it at 0. Returns: its exit code."""
    child.start(now=0.0)
    assert child.process is not None
    return child.process.wait()


def test_a_dead_child_is_started_again_after_its_backoff(make: MakeChild) -> None:
    child = make(*python(SLEEPER))
    child.start(now=0.0)
    assert child.process is not None
    first = child.process.pid
    until(lambda: child.last_line() == "up")
    os.kill(first, signal.SIGKILL)
    child.process.wait()

    child.check(now=1.0)
    waiting = child.process is None
    child.check(now=1.4)
    still_waiting = child.process is None
    child.check(now=1.5)

    assert waiting
    assert still_waiting
    assert child.process is not None
    assert child.process.pid != first


def die_often(child: Child, deaths: int) -> list[bool]:
    """Let it die so often, each after a second of its life. Returns: whether it is given up."""
    given_up = []
    now = 0.0
    child.start(now)
    for _ in range(deaths):
        assert child.process is not None
        child.process.wait()
        now += 1.0
        child.check(now)
        given_up.append(child.is_hopeless)
        now = child.restart_at
        child.check(now)
    return given_up


def test_a_child_that_never_worked_is_given_up_after_five_deaths(make: MakeChild) -> None:
    child = make(*python("raise SystemExit('no')"), tells_ready=True)

    assert die_often(child, 5) == [False, False, False, False, True]
    assert child.is_failing


def test_a_child_that_worked_once_is_started_again_for_ever(make: MakeChild) -> None:
    code = "from sidecar.processes import tell_ready; tell_ready('http://x');raise SystemExit(1)"

    assert die_often(make(*python(code), tells_ready=True), 7) == [False] * 7


@pytest.mark.parametrize(
    ("ends", "event"),
    [
        ("tell_ready(); os.kill(os.getpid(), signal.SIGTERM)", "process_ended"),
        ("tell_ready(); os.kill(os.getpid(), signal.SIGHUP)", "process_ended"),
        ("tell_ready(); sys.exit(0)", "process_ended"),
        ("sys.exit(0)", "process_died"),
        ("tell_ready(); sys.exit(1)", "process_died"),
        ("tell_ready(); os.kill(os.getpid(), signal.SIGKILL)", "process_died"),
    ],
)
def test_a_child_that_was_told_to_end_is_no_error_and_is_started_again(
    make: MakeChild, ends: str, event: str
) -> None:
    code = f"import os, signal, sys; from sidecar.processes import tell_ready; {ends}"
    child = make(*python(code), tells_ready=True)
    died(child)

    with capture_logs() as logs:
        child.check(now=1.0)
        child.check(now=child.restart_at)

    levels = {entry["event"]: entry["log_level"] for entry in logs}
    assert list(levels) == [event, "process_started"]
    assert levels[event] == ("info" if event == "process_ended" else "error")


def test_the_last_line_is_of_this_life_and_one_that_a_terminal_can_show(
    tmp_path: Path, make: MakeChild
) -> None:
    (tmp_path / "x.log").write_text("of an earlier start\n")
    silent, loud = make(*python("raise SystemExit(3)")), make(*python("print('a\\x1b[31mb')"))
    died(silent)
    first = silent.last_line()
    died(loud)

    assert first == ""
    assert loud.last_line() == "a?[31mb"


def test_a_program_that_is_not_there_is_named_in_one_line(make: MakeChild) -> None:
    child = make("/no/such/vllm")

    assert died(child) == 127
    assert child.last_line() == (
        "/no/such/vllm cannot be started: No such file or directory; correct the command"
    )


def test_a_process_that_cannot_be_made_now_is_tried_again(
    make: MakeChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    child = make(*python(SLEEPER))
    with monkeypatch.context() as patch:
        patch.setattr("deploy.supervise.subprocess.Popen", refuse)
        child.check(now=0.0)
    died = child.died
    child.check(now=child.restart_at)

    assert died == "could not be started: Resource temporarily unavailable"
    assert child.process is not None


def test_an_engine_gets_the_environment_as_it_is(
    make: MakeChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":/theirs")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    code = "import os; print(os.environ['PYTHONPATH'], os.environ.get('PYTHONSAFEPATH'))"
    child = make(*python(code))

    died(child)

    assert child.last_line() == ":/theirs None"


def test_stop_ends_what_was_started_and_nothing_else(tmp_path: Path) -> None:
    unrelated = subprocess.Popen(python(SLEEPER), stdout=subprocess.DEVNULL)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL); " + SLEEPER
    specs = [
        ProcessSpec(name="one", command=python(SLEEPER)),
        ProcessSpec(name="two", command=python(stubborn)),
    ]
    said: list[str] = []
    supervisor = Supervisor(Settings(state_dir=tmp_path), None, announce=said.append, specs=specs)
    for child in supervisor.children:
        child.start(time.monotonic())
    pids = [child.process.pid for child in supervisor.children if child.process]
    until(lambda: all(child.last_line() == "up" for child in supervisor.children))

    supervisor.stop()

    assert [is_alive(pid) for pid in pids] == [False, False]
    assert unrelated.poll() is None
    assert said == ["stopping", "stopped"]
    unrelated.kill()
    unrelated.wait()


def test_our_own_engine_is_stopped_after_those_who_use_it(tmp_path: Path) -> None:
    stamp = "import signal, sys, time; from pathlib import Path\n"
    stamp += "def end(*_): Path(sys.argv[1]).write_text(str(time.monotonic())); sys.exit()\n"
    stamp += "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(60)"
    specs = [
        ProcessSpec(name=name, command=(*python(stamp), str(tmp_path / name)))
        for name in ("engine", "proxy")
    ]
    supervisor = Supervisor(
        Settings(state_dir=tmp_path), None, announce=lambda _: None, specs=specs
    )
    for child in supervisor.children:
        child.start(time.monotonic())
    until(lambda: all(child.last_line() == "up" for child in supervisor.children))

    supervisor.stop()

    ended = {name: float((tmp_path / name).read_text()) for name in ("engine", "proxy")}
    assert ended["proxy"] < ended["engine"]


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = (
        "import time\nfrom pathlib import Path\n"
        "from deploy.supervisor_rules import ProcessSpec\n"
        "from deploy.supervise import Child\n"
        f"import sys\nspec = ProcessSpec(name='c', command=(sys.executable, '-c', {SLEEPER!r}))\n"
        f"child = Child(spec, Path({str(tmp_path / 'c.log')!r}))\nchild.start(0.0)\n"
        "print(child.process.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    # The first line may be the supervisor's own event; the pid is the last word of a line.
    pid = int(next(line for line in parent.stdout if line.strip().isdigit()))
    until(lambda: "up" in (tmp_path / "c.log").read_text())

    parent.kill()
    parent.wait()
    parent.stdout.close()

    until(lambda: not is_alive(pid))


def test_what_a_child_says_is_shown_on_the_terminal(tmp_path: Path) -> None:
    code = (
        "import time; from sidecar.processes import open_report; report = open_report();"
        "report.ready(); report.say('judge rejects:\\n401 \\x1b[31m' + 'x' * 2_000);"
        "time.sleep(600)"
    )
    spec = ProcessSpec(name="score", command=python(code), tells_ready=True)
    said: list[str] = []

    def announce(line: str) -> None:
        said.append(line)
        if line.startswith("judge"):
            supervisor.stopping.set()

    supervisor = Supervisor(Settings(state_dir=tmp_path), None, announce=announce, specs=[spec])
    supervisor._tell_when_ready = lambda: None  # type: ignore[method-assign]
    supervisor._supervise()

    assert said[0].startswith("judge rejects: 401 ?[31mxxx")
    assert len(said[0]) == 900
    assert said[1:] == ["stopping", "stopped"]
    assert supervisor.children[0].worked


def test_an_absent_vllm_is_named_with_what_to_check() -> None:
    line = _waiting_line("http://10.0.0.5:8000", None, owned=False)

    assert line == (
        "waiting for vLLM at http://10.0.0.5:8000: nothing answers; check that it is running, "
        "that serving.upstreams names its address without /v1, and that no firewall is between; "
        "trying again every second"
    )


def test_one_vllm_of_several_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(upstreams=("http://a", "http://b"))
    answers: dict[str, list[int | None]] = {
        "http://a/v1/models": [None, None],
        "http://b/v1/models": [None, 200],
    }
    monkeypatch.setattr("deploy.supervise.status_of", lambda url: answers[url].pop(0))
    said: list[str] = []
    supervisor = Supervisor(
        Settings(state_dir=tmp_path, serving=serving), None, announce=said.append, specs=[]
    )
    monkeypatch.setattr(supervisor.stopping, "wait", lambda _: False)

    assert supervisor._wait_for_engine(Upstreams(serving.upstreams)) is True

    assert len(said) == 1
    assert said[0].startswith("waiting for vLLM at http://a or http://b: nothing answers; check")
    assert answers == {"http://a/v1/models": [], "http://b/v1/models": []}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_proxy_gets_the_signals_of_up_and_all_others_term(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After TERM alone the proxy waits for load balancers."""
    specs = [ProcessSpec(name=name, command=("true",)) for name in ("engine", "proxy", "ingest")]
    supervisor = Supervisor(
        Settings(state_dir=tmp_path), None, announce=lambda _: None, specs=specs
    )
    sent: dict[str, signal.Signals] = {}
    for child in supervisor.children:
        monkeypatch.setattr(
            child, "terminate", lambda number, name=child.spec.name: sent.update({name: number})
        )

    supervisor._reload(signal.SIGHUP, None)
    assert sent == {}, "a proxy that starts reads its settings now, and would die of it"
    supervisor.children[1].address = ""
    supervisor._reload(signal.SIGHUP, None)
    assert sent == {"proxy": signal.SIGHUP}
    assert not supervisor.stopping.is_set()

    supervisor._end(number, None)
    supervisor.stop()

    term = signal.SIGTERM
    proxy = signal.SIGINT if number == signal.SIGHUP else number
    assert sent == {"engine": term, "proxy": proxy, "ingest": term}

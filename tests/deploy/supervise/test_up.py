"""`sidecar up` as a person types it: the console script, real processes, a folder of theirs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from pydantic import BaseModel

from demo.ports import free_port
from learner.schedule.loop import REQUESTED_FLAG
from learning_sidecar import hidden_by, without_working_folder
from sidecar.settings import Learner, Settings
from sidecar.settings.kinds import Between
from sidecar.store.database import Database, set_flag
from support.outside_server import outside_server
from support.processes import is_alive, until

ROOT = Path(__file__).resolve().parents[3]
OWN_PATH = os.environ.get("PYTHONPATH") or str(ROOT)
"""Where a child process finds what this one runs, the compiled relay too."""
SIDECAR = Path(sys.executable).with_name("sidecar")
"""The console script."""
USERS_OWN = ("ingest", "sidecar", "learner", "deploy", "json", "structlog", "httpx", "typing")
"""Modules of ours, of the standard library and of our dependencies that a user's files hide."""

WITHOUT_PEFT = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "peft" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
"""A `sitecustomize.py` of a Python that has no peft."""

pytestmark = pytest.mark.timeout(900)


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """URL of the parts of vLLM that a start needs: `/health` and the list of models."""
    with outside_server() as server:
        server.body = json.dumps(
            {"object": "list", "data": [{"id": "m", "object": "model"}]}
        ).encode()
        server.headers = {"content-type": "application/json"}
        yield server.url


@pytest.fixture(scope="module")
def vllm() -> Iterator[str]:
    with serving() as url:
        yield url


def write_settings(folder: Path, vllm: str, **sections: dict[str, Any]) -> None:
    values: dict[str, dict[str, Any]] = {
        "serving": {"upstreams": [vllm], "model": "m"},
        "proxy": {"port": free_port()},
        "admin": {"port": free_port()},
        # Else `learn` first loads torch, to measure, and is not started where there is no peft.
        "learner": {"pack_tokens": 2048, "schedule": "manual"},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    lines = [
        line
        for name, section in values.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in section.items()))
    ]
    (folder / "sidecar.toml").write_text("\n".join(lines) + "\n")


class Up:
    """A command that runs, and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def said(self, pattern: str, timeout_s: float = 400.0) -> re.Match[str]:
        """Wait for a line in which the pattern is found."""

        def find() -> re.Match[str] | None:
            return next((m for line in self.lines if (m := re.search(pattern, line))), None)

        with self._changed:
            assert self._changed.wait_for(find, timeout_s), "\n".join(self.lines)
            found = find()
        assert found is not None
        return found

    def ended(self, timeout_s: float = 400.0) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def child_pid(self, name: str) -> int:
        """The newest process of this name that it started."""
        found = re.findall(rf"process_started\s+name={name} pid=(\d+)", self.text)
        return int(found[-1])


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Up]]:
    """Run `sidecar ...` in this folder; end at the exit what still runs."""
    started: list[Up] = []

    def start(*words: str, cwd: Path = folder, **variables: str) -> Up:
        env = {**os.environ, "PYTHONPATH": OWN_PATH, "NO_COLOR": "1", **variables}
        process = subprocess.Popen(
            [str(SIDECAR), *words],
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(Up(process))
        return started[-1]

    yield start
    for up in started:
        if up.process.poll() is None:
            up.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            up.process.wait(60)
        up.process.kill()
        up.process.wait()
        assert up.process.stdout is not None
        up._reader.join()
        up.process.stdout.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Run `sidecar ...` in the folder of the test."""
    with commands(tmp_path) as start:
        yield start


@dataclass(frozen=True)
class Service:
    """A `sidecar up` that is ready, and a way to run further commands in its folder."""

    folder: Path
    up: Up
    run: Callable[..., Up]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, vllm: str) -> Iterator[Service]:
    """One for all tests that change nothing of it: a start is six processes."""
    folder = tmp_path_factory.mktemp("service")
    write_settings(
        folder, vllm, proxy={"port": 0, "host": "::1"}, admin={"port": free_port(), "host": "::1"}
    )
    with commands(folder) as run:
        up = run("up")
        up.said(r"^sidecar ready: ")
        yield Service(folder, up, run)


def hide_modules(folder: Path) -> Path:
    """Files and folders of a user that have the names of modules; each notes that it was run."""
    note = folder / "was_run"
    code = f"import os\nwith open({str(note)!r}, 'a') as f: f.write(__name__ + '\\n')\n"
    for name in USERS_OWN:
        if name in ("deploy", "structlog"):  # a folder hides as a file does
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text(code)
        else:
            (folder / f"{name}.py").write_text(code)
    return note


def settings_of(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "sidecar.toml").read_text())


def log_of(folder: Path, name: str) -> str:
    path = folder / ".sidecar" / "logs" / f"{name}.log"
    return path.read_text() if path.exists() else ""


def has_logged(folder: Path, name: str, event: str) -> bool:
    return event in log_of(folder, name)


def test_a_users_own_modules_are_never_run_by_a_child_or_a_grandchild(
    tmp_path: Path, run: Callable[..., Up], vllm: str
) -> None:
    write_settings(tmp_path, vllm, proxy={"workers": 2})
    note = hide_modules(tmp_path)

    up = run("up")
    up.said(r"^sidecar ready: ")
    database = Database(f"sqlite:///{tmp_path}/.sidecar/store.db")
    with database.write() as session:
        set_flag(session, REQUESTED_FLAG, "1", now=time.time())
    database.close()
    until(lambda: "run_ended" in log_of(tmp_path, "learn"))
    up.process.send_signal(signal.SIGTERM)

    assert up.ended() == 0
    assert not note.exists(), note.read_text()
    assert "process_died" not in up.text


@pytest.mark.parametrize(
    ("python_path", "own", "left"),
    [
        (":/x", "/our", ["/bin", "/x", "/lib"]),
        ("/x:", "/our", ["/bin", "/x", "/lib"]),
        ("/x", "/our", ["/bin", "/here", "/x", "", "/lib"]),
        ("", "/our", ["/bin", "/here", "/x", "", "/lib"]),
        (":/x:/here", "/our", ["/bin", "/here", "/x", "", "/lib"]),
        (":.", "/our", ["/bin", "/here", "/x", "", "/lib"]),
        (":/x", "/here", ["/bin", "/here", "/x", "", "/lib"]),
    ],
)
def test_the_working_folder_stays_on_the_path_only_where_it_was_named(
    python_path: str, own: str, left: list[str]
) -> None:
    path = ["/bin", "/here", "/x", "", "/lib"]

    assert without_working_folder(path, python_path, "/here", own) == left


def test_a_package_of_a_users_that_hides_one_of_ours_is_one_line(
    tmp_path: Path, run: Callable[..., Up]
) -> None:
    for room in ("sidecar", "ingest", "deploy", "learner"):
        (tmp_path / room).mkdir()
        assert hidden_by([str(tmp_path), str(ROOT)]) == ""  # without modules it hides nothing
    (tmp_path / room / "__init__.py").touch()
    assert hidden_by([str(ROOT), str(tmp_path)]) == ""

    up = run("status", PYTHONPATH=f"{tmp_path}:{OWN_PATH}")

    assert up.ended() == 1
    assert up.lines == [
        f"sidecar: {tmp_path}/{room} hides the sidecar's own package `{room}`; take {tmp_path} out "
        "of PYTHONPATH for this command"
    ]


def test_no_request_to_this_machine_goes_through_the_environments_proxy(
    tmp_path: Path, run: Callable[..., Up], vllm: str
) -> None:
    write_settings(tmp_path, vllm, telemetry={"otlp_endpoint": f"{vllm}/v1/traces"})
    with outside_server() as recorder:
        named = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
        nobody = {"NO_PROXY": "", "no_proxy": ""}
        up = run("up", **dict.fromkeys(named, recorder.url), **nobody)
        ready = up.said(r"^sidecar ready: .* base_url to (\S+)/v1 ")
        httpx.get(f"{ready[1]}/v1/models", trust_env=False)
        up.process.send_signal(signal.SIGTERM)
        code = up.ended()

    assert code == 0
    assert recorder.asked == []


def test_it_gives_up_a_child_that_dies_at_once_and_shows_its_last_line(
    tmp_path: Path, run: Callable[..., Up], vllm: str
) -> None:
    write_settings(tmp_path, vllm)
    broken = tmp_path / "broken"
    broken.mkdir()
    # Only the proxy has it imported, as the process starts.
    (broken / "uvloop.py").write_text("raise ImportError('broken on purpose')\n")

    up = run("up", PYTHONPATH=f"{broken}:{ROOT}")
    code = up.ended()

    pids = re.findall(r"process_started .*pid=(\d+)", up.text)
    assert code == 1
    assert up.lines[-1] == (
        "sidecar: gave up: proxy ended 5 times before it was ready; the last time it exited with "
        "1: ImportError: broken on purpose; correct that, its log is .sidecar/logs/proxy.log"
    )
    assert (
        len(pids) >= 9
    )  # more where a slow machine takes longer than the time in which lives count
    assert [pid for pid in pids if is_alive(int(pid))] == []
    assert "firewall" not in up.text
    assert "sidecar ready" not in up.text


def test_without_the_learners_packages_it_says_so_once_and_the_others_work(
    tmp_path: Path, run: Callable[..., Up], vllm: str
) -> None:
    write_settings(tmp_path, vllm, learner={"schedule": "groups"})
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    (lacking / "sitecustomize.py").write_text(WITHOUT_PEFT)

    up = run("up", PYTHONPATH=f"{lacking}:{OWN_PATH}")
    ready = up.said(r"^sidecar ready: .* base_url to (\S+)/v1 ")
    served = httpx.get(f"{ready[1]}/v1/models", trust_env=False).status_code
    alone = run("learn", PYTHONPATH=f"{lacking}:{OWN_PATH}")
    code = alone.ended()
    up.process.send_signal(signal.SIGTERM)

    what = "peft cannot be imported; run `pip install 'learning-sidecar[learner]'`"
    assert up.ended() == 0
    assert served == 200
    assert up.text.count(f"sidecar: warning: `sidecar learn` is not started: {what}") == 1
    assert re.findall(r"process_started\s+name=(\w+)", up.text) == [
        "proxy",
        "ingest",
        "score",
        "control",
    ]
    assert "process_died" not in up.text
    assert (code, len(alone.lines)) == (1, 1)
    assert alone.text.startswith(f"learner: {what}")


def test_a_vllm_that_is_not_ours_is_refused_where_ours_shall_listen(
    tmp_path: Path, run: Callable[..., Up], vllm: str
) -> None:
    write_settings(tmp_path, vllm, engine={"command": [sys.executable, "-c", "import time"]})

    up = run("up")
    code = up.ended()

    assert code == 1
    assert up.lines[-1].startswith(f"sidecar: something answers at {vllm} already")
    assert "process_started" not in up.text
    assert "sidecar ready" not in up.text


def test_after_a_kill_it_waits_for_what_is_left_and_starts(
    tmp_path: Path, run: Callable[..., Up], vllm: str
) -> None:
    write_settings(tmp_path, vllm)
    first = run("up")
    first.said(r"^sidecar ready: ")
    left = first.child_pid("ingest")
    os.kill(left, signal.SIGSTOP)  # it cannot end by itself
    first.process.kill()
    first.ended()

    second = run("up")
    second.said(rf"^sidecar waiting for `sidecar ingest` \(pid {left}\) to end")
    os.kill(left, signal.SIGCONT)
    second.said(r"^sidecar ready: ")

    assert not is_alive(left)
    assert second.child_pid("ingest") != left


@pytest.mark.parametrize("name", ["proxy", "admin"])
def test_a_port_that_somebody_else_serves_is_named_and_never_called_ready(
    tmp_path: Path, run: Callable[..., Up], vllm: str, name: str
) -> None:
    # What stands there answers 200 to everything, /readyz too.
    taken = int(vllm.rpartition(":")[2])
    with serving() as other:
        write_settings(tmp_path, other, **{name: {"port": taken}})

        up = run("up")
        code = up.ended()

    assert code == 1
    assert up.lines == [
        f"sidecar: cannot listen on {name}.host 127.0.0.1, {name}.port {taken} (Address already "
        f"in use); stop what listens there, or set another {name}.port"
    ]


def betweens(kind: Any) -> list[Between]:
    inner = get_args(kind)
    return [one for one in inner if isinstance(one, Between)] + [
        found for one in inner if not isinstance(one, Between) for found in betweens(one)
    ]


def extremes(end: str) -> dict[str, dict[str, Any]]:
    """Every numeric setting at the lower or the upper end of its range."""
    values: dict[str, dict[str, Any]] = {}
    fields = dict(Settings.model_fields)
    fields["learner.advanced"] = Learner.model_fields["advanced"]
    for section, field in fields.items():
        kind = field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            continue
        for key, annotated in get_type_hints(kind, include_extras=True).items():
            if key == "port" or key not in kind.model_fields or not (f := betweens(annotated)):
                continue
            low = f[0].low + (1e-9 if f[0].above_low else 0)
            high = f[0].high - (1e-9 if f[0].below_high else 0)
            value = low if end == "low" else high
            default = kind.model_fields[key].default
            if isinstance(default, (int, float)):
                values.setdefault(section, {})[key] = type(default)(value)
            elif isinstance(default, tuple):
                values.setdefault(section, {})[key] = [value]
    return values


@pytest.mark.parametrize("end", ["low", "high"])
def test_every_process_works_with_every_number_at_the_end_of_its_range(
    tmp_path: Path, run: Callable[..., Up], vllm: str, end: str
) -> None:
    sections = extremes(end)
    sections["proxy"]["workers"] = 2  # 128 processes are more than this machine has room for
    judge = {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1"}
    for section in ("judge", "gate_judge"):  # budgets need prices, the gate's numbers its model
        sections.setdefault(section, {}).update(judge)
        sections[f"{section}.price"] = {"input": 1, "output": 1}
    sections["learner"]["schedule"] = "interval"
    write_settings(tmp_path, vllm, **sections)
    works = {
        "proxy": "workers_started",
        "ingest": "ingest_ready",
        "score": "score_ready",
        "learn": "learn_ready",
        "control": "control_ready",
    }

    up = run("up")
    for name, event in works.items():
        until(partial(has_logged, tmp_path, name, event))
    up.process.send_signal(signal.SIGTERM)

    assert up.ended() == 0
    assert "process_died" not in up.text
    assert [name for name in works if "Traceback" in log_of(tmp_path, name)] == []


def test_ready_names_the_ports_that_were_found_free_and_ipv6_addresses(service: Service) -> None:
    port = settings_of(service.folder)["admin"]["port"]

    ready = service.up.said(r"^sidecar ready: .* base_url to (\S+)/v1 \(model m\); admin at (\S+)")
    status = service.run("status", "-o", "json")

    assert re.fullmatch(r"http://\[::1\]:\d{2,5}", ready[1])
    assert httpx.get(f"{ready[1]}/readyz").status_code == 200
    assert ready[2] == f"http://[::1]:{port}"
    assert status.ended() == 0


def test_a_second_up_on_the_same_folder_is_refused_and_starts_nothing(service: Service) -> None:
    # Other ports, so that nothing but the folder stands in its way.
    ports = {"SIDECAR_PROXY__PORT": str(free_port()), "SIDECAR_ADMIN__PORT": str(free_port())}
    second = service.run("up", **ports)
    code = second.ended()

    assert code == 1
    assert second.lines == [
        f"sidecar: `sidecar up` runs already (pid {service.up.process.pid}) with state_dir "
        f"{service.folder}/.sidecar; stop it first, or give this one a state_dir, a bus.url and a "
        "store.url of its own"
    ]
    assert service.up.process.poll() is None


def test_a_process_that_must_be_alone_is_refused_beside_up(service: Service) -> None:
    names = ("ingest", "learn", "control")

    seconds = {one: service.run(one, SIDECAR_ADMIN__PORT=str(free_port())) for one in names}
    codes = {one: second.ended() for one, second in seconds.items()}

    assert codes == dict.fromkeys(names, 1)
    for one in names:
        said = f"`sidecar {one}` runs already (pid {service.up.child_pid(one)})"
        assert said in seconds[one].lines[-1]
        assert "Traceback" not in seconds[one].text

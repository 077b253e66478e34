"""An upgrade from the commit before, one process after the other, while users ask.

The processes of both commits are real and share a store, an outbox and a settings file. Ingest and
control come first, as docs/upgrade.md says: a proxy of before goes on under them.
"""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from demo.ports import free_port
from demo.stack import ROOT
from support.adapter_endpoints import MODEL, vllm_in_thread
from support.processes import until
from tests.deploy.conftest import write_adapter

BEFORE = "HEAD~1"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the commit before."""
    found = subprocess.run(
        ["git", "archive", BEFORE, "sidecar", "ingest", "learner", "deploy", "learning_sidecar.py"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if found.returncode:
        pytest.skip(f"no commit before this one is here: {found.stderr.decode()[:200]}")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@dataclass
class Users:
    """Ask one question after the other, and count what came."""

    url: str
    key: str
    statuses: Counter[str] = field(default_factory=Counter)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._ask)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(60)

    def _ask(self) -> None:
        while not self._stop.wait(0.05):
            self.ask()

    def ask(self) -> str:
        asked = sum(self.statuses.values())
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"question {asked}"}]}
        try:
            reply = httpx.post(
                f"{self.url}/v1/chat/completions",
                json=body,
                headers={"authorization": f"Bearer {self.key}"},
                timeout=30,
            )
        except httpx.TransportError:
            self.statuses["refused"] += 1
            return "refused"
        self.statuses[str(reply.status_code)] += 1
        return str(reply.status_code)

    def more(self, count: int) -> None:
        aim = self.statuses["200"] + count
        until(lambda: self.statuses["200"] >= aim)


@dataclass
class Site:
    """Processes over one folder."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "sidecar.toml"

    def _environment(self, tree: Path) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(tree)}

    def command(self, tree: Path, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "deploy.cli.main", "--config", str(self.config), *words],
            cwd=self.folder,
            env=self._environment(tree),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextlib.contextmanager
    def process(self, tree: Path, module: str) -> Iterator[None]:
        """Run until it is ready, and end it with TERM."""
        log = self.folder / f"{module}-{time.monotonic_ns()}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", module, "--config", str(self.config)],
                cwd=self.folder,
                env=self._environment(tree),
                stdout=out,
                stderr=out,
            )
        try:
            until(lambda: "_ready" in log.read_text() or child.poll() is not None)
            assert child.poll() is None, log.read_text()
            yield
        finally:
            child.terminate()
            code = child.wait(60)
        assert code == 0, log.read_text()

    def rows(self, query: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.folder / "store.db")) as store:
            return store.execute(query).fetchall()

    def stored(self) -> int:
        return int(str(self.rows("SELECT count(*) FROM exchange")[0][0]))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with vllm_in_thread() as (vllm, _):
        (tmp_path / "sidecar.toml").write_text(
            f'state_dir = "{tmp_path}/state"\n'
            f'[serving]\nupstreams = ["{vllm}"]\nmodel = "{MODEL}"\n'
            f"[proxy]\nport = {free_port()}\n[admin]\nport = {free_port()}\n"
            '[access]\nmode = "keys"\n'
            f'[learner]\nschedule = "manual"\nadapters_dir = "{tmp_path}/adapters"\n'
            f'[store]\nurl = "sqlite:///{tmp_path}/store.db"\n'
            f'[bus]\nurl = "sqlite:///{tmp_path}/outbox.db"\n'
        )
        yield Site(tmp_path)


def test_users_notice_nothing_but_the_restart_of_their_proxy(before: Path, site: Site) -> None:
    key = site.command(before, "keys", "create", "--project", "shop").split()
    users = Users(url=_proxy_of(site), key=next(word for word in key if word.startswith("sk-")))
    with contextlib.ExitStack() as new:
        with contextlib.ExitStack() as old_proxy:
            with contextlib.ExitStack() as old:
                old.enter_context(site.process(before, "deploy"))
                old.enter_context(site.process(before, "ingest"))
                old_proxy.enter_context(site.process(before, "sidecar"))
                until(lambda: users.ask() == "200")
                new.enter_context(users.asking())
                users.more(20)
            new.enter_context(site.process(ROOT, "ingest"))
            new.enter_context(site.process(ROOT, "deploy"))
            users.more(20)
            # The proxy of before obeys what the new ones write.
            write_adapter(site.folder / "mine", values=(0.5, 0.25))
            site.command(ROOT, "adapters", "import", str(site.folder / "mine"), "--reason", "new")
            other = site.command(ROOT, "keys", "create", "--project", "other").split()
            users.key = next(word for word in other if word.startswith("sk-"))
            until(lambda: users.ask() == "200")
            users.more(20)
        new.enter_context(site.process(ROOT, "sidecar"))
        users.more(20)
        until(lambda: site.stored() >= users.statuses["200"])

    answered = users.statuses["200"]
    assert set(users.statuses) <= {"200", "401", "refused"}, users.statuses
    assert site.stored() == answered >= 80
    assert site.rows("SELECT count(*) FROM dead_letter") == [(0,)]


def _proxy_of(site: Site) -> str:
    lines = site.config.read_text().splitlines()
    return f"http://127.0.0.1:{lines[lines.index('[proxy]') + 1].split()[-1]}"

"""The images, run as compose.yaml runs them beside a fake vLLM: any container may be killed.

SIDECAR_TEST_IMAGES asks for it: `localhost/learning-sidecar` stands for the images
`localhost/learning-sidecar-proxy` and `-control`. `.ci/images` makes them and runs this.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from demo.ports import free_port
from sidecar.store.database import Database
from sidecar.store.models import ExchangeRow, GroupRow
from support.adapter_endpoints import MODEL, AdapterEndpoints, vllm_in_thread
from support.install_tools import COMPOSE, ROOT, SECRETS, compose_config, output, tool
from support.kafka_broker import Broker
from support.postgres import NoPostgresError, Server

IMAGES = os.environ.get("SIDECAR_TEST_IMAGES", "")
PROXIES = ("proxy-1", "proxy-2")
OURS = (*PROXIES, "ingest", "score", "control")
TOKEN = "t"
WITHIN_S = 150.0
WORDS = ("Yes,", " it", " comes", " tomorrow,", " thank", " you", " for", " asking", " us.")


def wait_for(what: Callable[[], bool], why: str) -> None:
    """Raises: AssertionError when it does not become true."""
    deadline = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.2)


class Talking(AdapterEndpoints):
    """Answers in more and fewer words, so that a judge has a choice."""

    def _chat(self, body: dict[str, Any]) -> tuple[int, bytes]:
        words = WORDS[: 3 + len(self.seen) % (len(WORDS) - 2)]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(words)},
            "finish_reason": "stop",
            "token_ids": [*range(len(words))],
            "logprobs": {"content": [{"token": one, "logprob": -0.5} for one in words]},
        }
        usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 9}
        reply = {"model": body["model"], "choices": [choice], "usage": usage}
        return 200, json.dumps({**reply, "prompt_token_ids": [5]}).encode()


@dataclass
class Stack:
    """Our containers of compose.yaml, with addresses of this machine."""

    name: str
    folder: Path
    ports: dict[str, int]
    database: Database
    key: str = ""
    unread: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROXIES, 0))
    """Requests to each proxy since its start."""

    def podman(self, *command: str) -> str:
        code, said = output("podman", *command)
        assert code == 0, said
        return said.strip()

    def compose(self, *command: str) -> None:
        program = tool("podman-compose")
        file = self.folder / "compose.json"
        code, said = output(program, "-p", self.name, "-f", file, *command)
        assert code == 0, said

    def inside(self, service: str, *command: str) -> tuple[int, str]:
        code, said = output("podman", "exec", f"{self.name}-{service}", *command)
        return code, said.strip()

    def ask(self, service: str, path: str) -> httpx.Response | None:
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports[service]}{path}", timeout=5)
        except httpx.TransportError:
            return None

    def wait_until_ready(self, service: str) -> None:
        def ready() -> bool:
            said = self.ask(service, "/readyz")
            return said is not None and said.status_code == 200

        wait_for(ready, f"{service} is not ready")

    def send(self, number: int, proxies: Sequence[str]) -> int:
        """Ask each of these proxies so often, by turns. Returns: the replies that came."""
        for at in range(number):
            proxy = proxies[at % len(proxies)]
            answered = httpx.post(
                f"http://127.0.0.1:{self.ports[proxy]}/v1/chat/completions",
                headers={"authorization": f"Bearer {self.key}"},
                json={"model": MODEL, "messages": [{"role": "user", "content": f"{proxy} {at}"}]},
                timeout=60,
            )
            assert answered.status_code == 200, answered.text
            self.unread[proxy] += 1
        return number

    def wait_until_kept(self, proxy: str) -> None:
        """Until all that it was asked stands in its outbox."""

        def kept() -> bool:
            said = self.ask(proxy, "/metrics")
            line = f"sidecar_captures_kept_total {float(self.unread[proxy])}"
            return said is not None and line in said.text

        wait_for(kept, f"{proxy} has not kept {self.unread[proxy]}")

    def stored(self) -> int:
        with self.database.read() as session:
            return session.scalar(select(func.count()).select_from(ExchangeRow)) or 0

    def scored(self) -> int:
        """Groups of which a judge has scored the answers."""
        scored = select(func.count()).where(GroupRow.status == "scored")
        with self.database.read() as session:
            return session.scalar(scored.select_from(GroupRow)) or 0


def ours(services: dict[str, Any], environment: dict[str, str], stack: Stack) -> dict[str, Any]:
    """The services that are ours, on the host's network. Any: YAML."""
    made = {}
    for name in OURS:
        one = services[name]
        port = {"SIDECAR_PROXY__PORT": str(stack.ports[name])} if name in PROXIES else {}
        kind = "proxy" if name in PROXIES else "control"
        socket = f"{stack.folder}/pg:/pg"
        made[name] = {
            **one,
            "image": f"{IMAGES}-{kind}",
            "container_name": f"{stack.name}-{name}",
            "network_mode": "host",
            "ports": [],
            "environment": {**one["environment"], **environment, **port},
            "volumes": [*one["volumes"], socket],
        }
    return made


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    if not IMAGES:
        pytest.skip("SIDECAR_TEST_IMAGES names no images; .ci/images makes them")
    tool("podman", "apt-get install podman")
    broker: Broker = request.getfixturevalue("broker")  # it starts a server
    with ExitStack() as ended, vllm_in_thread(Talking()) as (vllm, _):
        folder = Path(tempfile.mkdtemp(prefix="images-", dir="/tmp"))
        ended.callback(shutil.rmtree, folder)
        folder.chmod(0o755)
        for name in ("pg", "models"):
            (folder / name).mkdir()
        try:
            server = Server(folder / "pg")
            server.start()
        except NoPostgresError as error:
            pytest.skip(f"no PostgreSQL: {error}")
        ended.callback(server.kill)
        (folder / "pg").chmod(0o755)
        database = Database(server.url().render_as_string(hide_password=False))
        ended.callback(database.close)
        ports = {one: free_port() for one in (*PROXIES, "control")}
        stack = Stack(folder.name, folder, ports, database)
        judge_port = free_port()
        command = [sys.executable, "-m", "demo.stand_in_judge", "--port", str(judge_port)]
        judge = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        ended.callback(judge.wait)
        ended.callback(judge.terminate)
        environment = {
            "SIDECAR_STORE__URL": "postgresql://sidecar@/postgres?host=/pg",
            "SIDECAR_BUS__URL": broker.new_url(),
            "SIDECAR_SERVING__UPSTREAMS": json.dumps([vllm]),
            "SIDECAR_SERVING__MODEL": MODEL,
            "SIDECAR_SERVING__SAMPLING_DEFAULTS": "{}",
            "SIDECAR_SERVING__GRAMMAR": "as_asked",
            "SIDECAR_JUDGE__API_BASE": f"http://127.0.0.1:{judge_port}/v1",
            "SIDECAR_GROUPS__SETTLE_S": "0",
            "SIDECAR_GROUPS__HELD_OUT_RATE": "0",
            "SIDECAR_PROXY__HOST": "127.0.0.1",
            "SIDECAR_ADMIN__HOST": "127.0.0.1",
            "SIDECAR_ADMIN__PORT": str(ports["control"]),
            "SIDECAR_ADMIN_TOKEN": TOKEN,
        }
        secrets = {**dict.fromkeys(SECRETS, "x"), "MODELS": f"{folder}/models"}
        secrets["ADMIN_TOKEN_SHA256"] = hashlib.sha256(TOKEN.encode()).hexdigest()
        made = compose_config(**secrets)["made"]
        services = ours(made["services"], environment, stack)
        shutil.copy(COMPOSE / "sidecar.toml", folder)
        (folder / "compose.json").write_text(json.dumps({**made, "services": services}))
        ended.callback(stack.compose, "down", "-v", "-t", "30")
        stack.compose("up", "-d")
        yield stack


def test_any_container_may_be_killed_and_nothing_is_lost(stack: Stack) -> None:
    for service in stack.ports:
        stack.wait_until_ready(service)
    create = ("sidecar", "keys", "create", "--project", "shop", "-o", "json")
    code, said = stack.inside("control", *create)
    assert code == 0, said
    stack.key = json.loads(said[: said.rindex("}") + 1])["key"]  # then it says to whom it is shown

    sent = 0
    for victim in OURS:
        sent += stack.send(10, PROXIES)
        if victim in PROXIES:  # what is not yet in its outbox dies with it
            stack.wait_until_kept(victim)
            stack.unread[victim] = 0
        stack.podman("kill", "--signal", "KILL", f"{stack.name}-{victim}")
        sent += stack.send(10, [one for one in PROXIES if one != victim])
        stack.podman("rm", f"{stack.name}-{victim}")
        stack.compose("up", "-d", victim)  # a new container, with the volumes of the old one
        if victim in stack.ports:
            stack.wait_until_ready(victim)

    wait_for(lambda: stack.stored() >= sent, f"{stack.stored()} of {sent} are stored")
    assert stack.stored() == sent == 20 * len(OURS)
    wait_for(lambda: stack.scored() >= sent // 2, f"{stack.scored()} groups are scored")
    code, said = stack.inside("control", "sidecar", "status")
    assert code == 0, said
    for service in OURS:
        assert stack.inside(service, "id", "-u") == (0, "65532")
        assert stack.inside(service, "touch", "/opt/x")[0] == 1
        rights = stack.inside(service, "grep", "-E", "^(CapBnd|NoNewPrivs)", "/proc/1/status")[1]
        assert rights.split() == ["CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    compiled = "import sidecar.relay.flight as one; print(one.__file__)"
    assert stack.inside("proxy-1", "python3", "-c", compiled)[1].endswith(".so")

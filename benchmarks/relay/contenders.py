"""How each peer is started: one worker, its access log off, keep-alive to the upstream.

Peers live in `.bench/peers` (made by `benchmarks/relay/setup`). One that is not there has a row
that says so; none is left out in silence.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.relay.interpreter import chosen, packages_of
from benchmarks.relay.scenarios import MODEL
from benchmarks.relay.unavailable import UnavailableError

CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a contender works."""

    bench: Path
    """`.bench`: peers and build results."""
    folder: Path
    """Its own, empty, on disk; taken away after the run."""
    port: int
    """Where it must listen, on 127.0.0.1."""
    upstream_port: int
    ends_core: int
    """The core of the load, for what does not belong to the contender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command to run, and what is asked of it."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    path: str = CHAT
    key: str = "sk-bench"
    """The bearer token that clients send."""
    beside: tuple[tuple[str, ...], ...] = ()
    """Commands that run on the other core and are not counted (the reader of the bus)."""
    metrics_path: str | None = None
    """Where it counts its captures, if it has any."""
    version: str = ""
    """What was measured, as its package names it."""
    takes_away: tuple[Path, ...] = ()
    """Folders that it made outside of its place."""


Start = Callable[[Place], Launch]


def nginx(place: Place) -> Launch:
    """Debian's nginx as a plain reverse proxy, at its best: replies are not buffered, as streams
    need, request bodies stay in memory, connections are not closed after 1,000 requests."""
    packed = place.bench / "debian"
    program = shutil.which("nginx") or str(packed / "usr/sbin/nginx")
    if not Path(program).exists():
        raise UnavailableError("nginx is not installed; apt-get install nginx")
    for name in ("body", "proxy", "fastcgi", "uwsgi", "scgi"):
        (place.folder / name).mkdir()
    config = place.folder / "nginx.conf"
    config.write_text(
        textwrap.dedent(f"""\
        {"user root;" if os.geteuid() == 0 else ""}
        worker_processes 1;
        daemon off;
        pid {place.folder}/nginx.pid;
        events {{ worker_connections 4096; }}
        http {{
          access_log off;
          keepalive_requests 100000000;
          client_max_body_size 64m;
          client_body_buffer_size 4m;
          client_body_temp_path {place.folder}/body;
          proxy_temp_path {place.folder}/proxy;
          fastcgi_temp_path {place.folder}/fastcgi;
          uwsgi_temp_path {place.folder}/uwsgi;
          scgi_temp_path {place.folder}/scgi;
          upstream vllm {{
            server 127.0.0.1:{place.upstream_port};
            keepalive 256;
            keepalive_requests 100000000;
          }}
          server {{
            listen 127.0.0.1:{place.port};
            location / {{
              proxy_pass http://vllm;
              proxy_http_version 1.1;
              proxy_set_header Connection "";
              proxy_buffering off;
            }}
          }}
        }}
        """)
    )
    command = (program, "-p", str(place.folder), "-e", "stderr", "-c", str(config))
    libraries = ":".join(str(path.parent) for path in sorted(packed.glob("**/*.so.*")))
    env = {"LD_LIBRARY_PATH": libraries} if libraries else {}
    shown = subprocess.run(
        [program, "-v"], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    return Launch(command=command, env=env, version=shown.stderr.strip())


def vllm_router(place: Place) -> Launch:
    """The Rust router of vLLM's own users, round robin over one worker."""
    program, env, version = _peer(place, "vllm-router", "vllm-router")
    worker = f"http://127.0.0.1:{place.upstream_port}"
    return Launch(
        command=(
            *(*program, "--worker-urls", worker, "--policy", "round_robin"),
            *("--host", "127.0.0.1", "--port", str(place.port), "--log-level", "error"),
            *("--max-concurrent-requests", "4096"),
        ),
        env=env,
        version=version,
    )


def litellm(place: Place) -> Launch:
    """LiteLLM's proxy, one worker, no database, telemetry off, prices from its own file."""
    program, env, version = _peer(place, "litellm", "litellm")
    config = place.folder / "config.yaml"
    config.write_text(
        textwrap.dedent(f"""\
        model_list:
          - model_name: {MODEL}
            litellm_params:
              model: hosted_vllm/{MODEL}
              api_base: http://127.0.0.1:{place.upstream_port}/v1
              api_key: none
        litellm_settings:
          telemetry: false
          num_retries: 0
        """)
    )
    return Launch(
        command=(
            *(*program, "--config", str(config), "--host", "127.0.0.1"),
            *("--port", str(place.port), "--num_workers", "1"),
        ),
        version=version,
        key="sk-bench-0123456789abcdef0123456789abcdef",
        env={
            **env,
            "LITELLM_MASTER_KEY": "sk-bench-0123456789abcdef0123456789abcdef",  # it asks for one
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )


def rllm_gateway(place: Place) -> Launch:
    """rLLM's capture gateway with its SQLite store; it captures what has a session in its path."""
    program, env, version = _peer(place, "rllm-model-gateway", "rllm-model-gateway")
    worker = f"http://127.0.0.1:{place.upstream_port}/v1"
    return Launch(
        command=(
            *(*program, "--host", "127.0.0.1", "--port", str(place.port), "--worker", worker),
            *("--db-path", str(place.folder / "traces.db"), "--log-level", "error"),
        ),
        env=env,
        path=f"/sessions/bench{CHAT}",
        version=version,
    )


def _peer(place: Place, name: str, program: str) -> tuple[tuple[str, str], dict[str, str], str]:
    """(the program under the Python that all have, its environment, its pinned version). Raises:
    UnavailableError."""
    installed = place.bench / "peers" / name
    path = installed / "bin" / program
    if not path.exists():
        raise UnavailableError(
            f"{name} is not in {place.bench.name}/peers; run benchmarks/relay/setup "
            f"and read {place.bench.name}/setup-{name}.log"
        )
    made = installed / ".made"  # written by the set-up
    return (
        (chosen().path, str(path)),
        packages_of(installed),
        made.read_text().strip() if made.exists() else "",
    )

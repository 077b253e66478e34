"""A small HTTP server that answers what a test says and keeps what it was asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class OutsideServer:
    """Change the fields between requests."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    """Time before the reply."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next replies; `status` afterwards."""
    asked: list[Asked] = field(default_factory=list)
    url: str = ""


@contextmanager
def outside_server() -> Iterator[OutsideServer]:
    """Serve on a free port of loopback until the end of the block."""
    state = OutsideServer()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            state.asked.append(
                Asked(method=self.command, path=self.path, headers=headers, body=body)
            )
            time.sleep(state.wait_s)
            self.send_response(state.statuses.pop(0) if state.statuses else state.status)
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(state.body)))
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # the client has what it wants
                self.wfile.write(state.body)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""Check folders, files, programs and ports of this machine. Nothing is made or changed."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import make_url

from deploy.preflight.findings import Finding, error
from sidecar.settings import Settings
from sidecar.settings.bus_url import outbox_file


def check_places(settings: Settings, *, running: bool) -> Iterator[Finding]:
    """Yield what the processes could not write, start or listen on.

    running: the sidecar runs with this `state_dir` already, so its ports are its own.
    """
    for name, folder in _folders(settings).items():
        if why := why_not_writable(folder):
            yield error(name, why)
    command = settings.engine.command
    if command and shutil.which(command[0]) is None:
        yield error("engine.command", f"{command[0]} is no program on this machine's PATH")
    if running:
        return
    for name, host, port in (
        ("proxy.port", settings.proxy.host, settings.proxy.port),
        ("admin.port", settings.admin.host, settings.admin.port),
    ):
        if why := why_not_free(host, port):
            yield error(name, why)


def _folders(settings: Settings) -> dict[str, Path]:
    found = {
        "state_dir": settings.state_dir,
        "learner.adapters_dir": settings.learner.adapters_dir,
    }
    found["bus.url"] = outbox_file(settings.bus.url, settings.state_dir).parent
    store = make_url(settings.store.url)
    if store.get_backend_name() == "sqlite" and store.database:
        found["store.url"] = Path(store.database).parent
    if settings.telemetry.spans_file:
        found["telemetry.spans_file"] = Path(settings.telemetry.spans_file).parent
    return found


def why_not_writable(folder: Path) -> str:
    """Say why `folder` cannot be made or written; empty when it can."""
    for existing in (folder.absolute(), *folder.absolute().parents):
        if existing.is_dir():
            if os.access(existing, os.W_OK | os.X_OK):
                return ""
            return f"{existing} cannot be written by this user; change its owner or the setting"
        if existing.exists():
            return f"{existing} is no folder; remove it or change the setting"
    return f"{folder} has no parent folder"


def why_not_free(host: str, port: int) -> str:
    """Say why nobody can listen there; empty when it is possible. Port 0 is always free."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, number) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as problem:
        return (
            f"cannot listen on {host} port {port} ({problem.strerror}); stop the program that "
            "does, or set another port"
        )
    return ""

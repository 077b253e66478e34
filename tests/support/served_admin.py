"""The admin listener over TCP, as control serves it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deploy.admin.context import AdminContext
from deploy.page.mount import with_page
from deploy.process import admin_server


@contextmanager
def served_admin(context: AdminContext) -> Iterator[int]:
    """Serve the API and the page. Gives: the port on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = admin_server(with_page(context))
        thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listener]),))
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()

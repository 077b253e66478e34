"""The status page over a store, behind an HTTP client that keeps cookies as a browser does."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest
import uvicorn

from deploy.admin.context import AdminContext
from deploy.engine.reconcile import Fleet, Reconciler
from deploy.page.mount import with_page
from deploy.process import admin_server
from support.chromium import Chromium, missing

if TYPE_CHECKING:
    from tests.deploy.conftest import World

HOST = "127.0.0.1:8081"


@dataclass
class Browser:
    """A visitor. `token`: of the admin API; each `open` goes on in the same session."""

    client: httpx.AsyncClient
    context: AdminContext
    reconciler: Reconciler

    async def get(self, path: str, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.get(path, headers=names)

    async def submit(self, page: str, action: str, **fields: str) -> httpx.Response:
        """Send a form of a page, with the form token that the page has."""
        found = await self.get(page)
        return await self.post(action, form_token=form_token(found.text), **fields)

    async def post(self, path: str, **fields: str) -> httpx.Response:
        return await self.client.post(path, data=fields, headers={"origin": f"http://{HOST}"})

    async def log_in(self, token: str) -> httpx.Response:
        return await self.submit("/login", "/login", token=token)


def form_token(html: str) -> str:
    """The form token of a page. Fails where the page has no form."""
    found = re.search(r'name="form_token" value="([0-9a-f]{64})"', html)
    assert found is not None, html
    return found[1]


MakeBrowser = Callable[..., Browser]
"""make_browser(*tokens): the page behind `admin.tokens`, given as `secret` or `secret:scopes`."""


@pytest.fixture
def make_browser(world: World) -> MakeBrowser:
    def make(*tokens: str, host: str = HOST) -> Browser:
        reconciler = Reconciler(
            database=world.database,
            control=world.control,
            model="m",
            max_loras=4,
            clock=world.clock,
        )
        context = AdminContext(
            database=world.database,
            model="m",
            rules=world.rules,
            fleet=Fleet({"http://vllm": reconciler}),
            tokens=tuple(map(_listed, tokens)),
            clock=world.clock,
        )
        transport = httpx.ASGITransport(
            app=with_page(context), raise_app_exceptions=False, client=("127.0.0.9", 4711)
        )
        client = httpx.AsyncClient(transport=transport, base_url=f"http://{host}")
        return Browser(client=client, context=context, reconciler=reconciler)

    return make


@pytest.fixture
def browser(make_browser: MakeBrowser) -> Browser:
    return make_browser()


def _listed(token: str) -> str:
    secret, colon, scopes = token.partition(":")
    return hashlib.sha256(secret.encode()).hexdigest() + colon + scopes


@pytest.fixture
def serve() -> Iterator[Callable[[AdminContext], str]]:
    """Serve the page of a context over TCP as control does: returns the URL."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(context: AdminContext) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        server = admin_server(with_page(context))
        thread = threading.Thread(target=asyncio.run, args=(server.serve(sockets=[listener]),))
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join()


@pytest.fixture
def url(make_browser: MakeBrowser, serve: Callable[[AdminContext], str]) -> str:
    """URL of the page of visitors who need no token."""
    return serve(make_browser().context)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if why := missing():
        pytest.skip(why)
    with Chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def window(opened: Chromium) -> Chromium:
    """A real browser, away from the page of the test before, whose server is gone: a page that is
    left open asks it what has changed, and complains of the silence in the next test."""
    opened.open("about:blank")
    opened.messages()
    return opened

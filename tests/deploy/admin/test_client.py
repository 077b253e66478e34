"""The command's way to the admin API: where its token goes, and where it never goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.admin.client import AdminApiError, AdminClient
from sidecar.errors import SettingsError
from sidecar.settings import Settings
from support.outside_server import Asked, outside_server

TOKEN = "s3cr3t-token"


@contextlib.contextmanager
def server(
    status: int = 200, body: bytes = b"{}", **headers: str
) -> Iterator[tuple[int, list[Asked]]]:
    """A server that gives one answer. Gives: its port, and what it was asked."""
    with outside_server() as one:
        one.status, one.body, one.headers = status, body, headers
        yield int(one.url.rpartition(":")[2]), one.asked


def targets(seen: list[Asked]) -> list[tuple[str, str]]:
    """Target and token of each request."""
    return [(one.path, one.headers.get("authorization", "")) for one in seen]


def client(port: int, host: str = "127.0.0.1") -> AdminClient:
    settings = Settings()
    admin = settings.admin.model_copy(update={"host": host, "port": port})
    return AdminClient(settings.model_copy(update={"admin": admin}))


@pytest.fixture
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_TOKEN", TOKEN)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_token")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_no_proxy_of_the_environment_sees_a_request_to_the_loopback(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    with server() as (proxy_port, proxied), server() as (port, seen):
        for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy_port}")
        client(port, host).get("/status")
        client(port, host).ask("/rollback", method="POST", body={})

    assert proxied == []
    assert targets(seen) == [
        ("/admin/v1/status", f"Bearer {TOKEN}"),
        ("/admin/v1/rollback", f"Bearer {TOKEN}"),
    ]


@pytest.mark.usefixtures("_token")
def test_another_machine_is_reached_as_http_clients_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as (port, proxied):
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
        client(8081, "admin.example").get("/status")

    assert [one.path for one in proxied] == ["http://admin.example:8081/admin/v1/status"]


@pytest.mark.usefixtures("_token")
@pytest.mark.parametrize("status", [301, 308])
def test_no_redirect_is_followed(status: int) -> None:
    with (
        server() as (elsewhere, followed),
        server(status, location=f"http://127.0.0.1:{elsewhere}/") as (port, _),
        pytest.raises(AdminApiError, match=f"{status}, a redirect: not followed"),
    ):
        client(port).get("/status")

    assert followed == []


@pytest.mark.usefixtures("_token")
def test_another_server_on_the_port_is_an_error_of_one_line() -> None:
    with (
        server(body=b"<html>") as (port, _),
        pytest.raises(AdminApiError, match="did not answer with JSON"),
    ):
        client(port).get("/status")


@pytest.mark.usefixtures("_token")
@pytest.mark.parametrize("problem", [b"[]", b'{"title": 1}', b"\xff"])
def test_an_error_that_is_no_problem_is_an_error_of_one_line(problem: bytes) -> None:
    with server(500, problem) as (port, _), pytest.raises(AdminApiError, match="admin API: "):
        client(port).get("/status")


@pytest.mark.usefixtures("_token")
@pytest.mark.parametrize("reply", [b'{"detail": "Not Found"}', b"<html>", b'{"type": {"a": 1}}'])
def test_another_service_on_the_port_is_named_with_the_settings(reply: bytes) -> None:
    with server(404, reply) as (port, _), pytest.raises(AdminApiError) as refused:
        client(port).get("/status")

    assert str(refused.value) == (
        f"admin API: what answers at http://127.0.0.1:{port}/admin/v1/status is not it "
        f"(404 {reply.decode()}); check admin.url, or admin.host and admin.port: they must be "
        "those of control"
    )


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("", "it wants a token; set SIDECAR_ADMIN_TOKEN to one whose digest is in admin.tokens"),
        (TOKEN, "it does not know the token in SIDECAR_ADMIN_TOKEN; set that to one"),
    ],
)
def test_a_token_that_is_wanted_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, token: str, said: str
) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_TOKEN", token)
    problem = b'{"type": "urn:learning-sidecar:problem:unauthorized", "title": "x", "detail": "y"}'

    with server(401, problem) as (port, _), pytest.raises(AdminApiError) as refused:
        client(port).get("/status")

    assert str(refused.value).startswith(f"admin API: {said}")
    assert TOKEN not in str(refused.value)


@pytest.mark.usefixtures("_token")
def test_what_is_allowed_is_told_once() -> None:
    problem = (
        b'{"type": "urn:learning-sidecar:problem:not-allowed-now", "title": "No", '
        b'"detail": "go to v1, base", "allowed_actions": [%s]}'
    )
    with server(409, problem % b'"v1", "base"') as (port, _), pytest.raises(AdminApiError) as once:
        client(port).get("/status")
    with server(409, problem % b'"v1", "v2"') as (port, _), pytest.raises(AdminApiError) as more:
        client(port).get("/status")

    assert str(once.value) == "admin API: No: go to v1, base"
    assert str(more.value) == "admin API: No: go to v1, base; allowed now: v1, v2"


@pytest.mark.usefixtures("_token")
def test_what_a_person_typed_stays_one_segment_of_the_path() -> None:
    with server() as (port, seen):
        for typed in ("../audit", "a/b?c#d", "\x1b[31m", "ü"):
            client(port).get("/adapters", typed)

    assert [one.path for one in seen] == [
        "/admin/v1/adapters/..%2Faudit",
        "/admin/v1/adapters/a%2Fb%3Fc%23d",
        "/admin/v1/adapters/%1B%5B31m",
        "/admin/v1/adapters/%C3%BC",
    ]


@pytest.mark.parametrize("token", ["s3cr\n3t", "s3cr\x003t", "schlüssel"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr("os.environ", {"SIDECAR_ADMIN_TOKEN": token})

    with pytest.raises(SettingsError) as refused:
        client(1)

    assert "SIDECAR_ADMIN_TOKEN" in str(refused.value)
    assert "3t" not in str(refused.value)
    assert "schl" not in str(refused.value)


def test_a_token_from_a_file_may_end_with_a_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_TOKEN", f"{TOKEN}\n")

    with server() as (port, seen):
        client(port).get("/status")

    assert targets(seen) == [("/admin/v1/status", f"Bearer {TOKEN}")]


def test_an_ipv6_host_is_written_in_brackets() -> None:
    made: Any = client(8081, "::1")

    assert made._url == "http://[::1]:8081/admin/v1"


@pytest.mark.usefixtures("_token")
def test_text_is_asked_for_and_comes_with_its_notes() -> None:
    headers: Any = {"content-type": "text/plain", "x-sidecar-notes": '["more"]'}
    with server(body=b"none\n", **headers) as (port, _):
        assert client(port).ask("/adapters", text=True) == ("none\n", ["more"])
    with server() as (port, _), pytest.raises(AdminApiError, match="did not answer with text"):
        client(port).ask("/adapters", text=True)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"{}", {"x-sidecar-notes": "no JSON"}),
        (b"{}", {"x-sidecar-notes": "5"}),
        (b"[" * 200_000, {}),
    ],
)
def test_odd_replies_of_another_server_are_one_line(body: bytes, headers: dict[str, str]) -> None:
    with server(200, body, **headers) as (port, _), pytest.raises(AdminApiError, match="check"):
        client(port).get("/status")


def test_a_token_that_another_server_repeats_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_ADMIN_TOKEN", TOKEN)
    with (
        server(401, f"you sent: Bearer {TOKEN}".encode()) as (port, _),
        pytest.raises(AdminApiError, match="is not it") as error,
    ):
        client(port).get("/status")
    assert TOKEN not in str(error.value)

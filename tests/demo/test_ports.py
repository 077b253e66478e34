"""A port that was chosen is there for the server that starts later, and for nobody else."""

from __future__ import annotations

import socket

import pytest

from demo.ports import free_port


def anybody() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_chosen_port_is_refused_until_its_server_listens_and_is_given_to_nobody_else() -> None:
    port = free_port()

    assert port not in {anybody() for _ in range(2_000)}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    for _ in range(2):  # a server that starts again finds it too
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port), 5).close()


def test_the_followers_are_reserved_too() -> None:
    port = free_port(followers=2)

    kept = {port, port + 1, port + 2}
    assert not kept & {anybody() for _ in range(2_000)}
    for one in kept:
        socket.create_server(("127.0.0.1", one)).close()

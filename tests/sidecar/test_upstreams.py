"""Which base URLs a list in the settings stands for, as the answers of a DNS server change."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from sidecar.upstreams import LOOKUP_S, MISSES, Upstreams, addresses_of

NAME = "dns+http://vllm.svc:8000"


class Names:
    """A DNS server and a clock."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Sequence[str] = addresses
        self.asked: list[tuple[str, int]] = []
        self.now = 100.0

    def upstreams(self, *urls: str) -> Upstreams:
        return Upstreams(urls, self.look_up, lambda: self.now)

    def look_up(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.addresses

    def later(self, found: Upstreams, *addresses: str) -> Sequence[str]:
        """What is found once these addresses were looked up."""
        self.addresses = addresses
        self.now += LOOKUP_S
        found.now()
        assert found._thread is not None
        found._thread.join()
        return found.now()


def test_a_name_stands_for_all_its_addresses_among_urls_that_stand_for_themselves() -> None:
    names = Names("10.0.0.2", "10.0.0.1", "fd00::7")

    found = names.upstreams("https://a.example/p/", f"{NAME}/v/", "http://10.0.0.3")

    assert found.follows_dns
    assert not names.upstreams("http://a:1/").follows_dns
    assert found.now() == (
        "https://a.example/p",
        "http://10.0.0.1:8000/v",
        "http://10.0.0.2:8000/v",
        "http://[fd00::7]:8000/v",
        "http://10.0.0.3",
    )
    assert names.asked == [("vllm.svc", 8000)]


def test_a_name_is_looked_up_no_more_often_than_its_ttl() -> None:
    names = Names("10.0.0.1")
    found = names.upstreams(NAME)

    found.now()
    names.addresses = ("10.0.0.2",)
    names.now += LOOKUP_S - 0.1
    assert found.now() == ("http://10.0.0.1:8000",)

    names.now -= LOOKUP_S - 0.1
    assert "http://10.0.0.2:8000" in names.later(found, "10.0.0.2")


def test_an_address_comes_at_once_and_goes_after_some_answers_without_it() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    found = names.upstreams(NAME)
    found.now()

    seen = []
    for _ in range(MISSES):
        seen.append(names.later(found, "10.0.0.2", "10.0.0.3"))

    both = ("http://10.0.0.2:8000", "http://10.0.0.3:8000")
    assert seen == [("http://10.0.0.1:8000", *both)] * (MISSES - 1) + [both]


def test_an_address_that_is_named_again_counts_anew() -> None:
    names = Names("10.0.0.1", "10.0.0.2")
    found = names.upstreams(NAME)
    found.now()

    for number in range(3 * MISSES):
        assert len(names.later(found, "10.0.0.1" if number % 2 else "10.0.0.2")) == 2


def test_a_server_that_is_away_takes_no_address_away() -> None:
    names = Names("10.0.0.1")
    found = names.upstreams(NAME)
    found.now()

    for _ in range(2 * MISSES):
        assert names.later(found) == ("http://10.0.0.1:8000",)


def test_a_name_that_has_no_address_yet_stands_for_itself() -> None:
    names = Names()
    found = names.upstreams(NAME)
    assert found.now() == ("http://vllm.svc:8000",)

    assert names.later(found, "10.0.0.1") == ("http://10.0.0.1:8000",)


def test_a_look_up_that_hangs_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    names, goes_on = Names("10.0.0.1"), threading.Event()
    found = names.upstreams(NAME)
    assert found.now() == ("http://10.0.0.1:8000",)

    def hang(host: str, port: int) -> Sequence[str]:
        goes_on.wait()
        return ("10.0.0.2",)

    monkeypatch.setattr(found, "_look_up", hang)
    for _ in range(3):
        names.now += LOOKUP_S
        assert found.now() == ("http://10.0.0.1:8000",)
    assert found._thread is not None
    assert found._thread.daemon
    goes_on.set()
    found._thread.join()
    assert "http://10.0.0.2:8000" in found.now()


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names("10.0.0.1")
    found = names.upstreams(NAME)

    def full(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr("sidecar.upstreams.threading.Thread.start", full)
        assert found.now() == ("http://vllm.svc:8000",)
    assert names.later(found, "10.0.0.1") == ("http://10.0.0.1:8000",)


@pytest.mark.parametrize(
    ("host", "addresses"),
    [("127.0.0.1", ["127.0.0.1"]), ("no-such-name.invalid", []), ("a" * 64, [])],
)
def test_a_real_look_up(host: str, addresses: list[str]) -> None:
    assert list(addresses_of(host, 80)) == addresses

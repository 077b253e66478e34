"""Who is let in, as whom, and what the others are told."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
from structlog.testing import capture_logs

from sidecar.access.admission import KEEP, Access, Admission, Credentials, Mode, open_access
from sidecar.access.denials import Denial, duration
from sidecar.access.keys import PREFIX, ApiKey, FreshKey, KeyRing, make_key
from sidecar.access.limits import DAY_S, MemoryLimiter
from sidecar.metrics.proxy import Metrics
from sidecar.settings import Settings

NOON = 20_000 * float(DAY_S) + 43_200.0
LIMITED = {"requests_per_minute": 2, "tokens_per_day": 100}


class Held:
    """The in-memory source of keys."""

    def __init__(self, *keys: ApiKey) -> None:
        self.ring: KeyRing | None = KeyRing(keys)


class Door:
    """An access and what it was made of."""

    def __init__(self, mode: Mode = "keys", **more: object) -> None:
        self.keys = Held()
        self.denied: Counter[str] = Counter()
        self.access = Access(
            mode,
            keys=self.keys if mode == "keys" else None,
            limiter=MemoryLimiter(),
            denied=lambda reason: self.denied.update([reason]),
            **more,  # type: ignore[arg-type]
        )

    def key(self, **changes: object) -> FreshKey:
        """Make a key that the door knows."""
        fresh = make_key(os.urandom)
        plain = {"key_id": fresh.key_id, "project": "shop", "secret_hash": fresh.secret_hash}
        key = ApiKey(**{**plain, **changes})  # type: ignore[arg-type]
        assert self.keys.ring is not None
        self.keys.ring = KeyRing([*self.keys.ring._keys, key])
        return fresh

    def ask(self, now: float = NOON, /, **headers: str | bytes) -> Admission | Denial:
        """Header names with `_` for `-`."""
        raw = {
            name.replace("_", "-").encode(): value.encode() if isinstance(value, str) else value
            for name, value in headers.items()
        }
        return self.ask_raw(raw, now)

    def ask_raw(self, headers: dict[bytes, bytes], now: float) -> Admission | Denial:
        return self.access.admit(Credentials(headers), now)

    def asked_with(self, fresh: FreshKey, now: float = NOON, /, **more: str) -> Admission | Denial:
        return self.ask(now, authorization=f"Bearer {fresh.presented}", **more)


@pytest.fixture
def door() -> Door:
    return Door()


def refusal(answer: Admission | Denial) -> tuple[int, str]:
    assert isinstance(answer, Denial), answer
    return answer.status, answer.reason


# Modes


def test_open_asks_for_no_key_and_passes_on_what_came() -> None:
    door = Door("open", best_of_max=4)

    answer = door.ask(authorization="Bearer whatever")

    assert answer == Admission(
        project="default", key_id="", operator=False, best_of_max=4, replace_authorization=KEEP
    )
    assert door.ask() == answer


def test_upstream_leaves_the_judging_to_vllm() -> None:
    door = Door("upstream", anyone_operates=True)

    answer = door.ask(authorization="Bearer theirs")

    assert answer == Admission(replace_authorization=KEEP)
    assert refusal(door.ask(x_sidecar_adapter="v3")) == (403, "scope_operate")


@pytest.mark.parametrize("told", [True, False])
def test_open_lets_everyone_name_an_adapter_only_where_told(told: bool) -> None:
    door = Door("open", anyone_operates=told)

    assert isinstance(door.ask(x_sidecar_adapter="v3"), Admission) is told


# Web pages of other sites

HERE = "127.0.0.1:8080"
PAGES = [
    ("http://evil.example", HERE, False, False),
    ("http://127.0.0.1:3000", HERE, False, False),  # another port is another site
    ("https://127.0.0.1:8080.evil.example", HERE, False, False),
    ("null", HERE, False, False),
    ("", HERE, False, False),
    ("http://[", HERE, False, False),
    (b"http://\xff", HERE, False, False),
    ("http://127.0.0.1:8080", HERE, True, True),
    ("http://localhost:8080", "localhost:8080", True, True),
    ("http://[::1]:8080", "[::1]:8080", True, True),
    ("http://evil.example:8080", "evil.example:8080", False, True),  # DNS rebinding
    ("http://gateway.internal", "gateway.internal", False, True),
]
"""Origin, Host, let in by a loopback listener, let in by another."""


@pytest.mark.parametrize(("origin", "host", "local", "remote"), PAGES)
@pytest.mark.parametrize("mode", ["open", "upstream"])
def test_where_no_key_says_who_asks_pages_of_other_sites_are_refused(
    mode: Mode, origin: str | bytes, host: str, local: bool, remote: bool
) -> None:
    for here, let_in in ((True, local), (False, remote)):
        door = Door(mode, anyone_operates=here)

        answer = door.ask(origin=origin, host=host)

        if let_in:
            assert isinstance(answer, Admission)
        else:
            assert refusal(answer) == (403, "foreign_origin")
        assert door.denied == ({} if let_in else {"foreign_origin": 1})


def test_a_page_in_mode_open_is_refused_whatever_key_it_sends() -> None:
    answer = Door("open").ask(origin="http://evil.example", host=HERE, authorization="Bearer x")
    assert refusal(answer) == (403, "foreign_origin")


def test_a_page_with_a_key_that_is_checked_is_let_in(door: Door) -> None:
    page = {"origin": "http://shop.example", "host": HERE}

    assert isinstance(door.asked_with(door.key(), **page), Admission)
    assert refusal(door.ask(**page)) == (401, "no_key")
    theirs = Door("upstream").ask(authorization="Bearer theirs", **page)
    assert isinstance(theirs, Admission)


# Keys


def test_a_known_key_says_who_asks(door: Door) -> None:
    fresh = door.key(scopes=frozenset({"infer", "operate"}), best_of_max=3)

    answer = door.asked_with(fresh)

    assert answer == Admission(
        project="shop", key_id=fresh.key_id, operator=True, best_of_max=3, headers=()
    )
    assert isinstance(door.asked_with(fresh, x_sidecar_adapter="v3"), Admission)
    assert door.denied == {}


def test_a_known_key_without_limits_costs_no_new_object(door: Door) -> None:
    fresh = door.key()

    assert door.asked_with(fresh) is door.asked_with(fresh)


@pytest.mark.parametrize(("upstream_key", "sent"), [("vllm-key", b"Bearer vllm-key"), (None, None)])
def test_vllm_is_sent_its_own_key_or_none_but_never_ours(
    upstream_key: str | None, sent: bytes | None
) -> None:
    door = Door(upstream_key=upstream_key)

    answer = door.asked_with(door.key())

    assert isinstance(answer, Admission)
    assert answer.replace_authorization == sent
    assert "vllm-key" not in repr(answer)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer {}"},
        {"authorization": "bearer {}"},
        {"authorization": "BEARER   {} "},
        {"x_api_key": "{}"},
        {"x_api_key": " {} "},
        {"authorization": "Bearer {}", "x_api_key": "{}"},
    ],
)
def test_the_key_may_stand_in_either_header(door: Door, headers: dict[str, str]) -> None:
    fresh = door.key()

    answer = door.ask(**{name: form.format(fresh.presented) for name, form in headers.items()})

    assert isinstance(answer, Admission), answer


def test_two_different_keys_are_not_chosen_between(door: Door) -> None:
    one, other = door.key(), door.key()

    answer = door.ask(authorization=f"Bearer {one.presented}", x_api_key=other.presented)

    assert refusal(answer) == (401, "two_keys")


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "no_key"),
        ({"authorization": ""}, "malformed"),
        ({"authorization": "Bearer"}, "malformed"),
        ({"authorization": "Bearer "}, "malformed"),
        ({"authorization": "Basic dXNlcjpwYXNz"}, "malformed"),
        ({"authorization": "sk-sidecar-000000000000-x"}, "malformed"),
        ({"authorization": b"Bearer " + b"x" * 10_000}, "malformed"),
        ({"x_api_key": b"x" * 10_000}, "malformed"),
        ({"x_api_key": ""}, "malformed"),
        ({"authorization": b"Bearer \xff\xfe\x00"}, "unknown"),
        ({"authorization": "Bearer schlüssel"}, "unknown"),
        ({"authorization": "Bearer sk-sidecar-000000000000-x"}, "unknown"),
    ],
)
def test_what_is_no_key_is_401_and_says_what_to_send(
    door: Door, headers: dict[str, str | bytes], reason: str
) -> None:
    door.key()

    answer = door.ask(**headers)

    assert refusal(answer) == (401, reason)
    assert isinstance(answer, Denial)
    assert answer.headers == ((b"www-authenticate", b"Bearer"),)
    assert (answer.kind, answer.code) == ("authentication_error", "invalid_api_key")
    assert door.denied == {reason: 1}


def test_a_wrong_secret_and_an_unknown_id_are_told_the_same(door: Door) -> None:
    fresh = door.key()
    wrong_secret = door.ask(authorization=f"Bearer {fresh.presented[:-3]}xyz")
    unknown_id = door.ask(authorization=f"Bearer {make_key(os.urandom).presented}")

    assert wrong_secret == unknown_id
    assert refusal(wrong_secret) == (401, "unknown")


def test_a_key_ends_at_its_hour_also_when_it_was_met_before(door: Door) -> None:
    fresh = door.key(expires_at=NOON)

    answers = [door.asked_with(fresh, now) for now in (NOON - 0.001, NOON, NOON - 0.001)]

    assert [isinstance(answer, Admission) for answer in answers] == [True, False, True]
    assert refusal(answers[1]) == (401, "expired")


def test_a_key_revoked_while_it_is_in_use_ends_with_the_next_request(door: Door) -> None:
    fresh = door.key()
    assert isinstance(door.asked_with(fresh), Admission)

    door.keys.ring = KeyRing()
    gone = door.asked_with(fresh)
    door.key(key_id=fresh.key_id, secret_hash=fresh.secret_hash, revoked=True)
    revoked = door.asked_with(fresh)

    assert (refusal(gone), refusal(revoked)) == ((401, "unknown"), (401, "revoked"))


def test_scopes_open_what_they_name_and_no_more(door: Door) -> None:
    infer, operate = door.key(), door.key(scopes=frozenset({"operate"}))

    assert refusal(door.asked_with(infer, x_sidecar_adapter="v3")) == (403, "scope_operate")
    assert refusal(door.asked_with(operate)) == (403, "scope_infer")


def test_before_the_store_was_seen_every_request_is_503(door: Door) -> None:
    fresh = door.key()
    ring, door.keys.ring = door.keys.ring, None

    answers = [door.asked_with(fresh), door.ask(), door.ask(authorization="Basic x")]
    door.keys.ring = ring

    assert [refusal(answer) for answer in answers] == [(503, "keys_unknown")] * 3
    assert isinstance(answers[0], Denial)
    assert answers[0].headers == ((b"retry-after", b"1"),)
    assert isinstance(door.asked_with(fresh), Admission)


# Limits


def test_the_reply_carries_the_fields_rate_limit_headers(door: Door) -> None:
    fresh = door.key(requests_per_minute=60, tokens_per_day=150_000)
    first = door.asked_with(fresh)
    assert isinstance(first, Admission)
    door.access.charge(first, 16, NOON)

    answer = door.asked_with(fresh)

    assert isinstance(answer, Admission)
    assert answer.headers == (
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"58"),
        (b"x-ratelimit-reset-requests", b"2s"),
        (b"x-ratelimit-limit-tokens", b"150000"),
        (b"x-ratelimit-remaining-tokens", b"149984"),
        (b"x-ratelimit-reset-tokens", b"12h0m0s"),
    )


def test_only_limits_that_there_are_have_headers(door: Door) -> None:
    by_requests = door.asked_with(door.key(requests_per_minute=2))
    by_tokens = door.asked_with(door.key(tokens_per_day=2))

    for answer, kind in ((by_requests, b"requests"), (by_tokens, b"tokens")):
        assert {name.split(b"-")[-1] for name, _ in answer.headers} == {kind}


def test_a_spent_minute_is_429_with_the_time_to_wait(door: Door) -> None:
    fresh = door.key(**LIMITED)
    answers = [door.asked_with(fresh) for _ in range(3)]

    denial = answers[2]

    assert refusal(denial) == (429, "requests_per_minute")
    assert isinstance(denial, Denial)
    assert (denial.kind, denial.code) == ("rate_limit_error", "rate_limit_exceeded")
    assert denial.headers[:4] == (
        (b"retry-after", b"30"),
        (b"x-ratelimit-limit-requests", b"2"),
        (b"x-ratelimit-remaining-requests", b"0"),
        (b"x-ratelimit-reset-requests", b"1m0s"),
    )
    assert "2 requests per minute" in denial.message
    assert "Try again in 30 s" in denial.message
    assert isinstance(door.asked_with(fresh, NOON + 30.0), Admission)


def test_a_spent_day_is_429_until_midnight(door: Door) -> None:
    fresh = door.key(**LIMITED)
    first = door.asked_with(fresh)
    assert isinstance(first, Admission)
    door.access.charge(first, 100, NOON)

    denial = door.asked_with(fresh)

    assert refusal(denial) == (429, "tokens_per_day")
    assert isinstance(denial, Denial)
    assert denial.headers[0] == (b"retry-after", b"43200")
    assert (b"x-ratelimit-remaining-tokens", b"0") in denial.headers
    assert "100 tokens of today (UTC)" in denial.message


def test_who_is_turned_away_at_the_door_uses_nothing_up(door: Door) -> None:
    fresh = door.key(**LIMITED)
    for _ in range(5):
        door.asked_with(fresh, x_sidecar_adapter="v3")

    assert isinstance(door.asked_with(fresh), Admission)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0, b"0ms"),
        (0.0195, b"20ms"),
        (0.9999, b"1000ms"),
        (1.0, b"1s"),
        (59.1, b"1m0s"),
        (360.0, b"6m0s"),
        (46_922.0, b"13h2m2s"),
        (86_400.0, b"24h0m0s"),
    ],
)
def test_durations_are_written_as_the_field_writes_them(seconds: float, written: bytes) -> None:
    assert duration(seconds) == written


# Secrets


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"revoked": True},
        {"expires_at": NOON - 1},
        {"scopes": frozenset({"operate"})},
        {"tokens_per_day": 1, "requests_per_minute": 1},
    ],
)
@pytest.mark.parametrize("more", [{}, {"x_sidecar_adapter": "v"}])
def test_no_key_of_ours_is_ever_repeated(changes: dict[str, Any], more: dict[str, str]) -> None:
    door = Door(upstream_key="the-key-of-vllm")
    fresh = door.key(**changes)
    with capture_logs() as lines:
        answers = [door.asked_with(fresh, **more) for _ in range(3)]

    assert door.keys.ring is not None
    said = repr([fresh, door.keys.ring._keys, door.keys.ring, lines, door.access, answers])
    said += "".join(f"{one}{asdict(one)}" for one in answers if isinstance(one, Denial))
    secret = fresh.presented.removeprefix(f"{PREFIX}{fresh.key_id}-")
    for hidden in (secret, fresh.secret_hash, "the-key-of-vllm"):
        assert hidden not in said


# As the settings ask


def test_the_settings_make_the_access() -> None:
    outside = {"host": "192.0.2.1", "allow_remote_without_keys": True}
    local, remote = (
        open_access(Settings(proxy=proxy), None, MemoryLimiter(), Metrics())
        for proxy in ({}, outside)
    )
    names_adapter = Credentials({b"x-sidecar-adapter": b"v1"})

    answer = local.admit(names_adapter, NOON)

    assert isinstance(answer, Admission)
    assert (answer.operator, answer.best_of_max) == (True, 4)
    assert refusal(remote.admit(names_adapter, NOON)) == (403, "scope_operate")

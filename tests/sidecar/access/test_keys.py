"""Keys: made from randomness, found by id and hash, never shown."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sidecar.access.keys import ApiKey, FreshKey, KeyRing, make_key
from sidecar.errors import InvalidKeyError


def fixed(count: int) -> bytes:
    return bytes(range(count))


def record(fresh: FreshKey, **changes: object) -> ApiKey:
    plain = ApiKey(key_id=fresh.key_id, project="p", secret_hash=fresh.secret_hash)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_key_is_its_prefix_its_id_and_32_random_bytes() -> None:
    fresh = make_key(fixed)

    assert fresh.key_id == "000102030405"
    assert fresh.presented == (
        "sk-sidecar-000102030405-AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
    )
    # printf %s <the key> | sha256sum
    assert fresh.secret_hash == "b9e7bbbbf23c8b99d1fa6f22f22bb27ec746aa93bb79cac823b5ed968950665c"


def test_the_right_key_is_found_among_others() -> None:
    made = [make_key(os.urandom) for _ in range(3)]
    ring = KeyRing(record(one, name=str(n)) for n, one in enumerate(made))

    found = [ring.find(one.presented.encode()) for one in made]

    assert [key.name if key else None for key in found] == ["0", "1", "2"]


@pytest.mark.parametrize(
    "change",
    [
        lambda key: key[:-1],
        lambda key: key + "x",
        lambda key: key[:-1] + ("A" if key[-1] != "A" else "B"),
        lambda key: key.upper(),
        lambda key: key.split("-")[2],
        lambda key: "",
        lambda key: key * 200,
    ],
)
def test_what_differs_by_anything_is_no_key(change: Callable[[str], str]) -> None:
    fresh = make_key(os.urandom)
    ring = KeyRing([record(fresh)])

    assert ring.find(change(fresh.presented).encode()) is None


def test_the_right_secret_with_another_id_is_no_key() -> None:
    one, other = make_key(os.urandom), make_key(os.urandom)
    ring = KeyRing([record(one), record(other)])

    assert ring.find(one.presented.replace(one.key_id, other.key_id).encode()) is None


def test_an_unknown_id_is_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(a: str, b: str) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("sidecar.access.keys.hmac.compare_digest", compare)
    known, unknown = make_key(os.urandom), make_key(os.urandom)
    ring = KeyRing([record(known)])

    ring.find(known.presented.encode())
    ring.find(unknown.presented.encode())

    assert compared == [
        (known.secret_hash, known.secret_hash),
        (unknown.secret_hash, "0" * 64),
    ]


@given(st.binary(max_size=300))
def test_no_bytes_are_taken_for_a_key_or_break_the_search(presented: bytes) -> None:
    assert KeyRing([record(make_key(fixed))]).find(presented) is None


def test_rings_are_equal_when_their_keys_are() -> None:
    one, other = make_key(os.urandom), make_key(os.urandom)
    keys = [record(one), record(other)]

    assert KeyRing(keys) == KeyRing(reversed(keys))
    assert KeyRing(keys) != KeyRing([record(one), record(other, revoked=True)])
    assert (len(KeyRing(keys)), KeyRing(keys).usable) == (2, 2)
    assert KeyRing([record(one), record(other, revoked=True)]).usable == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"project": ""}, "project '' is not a name"),
        ({"project": "a b"}, "project 'a b' is not a name"),
        ({"project": "p" * 65}, "is not a name"),
        ({"scopes": frozenset({"infer", "admin"})}, "scope 'admin' does not exist"),
        ({"best_of_max": 0}, "best of 0: give 1 (off) to 8"),
        ({"best_of_max": 9}, "best of 9: give 1 (off) to 8"),
        ({"requests_per_minute": 0}, "requests per minute: 0 lets nothing through"),
        ({"tokens_per_day": -1}, "tokens per day: -1 lets nothing through"),
        ({"name": "two\nlines"}, "name: give at most 128 printable characters"),
        ({"name": "n" * 129}, "name: give at most 128 printable characters"),
        ({"key_id": "Not-an-id"}, "key id: give 1 to 16"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidKeyError, match=re.escape(message)):
        record(make_key(fixed), **changes)

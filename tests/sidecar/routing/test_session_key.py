"""Session keys: frozen values, and what does not change them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import example, given, strategies as st

from sidecar.bounds import PROJECT
from sidecar.routing.session_key import (
    LONGEST_NAME_BYTES,
    MOST_OPENINGS,
    KnownSessions,
    header_name,
    looks_drawn,
    session_key,
    short_name,
    user_and_session,
)

OPENING = bytes(range(16))
UUID = "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe"


PROJECTS = st.sampled_from(["default", "acme", "a", "ab", "key", "acme.s1"])
HEADERS = st.text("as1/:.-\\xé", min_size=1) | st.text("a/", min_size=240, max_size=300)
UNSTORABLE = ["a" * (LONGEST_NAME_BYTES + 1), "é" * 128, "a\0b", "a\ud800", "x" * 50_000]


def by_header(header: str, project: str = "default") -> str:
    return session_key(header=header, user="", project=project)


def test_the_key_of_an_opening_never_changes() -> None:
    # Frozen: another value would break every conversation on the day of an upgrade.
    whole = b"000102030405060708090a0b0c0d0e0f\0\0ann\0default\0k1"
    expected = "m:" + hashlib.sha256(whole).hexdigest()[:32]
    assert session_key(header=None, user="ann", opening=OPENING, key_id="k1") == expected
    assert expected == "m:9580fc526cbe75dbe2f72c0eeb19a69e"


def test_a_name_counts_for_its_project_key_and_user() -> None:
    names = [
        session_key(header=None, user=user, name=name, project=project, key_id=key)
        for name in ("s1", "s2", "x" * 300)
        for user in ("", "ann")
        for project in ("default", "p")
        for key in ("", "k1")
    ]

    assert len(set(names)) == 24
    assert {name[:2] for name in names} == {"n:"}
    assert {len(name) for name in names} == {34}


def test_a_name_of_more_than_eight_openings_is_shared() -> None:
    known = KnownSessions()
    few = [known.is_shared("n:1", bytes([one]), goes_on=False) for one in range(MOST_OPENINGS)]
    again = [known.is_shared("n:1", bytes([one]), goes_on=False) for one in range(MOST_OPENINGS)]
    later = [known.is_shared("n:1", bytes([one]), goes_on=True) for one in range(100)]

    assert MOST_OPENINGS == 8
    assert not any(few + again + later)
    assert known.is_shared("n:1", b"one more", goes_on=False)
    assert known.is_shared("n:1", bytes([0]), goes_on=True), "from now on, whatever the opening"
    assert not known.is_shared("n:2", b"one more", goes_on=False)


@pytest.mark.parametrize(
    ("user_id", "expected"),
    [
        (f"user_0a1b_account_7c_session_{UUID}", ("user_0a1b_account_7c", UUID)),
        (f"user_0a1b_account__session_{UUID}", ("user_0a1b_account_", UUID)),
        (
            f'{{"device_id":"d1","account_uuid":"","session_id":"{UUID}"}}',
            ("d1", UUID),
        ),
        (f'{{"account_uuid":"a1","session_id":"{UUID}"}}', ("a1", UUID)),
        (f'{{"session_id":"{UUID}"}}', ("", UUID)),
        ('{"session_id":7}', ('{"session_id":7}', "")),
        ("{not json", ("{not json", "")),
        ("ann", ("ann", "")),
        ("ann_session_", ("ann_session_", "")),
        ("_session_x", ("_session_x", "")),
        ("", ("", "")),
    ],
)
def test_the_session_that_coding_agents_put_into_the_users_name(
    user_id: str, expected: tuple[str, str]
) -> None:
    assert user_and_session(user_id) == expected


def test_an_id_that_was_drawn_is_told_from_the_name_of_an_application() -> None:
    drawn = [UUID, UUID.replace("-", ""), "ses_4f2a91c07ffe8Kq3", "01JDPKZ5T4W8Q3"[:16] + "99"]
    named = ["", "support-bot", "customer-support-agent-v2", "1234", "tickets of 2026-11-27 08:15"]

    assert all(map(looks_drawn, drawn))
    assert not any(map(looks_drawn, named))


def test_the_header_wins() -> None:
    assert session_key(header="s-1", user="ann", opening=OPENING) == "h:s-1"
    assert session_key(header="s-1", user="", project="p") == "h:p/s-1"


@given(PROJECTS, HEADERS, PROJECTS, HEADERS)
@example("default", "acme/s1", "acme", "s1")
@example("default", "default/s", "default", "s")
@example("acme", "acme/s", "acme", "s")
def test_each_project_and_header_have_a_key_of_their_own(
    project: str, header: str, other_project: str, other_header: str
) -> None:
    assert PROJECT.fullmatch(project)
    same = (project, header) == (other_project, other_header)

    assert (by_header(header, project) == by_header(other_header, other_project)) is same


def test_a_long_header_is_bounded_and_two_that_begin_alike_stay_apart() -> None:
    longest = "s" * (LONGEST_NAME_BYTES - len("h:"))
    assert by_header(longest) == "h:" + longest

    longer = [by_header(longest + "s" + end) for end in ("", "a", "b", "a" * 60_000)]

    assert len(set(longer)) == 4
    assert {len(key) for key in longer} == {len("hx:") + 64}
    assert by_header(longest, "acme") != by_header("acme/" + longest)
    assert len(by_header("é" * 200).encode()) <= LONGEST_NAME_BYTES


@pytest.mark.parametrize("name", UNSTORABLE)
def test_a_user_whom_the_store_could_not_hold_stands_by_a_digest(name: str) -> None:
    kept = short_name(name)

    assert kept == short_name(name)
    assert kept.startswith("sha256:")
    assert len(kept.encode()) <= LONGEST_NAME_BYTES
    assert kept != short_name(name + "a")


def test_names_that_the_store_can_hold_are_kept_as_they_are() -> None:
    for name in ("", "ann", "a" * LONGEST_NAME_BYTES, "é" * 127, "sha256:", "a b\n"):
        assert short_name(name) == name


def test_headers_that_are_not_text_stay_apart_from_those_that_are() -> None:
    values = [b"a\xff", b"a\\xff", b"a\xfe", b"a\xc3\xbf", "a\u00a0".encode(), b"a"]

    assert len({header_name(value) for value in values}) == len(values)
    assert header_name(b" a\t") == "a"
    assert header_name(None) == header_name(b"  ") == ""


@given(st.tuples(*[st.text("a0:", max_size=3)] * 4), st.tuples(*[st.text("a0:", max_size=3)] * 4))
def test_each_sender_and_hint_have_a_key_of_their_own(
    one: tuple[str, str, str, str], other: tuple[str, str, str, str]
) -> None:
    def key(user: str, project: str, key_id: str, hint: str) -> str:
        return session_key(
            header=None,
            user=short_name(user),
            opening=OPENING,
            project=project,
            key_id=key_id,
            hint=hint,
        )

    assert (key(*one) == key(*other)) is (one == other)

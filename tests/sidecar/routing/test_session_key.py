"""Session keys: frozen values, and what does not change them."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sidecar.bounds import PROJECT
from sidecar.relay.payload.peek import peek_request
from sidecar.routing.session_key import (
    LONG_PIECE_BYTES,
    LONGEST_NAME_BYTES,
    header_name,
    session_key,
    short_name,
)

PREFIX = [b'"system"', b'"Be short."', b'"user"', b'"Hi"']


PROJECTS = st.sampled_from(["default", "acme", "a", "ab", "key", "acme.s1"])
HEADERS = st.text("as1/:.-\\xé", min_size=1) | st.text("a/", min_size=240, max_size=300)
UNSTORABLE = ["a" * (LONGEST_NAME_BYTES + 1), "é" * 128, "a\0b", "a\ud800", "x" * 50_000]


def by_header(header: str, project: str = "default") -> str:
    return session_key(header=header, user="", conversation_prefix=(), project=project)


def of(body: bytes, **more: str) -> str:
    given = {"user": "", **more}
    return session_key(
        header=None, conversation_prefix=peek_request(body).conversation_prefix(), **given
    )


def test_the_key_of_an_opening_never_changes() -> None:
    # Frozen: another value would break every conversation on the day of an upgrade.
    whole = b'"system"\0"Be short."\0"user"\0"Hi"\0ann\0default'
    expected = "m:" + hashlib.sha256(whole).hexdigest()[:32]
    assert session_key(header=None, user="ann", conversation_prefix=PREFIX) == expected
    assert expected == "m:41c54ffa72bb2d524e27e9b242af8b5c"


def test_a_long_message_stands_in_the_key_by_its_digest() -> None:
    # Frozen, as above. The digest is XXH3's of 128 bits, which its authors keep as it is.
    long = b'"' + b"x" * LONG_PIECE_BYTES + b'"'
    digest = bytes.fromhex("9c7342f995d214e39af8b486a522058e")
    whole = b'"user"\0' + b"xxh3:" + digest + b"\0ann\0default"
    expected = "m:" + hashlib.sha256(whole).hexdigest()[:32]
    assert session_key(header=None, user="ann", conversation_prefix=[b'"user"', long]) == expected


def test_long_messages_that_differ_in_a_byte_are_two_conversations() -> None:
    long = b'{"messages":[{"role":"user","content":"%b"}]}'
    texts = [b"x" * LONG_PIECE_BYTES, b"x" * (LONG_PIECE_BYTES // 2) + b"y"]
    texts[1] += b"x" * (LONG_PIECE_BYTES - len(texts[1]))
    assert len(texts[0]) == len(texts[1])

    assert of(long % texts[0]) != of(long % texts[1])
    assert of(long % texts[0]) == of(long % texts[0])


def test_later_turns_and_what_else_a_message_holds_do_not_count() -> None:
    first = of(
        b'{"messages":[{"role":"system","content":"Be short."},{"role":"user","content":"Hi"}]}'
    )
    later = of(
        b'{"messages":[{"content":"Be short.","role":"system"},'
        b'{"content":"Hi","role":"user","name":"x"},'
        b'{"role":"assistant","content":"Hello"},{"role":"user","content":"Bye"}],"n":1}'
    )

    assert first == later == session_key(header=None, user="", conversation_prefix=PREFIX)


def test_the_header_wins() -> None:
    assert session_key(header="s-1", user="ann", conversation_prefix=PREFIX) == "h:s-1"
    assert session_key(header="s-1", user="", conversation_prefix=(), project="p") == "h:p/s-1"


def test_two_users_or_two_projects_that_open_alike_stay_apart() -> None:
    keys = {
        session_key(header=None, user=user, conversation_prefix=PREFIX, project=project)
        for user in ("", "ann", "bob")
        for project in ("default", "p")
    }

    assert len(keys) == 6


def test_requests_that_open_with_nothing_are_told_apart_by_key_and_user() -> None:
    keys = {
        session_key(header=None, user=user, conversation_prefix=(), key_id=key)
        for user in ("", "ann")
        for key in ("k1", "k2")
    }

    assert len(keys) == 4
    with_prefix = {
        session_key(header=None, user="", conversation_prefix=PREFIX, key_id=key)
        for key in ("k1", "k2")
    }
    assert len(with_prefix) == 1


def test_a_header_of_one_project_names_no_session_of_another() -> None:
    assert by_header("acme/s1") == "h:default/acme/s1"
    assert by_header("s1", "acme") == "h:acme/s1"
    assert by_header("a/b") != by_header("b", "a")


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


@given(st.text("a\0:", max_size=4), PROJECTS, PROJECTS, st.text("a0", max_size=3))
def test_a_request_that_opens_with_nothing_is_in_no_session_of_another_project(
    user: str, project: str, other: str, key_id: str
) -> None:
    """A user may bring zeros, by which the pieces of a key are told apart."""
    named_by_key = session_key(
        header=None, user=short_name(user), conversation_prefix=(), project=project, key_id=key_id
    )
    opened = session_key(
        header=None, user=project, conversation_prefix=[short_name(user).encode()], project=other
    )
    assert named_by_key != opened

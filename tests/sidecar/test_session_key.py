"""Session keys: frozen values, and what does not change them."""

from __future__ import annotations

import hashlib

from sidecar.relay.request_peek import peek_request
from sidecar.session_key import LONG_PIECE_BYTES, session_key

OPENING = [b'"system"', b'"Be short."', b'"user"', b'"Hi"']


def of(body: bytes, **more: str) -> str:
    given = {"user": "", **more}
    return session_key(header=None, opening=peek_request(body).opening(), **given)


def test_the_key_of_an_opening_never_changes() -> None:
    # Frozen: another value would break every conversation on the day of an upgrade.
    whole = b'"system"\0"Be short."\0"user"\0"Hi"\0ann\0default'
    expected = "m:" + hashlib.sha256(whole).hexdigest()[:32]
    assert session_key(header=None, user="ann", opening=OPENING) == expected
    assert expected == "m:41c54ffa72bb2d524e27e9b242af8b5c"


def test_a_long_message_stands_in_the_key_by_its_digest() -> None:
    # Frozen, as above. The digest is XXH3's of 128 bits, which its authors keep as it is.
    long = b'"' + b"x" * LONG_PIECE_BYTES + b'"'
    digest = bytes.fromhex("9c7342f995d214e39af8b486a522058e")
    whole = b'"user"\0' + b"xxh3:" + digest + b"\0ann\0default"
    expected = "m:" + hashlib.sha256(whole).hexdigest()[:32]
    assert session_key(header=None, user="ann", opening=[b'"user"', long]) == expected


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

    assert first == later == session_key(header=None, user="", opening=OPENING)


def test_the_header_wins() -> None:
    assert session_key(header="s-1", user="ann", opening=OPENING) == "h:s-1"
    assert session_key(header="s-1", user="", opening=(), project="p") == "h:p/s-1"


def test_two_users_or_two_projects_that_open_alike_stay_apart() -> None:
    keys = {
        session_key(header=None, user=user, opening=OPENING, project=project)
        for user in ("", "ann", "bob")
        for project in ("default", "p")
    }

    assert len(keys) == 6


def test_requests_that_open_with_nothing_are_told_apart_by_key_and_user() -> None:
    keys = {
        session_key(header=None, user=user, opening=(), key_id=key)
        for user in ("", "ann")
        for key in ("k1", "k2")
    }

    assert len(keys) == 4
    with_opening = {
        session_key(header=None, user="", opening=OPENING, key_id=key) for key in ("k1", "k2")
    }
    assert len(with_opening) == 1

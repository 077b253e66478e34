"""Session keys: frozen values, and what does not change them."""

from __future__ import annotations

from sidecar.session_key import session_key

OPENING = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


def test_the_key_of_an_opening_never_changes() -> None:
    # Frozen: another value would break every conversation on the day of an upgrade.
    assert (
        session_key(header=None, user="", messages=OPENING) == "m:bd6212f2953e9a00d323cefa13eb9e97"
    )
    assert (
        session_key(header=None, user="ann", messages=OPENING)
        == "m:914033ead6737422bc5e87c346cbe817"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "Grüße"}]}]
    assert session_key(header=None, user="", messages=parts) == "m:a150e2bcabff53d0e38d9a6a75620f90"


def test_later_turns_white_space_and_key_order_do_not_count() -> None:
    later = [
        {"content": " Be short.\n", "role": "system"},
        {"content": "Hi ", "role": "user", "name": "x"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]

    assert session_key(header=None, user="", messages=later) == session_key(
        header=None, user="", messages=OPENING
    )


def test_the_header_wins() -> None:
    assert session_key(header="s-1", user="ann", messages=OPENING) == "h:s-1"


def test_two_users_that_open_alike_stay_apart() -> None:
    keys = {session_key(header=None, user=user, messages=OPENING) for user in ("", "ann", "bob")}

    assert len(keys) == 3

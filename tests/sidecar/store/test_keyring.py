"""Encrypted values: who reads them, what binds them to their place, and what a lost key says."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from sidecar.errors import SettingsError
from sidecar.settings import Store, load_settings, open_keyring
from sidecar.store.codec import HEAD_BYTES, compress, decoded_bytes, decoded_ids, pack_ids
from sidecar.store.keyring import NO_KEYS, Keyring, MissingKeyError, is_sealed, place_in, read_keys

OLD, NEW = {"old": b"o" * 32}, {"new": b"n" * 32}
PLACE = place_in("exchange", "request_body", "e1")


def test_a_value_is_read_where_it_was_put_and_nowhere_else() -> None:
    sealed = Keyring(OLD).seal(b"hello", PLACE)

    assert is_sealed(sealed)
    assert b"hello" not in sealed
    assert Keyring(OLD).open(sealed, PLACE) == b"hello"
    with pytest.raises(ValueError, match="changed or moved"):
        Keyring(OLD).open(sealed, place_in("exchange", "request_body", "e2"))
    with pytest.raises(ValueError, match="changed or moved"):
        Keyring(OLD).open(sealed, place_in("exchange", "prompt_token_ids", "e1"))


@pytest.mark.parametrize("at", range(4, 40))
def test_a_changed_byte_is_noticed(at: int) -> None:
    sealed = bytearray(Keyring(OLD).seal(b"hello", PLACE))
    sealed[at] ^= 1
    with pytest.raises(ValueError, match=r"decrypt|missing|damaged"):
        Keyring(OLD).open(bytes(sealed), PLACE)


def test_the_first_key_encrypts_and_every_key_decrypts() -> None:
    before = Keyring(OLD).seal(b"hello", PLACE)
    both = Keyring(NEW | OLD)

    assert both.open(before, PLACE) == b"hello"
    with pytest.raises(MissingKeyError, match=r"the key 'new', which is missing"):
        Keyring(OLD).open(both.seal(b"hello", PLACE), PLACE)
    with pytest.raises(ValueError, match="another key has this id"):
        Keyring({"old": b"x" * 32}).open(before, PLACE)


def test_without_a_key_values_stay_as_they_are() -> None:
    assert NO_KEYS.seal(b"hello", PLACE) == b"hello"
    assert NO_KEYS.seal_text("hello", PLACE) == "hello"
    for plain in (compress(b"hello"), pack_ids((1, 2**31 - 1)), b"", b"x\x9c"):
        assert Keyring(OLD).open(plain, PLACE) == plain


def test_a_text_is_encrypted_as_text() -> None:
    sealed = Keyring(OLD).seal_text("über", PLACE)

    assert "über" not in sealed
    assert sealed.isascii()
    assert Keyring(OLD).open_text(sealed, PLACE) == "über"
    for plain in ("", "plain", "sealed:", "sealed:no base64", "sealed:aGVsbG8="):
        assert Keyring(OLD).open_text(plain, PLACE) == plain


def test_the_head_says_how_long_the_decoded_value_is() -> None:
    body = b"x" * 10_000
    sealed = Keyring(OLD).seal(compress(body), PLACE, size=len(body))

    assert decoded_bytes(sealed[:HEAD_BYTES], len(sealed)) == 10_000
    ids = Keyring(OLD).seal(pack_ids((1, 2, 3)), PLACE)
    assert decoded_ids(ids[:HEAD_BYTES], len(ids)) == 12


def line(name: str, key: bytes) -> str:
    return f"{name}:{base64.b64encode(key).decode()}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no key in it"),
        ("# only this", "no key in it"),
        ("abc", "not written ID:BASE64"),
        (line("a b", b"x" * 32), "not written ID:BASE64"),
        ("old:***", "'old' is not 32 bytes"),
        (line("old", b"x" * 16), "'old' is not 32 bytes"),
        (line("old", b"x" * 32) + "\n" + line("old", b"y" * 32), "two keys have the id"),
    ],
)
def test_a_file_that_holds_no_keys_is_refused_and_not_quoted(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_keys(text)
    assert base64.b64encode(b"x" * 32).decode() not in str(caught.value)


def test_keys_come_from_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(f"# two\n{line('b', b'b' * 32)}\n{line('c', b'c' * 32)}\n")
    (tmp_path / "sidecar.toml").write_text(
        f'[store]\nencryption_key_file = "{tmp_path}/keys"\nurl = "sqlite:///{tmp_path}/s.db"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIDECAR_STORE__ENCRYPTION_KEYS", line("a", b"a" * 32))

    settings = load_settings()
    keyring = open_keyring(settings.store)

    assert keyring.first == "a"
    assert keyring.open(Keyring({"c": b"c" * 32}).seal(b"hello", PLACE), PLACE) == b"hello"
    assert line("a", b"a" * 32) not in repr(settings)
    assert open_keyring(Store()).first == ""


def test_a_missing_or_wrong_key_file_is_refused_when_the_settings_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIDECAR_STORE__ENCRYPTION_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match=r"ENCRYPTION_KEY_FILE names .*which cannot be read"):
        load_settings()
    (tmp_path / "none").write_bytes(b"\xff\x00")
    with pytest.raises(SettingsError, match="no file of keys"):
        load_settings()

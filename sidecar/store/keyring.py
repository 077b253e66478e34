"""Encrypt what is at rest: values of the store, and records on the bus. AES-256-GCM.

A value is encrypted after it is compressed, with the first key of a keyring; any of its keys
decrypts. What is encrypted begins with a head: `MAGIC`, the length of the value once it is decoded,
the id of the key, and a nonce. The head and the place of the value (its table, column and row) are
authenticated: a value that is moved to another row does not decrypt. Values without the head are
not encrypted, and are read as they are: a store may hold both.

A nonce is drawn for each value, 96 random bits: a key must not encrypt more than 2**32 values
(NIST SP 800-38D, 8.3), some 10**9 exchanges.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC: Final = b"SCE\xfe"
"""The first bytes of an encrypted value. No zlib stream, no zstd frame and no msgpack map begins
so, and no packed array of token ids: as an int32 it is negative."""
TEXT_MARK: Final = "sealed:"
"""Begins an encrypted text, in base64."""
BUS: Final = b"bus"
"""The place of a record on the bus, which is complete in itself, and of a dead letter."""
KEY_BYTES: Final = 32
MAX_KEYS: Final = 64
_SIZE_END: Final = 8
"""Where the length ends: within what `frames.HEAD_BYTES` reads."""
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,32}")
_MISSING: Final = re.compile(r"is encrypted with the key '[^']*', which is missing")


class MissingKeyError(ValueError):
    """A value is encrypted with a key that this process was not given."""


class Keyring:
    """The keys of a store, the one that encrypts first. Without keys it encrypts nothing."""

    def __init__(self, keys: Mapping[str, bytes] | None = None) -> None:
        """keys: 32 bytes each, by id.

        Raises: ImportError when `cryptography` is not installed.
        """
        self._ciphers: dict[str, AESGCM] = {}
        self.first = ""
        """Id of the key that encrypts; empty: there is none."""
        if keys:
            # Imported here: most processes have no key, and need not wait for it.
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM as Cipher

            self._ciphers = {name: Cipher(key) for name, key in keys.items()}
            self.first = next(iter(keys))

    def __bool__(self) -> bool:
        return bool(self._ciphers)

    def seal(self, value: bytes, place: bytes, *, size: int | None = None) -> bytes:
        """Encrypt a value; returned as it is when there is no key, or it is empty.

        size: its length once it is decoded; None: it is not compressed.
        """
        if not self.first or not value:
            return value
        name = self.first.encode()
        length = min(len(value) if size is None else size, 2**32 - 1)
        nonce = os.urandom(_NONCE_BYTES)
        head = b"".join((MAGIC, length.to_bytes(4, "little"), bytes((len(name),)), name, nonce))
        return head + self._ciphers[self.first].encrypt(nonce, value, head + place)

    def open(self, stored: bytes, place: bytes) -> bytes:
        """Undo `seal`; a value that is not encrypted is returned as it is.

        Raises: MissingKeyError; ValueError when the value was changed, belongs to another place, or
            was encrypted with another key of this id.
        """
        if not is_sealed(stored):
            return stored
        name = key_id_of(stored)
        cipher = self._ciphers.get(name)
        if cipher is None:
            raise MissingKeyError(
                f"is encrypted with the key {name!r}, which is missing; add it to "
                "store.encryption_key_file"
            )
        from cryptography.exceptions import InvalidTag

        end = _SIZE_END + 1 + len(name) + _NONCE_BYTES
        try:
            return cipher.decrypt(
                stored[end - _NONCE_BYTES : end], stored[end:], stored[:end] + place
            )
        except (InvalidTag, ValueError):
            raise ValueError(
                f"does not decrypt with the key {name!r}: another key has this id, or the value "
                "was changed or moved"
            ) from None

    def seal_text(self, text: str, place: bytes) -> str:
        """Encrypt a text; as `seal`."""
        if not self.first or not text:
            return text
        sealed = self.seal(text.encode("utf-8", "surrogatepass"), place)
        return TEXT_MARK + base64.b64encode(sealed).decode()

    def open_text(self, stored: str, place: bytes) -> str:
        """Undo `seal_text`. Raises: as `open`."""
        sealed = sealed_of_text(stored)
        return stored if sealed is None else self.open(sealed, place).decode("utf-8", "replace")


NO_KEYS: Final = Keyring()


def missing_key(why: str) -> str:
    """Return what a `MissingKeyError` said within the words of a damage; "" when none did."""
    said = _MISSING.search(why)
    return said[0] if said is not None else ""


def is_sealed(stored: object) -> bool:
    """Return True for an encrypted value, or its first bytes."""
    return isinstance(stored, bytes) and stored[:4] == MAGIC


def sealed_of_text(stored: object) -> bytes | None:
    """Return what an encrypted text holds; None when it is not encrypted."""
    if not isinstance(stored, str) or not stored.startswith(TEXT_MARK):
        return None
    try:
        sealed = base64.b64decode(stored[len(TEXT_MARK) :], validate=True)
    except (binascii.Error, ValueError):
        return None
    return sealed if is_sealed(sealed) else None


def key_id_of(sealed: bytes) -> str:
    """Return the id of the key of an encrypted value. Raises: ValueError when its head is cut."""
    length = sealed[_SIZE_END] if len(sealed) > _SIZE_END else 0
    name = sealed[_SIZE_END + 1 : _SIZE_END + 1 + length]
    if not length or len(sealed) < _SIZE_END + 1 + length + _NONCE_BYTES + _TAG_BYTES:
        raise ValueError("the head of an encrypted value is damaged")
    return name.decode("ascii", "replace")


def sealed_size(head: bytes) -> int:
    """Return how long an encrypted value is once it is decoded. head: its first 8 bytes or more."""
    return int.from_bytes(head[4:_SIZE_END], "little")


def place_in(table: str, column: str, *row: object) -> bytes:
    """Return the place of a value, which is authenticated with it."""
    return "\x1f".join((table, column, *map(str, row))).encode("utf-8", "surrogatepass")


def read_keys(text: str) -> dict[str, bytes]:
    """Read keys, the one that encrypts first: `ID:BASE64` on a line of its own, or behind a comma.

    Lines that begin with `#` are comments.
    Raises: ValueError, which quotes no key.
    """
    keys: dict[str, bytes] = {}
    lines = [line.strip() for line in text.replace(",", "\n").splitlines()]
    for number, line in enumerate((one for one in lines if one and one[0] != "#"), start=1):
        name, colon, encoded = line.partition(":")
        if not colon or _ID.fullmatch(name) is None:
            raise ValueError(
                f"key {number} is not written ID:BASE64, with an id of up to 32 letters, digits, "
                "dots, dashes and underscores"
            )
        try:
            key = base64.b64decode(encoded.strip(), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key {name!r} is not {KEY_BYTES} bytes in base64")
        if name in keys:
            raise ValueError(f"two keys have the id {name!r}")
        keys[name] = key
    if not keys:
        raise ValueError("there is no key in it; make one with `sidecar store new-key`")
    if len(keys) > MAX_KEYS:
        raise ValueError(f"there are {len(keys)} keys in it; at most {MAX_KEYS} are read")
    return keys

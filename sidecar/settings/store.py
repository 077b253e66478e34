"""The section of the store, and the keys that encrypt what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from sidecar.errors import SettingsError
from sidecar.settings.kinds import Key, Name, Word, no_empty_key
from sidecar.settings.section import Section
from sidecar.store.keyring import Keyring, read_keys

INSTALL = "needs the package `cryptography`; install it, or leave store.encryption_* out"
MAX_FILE_BYTES = 64 * 1024


class Store(Section):
    """Where exchanges are kept, and whether they are encrypted there."""

    url: Name = "sqlite:///.sidecar/store.db"
    """Any SQLAlchemy URL: SQLite or PostgreSQL."""
    encryption_key_file: Word = ""
    """File of keys, `ID:BASE64` on each line; the first encrypts, all decrypt. Empty: contents are
    not encrypted."""
    encryption_keys: Annotated[Key | None, BeforeValidator(no_empty_key)] = None
    """The same from the environment, with commas between; the file's keys come behind it."""


def open_keyring(store: Store) -> Keyring:
    """Read the keys of a store; without any, nothing is encrypted.

    Raises: SettingsError, which quotes no key.
    """
    keys: dict[str, bytes] = {}
    for name, text in _texts(store):
        try:
            found = read_keys(text)
        except ValueError as error:
            raise SettingsError(f"setting store.{name}: cannot be used: {error}") from None
        keys |= {key_id: key for key_id, key in found.items() if key_id not in keys}
    try:
        return Keyring(keys)
    except ImportError:
        raise SettingsError(f"setting store.encryption_key_file: {INSTALL}") from None


def _texts(store: Store) -> list[tuple[str, str]]:
    texts = []
    if store.encryption_keys is not None:
        texts.append(("encryption_keys", store.encryption_keys.get_secret_value()))
    if path := store.encryption_key_file:
        try:
            with Path(path).open("rb") as file:
                read = file.read(MAX_FILE_BYTES + 1)
            if len(read) > MAX_FILE_BYTES:
                raise ValueError("is over 64 kB")
            texts.append(("encryption_key_file", read.decode("ascii")))
        except OSError as error:
            raise SettingsError(
                f"setting store.encryption_key_file: names {path}, which cannot be read "
                f"({error.strerror}); "
                "make it with `sidecar store new-key`"
            ) from None
        except ValueError:
            raise SettingsError(
                f"setting store.encryption_key_file: names {path}, which is no file of keys"
            ) from None
    return texts

"""Check the sections of the bus, the store and its keys, and the files that they name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from sidecar.errors import SettingsError
from sidecar.settings.bus_url import KafkaUrl, outbox_file, read_bus_url
from sidecar.settings.checks.problem import Problem
from sidecar.settings.store import open_keyring

if TYPE_CHECKING:
    from sidecar.settings.sections import Settings


def keys(settings: Settings) -> Iterator[Problem]:
    """Yield keys of encryption that are missing or cannot be read."""
    try:
        open_keyring(settings.store)
    except SettingsError as error:
        key, _, what = str(error).removeprefix("setting store.").partition(": ")
        yield ("store", key), what
        return
    privacy, store = settings.privacy, settings.store
    rules = [privacy, *(privacy.of(name) for name in privacy.projects)]
    keyed = store.encryption_key_file or store.encryption_keys
    if not keyed and any(one.flagged == "encrypt" for one in rules):
        yield ("privacy", "flagged"), "is encrypt, without a key; set store.encryption_key_file"


def kafka(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the connection to Kafka."""
    rules = settings.kafka
    if not isinstance(read_bus_url(settings.bus.url), KafkaUrl):
        return
    if rules.security_protocol.startswith("SASL"):
        if not rules.sasl_mechanism:
            yield (
                ("kafka", "sasl_mechanism"),
                f"is empty and kafka.security_protocol is {rules.security_protocol}; give PLAIN, "
                "SCRAM-SHA-256 or SCRAM-SHA-512",
            )
        elif not rules.sasl_username or rules.sasl_password is None:
            yield (
                ("kafka", "sasl_username"),
                "or kafka.sasl_password is empty and SASL needs both; set the password by "
                "SIDECAR_KAFKA__SASL_PASSWORD",
            )
    elif rules.sasl_mechanism or rules.sasl_username or rules.sasl_password is not None:
        yield (
            ("kafka", "security_protocol"),
            f"is {rules.security_protocol}, so the SASL settings would not be used; give SASL_SSL",
        )
    files = {
        "ssl_cafile": rules.ssl_cafile,
        "ssl_certfile": rules.ssl_certfile,
        "ssl_keyfile": rules.ssl_keyfile,
    }
    for name, file in files.items():
        if file and not os.path.isfile(file):
            yield ("kafka", name), f"names {file}, which is no file; correct the path"
        if file and not rules.security_protocol.endswith("SSL"):
            yield (
                ("kafka", "security_protocol"),
                f"is {rules.security_protocol}, so kafka.{name} would not be used; give SSL or "
                "SASL_SSL",
            )


_STORES = "sqlite:///path/to/store.db or postgresql://user@host/database"


def store(url: str) -> Iterator[Problem]:
    """Yield what is wrong with the URL of the store."""
    key = ("store", "url")
    scheme, colon, rest = url.partition("://")
    if scheme.partition("+")[0] == "sqlite":
        path = rest.partition("?")[0].removeprefix("/")
        if not rest.startswith("/") or not path or path == ":memory:":
            yield key, "names no file; processes share it, so give sqlite:///path/to/store.db"
        elif path.startswith("file:"):
            yield (
                key,
                "names a URI, not a path; leave out file: and give sqlite:///path/to/store.db",
            )
        return
    if not colon:
        yield key, f"is no database URL; give {_STORES}"
        return
    # Imported here, because loading SQLAlchemy is slow and most stores are SQLite files.
    from sqlalchemy.exc import ArgumentError

    from sidecar.store.postgres import is_postgres, with_driver

    try:
        parsed = with_driver(url)
        parsed.get_dialect()
    except ArgumentError:  # also raised for an unknown dialect
        yield key, f"is no database URL that SQLAlchemy knows; give {_STORES}"
    except (ValueError, UnicodeError):
        yield key, "is no database URL: host, port or encoding is wrong; correct it"
    else:
        if not is_postgres(parsed):
            yield key, f"is of {parsed.get_backend_name()}; give {_STORES}"


def disk(settings: Settings) -> Iterator[Problem]:
    """Yield paths where something else lies."""
    if "\0" in str(settings.state_dir) or "\0" in str(settings.learner.adapters_dir):
        yield ("state_dir",), "or learner.adapters_dir holds a NUL byte, which no path may hold"
        return
    for key, folder in (
        (("state_dir",), settings.state_dir),
        (("learner", "adapters_dir"), settings.learner.adapters_dir),
    ):
        if (file := _file_in_the_way(folder)) is not None:
            yield key, f"must be a folder, and {file} is a file; give another"
    bus, store = outbox_file(settings.bus.url, settings.state_dir), _store_file(settings.store.url)
    files = [(("bus", "url"), bus)]
    if store is not None:
        files.append((("store", "url"), store))
        if os.path.abspath(bus) == os.path.abspath(store):
            yield ("bus", "url"), "and store.url name one file; give each its own"
    if settings.telemetry.spans_file:
        files.append((("telemetry", "spans_file"), Path(settings.telemetry.spans_file)))
    for key, path in files:
        if os.path.isdir(path):
            yield key, f"must name a file, and {path} is a folder; add a file's name"
        elif (file := _file_in_the_way(path.parent)) is not None:
            yield key, f"goes through {file}, which is a file; give another path"


def _file_in_the_way(folder: Path) -> Path | None:
    """Return the first part of the path that exists and is not a folder."""
    for part in (*reversed(folder.parents), folder):
        if os.path.lexists(part) and not os.path.isdir(part):
            return part
    return None


def _store_file(url: str) -> Path | None:
    scheme, _, rest = url.partition("://")
    path = rest.partition("?")[0].removeprefix("/")
    is_file = scheme.partition("+")[0] == "sqlite" and path and not path.startswith(":")
    return Path(unquote(path)) if is_file else None

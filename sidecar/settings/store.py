"""The sections of the store, its keys, privacy and Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from sidecar.errors import SettingsError
from sidecar.settings.kinds import (
    Between,
    Key,
    Line,
    Name,
    Section,
    Word,
    from_file,
    matching,
    read_secret,
)
from sidecar.store.keyring import Keyring, read_keys

# The section of the store, and the keys that encrypt what it holds.

INSTALL = "needs the package `cryptography`; install it, or leave store.encryption_* out"
MAX_FILE_BYTES = 64 * 1024


class Store(Section):
    """Where exchanges are kept, and whether they are encrypted there."""

    url: Annotated[Name, BeforeValidator(from_file)] = "sqlite:///.sidecar/store.db"
    """Any SQLAlchemy URL: SQLite or PostgreSQL."""
    encryption_key_file: Word = ""
    """File of keys, `ID:BASE64` on each line; the first encrypts, all decrypt. Empty: contents are
    not encrypted."""
    encryption_keys: Annotated[Key | None, BeforeValidator(read_secret)] = None
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


# The section of the settings for Kafka; used when `bus.url` names it.


def _password(secret: SecretStr) -> SecretStr:
    if any(char in secret.get_secret_value() for char in "\0\r\n"):
        raise ValueError("holds a line's end or a NUL byte; give the password alone")
    return secret


Password = Annotated[
    Annotated[SecretStr, AfterValidator(_password)] | None, BeforeValidator(read_secret)
]
"""An empty environment variable counts as not set."""


class Kafka(Section):
    """How Kafka is reached, what its topics are like, and how records are spread over them."""

    partition_by: Literal["caller", "session"] = "caller"
    """What records share a partition, and with it an order and a consumer. `caller`: of one
    project, API key and user; no session is ever split. `session`: of one session key of the proxy;
    spreads better, and splits conversations whose opening changes and that send no header."""
    create_topics: bool = True
    """Create topics that are missing. False: somebody else does, and they are only checked."""
    partitions: Annotated[int, Between(1, 10_000, "each ingest process needs one at least")] = 8
    """Partitions of a topic that is created: the most ingest processes that can share the work."""
    replication_factor: Annotated[
        int, Between(0, 100, "0 takes the brokers' default.replication.factor")
    ] = 0
    """Replicas of a topic that is created; 0 takes the brokers' default. Three survive the loss of
    a broker."""
    retention_hours: Annotated[
        int, Between(1, 87_600, "records that ingest has not read by then are lost")
    ] = 168
    """How long a topic that is created keeps records, including those that ingest has stored. They
    hold content of users."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How the brokers are reached: with TLS (`SSL`), with a password (`SASL_...`), or both."""
    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    """Needed with SASL_PLAINTEXT and SASL_SSL."""
    sasl_username: Line = ""
    """User of `sasl_mechanism`; the password is `sasl_password`."""
    sasl_password: Password = None
    """A secret: set it by `SIDECAR_KAFKA__SASL_PASSWORD`."""
    ssl_cafile: Word = ""
    """Certificates (PEM) that sign the brokers'. Empty: those of the system."""
    ssl_certfile: Word = ""
    """The client's own certificate (PEM), where the brokers ask for one."""
    ssl_keyfile: Word = ""
    """The key (PEM) of `ssl_certfile`."""
    ssl_key_password: Password = None
    """A secret: set it by `SIDECAR_KAFKA__SSL_KEY_PASSWORD`."""


SECRET, EMAIL, PHONE, CARD, IBAN, SSN = "SECRET", "EMAIL", "PHONE", "CREDIT_CARD", "IBAN", "US_SSN"
BUILT_IN = (SECRET, EMAIL, PHONE, IBAN, CARD, SSN)  # a card number may stand within an IBAN
MAX_PATTERN = 1_000
"""Characters of a pattern."""
MAX_PATTERNS = 64
PROGRAM_BYTES = 2**20
"""Memory of a compiled pattern: what RE2 needs to say no to a repetition of repetitions."""
_EDGES = tuple("".join(one) for n in range(3) for one in product("a-\n", repeat=n))
"""In these stand all edges that RE2 tells apart: what is beside one is a letter of a word, another
character, a line's end or nothing."""


def compiled(pattern: str, most: int) -> Any:  # Any: the library has no types
    """Compile a pattern of RE2. most: its characters. Raises: ValueError."""
    import re2  # no other setting needs it

    if len(pattern) > most:
        raise ValueError(f"a pattern has over {most} characters")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PROGRAM_BYTES
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else error
        raise ValueError(
            f"the pattern is refused ({why}): it must be one of RE2, which takes linear time: no "
            "backreferences, no look-around, repetitions up to 1000"
        ) from None


def _pattern(pattern: str) -> str:
    found = compiled(pattern, MAX_PATTERN)
    for text in _EDGES:
        for at in range(len(text) + 1):
            match = found.search(text, at)
            if match is not None and not match[0]:
                raise ValueError(
                    "the pattern matches the empty text or an edge of words (`\\b` alone), so "
                    "nearly everywhere; let each of its branches take a character"
                )
    return pattern


Kind = Annotated[
    str,
    matching(
        r"[A-Z][A-Z0-9_]{0,31}",
        "is no kind: capitals, digits and underscores, 32 at most, such as EMAIL",
    ),
]
Policy = Literal["keep_out", "encrypt", "drop"]


class ProjectPrivacy(Section):
    """What one project has otherwise; a key that is left out is as in `[privacy]`."""

    flag: tuple[Kind, ...] | None = None
    flagged: Policy | None = None
    before_storage: bool | None = None


class Privacy(Section):
    """What is personal or secret in exchanges, and what becomes of it."""

    hide: tuple[Kind, ...] | None = None
    """Kinds that the judge does not see. None: all built-in ones and all of `patterns`."""
    flag: tuple[Kind, ...] = (SECRET, CARD, IBAN, SSN)
    """Kinds that flag an exchange."""
    flagged: Policy = "keep_out"
    """What becomes of a flagged exchange: it is not learned from; or it is, and must be stored
    encrypted; or it is not stored."""
    before_storage: bool = False
    """Replace what `hide` names before an exchange is stored. It is then not learned from."""
    patterns: Mapping[Kind, Annotated[str, AfterValidator(_pattern)]] = Field(default_factory=dict)
    """Further kinds, each by a pattern of RE2."""
    projects: Mapping[str, ProjectPrivacy] = Field(default_factory=dict)
    """Other rules for single projects, by name."""

    @field_validator("patterns")
    @classmethod
    def _few(cls, patterns: Mapping[str, str]) -> Mapping[str, str]:
        if len(patterns) > MAX_PATTERNS:
            raise ValueError(f"there are over {MAX_PATTERNS} patterns")
        if taken := set(patterns) & set(BUILT_IN):
            raise ValueError(f"{min(taken)} is built in; give the pattern another name")
        return patterns

    @model_validator(mode="after")
    def _known(self) -> Privacy:
        known = {*BUILT_IN, *self.patterns}
        flags = [self.flag, *(one.flag or () for one in self.projects.values())]
        for name in (*(self.hide or ()), *(kind for kinds in flags for kind in kinds)):
            if name not in known:
                raise ValueError(f"{name} is no kind; known are {', '.join(sorted(known))}")
        return self

    @property
    def hidden(self) -> tuple[str, ...]:
        """The kinds that are hidden."""
        return (*BUILT_IN, *self.patterns) if self.hide is None else self.hide

    def of(self, project: str) -> Privacy:
        """Return the rules of a project."""
        own = self.projects.get(project)
        if own is None:
            return self
        return self.model_copy(update=own.model_dump(exclude_none=True))

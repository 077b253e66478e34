"""Make API keys of the data plane, and recognise them. Pure.

A key reads `sk-sidecar-<key_id>-<secret>`. Only the SHA-256 of the whole of it is stored; 32 random
bytes need no slow hash, because nobody can try them all. The key id is no secret: it finds the
record, and it is the name under which a key is listed, revoked and counted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from sidecar.bounds import PROJECT
from sidecar.errors import InvalidKeyError

Scope = Literal["infer", "operate", "voices"]
"""infer: ask the model. operate: also name an adapter by `x-sidecar-adapter`. voices: each `source`
that its feedback names counts as a voice of its own; without it all of them are one."""
SCOPES: frozenset[str] = frozenset(get_args(Scope))
PREFIX = "sk-sidecar-"
KEY_ID_BYTES = 6
SECRET_BYTES = 32
MAX_PRESENTED_BYTES = 128
"""Ours have 67; what is longer is not hashed at all."""
MAX_BEST_OF = 8
KEY_ID = re.compile(r"[a-z0-9]{1,16}")
MAX_NAME_CHARS = 128
_NOBODY = "0" * 64
"""What an unknown key is compared with, so that it takes as long as a known one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What the sidecar knows of one key: everything but the key."""

    key_id: str
    project: str
    secret_hash: str = field(repr=False)
    """SHA-256 of the whole presented key, as hex."""
    scopes: frozenset[str] = frozenset({"infer"})
    """What the key may do: values of `Scope`."""
    expires_at: float | None = None
    """Unix seconds; from then on the key is refused."""
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    """Prompt and completion tokens between two midnights UTC."""
    best_of_max: int = 1
    """Largest `x-sidecar-best-of`, 1..8; 1 is off."""
    name: str = ""
    revoked: bool = False

    def __post_init__(self) -> None:
        """Raises: InvalidKeyError."""
        if not KEY_ID.fullmatch(self.key_id):
            raise InvalidKeyError("key id: give 1 to 16 lower-case letters and digits")
        if not PROJECT.fullmatch(self.project):
            raise InvalidKeyError(
                f"project {self.project!r} is not a name: 1 to 64 letters, digits, '.', '_', '-', "
                "beginning with a letter or digit"
            )
        if unknown := sorted(self.scopes - SCOPES):
            raise InvalidKeyError(
                f"scope {unknown[0]!r} does not exist; there are {', '.join(get_args(Scope))}"
            )
        if not 1 <= self.best_of_max <= MAX_BEST_OF:
            raise InvalidKeyError(f"best of {self.best_of_max}: give 1 (off) to {MAX_BEST_OF}")
        for what, limit in (
            ("requests per minute", self.requests_per_minute),
            ("tokens per day", self.tokens_per_day),
        ):
            if limit is not None and limit < 1:
                raise InvalidKeyError(f"{what}: {limit} lets nothing through; revoke the key")
        if len(self.name) > MAX_NAME_CHARS or not self.name.isprintable():
            raise InvalidKeyError(f"name: give at most {MAX_NAME_CHARS} printable characters")


@dataclass(frozen=True, slots=True)
class FreshKey:
    """A key that was just made: the one moment when it can be shown."""

    key_id: str
    presented: str = field(repr=False)
    secret_hash: str = field(repr=False)


def make_key(randomness: Callable[[int], bytes]) -> FreshKey:
    """Make a key. randomness: `os.urandom`, or a fake of it."""
    key_id = randomness(KEY_ID_BYTES).hex()
    secret = base64.urlsafe_b64encode(randomness(SECRET_BYTES)).rstrip(b"=").decode()
    presented = f"{PREFIX}{key_id}-{secret}"
    return FreshKey(key_id, presented, secret_hash(presented.encode()))


def secret_hash(presented: bytes) -> str:
    """What is stored of a key. presented: the whole key, as the client sends it."""
    return hashlib.sha256(presented).hexdigest()


class KeyRing:
    """All keys at one moment. Immutable; equal when the keys are."""

    __slots__ = ("_by_id", "_keys")

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = frozenset(keys)
        by_id = {key.key_id.encode(): key for key in self._keys}
        self._by_id: Mapping[bytes, ApiKey] = MappingProxyType(by_id)

    def find(self, presented: bytes) -> ApiKey | None:
        """The key that this is, also when it is revoked or expired. None: no key of ours.

        An unknown id and a wrong secret take the same steps.
        """
        if len(presented) > MAX_PRESENTED_BYTES:
            return None
        key_id = presented.removeprefix(PREFIX.encode()).partition(b"-")[0]
        known = self._by_id.get(key_id)
        expected = _NOBODY if known is None else known.secret_hash
        matches = hmac.compare_digest(secret_hash(presented), expected)
        return known if matches else None

    @property
    def usable(self) -> int:
        """How many are not revoked."""
        return sum(not key.revoked for key in self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyRing) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(self._keys)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys)"

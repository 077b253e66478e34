"""The types of values that settings may have, each with its check and its reason. Pure.

A message never quotes a value that may hold a secret: URLs, keys and tokens are only described.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SecretStr,
)
from pydantic_core import CoreSchema, core_schema

from sidecar.bounds import PROJECT
from sidecar.upstreams import DNS

# The base class of all sections of the settings.


class Section(BaseModel):
    """A frozen section that refuses unknown keys."""

    # A traceback must not show a key that was written in the wrong place.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


MAX_PORT = 65_535
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MAX_LINE = 500
_SECRET_MARKS = frozenset("@?#")
"""Characters beside which a URL may hold a secret: user information, query, fragment."""
AdminScope = Literal["read", "content", "operate", "train", "admin"]
"""What a token of the admin API may do: read figures; read what was said; roll back and steer
canaries; steer the learner; everything."""
_SHOWN = 40
"""Characters of a refused number that a message quotes."""


@dataclass(frozen=True, slots=True)
class Between:
    """A finite number within limits. The message states the limits and their reason."""

    low: int | float
    high: int | float
    why: str
    unit: str = ""
    above_low: bool = False
    """`low` itself is refused."""
    below_high: bool = False
    """`high` itself is refused."""

    @property
    def words(self) -> str:
        """Return the limits as the message and docs/settings.md write them."""
        low = f"above {self.low}" if self.above_low else f"{self.low}"
        high = f"below {self.high}" if self.below_high else f"{self.high}"
        return " ".join((low, "to", high, self.unit)).rstrip()

    def holds(self, value: float) -> bool:
        """Return True if the value is within the limits; False for NaN."""
        above = value > self.low if self.above_low else value >= self.low
        below = value < self.high if self.below_high else value <= self.high
        return above and below

    def __get_pydantic_core_schema__(
        self,
        source: Any,  # Any: pydantic's own
        handler: GetCoreSchemaHandler,
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def _check(self, value: object, read: Callable[[object], int | float]) -> int | float:
        if isinstance(value, bool):
            raise ValueError(f"true and false are no numbers; give {self.words}")
        try:
            number = read(value)
        except OverflowError as error:  # an integer that no float can hold
            raise ValueError(f"is too large; give {self.words}: {self.why}") from error
        if not self.holds(number):
            shown = str(value)
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
            raise ValueError(f"{shown} is out of range; give {self.words}: {self.why}")
        return number


def base_url(host: str, port: int) -> str:
    """Return the URL at which tools on this machine reach a listener: loopback for a wildcard
    host."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _split(url: str) -> SplitResult:
    """Raises: ValueError, without the URL, which may hold a password."""
    if not url.isprintable() or " " in url:
        raise ValueError("holds a space or a control character; remove it")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(
            f"{_quoted(url)}is no URL; give http://host:port, with a port up to {MAX_PORT}"
        ) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{_quoted(url)}is not http://host:port or https://host")
    if port == 0:
        raise ValueError(f"has port 0, where nobody listens; give 1 to {MAX_PORT}")
    checked_host(parts.hostname)
    return parts


def _quoted(url: str) -> str:
    """Return the URL for a message, unless it may hold a secret."""
    return "" if not _SECRET_MARKS.isdisjoint(url) or len(url) > _MAX_LINE else f"{url} "


def _web_url(url: str) -> str:
    _split(url)
    return url


def _base_alone(url: str, key: str) -> SplitResult:
    parts = _split(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"holds a user name or a password; {key} instead")
    if parts.query or parts.fragment:
        raise ValueError("holds `?` or `#`; give the base URL alone")
    return parts


def _admin_url(url: str) -> str:
    if url:
        _base_alone(url, "set SIDECAR_ADMIN_TOKEN")
    return url


def _upstream(url: str) -> str:
    if url.lower().startswith("dns+") and not url.startswith(f"{DNS}:"):
        raise ValueError(
            f"{_quoted(url)}is not {DNS}://NAME:PORT; no certificate names the address of a replica"
        )
    parts = _base_alone(url.removeprefix("dns+"), "set serving.api_key")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"{_quoted(url)}ends in /v1, which the sidecar adds itself; leave it out")
    return url


def checked_host(host: str) -> str:
    """Return an address or a host name. Raises: ValueError when it is neither."""
    if host.startswith("["):
        raise ValueError("write an IPv6 address without brackets")
    try:
        ipaddress.ip_address(host)
    except ValueError as error:
        if not host:
            raise ValueError("is empty; 127.0.0.1 is this machine, 0.0.0.0 every address") from None
        # No host name ends in a number: this is a mistyped IPv4 address.
        only_digits = host.rstrip(".").rpartition(".")[2].isdigit()
        if not _HOST_NAME.fullmatch(host) or len(host) > 253 or only_digits:
            raise ValueError(
                "is no address and no host name; give one alone, without http:// and port"
            ) from error
    return host


def _line(text: str) -> str:
    if not text.isprintable() or text != text.strip() or len(text) > _MAX_LINE:
        raise ValueError(
            f"must be one line of at most {_MAX_LINE} printable characters, without spaces around"
        )
    return text


def _name(text: str) -> str:
    if not text:
        raise ValueError("is empty; give a name")
    return _line(text)


def matching(pattern: str, why: str) -> AfterValidator:
    """Refuse a text that is not as a whole like a pattern. why: what is wrong with it then."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(why)
        return text

    return AfterValidator(check)


def _admin_token(value: str) -> str:
    digest, colon, words = value.partition(":")
    scopes, at, projects = words.partition("@")
    known = get_args(AdminScope)
    if colon and not set(scopes.split("+")) <= set(known):
        raise ValueError(
            "names an unknown scope; after the colon write scopes, joined by +: " + ", ".join(known)
        )
    if at and not all(projects.split("+")):
        raise ValueError("has no project behind its @; write projects, joined by +")
    return _digest(digest) + colon + words


def _digest(token: str) -> str:
    if not _DIGEST.fullmatch(token):
        raise ValueError(
            "is no SHA-256 digest of 64 hex digits; put the digest here and keep the token to "
            "yourself: printf %s TOKEN | sha256sum"
        )
    return token


def _key(secret: SecretStr) -> SecretStr:
    value = secret.get_secret_value()
    if not value.isascii() or not value.isprintable() or value != value.strip():
        raise ValueError(
            "holds a space around it, a line's end or a character that no HTTP header may hold; "
            "give the key alone"
        )
    return secret


FILE = "file:"
"""How a value that stands in a file begins, as containers mount secrets: `file:/run/secrets/judge`.
"""
MAX_SECRET_BYTES = 64 * 1024


def from_file(value: object) -> object:
    """Return the text of the file that a secret names, without white space around it; another value
    as it is. Raises: ValueError, without the text."""
    if not isinstance(value, str) or not value.startswith(FILE):
        return value
    path = Path(value.removeprefix(FILE))
    if not path.is_absolute():
        raise ValueError("names a file by a relative path; give file: and an absolute one")
    if "\0" in value:
        raise ValueError("names a file by a path with a NUL byte; give the path without it")
    try:
        # A pipe would be waited for until somebody writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("names something else than a plain file")
            with open(descriptor, "rb", closefd=False) as file:
                found = file.read(MAX_SECRET_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"names a file that cannot be read ({error.strerror})") from None
    if len(found) > MAX_SECRET_BYTES or not found.strip():
        raise ValueError(f"names a file that is empty, or has over {MAX_SECRET_BYTES} bytes")
    try:
        return found.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError("names a file that is not UTF-8; save the secret as plain text") from None


def read_secret(value: object) -> object:
    """Read a secret: the text of a file, if it names one (`from_file`). An empty environment
    variable is none, as containers set them."""
    return None if value == "" else from_file(value)


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; leave the key out to have the default")
    return text


def _word(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL byte, which no command line and no file name may hold")
    return text


def _no_empty_path(value: object) -> object:
    """Refuse an empty path: `Path("")` would be the working folder."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("is empty; give a folder (. is the working folder)")
    return value


_BUSY = "a shorter one keeps a core busy, a longer one looks like a process that hangs"
_FOREVER = "nothing waits shorter than a millisecond, or longer than a week"
_A_SHARE = "it is a share"

Share = Annotated[float, Between(0, 1, _A_SHARE)]
Interval = Annotated[float, Between(0.001, 86_400, _BUSY, "s")]
"""Seconds between two polls."""
Timeout = Annotated[float, Between(0.001, 604_800, _FOREVER, "s")]
Count = Annotated[int, Between(1, 1_000_000_000, "none at all would stop the process's work")]
Parallel = Annotated[int, Between(1, 10_000, "none would do nothing, more is no limit")]
Bytes = Annotated[
    int, Between(1, 1_000_000_000_000, "nothing fits into less, and no memory holds more")
]
Port = Annotated[int, Between(0, MAX_PORT, "TCP has no other ports; 0 takes a free one")]
Host = Annotated[str, AfterValidator(checked_host)]
Upstream = Annotated[str, AfterValidator(_upstream)]
WebUrl = Annotated[str, AfterValidator(_web_url)]
WebUrlOrNone = Annotated[str, AfterValidator(lambda url: _web_url(url) if url else url)]
"""A URL, or the empty text for none."""
AdminUrl = Annotated[str, AfterValidator(_admin_url)]
"""Where control is, or the empty text."""
Line = Annotated[str, AfterValidator(_line)]
Name = Annotated[str, AfterValidator(_name)]
Project = Annotated[
    str,
    matching(
        PROJECT.pattern,
        "is no name that a project may have: 1 to 64 letters, digits, '.', '_', '-', beginning "
        "with a letter or digit",
    ),
]
Text = Annotated[str, AfterValidator(_text)]
Word = Annotated[str, AfterValidator(_word)]
Folder = Annotated[Path, BeforeValidator(_no_empty_path)]
Device = Annotated[
    str,
    matching(
        r"cpu|mps|cuda(?::\d{1,4})?",
        "is no device of the learner; give cpu, cuda, cuda:0 or another card, or mps",
    ),
]
AdminToken = Annotated[str, AfterValidator(_admin_token)]
"""A digest, or a digest and its scopes, and projects: `<64 hex digits>:read+content@support`."""
Key = Annotated[SecretStr, AfterValidator(_key)]

Price = Mapping[
    Literal["input", "output"],
    Annotated[float, Between(0, 1_000_000, "no token costs a dollar; 0: it costs nothing")],
]
"""US dollars for a million tokens; both keys are needed (`sidecar.settings.checks`)."""
ContextTokens = Annotated[int, Between(0, 100_000_000, "0 takes what LiteLLM knows of the model")]
Budget = Annotated[int, Between(0, 10**15, "0 sets no limit")]
"""Tokens in an hour or a day."""
PerMinute = Annotated[int, Between(0, 10**12, "0 sets no limit")]


class Fallback(Section):
    """A judge that is asked while those before it are away, reject everything, or are limited for
    long. Rubric, passes, time limit and budget are those of `[judge]`."""

    model: Name
    """A LiteLLM model name."""
    api_base: WebUrl | None = None
    """Base URL, for a judge of your own."""
    api_key: Annotated[Key | None, BeforeValidator(read_secret)] = None
    """Key of its API. Without it LiteLLM reads the provider's own environment variable."""
    context_tokens: ContextTokens = 0
    """As `judge.context_tokens`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """As `judge.params`."""
    price: Price | None = None
    """As `judge.price`."""
    requests_per_minute: PerMinute = 0
    """As `judge.requests_per_minute`."""


# Decide which addresses a host in the settings stands for, in any notation.

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LOCALHOST: frozenset[Address] = frozenset(
    {ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")}
)


def addresses(host: str) -> frozenset[Address]:
    """Return the addresses of a literal or of `localhost`; none for another name. Pure."""
    if host.lower().rstrip(".") == "localhost":
        return LOCALHOST
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return frozenset()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return frozenset({mapped or address})


def is_loopback(host: str) -> bool:
    """Return True for a host that only this machine can reach. Pure."""
    found = addresses(host)
    return bool(found) and all(address.is_loopback for address in found)


def is_every_address(host: str) -> bool:
    """Return True for the wildcard address of IPv4 or IPv6. Pure."""
    return any(address.is_unspecified for address in addresses(host))


def share_an_address(one: str, other: str) -> bool:
    """Return True if listeners at these two hosts would conflict on one port. May ask the
    resolver."""
    if one.lower() == other.lower() or is_every_address(one) or is_every_address(other):
        return True
    return not (addresses(one) or _resolved(one)).isdisjoint(addresses(other) or _resolved(other))


def _resolved(host: str) -> frozenset[Address]:
    """Return None for a name that cannot be resolved now; the listener reports that later."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset().union(*(addresses(str(entry[4][0])) for entry in found))


# Read `bus.url`: the file of the embedded bus, or the servers and the topic of Kafka. Pure.

OUTBOX_SCHEME = "sqlite:///"
KAFKA_SCHEME = "kafka://"
KAFKA_PORT = 9092
"""The port that Kafka's own configuration files use; taken when the URL names none."""
DEAD_LETTERS = ".dead-letters"
"""What follows the topic's name in the name of its dead-letter topic."""
_MAX_TOPIC = 249 - len(DEAD_LETTERS)
"""Kafka takes 249 characters, and the name of the dead-letter topic is longer."""
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")
_EXAMPLES = "give sqlite:///path/to/outbox.db or kafka://host:port,host:port/topic"


@dataclass(frozen=True, slots=True)
class OutboxUrl:
    """The embedded bus."""

    path: str


@dataclass(frozen=True, slots=True)
class KafkaUrl:
    """A Kafka cluster and the topic of the exchanges."""

    servers: tuple[str, ...]
    """`host:port` of the brokers that are asked first."""
    topic: str

    @property
    def dead_letters(self) -> str:
        """The topic of the records that cannot be stored."""
        return self.topic + DEAD_LETTERS

    def __str__(self) -> str:
        return f"{KAFKA_SCHEME}{','.join(self.servers)}/{self.topic}"


PlaceOfBus: TypeAlias = OutboxUrl | KafkaUrl


def read_bus_url(url: str) -> PlaceOfBus:
    """Return where the bus is. Raises: ValueError, which quotes nothing that may be a secret."""
    if url.startswith(OUTBOX_SCHEME):
        return OutboxUrl(_file(url.removeprefix(OUTBOX_SCHEME)))
    if url.startswith(KAFKA_SCHEME):
        return _kafka(url.removeprefix(KAFKA_SCHEME))
    raise ValueError(f"is no bus that this release knows; {_EXAMPLES}")


def outbox_file(url: str, state_dir: Path) -> Path:
    """Return the file in which the proxy keeps records: the embedded bus, or what waits for Kafka.

    Raises: ValueError for a `bus.url` that is no bus.
    """
    place = read_bus_url(url)
    return Path(place.path) if isinstance(place, OutboxUrl) else state_dir / "outbox.db"


def _file(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError(f"names no file; {_EXAMPLES}")
    if path == ":memory:":
        raise ValueError("memory is not shared between processes; name a file")
    return path


def _kafka(rest: str) -> KafkaUrl:
    if "@" in rest:
        raise ValueError(
            "holds a user name or a password; set kafka.sasl_username, and the password by the "
            "environment variable SIDECAR_KAFKA__SASL_PASSWORD"
        )
    if "?" in rest or "#" in rest:
        raise ValueError("holds `?` or `#`; options belong in the section [kafka]")
    servers, slash, topic = rest.partition("/")
    if not slash or not topic:
        raise ValueError("names no topic; give kafka://host:port,host:port/topic")
    if not _TOPIC.fullmatch(topic) or topic in (".", "..") or len(topic) > _MAX_TOPIC:
        raise ValueError(
            f"names a topic that Kafka refuses; give at most {_MAX_TOPIC} letters, digits, "
            "dots, dashes and underscores"
        )
    return KafkaUrl(tuple(_server(server) for server in servers.split(",")), topic)


def _server(server: str) -> str:
    try:
        parts = urlsplit(f"//{server}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(f"has a port that is no number from 1 to {MAX_PORT}") from error
    if not host or port == 0 or parts.path:
        raise ValueError("names a server without a host, or its port 0; give host:port")
    try:
        checked_host(host)
    except ValueError as error:
        raise ValueError(
            "names a server that is no address and no host name; give kafka://host:port/topic"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{KAFKA_PORT if port is None else port}"


def _checked(url: str) -> str:
    read_bus_url(url)
    return url


BusUrl = Annotated[str, BeforeValidator(from_file), AfterValidator(_checked)]


# Send requests to this machine directly, not through the proxy of the environment (`HTTP_PROXY`).

ALWAYS = ("localhost", "127.0.0.1", "::1")
_NAMES = ("no_proxy", "NO_PROXY")
"""Clients read the first of these that is set."""


def ask_loopback_directly(environ: MutableMapping[str, str], *urls: str) -> None:
    """Add the usual loopback hosts and those of the URLs to `NO_PROXY`. Changes `environ`.

    The user's entries are kept; `*`, which means every host, stays alone.
    """
    hosts = [urlsplit(url).hostname or "" for url in urls]
    wanted = [*ALWAYS, *(host for host in hosts if is_loopback(host))]
    said = next((environ[name] for name in _NAMES if environ.get(name)), "")
    entries = [entry for part in said.split(",") if (entry := part.strip())]
    if "*" in entries:
        return
    entries += [host for host in dict.fromkeys(wanted) if host not in entries]
    for name in _NAMES:
        environ[name] = ",".join(entries)

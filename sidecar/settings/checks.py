"""Check settings that contradict each other, or the disk.

Each check yields the key and, in words, what is wrong and what to do. No message quotes a value
that may hold a secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sidecar.errors import SettingsError
from sidecar.settings.addresses import (
    addresses,
    is_every_address,
    is_loopback,
    share_an_address,
)
from sidecar.settings.bus_url import KafkaUrl, outbox_file, read_bus_url
from sidecar.settings.kinds import MAX_PORT
from sidecar.settings.reward import HttpVerifier, LengthVerifier, RegexVerifier, Reward
from sidecar.settings.store import open_keyring

if TYPE_CHECKING:
    from sidecar.settings.kinds import Fallback, Price
    from sidecar.settings.learning import Judge
    from sidecar.settings.sections import Proxy, Settings

Problem = tuple[tuple[str, ...], str]
"""The key, section first, and what is wrong with it."""

MAX_UNIX_PATH = 100
"""Bytes of a unix socket's path: Linux takes 107, macOS 103."""
JUDGE_OWN = frozenset({"model", "messages", "timeout", "num_retries", "caching", "response_format"})
"""Parameters of a judge call that the sidecar sets itself."""
MAX_PARAMS_DEPTH = 32
"""Deepest nesting of tables and lists. Python cannot recurse through a thousand."""


def problems(settings: Settings) -> Iterator[Problem]:
    """Yield every problem, in the order of the checks."""
    yield from _upstreams(settings)
    yield from _engine(settings)
    yield from _listeners(settings)
    yield from _judges(settings)
    yield from _reward(settings.reward)
    yield from _learner(settings)
    yield from _canary(settings)
    yield from _kafka(settings)
    yield from _store(settings.store.url)
    yield from _keys(settings)
    yield from _disk(settings)


def _keys(settings: Settings) -> Iterator[Problem]:
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


def _upstreams(settings: Settings) -> Iterator[Problem]:
    if not settings.serving.upstreams:
        yield ("serving", "upstreams"), "is empty; name at least one vLLM"
    lists = (
        (("serving", "upstreams"), settings.serving.upstreams),
        (("groups", "sampling_upstreams"), settings.groups.sampling_upstreams),
    )
    proxy, admin = settings.proxy, settings.admin
    own = {"proxy": (proxy.host, proxy.port), "admin": (admin.host, admin.port)}
    for key, upstreams in lists:
        if len({url.rstrip("/").lower() for url in upstreams}) < len(upstreams):
            yield key, "names one vLLM twice; name each once"
        for name, (host, port) in own.items():
            if any(_same_place(url, host, port) for url in upstreams):
                yield (
                    key,
                    f"names the sidecar's own {name}.host and {name}.port, so requests would go "
                    "round in a circle; name vLLM's address",
                )


def _same_place(url: str, host: str, port: int) -> bool:
    parts = urlsplit(url)
    theirs = parts.hostname or ""
    same_host = theirs == host.lower() or not addresses(theirs).isdisjoint(addresses(host))
    both_here = all(is_loopback(one) or is_every_address(one) for one in (theirs, host))
    their_port = parts.port or (443 if parts.scheme == "https" else 80)
    return their_port == port and (same_host or both_here)


def _engine(settings: Settings) -> Iterator[Problem]:
    command = settings.engine.command
    if command and not command[0].strip():
        yield ("engine", "command"), "begins with an empty word; name the program first"
    if wrong := [name for name in settings.engine.env if not name or "=" in name]:
        yield ("engine", "env"), f"{wrong[0]!r} is no name of a variable; leave out the `=`"


def _listeners(settings: Settings) -> Iterator[Problem]:
    proxy, admin = settings.proxy, settings.admin
    if proxy.port and proxy.port == admin.port and share_an_address(proxy.host, admin.host):
        yield (
            ("admin", "port"),
            f"is {admin.port}, as proxy.port; the two listen apart, so give each its own",
        )


def _judges(settings: Settings) -> Iterator[Problem]:
    judge, own = settings.judge, settings.gate_judge
    yield from _asked(("judge",), judge.params, judge.price)
    yield from _asked(("gate_judge",), own.params, own.price)
    for one in judge.fallbacks:
        yield from _asked(("judge", "fallbacks"), one.params, one.price)
    if judge.fallbacks and not judge.model:
        yield ("judge", "fallbacks"), "has judges and judge.model is empty; name the first there"
    judges: tuple[Judge | Fallback, ...] = (judge, *judge.fallbacks)
    if len({(one.model, one.api_base) for one in judges}) < len(judges):
        yield ("judge", "fallbacks"), "names one judge twice; name each once"
    for section, asked in (("judge", judge), ("gate_judge", own)):
        if asked.rubric_file and "rubric" in asked.model_fields_set:
            yield (
                (section, "rubric_file"),
                f"and {section}.rubric are both set; give the rubric once",
            )
    if not own.model:
        for name in ("api_base", "api_key", "context_tokens", "params", "price"):
            if getattr(own, name):
                yield (
                    ("gate_judge", name),
                    "is set without gate_judge.model, so it would not be used; name the model",
                )


def _asked(
    where: tuple[str, ...], params: dict[str, Any], price: Price | None
) -> Iterator[Problem]:
    """Yield what is wrong with how one judge is asked, and with its price."""
    key = (*where, "params")
    if price is not None and (missing := {"input", "output"} - price.keys()):
        yield (
            (*where, "price"),
            f"lacks {sorted(missing)[0]}; give input and output, US dollars for a million tokens",
        )
    if _deeper_than(MAX_PARAMS_DEPTH, params):
        yield key, f"nests deeper than {MAX_PARAMS_DEPTH} levels; give a flatter table"
        return
    if not _is_json(params):
        yield (
            key,
            "is sent as JSON and holds what JSON cannot (a date, nan, inf, no Unicode); correct it",
        )
    if own := sorted(JUDGE_OWN & params.keys()):
        yield key, f"holds {own[0]}, which the sidecar sets itself; leave it out"
    if _asks_for_stream(params):
        yield key, "holds stream; the judge's reply is read whole, so leave it out"


def _reward(reward: Reward) -> Iterator[Problem]:
    gates = [name for name, one in reward.verifiers.items() if one.gate]
    if reward.combine == "gate_then_rank" and not gates:
        yield (
            ("reward", "combine"),
            'is "gate_then_rank" and no verifier is a gate; give one of them gate = true',
        )
    if reward.combine == "weights" and gates:
        yield (
            ("reward", "verifiers", gates[0], "gate"),
            'is true and reward.combine is "weights", so it would not be used; set reward.combine '
            '= "gate_then_rank"',
        )
    for name, one in reward.verifiers.items():
        if isinstance(one, HttpVerifier | LengthVerifier | RegexVerifier):
            continue
        values = one.model_dump(include={"params", "json_schema"})
        for key, value in values.items():
            where = ("reward", "verifiers", name, key)
            if _deeper_than(MAX_PARAMS_DEPTH, value):
                yield where, f"nests deeper than {MAX_PARAMS_DEPTH} levels; give a flatter table"
            elif not _is_json(value):
                yield where, "holds what JSON cannot (a date, nan, inf, no Unicode); correct it"


def _is_json(value: Any) -> bool:  # Any: of TOML
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _deeper_than(levels: int, value: Any) -> bool:  # Any: JSON
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, one) for one in inner)


def _asks_for_stream(params: dict[str, Any]) -> bool:
    return params.get("stream", False) not in (False, None)


def _learner(settings: Settings) -> Iterator[Problem]:
    learner, serving, groups = settings.learner, settings.serving, settings.groups
    if learner.rank > serving.max_lora_rank:
        yield (
            ("learner", "rank"),
            f"is {learner.rank} and serving.max_lora_rank is {serving.max_lora_rank}, so vLLM "
            "would refuse every adapter; lower the rank, or raise that and vLLM's --max-lora-rank",
        )
    if learner.min_groups > learner.max_groups:
        yield (
            ("learner", "min_groups"),
            f"is {learner.min_groups} and learner.max_groups, what one run takes, is "
            f"{learner.max_groups}; give no more than that",
        )
    if learner.min_groups > groups.max_pending_groups:
        yield (
            ("learner", "min_groups"),
            f"is {learner.min_groups} and only groups.max_pending_groups = "
            f"{groups.max_pending_groups} may wait, so no run would ever start; lower the one or "
            "raise the other",
        )


def _canary(settings: Settings) -> Iterator[Problem]:
    canary = settings.canary
    if canary.gate_min_prompts > canary.gate_prompts:
        yield (
            ("canary", "gate_min_prompts"),
            f"is {canary.gate_min_prompts} and canary.gate_prompts is {canary.gate_prompts}, so no "
            "candidate could pass; give no more than that",
        )
    if not canary.steps:
        yield ("canary", "steps"), "is empty; give at least one weight in basis points, as [2000]"
    if any(later <= earlier for earlier, later in pairwise(canary.steps)):
        yield (
            ("canary", "steps"),
            f"is {list(canary.steps)}; a ramp goes up, so give each step a larger weight than the "
            "one before (the candidate is promoted after the last)",
        )
    if canary.step_min_s > canary.step_max_s:
        yield (
            ("canary", "step_min_s"),
            f"is {canary.step_min_s:g} and canary.step_max_s is {canary.step_max_s:g}, so every "
            "step would end inconclusive; give no more than that",
        )


def _kafka(settings: Settings) -> Iterator[Problem]:
    kafka = settings.kafka
    if not isinstance(read_bus_url(settings.bus.url), KafkaUrl):
        return
    if kafka.security_protocol.startswith("SASL"):
        if not kafka.sasl_mechanism:
            yield (
                ("kafka", "sasl_mechanism"),
                f"is empty and kafka.security_protocol is {kafka.security_protocol}; give PLAIN, "
                "SCRAM-SHA-256 or SCRAM-SHA-512",
            )
        elif not kafka.sasl_username or kafka.sasl_password is None:
            yield (
                ("kafka", "sasl_username"),
                "or kafka.sasl_password is empty and SASL needs both; set the password by "
                "SIDECAR_KAFKA__SASL_PASSWORD",
            )
    elif kafka.sasl_mechanism or kafka.sasl_username or kafka.sasl_password is not None:
        yield (
            ("kafka", "security_protocol"),
            f"is {kafka.security_protocol}, so the SASL settings would not be used; give SASL_SSL",
        )
    files = {
        "ssl_cafile": kafka.ssl_cafile,
        "ssl_certfile": kafka.ssl_certfile,
        "ssl_keyfile": kafka.ssl_keyfile,
    }
    for name, file in files.items():
        if file and not os.path.isfile(file):
            yield ("kafka", name), f"names {file}, which is no file; correct the path"
        if file and not kafka.security_protocol.endswith("SSL"):
            yield (
                ("kafka", "security_protocol"),
                f"is {kafka.security_protocol}, so kafka.{name} would not be used; give SSL or "
                "SASL_SSL",
            )


_STORES = "sqlite:///path/to/store.db or postgresql://user@host/database"


def _store(url: str) -> Iterator[Problem]:
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


def _disk(settings: Settings) -> Iterator[Problem]:
    if "\0" in str(settings.state_dir) or "\0" in str(settings.learner.adapters_dir):
        yield ("state_dir",), "or learner.adapters_dir holds a NUL byte, which no path may hold"
        return
    if len(os.fsencode(settings.state_dir / _socket_name(settings.proxy))) > MAX_UNIX_PATH:
        yield (
            ("state_dir",),
            f"is too long: the path of a unix socket in it would be over {MAX_UNIX_PATH} bytes; "
            "give a shorter one",
        )
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


def _socket_name(proxy: Proxy) -> str:
    """Return the longest name of a socket of the proxy or one of its workers."""
    if proxy.workers == 1:
        return f"proxy-{proxy.port}.sock"
    return f"proxy-{proxy.port or MAX_PORT}-{2 * proxy.workers}.sock"


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
    return Path(path) if is_file else None

"""Checks of settings beyond one value: each section, contradictions, open listeners, files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel

from sidecar.errors import SettingsError
from sidecar.lines import SEPARATOR
from sidecar.settings.judge import (
    EntryPointVerifier,
    JsonSchemaVerifier,
    LengthVerifier,
    RegexVerifier,
    VerifierSection,
    is_found_everywhere,
)
from sidecar.settings.kinds import (
    KafkaUrl,
    addresses,
    is_every_address,
    is_loopback,
    outbox_file,
    read_bus_url,
    share_an_address,
)
from sidecar.settings.learning import ADVISED_SIZES, MOST_WEIGHT
from sidecar.settings.store import open_keyring
from sidecar.settings.training import SHORT_PACK

if TYPE_CHECKING:
    from sidecar.settings.judge import Judge
    from sidecar.settings.kinds import Fallback, Price
    from sidecar.settings.sections import Settings
    from sidecar.settings.training import Learner


# What a check yields, and the check that a table can be sent as JSON. Pure.

Problem = tuple[tuple[str, ...], str]
"""The key, section first, and what is wrong with it."""
DEFAULT_PROJECT = "default"
"""Project of traffic that the sidecar has no keys for (`access.mode`)."""
MAX_DEPTH = 32
"""Deepest nesting of tables and lists. Python cannot recurse through a thousand."""


def unsendable(key: tuple[str, ...], value: Any) -> Iterator[Problem]:  # Any: of TOML
    """Yield why a table cannot be sent as JSON."""
    if _deeper_than(MAX_DEPTH, value):
        yield key, f"nests deeper than {MAX_DEPTH} levels; give a flatter table"
        return
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        yield (
            key,
            "is sent as JSON and holds what JSON cannot (a date, nan, inf, no Unicode); correct it",
        )


def _deeper_than(levels: int, value: Any) -> bool:  # Any: JSON
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, one) for one in inner)


def is_changed(section: BaseModel, name: str) -> bool:
    """Tell whether a setting is another than its default."""
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(section, name) != default)


FAST_S = 1.0
"""A time limit under this ends calls before a language model has read the prompt."""
TOKENS_OF_AN_ENTRY = 60
"""Tokens of one answer's entry in a judge's reply (`ingest.ruler.prompt.TOKENS_PER_ANSWER`)."""
REPLY_LIMITS = ("max_tokens", "max_completion_tokens")
WITHOUT_MODEL = (
    "api_base",
    "api_key",
    "params",
    "price",
    "budget",
    "budget_tokens",
    "requests_per_minute",
    "rubric",
    "projects",
    "context_tokens",
    "passes",
)
"""Keys of [judge] that nobody sets for a sidecar that only records."""
JUDGE_OWN = frozenset({"model", "messages", "timeout", "num_retries", "caching", "response_format"})
"""Parameters of a judge call that the sidecar sets itself."""


def judges(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the judges and how they are asked."""
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
    for name, own_rubric in judge.projects.items():
        if not own_rubric.rubric.strip():
            yield ("judge", "projects", name), "has no rubric; give one"
    if not own.model:
        for name in ("api_base", "api_key", "params", "price"):
            if is_changed(own, name):
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
    if found := list(unsendable(key, params)):
        yield from found
        return
    if own := sorted(JUDGE_OWN & params.keys()):
        yield key, f"holds {own[0]}, which the sidecar sets itself; leave it out"
    if params.get("stream") not in (False, None):
        yield key, "holds stream; the judge's reply is read whole, so leave it out"


def useless_judge_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of judges that have no effect, or that no judge could work with."""
    judge = settings.judge
    if not judge.model:
        unused = [f"judge.{name}" for name in WITHOUT_MODEL if is_changed(judge, name)]
        if unused:
            yield (
                ("judge", "model"),
                f"is empty, so {', '.join(unused)} would not be used and nothing is learned; name "
                "a LiteLLM model",
            )
    if judge.timeout_s < FAST_S:
        yield (
            ("judge", "timeout_s"),
            f"is {judge.timeout_s:g} s, and a judge takes longer to read a group, so every call "
            "would end without a score; give 60 s",
        )
    yield from _reply_limits(settings)
    # Only the sidecar's own keys name a project.
    nobody_has = () if settings.access.mode == "keys" else judge.projects.keys() - {DEFAULT_PROJECT}
    for name in (one for one in judge.projects if one in nobody_has):
        yield (
            ("judge", "projects", name),
            f'is a rubric of a project, and with access.mode = "{settings.access.mode}" all '
            f'traffic is of "{DEFAULT_PROJECT}", so it would not be used; set access.mode = '
            '"keys", or leave it out',
        )
    if judge.budget and judge.price is not None and not any(judge.price.values()):
        yield (
            ("judge", "price"),
            "is 0, so a budget in dollars is never spent; limit such a judge by "
            "judge.budget_tokens",
        )


def _reply_limits(settings: Settings) -> Iterator[Problem]:
    size, compared = settings.groups.size, 2 * settings.canary.gate_answers
    asked = [
        (("judge", "params"), settings.judge.params, size),
        (("gate_judge", "params"), settings.gate_judge.params, compared),
        *((("judge", "fallbacks"), one.params, size) for one in settings.judge.fallbacks),
    ]
    for key, params, answers in asked:
        for name in REPLY_LIMITS:
            most = params.get(name)
            if isinstance(most, int) and most < TOKENS_OF_AN_ENTRY * answers:
                yield (
                    key,
                    f"has {name} = {most}, and scores of {answers} answers take about "
                    f"{TOKENS_OF_AN_ENTRY * answers} tokens, so replies would be cut and refused "
                    f"(judge_rubbish); leave it out, or give more",
                )


# Check the sections of learning: groups, learner, canary, best of N. Pure.


def learner(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the learner's settings."""
    rules, serving = settings.learner, settings.serving
    if rules.rank > serving.max_lora_rank:
        yield (
            ("learner", "rank"),
            f"is {rules.rank} and serving.max_lora_rank is {serving.max_lora_rank}, so vLLM "
            "would refuse every adapter; lower the rank, or raise that and vLLM's --max-lora-rank",
        )
    if rules.min_groups > rules.max_groups:
        yield (
            ("learner", "min_groups"),
            f"is {rules.min_groups} and learner.max_groups, what one run takes, is "
            f"{rules.max_groups}; give no more than that",
        )
    if rules.tinker_url:
        yield from _tinker(rules)


TINKER_ALPHA = 32
"""LoRA alpha of the Tinker API's servers; a client cannot ask for another."""


def _tinker(rules: Learner) -> Iterator[Problem]:
    """Yield what a server of the Tinker API cannot do."""
    for name, value, wanted, why in (
        ("alpha", rules.alpha, TINKER_ALPHA, "has this alpha for every adapter"),
        ("processes", rules.processes, 1, "has its own processes"),
        ("shard_base", rules.shard_base, False, "has the base"),
        ("advanced.kl_coef", rules.advanced.kl_coef, 0, "computes no divergence from the base"),
    ):
        if value != wanted:
            yield (
                ("learner", *name.split(".")),
                f"is {json.dumps(value)} and learner.tinker_url names a server, which {why}; give "
                f"{json.dumps(wanted)}, or no tinker_url",
            )


def canary(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the gate and the ramp."""
    rules = settings.canary
    if rules.gate_min_prompts > rules.gate_prompts:
        yield (
            ("canary", "gate_min_prompts"),
            f"is {rules.gate_min_prompts} and canary.gate_prompts is {rules.gate_prompts}, so no "
            "candidate could pass; give no more than that",
        )
    if not rules.steps:
        yield ("canary", "steps"), "is empty; give at least one weight in basis points, as [2000]"
    if any(later <= earlier for earlier, later in pairwise(rules.steps)):
        yield (
            ("canary", "steps"),
            f"is {list(rules.steps)}; a ramp goes up, so give each step a larger weight than the "
            "one before (the candidate is promoted after the last)",
        )
    if rules.step_min_s > rules.step_max_s:
        yield (
            ("canary", "step_min_s"),
            f"is {rules.step_min_s:g} and canary.step_max_s is {rules.step_max_s:g}, so every "
            "step would end inconclusive; give no more than that",
        )
    elif rules.step_min_s + rules.turn_wait_s > rules.step_max_s:
        yield (
            ("canary", "turn_wait_s"),
            f"is {rules.turn_wait_s:g}; with canary.step_min_s, {rules.step_min_s:g}, it is over "
            f"canary.step_max_s, {rules.step_max_s:g}, so every step would end inconclusive before "
            "the guards have seen it; give less",
        )


def useless_group_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of groups that have no effect, or that leave a stage without work."""
    groups, (few, many) = settings.groups, ADVISED_SIZES
    if not few <= groups.size <= many:
        why = "so few answers differ by little" if groups.size < few else "so many confuse a judge"
        yield ("groups", "size"), f"is {groups.size}: {why}; {few} to {many} are best"
    if groups.rate == 0 and settings.judge.model:
        yield (
            ("groups", "rate"),
            "is 0 and judge.model is set: no exchange is chosen, so nothing is sampled, judged or "
            "learned; raise it, or leave judge.model empty to record alone",
        )
    if groups.held_out_rate == 0 and settings.judge.model:
        yield (
            ("groups", "held_out_rate"),
            "is 0, so no prompt is held out for the gate and every new adapter waits for ever; "
            "give 0.2",
        )
    serving = set(settings.serving.upstreams)
    if groups.sampling_upstreams and set(groups.sampling_upstreams) == serving:
        yield (
            ("groups", "sampling_upstreams"),
            "names the vLLMs of serving.upstreams, which sample without it; leave it out",
        )


def useless_best_of_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of best of N that have no effect."""
    best_of = settings.best_of
    if best_of.enabled and not settings.judge.model:
        yield (
            ("best_of", "enabled"),
            "is true and judge.model is empty, so nobody chooses among the answers and each user "
            "gets the first; name a judge",
        )
    if not best_of.enabled and is_changed(best_of, "timeout_s"):
        yield (
            ("best_of", "timeout_s"),
            "is set and best_of.enabled is false, so it would not be used; set that to true, or "
            "leave this out",
        )


def shortened_ramp(settings: Settings) -> Iterator[Problem]:
    """Yield a step of the ramp that is not played as it was asked for."""
    rules = settings.canary
    if rules.ramp != rules.steps:
        yield (
            ("canary", "steps"),
            f"is {list(rules.steps)} and is played as {list(rules.ramp)}: beyond {MOST_WEIGHT} too "
            "few sessions stay with the champion for the guards to compare",
        )


# Check `serving.own_adapters`: which projects have a line of adapters of their own.

LONGEST_LINE = 225
"""Characters of a line's name: an adapter's name has up to 26 more, and the store holds 255."""
LOADED_OF_A_LINE = 3
"""Adapters of a line that are loaded at once: champion, previous and candidate."""
KEY = ("serving", "own_adapters")


def lines(settings: Settings) -> Iterator[Problem]:
    """Yield lines of adapters that cannot be told from others."""
    serving = settings.serving
    if SEPARATOR in serving.model:
        yield (
            ("serving", "model"),
            f"has {SEPARATOR!r} in it, which stands in the names of a project's adapters; choose "
            "another name",
        )
    if len(set(serving.own_adapters)) < len(serving.own_adapters):
        yield KEY, "names one project twice; name each once"
    if DEFAULT_PROJECT in serving.own_adapters:
        yield (
            KEY,
            f'names "{DEFAULT_PROJECT}", the project of every request without a key of another; '
            "those have the adapters that all share, so leave it out",
        )
    if any(len(line.name) > LONGEST_LINE for line in settings.lines[1:]):
        yield (
            KEY,
            f"has a name that is too long: with serving.model it may have "
            f"{LONGEST_LINE - len(SEPARATOR)} characters; choose shorter ones",
        )


def useless_lines(settings: Settings) -> Iterator[Problem]:
    """Yield lines that no request reaches, and more lines than vLLM has room for."""
    serving, mode = settings.serving, settings.access.mode
    if not serving.own_adapters:
        return
    if mode != "keys":
        yield (
            KEY,
            f'names projects, and with access.mode = "{mode}" all traffic is of '
            f'"{DEFAULT_PROJECT}", so none would reach their adapters; set access.mode = "keys", '
            "or leave it out",
        )
    needed = LOADED_OF_A_LINE * len(settings.lines)
    if serving.max_loras < needed:
        yield (
            ("serving", "max_loras"),
            f"is {serving.max_loras}, and {len(settings.lines)} lines of adapters need {needed}: "
            f"each has a champion, a previous and a candidate loaded; raise it here and vLLM's "
            "--max-loras too, or vLLM swaps adapters while users wait",
        )


# Check the section of the reward. Pure.


def reward(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the verifiers and how they join the judge."""
    for name, one in settings.reward.verifiers.items():
        where = ("reward", "verifiers", name)
        if is_changed(one, "pass_at") and not one.gate:
            yield (
                (*where, "pass_at"),
                f"is {one.pass_at:g} and gate is false, so it would not be used; set gate = true, "
                "or leave it out",
            )
        if isinstance(one, EntryPointVerifier):
            yield from unsendable((*where, "params"), one.params)
        if isinstance(one, JsonSchemaVerifier):
            yield from unsendable((*where, "json_schema"), one.json_schema)
        if not isinstance(one, LengthVerifier) or not one.fade:
            continue
        if one.max_characters is None and one.max_tokens is None:
            yield (
                (*where, "fade"),
                f"is {one.fade:g} and there is no maximum to fade beyond (a minimum has no fade), "
                "so it would not be used; give max_tokens or max_characters, or leave it out",
            )


def useless_reward_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of the reward that have no effect."""
    for key, one in settings.reward.verifiers.items():
        yield from _useless_verifier(settings, ("reward", "verifiers", key), one)


def _useless_verifier(
    settings: Settings, where: tuple[str, ...], one: VerifierSection
) -> Iterator[Problem]:
    if one.weight == 0 and not one.gate:
        yield (
            (*where, "weight"),
            "is 0 and gate is false, so what it finds is stored and counts for nothing; give a "
            "weight once you trust it",
        )
    if one.gate and is_changed(one, "weight"):
        yield (
            (*where, "weight"),
            "is set and gate is true: a gate is no part of the ranking, so the weight changes "
            "`independent_reward` alone and not the reward; leave it out",
        )
    if one.projects and settings.access.mode != "keys" and DEFAULT_PROJECT not in one.projects:
        yield (
            (*where, "projects"),
            f'is without "{DEFAULT_PROJECT}", and with access.mode = "{settings.access.mode}" all '
            f'traffic is of that project, so it would check nothing; add "{DEFAULT_PROJECT}", or '
            'set access.mode = "keys"',
        )
    if isinstance(one, RegexVerifier) and is_found_everywhere(one.pattern):
        same = "right" if one.must == "match" else "wrong"
        yield (
            (*where, "pattern"),
            f"is found in every text, also the empty one, so every answer is {same}; give one that "
            "tells answers apart",
        )


# Refuse settings that would open the sidecar to other machines without an explicit setting.


def refuse_unsafe(settings: Settings) -> None:
    """Raises: SettingsError, one line: what, why, what to do."""
    proxy, admin = settings.proxy, settings.admin
    asks_nobody = settings.access.mode == "open" and not proxy.allow_remote_without_keys
    if not is_loopback(proxy.host) and asks_nobody:
        raise SettingsError(
            f'proxy.host {proxy.host} is reachable from outside and access.mode is "open"; set '
            'access.mode = "keys" (`sidecar keys create` makes one) or "upstream" (vLLM has '
            "--api-key), or, behind a gateway of yours, proxy.allow_remote_without_keys = true"
        )
    if not is_loopback(admin.host) and not admin.tokens:
        raise SettingsError(
            f"admin.host {admin.host} is reachable from outside and admin.tokens is empty; "
            "add the SHA-256 hex digest of a token, or listen on 127.0.0.1"
        )


# Check the sections of addresses: where vLLM answers and where the sidecar listens.


def upstreams(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the addresses of vLLM."""
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


def engine(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the command that starts vLLM."""
    command = settings.engine.command
    if command and not command[0].strip():
        yield ("engine", "command"), "begins with an empty word; name the program first"
    if wrong := [name for name in settings.engine.env if not name or "=" in name]:
        yield ("engine", "env"), f"{wrong[0]!r} is no name of a variable; leave out the `=`"


def listeners(settings: Settings) -> Iterator[Problem]:
    """Yield listeners that share a port."""
    proxy, admin = settings.proxy, settings.admin
    if proxy.port and proxy.port == admin.port and share_an_address(proxy.host, admin.host):
        yield (
            ("admin", "port"),
            f"is {admin.port}, as proxy.port; the two listen apart, so give each its own",
        )


def useless_sampling_settings(settings: Settings) -> Iterator[Problem]:
    """Yield defaults of sampling with which the answers that users get are not learned from."""
    serving = settings.serving
    temperature = (serving.sampling_defaults or {}).get("temperature")
    if temperature is None:
        return
    key = ("serving", "sampling_defaults")
    if temperature == 0:
        yield (
            key,
            "has temperature = 0: an answer whose request names none is greedy and is not learned "
            "from (`temperature_zero`); have agents ask at a temperature above 0, best 1",
        )
    elif temperature != 1 and serving.logprobs_mode == "raw_logprobs":
        yield (
            key,
            f'has temperature = {temperature:g} and serving.logprobs_mode is "raw_logprobs", '
            "with which only answers at temperature 1 are exact; start vLLM with --logprobs-mode "
            "processed_logprobs",
        )


# Check the sections of the bus, the store and its keys, and the files that they name.


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
    for name in ("ssl_cafile", "ssl_certfile", "ssl_keyfile"):
        file = getattr(rules, name)
        if file and not os.path.isfile(file):
            yield ("kafka", name), f"names {file}, which is no file; correct the path"
        if file and not rules.security_protocol.endswith("SSL"):
            yield (
                ("kafka", "security_protocol"),
                f"is {rules.security_protocol}, so kafka.{name} would not be used; give SSL or "
                "SASL_SSL",
            )


def store(url: str) -> Iterator[Problem]:
    """Yield what is wrong with the URL of the store."""
    key = ("store", "url")
    scheme, _, rest = url.partition("://")
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
    # Imported here, because loading SQLAlchemy is slow and most stores are SQLite files.
    from sidecar.store.engines import dialect_of

    try:
        dialect_of(url)
    except ValueError as error:
        yield key, str(error)


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


# Find settings of `[learner]` that have no effect beside the others. Pure.

SCHEDULE_OF: Mapping[str, str] = {"interval_s": "interval", "cron": "cron"}


def useless_learner_settings(settings: Settings) -> Iterator[Problem]:
    """Yield settings of the learner that change nothing, or that leave it without work."""
    rules = settings.learner
    for name, schedule in SCHEDULE_OF.items():
        if name in rules.model_fields_set and rules.schedule != schedule:
            yield (
                ("learner", name),
                f'is set and learner.schedule is "{rules.schedule}", so it would not be used; set '
                f'that to "{schedule}", or leave this out',
            )
    if 0 < rules.pack_tokens < SHORT_PACK:
        yield (
            ("learner", "pack_tokens"),
            f"is {rules.pack_tokens}, and hardly a prompt with its answer is so short: longer ones "
            'are not sampled, and their groups are left out (too_long); give "auto"',
        )
    # With `manual` a launcher may start the processes (docs/several-processes.md).
    if rules.shard_base and rules.processes == 1 and rules.schedule != "manual":
        yield (
            ("learner", "shard_base"),
            "is set and learner.processes is 1, so nothing is shared, but in a run that torchrun "
            "starts; raise that, or leave this out",
        )


# Check settings that contradict each other, or the disk, or that do nothing.


def problems(settings: Settings) -> Iterator[Problem]:
    """Yield every problem, in the order of the checks."""
    for check in (upstreams, lines, engine, listeners, judges, reward, learner, canary, kafka):
        yield from check(settings)
    yield from store(settings.store.url)
    yield from keys(settings)
    yield from disk(settings)


def advice(settings: Settings) -> Iterator[Problem]:
    """Yield what works with these settings, but does nothing, or less well than it could."""
    yield from useless_sampling_settings(settings)
    yield from useless_lines(settings)
    yield from useless_group_settings(settings)
    yield from useless_judge_settings(settings)
    yield from useless_reward_settings(settings)
    yield from useless_learner_settings(settings)
    yield from useless_best_of_settings(settings)
    yield from shortened_ramp(settings)

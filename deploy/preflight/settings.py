"""Preflight: what `config init` writes, and the checks of `config check` and `up`.

It is made from the settings classes, so it lacks none and names no other. A line that starts with
`# ` and holds `=` is a setting with its default; lines that start with `#:` explain.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import random
import shutil
import socket
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sqlalchemy import make_url, text

from deploy.preflight.peers import (
    Finding,
    check_judges,
    check_replicas,
    check_verifiers,
    error,
    warning,
)
from deploy.registry import api_keys
from ingest.errors import JudgeTooLongError
from learner.ready import why_not_ready
from learner.schedule.rule import read_cron
from sidecar.errors import SettingsError, StoreError
from sidecar.forwarding.sender import describe, missing_topics
from sidecar.processes import holder
from sidecar.settings import (
    EntryPointVerifier,
    Judge as JudgeSettings,
    KafkaUrl,
    Section,
    Settings,
    load_settings,
    read_bus_url,
)
from sidecar.settings.checks import advice as settings_advice
from sidecar.settings.judge import JsonSchemaVerifier
from sidecar.settings.kinds import outbox_file
from sidecar.store.database import Database
from sidecar.store.engines import is_postgres, newest_revision, refuse_bad_arguments, with_driver

# Ask Kafka, where the bus is one, whether it answers and has the topics. Nothing is created.


def check_bus(settings: Settings) -> Iterator[Finding]:
    """Yield what keeps records from passing; nothing with the embedded bus."""
    place, kafka = read_bus_url(settings.bus.url), settings.kafka
    if not isinstance(place, KafkaUrl):
        return
    from kafka.errors import KafkaError

    try:
        missing = missing_topics(place, kafka)
    except KafkaError as problem:
        why = describe(problem, place, kafka)
        to_do = "start the brokers, or correct the address or [kafka]"
        yield error("bus.url", f"{why}; {to_do}", "kafka_away")
        return
    if missing and not kafka.create_topics:
        names = " and ".join(missing)
        yield error(
            "kafka.create_topics",
            f"is false and {names} is not there or may not be seen; create it, or set it to true",
        )


HEAD = """\
#: Settings of the sidecar, for every process on this machine.
#: A line "# key = value" shows a default: remove the "# " and change the value.
#: `sidecar config check` tells whether this file is sound, `sidecar doctor` whether records come
#: through; restart the processes after a change.
#: Each value can also come from the environment: SIDECAR_<SECTION>__<KEY>. Keep secrets there.
"""
LIVE = {
    ("serving", "upstreams"),
    ("serving", "model"),
    ("serving", "base_model_path"),
    ("judge", "model"),
}
"""Settings that nearly everybody changes: they stand there as values, not as comments."""
WIDTH = 100


def first_settings() -> str:
    """Return the file's text."""
    plain = [name for name, field in Settings.model_fields.items() if not _is_section(field)]
    sections = [name for name in Settings.model_fields if name not in plain]
    blocks = [HEAD, "\n".join(_lines(Settings, "", plain)) + "\n"]
    for name in sections:
        blocks += _blocks(name, Settings.model_fields[name])
    return "\n".join(blocks)


def _blocks(name: str, section: FieldInfo) -> Iterator[str]:
    """Yield the text of a section, then of those in it."""
    kind: type[BaseModel] = section.annotation  # type: ignore[assignment]
    inner = {key: field for key, field in kind.model_fields.items() if _is_section(field)}
    about = _comment(inspect.cleandoc(kind.__doc__ or ""))
    plain = [key for key in kind.model_fields if key not in inner]
    yield "\n".join((f"[{name}]", *about, *_lines(kind, name, plain))) + "\n"
    for key, field in inner.items():
        yield from _blocks(f"{name}.{key}", field)


def documented(kind: type[BaseModel]) -> dict[str, str]:
    """Return the text under each field of a settings class, by the field's name; those of the
    sections that it is made of come first."""
    found: dict[str, str] = {}
    for base in kind.__bases__:
        if issubclass(base, Section):
            found |= documented(base)
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    field = ""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = node.target.id
        elif field and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[field] = inspect.cleandoc(str(node.value.value))
            field = ""
        else:
            field = ""
    return found


def choices_of(annotation: Any) -> tuple[str, ...]:  # Any: the type of a setting
    """Return the values that a setting may have, of a table its keys; none where any will do."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    inner = get_args(annotation)
    return choices_of(inner[0]) if inner else ()


def _lines(kind: type[BaseModel], section: str, names: list[str]) -> Iterator[str]:
    texts = documented(kind)
    for name in names:
        text = texts.get(name, "")
        choices = choices_of(kind.model_fields[name].annotation)
        if not all(f"`{one}`" in text for one in choices if one):
            text += f" Possible: {', '.join(_toml(one) for one in choices)}."
        yield from _comment(text)
        value = kind.model_fields[name].get_default(call_default_factory=True)
        if value is None:
            secret = "SecretStr" in str(kind.model_fields[name].annotation)
            variable = f"SIDECAR_{section.upper()}__{name.upper()}"
            where = f"; a secret: set it by {variable}" if secret else ""
            yield f"#: {name}: not set{where}."
        else:
            live = (section, name) in LIVE
            yield f"{'' if live else '# '}{name} = {_toml(value)}"


def _comment(text: str) -> list[str]:
    return [f"#: {line}" for line in textwrap.wrap(" ".join(text.split()), WIDTH - 3)]


def _toml(value: Any) -> str:  # Any: a default of a setting
    """Return a default in TOML, which writes plain values as JSON does."""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, dict):
        assert not value, "no table has a default that is not empty"
        return "{}"
    return json.dumps(value, ensure_ascii=False)


def _is_section(field: FieldInfo) -> bool:
    kind = field.annotation
    return isinstance(kind, type) and issubclass(kind, BaseModel)


# Check folders, files, programs and ports of this machine. Nothing is made or changed.


def check_places(settings: Settings, *, running: bool) -> Iterator[Finding]:
    """Yield what the processes could not write, start or listen on.

    running: the sidecar runs with this `state_dir` already, so its ports are its own.
    """
    for name, folder in _folders(settings).items():
        if why := why_not_writable(folder):
            yield error(name, why)
    command = settings.engine.command
    if command and shutil.which(command[0]) is None:
        yield error("engine.command", f"{command[0]} is no program on this machine's PATH")
    if running:
        return
    for name, host, port in (
        ("proxy.port", settings.proxy.host, settings.proxy.port),
        ("admin.port", settings.admin.host, settings.admin.port),
    ):
        if why := why_not_free(host, port):
            yield error(name, why)


def _folders(settings: Settings) -> dict[str, Path]:
    found = {
        "state_dir": settings.state_dir,
        "learner.adapters_dir": settings.learner.adapters_dir,
    }
    found["bus.url"] = outbox_file(settings.bus.url, settings.state_dir).parent
    store = make_url(settings.store.url)
    if store.get_backend_name() == "sqlite" and store.database:
        found["store.url"] = Path(store.database).parent
    if settings.telemetry.spans_file:
        found["telemetry.spans_file"] = Path(settings.telemetry.spans_file).parent
    return found


def why_not_writable(folder: Path) -> str:
    """Say why `folder` cannot be made or written; empty when it can."""
    for existing in (folder.absolute(), *folder.absolute().parents):
        if existing.is_dir():
            if os.access(existing, os.W_OK | os.X_OK):
                return ""
            return f"{existing} cannot be written by this user; change its owner or the setting"
        if existing.exists():
            return f"{existing} is no folder; remove it or change the setting"
    return f"{folder} has no parent folder"


def why_not_free(host: str, port: int) -> str:
    """Say why nobody can listen there; empty when it is possible. Port 0 is always free."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, number) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as problem:
        return (
            f"cannot listen on {host} port {port} ({problem.strerror}); stop the program that "
            "does, or set another port"
        )
    return ""


# Find projects of the settings that no key names: a project is known by its keys alone.


def check_projects(settings: Settings) -> Iterator[Finding]:
    """Yield each rubric, and each line of adapters, of a project without a key, where the sidecar's
    own keys are asked for.

    Yields nothing where there is no store of this version yet: then no project is known.
    """
    named = [
        (f"judge.projects.{project}", project, "its rubric is not used")
        for project in settings.judge.projects
    ]
    named += [
        ("serving.own_adapters", project, "its adapters answer nobody")
        for project in settings.serving.own_adapters
    ]
    if settings.access.mode != "keys" or not named:
        return
    projects = _known(settings.store.url)
    if projects is None:
        return
    for key, project, so in named:
        if project not in projects:
            known = ", ".join(sorted(projects)) or "none"
            yield warning(
                key,
                f"no key is of project {project}, so {so}; the projects of the keys: {known}",
                "unknown_project",
            )


def _known(url: str) -> set[str] | None:
    """Return the projects of keys that are not revoked; None where they cannot be read. Makes no
    store."""
    place = make_url(url)
    if place.get_backend_name() == "sqlite" and not Path(place.database or "").exists():
        return None
    try:
        with closing(Database(url)) as database:
            if database.revision() != newest_revision():
                return None
            found, _ = api_keys.all_keys(database)
            return {one.key.project for one in found if one.revoked_at is None}
    except StoreError:  # `check_places` and `check_store` say what is wrong with the store
        return None


# Check that a PostgreSQL store can be reached and hold the tables. Nothing is made or changed.

KEY = "store.url"


def check_store(url: str) -> Iterator[Finding]:
    """Yield what keeps the processes from using this store. SQLite: see `places`."""
    if not is_postgres(with_driver(url)):
        return
    try:
        with closing(Database(url)) as database, database.read() as session:
            encoding = session.scalar(text("SHOW server_encoding"))
            schema = session.scalar(text("SELECT current_schema()"))
            may_create = schema is not None and session.scalar(
                text("SELECT has_schema_privilege(:schema, 'CREATE')"), {"schema": schema}
            )
    except StoreError as problem:
        yield error(KEY, f"{problem}; start the server, make the database, or correct the URL")
        return
    if encoding != "UTF8":
        yield error(
            KEY,
            f"the encoding of the database is {encoding}; make one with `createdb --encoding UTF8 "
            "--template template0 NAME`",
        )
    if not may_create:
        yield error(
            KEY,
            "its user may not make tables there; make the user the database's owner, or GRANT "
            "CREATE ON SCHEMA public",
        )


# Run every check of a preflight, one after the other. Errors come first.

LOCKS = ("up", "control", "ingest")
"""Processes that lock `state_dir` while they run."""


def learner_findings(settings: Settings) -> list[Finding]:
    """Return what keeps runs from training on this machine, whatever the schedule is."""
    return [Finding(one.level, one.setting, one.why) for one in why_not_ready(settings)]


async def preflight(settings: Settings, *, running: bool, learner: bool = False) -> list[Finding]:
    """Return what keeps these settings from running here.

    running: the sidecar runs with this `state_dir` already. learner: the learner is looked at also
    where its schedule is `manual`, because another machine may learn.
    """
    found = list(check_places(settings, running=running))
    found += check_store(settings.store.url)
    found += await asyncio.to_thread(lambda: [*check_projects(settings), *check_bus(settings)])
    found += await check_replicas(settings)
    found += await check_judges(settings)
    if settings.judge.model:
        found += await check_verifiers(settings)
    if learner or settings.learner.schedule != "manual":
        found += await asyncio.to_thread(learner_findings, settings)
    elif not settings.serving.base_model_path:
        found.append(
            warning(
                "serving.base_model_path",
                "it is empty, so replies are not checked against their token ids, and "
                "`sidecar learn --once` cannot run; name the folder or hub name of the weights "
                "that vLLM serves",
            )
        )
    return sorted(found, key=lambda one: one.level != "error")


def runs_already(settings: Settings) -> bool:
    """True when a process of the sidecar works with this `state_dir`. Makes no file."""
    return any(is_held(settings.state_dir, name) for name in LOCKS)


def is_held(folder: Path, name: str) -> bool:
    """Return whether a process holds this lock. Makes no file."""
    return (folder / f"{name}.lock").exists() and holder(folder, name) is not None


# Refuse settings under which no group could be judged, or a verifier could check no answer.

WINDOW = "num_ctx"
"""Ollama's name of the context's size, in `judge.params`."""
SHORT = "yes"
"""An answer, and a question, of one token."""


def refuse_useless(settings: Settings) -> None:
    """Raises: SettingsError, one line: what, why, what to do."""
    for section, judge, answers in _judges(settings):
        _refuse_small_context(section, judge, answers)
    for name, one in settings.reward.verifiers.items():
        if isinstance(one, JsonSchemaVerifier) and one.json_schema is not None:
            _refuse_bad_schema(name, one)
        if isinstance(one, EntryPointVerifier):
            _refuse_unknown_entry_point(name, one.entry_point)


def _judges(settings: Settings) -> Iterator[tuple[str, JudgeSettings, int]]:
    from ingest.judges.build import each_judge

    first, *others = each_judge(settings.judge)
    yield "judge", first, settings.groups.size
    for one in others:
        yield "judge.fallbacks", one, settings.groups.size
    if settings.gate_judge.model:
        yield "gate_judge", settings.judge_of_gate, 2 * settings.canary.gate_answers


def _refuse_small_context(section: str, judge: JudgeSettings, answers: int) -> None:
    window = judge.params.get(WINDOW)
    set_here, key = judge.context_tokens, "context_tokens"
    if not set_here and isinstance(window, int):
        set_here, key = window, f"params.{WINDOW}"
    if set_here <= 0:
        return
    from ingest.ruler.prompt import build_prompt

    longest = max((judge.of(project).rubric for project in ("", *judge.projects)), key=len)
    try:
        build_prompt(
            context=[{"role": "user", "content": SHORT}],
            tools=[],
            answers=[{"role": "assistant", "content": SHORT}] * answers,
            rubric=longest,
            rng=random.Random(0),
            context_tokens=set_here,
        )
    except JudgeTooLongError:
        raise SettingsError(
            f"setting {section}.{key}: {set_here} holds not even {answers} answers of one word "
            "with the instructions, the rubric and the reply, so every group would be set aside "
            "(judge_too_long); give the size of the judge's context, or 0 where it is not known"
        ) from None


def _refuse_bad_schema(name: str, settings: JsonSchemaVerifier) -> None:
    from ingest.verifiers.built_in import NoSchemaError, why_invalid

    try:
        why_invalid(None, settings.json_schema)
    except NoSchemaError as error:
        raise SettingsError(
            f"setting reward.verifiers.{name}.json_schema: is no JSON schema ({error}), so the "
            "verifier would check nothing; correct it"
        ) from None


def _refuse_unknown_entry_point(name: str, wanted: str) -> None:
    from ingest.verifiers.child import LoadError, find_entry_point

    try:
        find_entry_point(wanted)
    except LoadError as error:
        raise SettingsError(f"setting reward.verifiers.{name}.entry_point: {error}") from None


# The checks that `sidecar config check` and `sidecar up` add to the settings' own rules.


def checked_settings(config: Path | None) -> Settings:
    """The settings, if every process can work with them. Raises: SettingsError."""
    settings = load_settings(config)
    read_cron(settings.learner)
    try:
        refuse_bad_arguments(settings.store.url)
    except ValueError as error:
        raise SettingsError(f"setting store.url: {error}") from None
    refuse_useless(settings)
    _refuse_unpriced(settings)
    return settings


def _refuse_unpriced(settings: Settings) -> None:
    """Refuse a budget in dollars that cannot be kept. Raises: SettingsError."""
    if not settings.judge.budget:
        return
    # Imported here: it loads LiteLLM, which takes seconds, to look prices up.
    from ingest.judges.build import each_judge
    from ingest.judges.spending import litellm_price, unpriced

    first, *fallbacks = each_judge(settings.judge)
    asked = [(first, "judge.price"), *((one, "price in judge.fallbacks") for one in fallbacks)]
    if settings.gate_judge.model:
        asked.append((settings.judge_of_gate, "gate_judge.price"))
    for judge, setting in asked:
        if judge.model and judge.price is None and litellm_price(judge.model) is None:
            raise SettingsError(f"setting {unpriced(judge.model, setting)}")


def advice(settings: Settings) -> list[str]:
    """Return what works with these settings, but does nothing, or less well than it could."""
    return [f"{'.'.join(key)} {what}" for key, what in settings_advice(settings)]


def will_not_happen(settings: Settings) -> list[str]:
    """Return what these settings leave out, for settings that are sound all the same. Pure."""
    left = []
    if not settings.judge.model:
        left.append(
            "judge.model is empty, so no group is sampled or scored and nothing is learned; "
            "requests are relayed and recorded"
        )
    if not settings.serving.base_model_path:
        left.append("serving.base_model_path is empty, so no training run can start")
    return left

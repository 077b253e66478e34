"""Read the settings: one TOML file, each value overridable from the environment.

`SIDECAR_<SECTION>__<KEY>` wins over the file, the file over the defaults; a table is JSON there.
The names of variables are read in any case. Unknown keys are refused with the nearest known name,
in the file and in the environment. A message is one line that names the key as it was written, and
quotes no value that may be a secret.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError as UnreadableSettingError

from sidecar.errors import SettingsError
from sidecar.settings.checks import problems, refuse_unsafe
from sidecar.settings.explain import explain, known, nearest, shown, written
from sidecar.settings.judge import GateJudge, Judge, ProjectRubric
from sidecar.settings.kinds import FILE
from sidecar.settings.removed import is_removed, without_removed
from sidecar.settings.sections import ENV_PREFIX, Proxy, Settings
from sidecar.settings.store import Store
from sidecar.visible import visible

DEFAULT_FILE = Path("sidecar.toml")
MAX_RUBRIC_BYTES = 64 * 1024
"""Largest file of a rubric: every judge call sends it."""
NOT_SETTINGS = frozenset(
    {"SIDECAR_ADMIN_TOKEN", "SIDECAR_COMPILE", "SIDECAR_READY_FD", "SIDECAR_RUNNER_TOKEN"}
)
"""Variables of the same prefix that are read elsewhere: by the `sidecar` command, by setup.py, by
the children of `sidecar up`, and by rehearsals with their runner."""


def load_settings(path: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    path: the TOML file; None takes `./sidecar.toml` if it is there. Relative paths in the settings
        begin at its folder; without a file at the working folder.
    env: for the check of unknown names; the values are read from the process environment.
    Raises: SettingsError, one line: what, why, what to do.
    """
    path = DEFAULT_FILE if path is None and DEFAULT_FILE.exists() else path
    values = {} if path is None else _read_file(path)
    _refuse_unknown_env(os.environ if env is None else env)
    try:
        settings = Settings(**without_removed(values))
    except ValidationError as error:
        raise SettingsError(explain(error)) from None
    except UnreadableSettingError:  # a list or a mapping that is not JSON
        # `from None`, here and below: pydantic's own errors quote values, and with them secrets.
        raise SettingsError(
            f"environment variable {shown(_no_json(os.environ))}: lists and tables are JSON there, "
            "and this is none; give a list such as '[1, 2]' or a table such as '{\"name\": 1}'"
        ) from None
    except RecursionError:
        raise SettingsError(
            f"environment variable {shown(_too_deep(os.environ))}: lists in lists, too deep to "
            "be read; give a flat value"
        ) from None
    folder = Path() if path is None else path.parent
    if folder.resolve() != Path.cwd():
        settings = _anchored(settings, folder.resolve())
    for key, what in problems(settings):
        raise SettingsError(f"setting {written(key)} {what}")
    refuse_unsafe(settings)
    return _with_rubrics(settings, folder)


_PATHS = frozenset(
    {
        "adapters_dir", "encryption_key_file", "secret_file", "spans_file",
        "state_dir",
    }
)  # fmt: skip
_STORE_URL = "store.url"
_RELATIVE_SQLITE = re.compile(r"(sqlite(?:\+\w+)?:///)(?!/|:|file:)(.+)", re.DOTALL)

Anchored = TypeVar("Anchored")
Rubric = TypeVar("Rubric", Judge, GateJudge, ProjectRubric)


def _anchored(value: Anchored, folder: Path, name: str = "") -> Anchored:
    """Return settings whose relative paths begin at a folder, that of the settings file: then a
    command finds the same store, adapters and state from wherever it is started."""
    found: Any = value  # Any: a section, a mapping of sections or a plain value
    if isinstance(found, BaseModel):
        inner = {name: getattr(found, name) for name in type(found).model_fields}
        url = _STORE_URL if isinstance(found, Store) else "url"
        changed = {
            name: new
            for name, old in inner.items()
            if (new := _anchored(old, folder, url if name == "url" else name)) is not old
        }
        found = found.model_copy(update=changed) if changed else found
    elif isinstance(found, Mapping) and any(isinstance(one, BaseModel) for one in found.values()):
        found = {key: _anchored(one, folder) for key, one in found.items()}
    elif isinstance(found, Path) or (name in _PATHS and found):
        found = type(found)(folder / found)
    elif name in ("url", _STORE_URL) and (parts := _RELATIVE_SQLITE.fullmatch(str(found))):
        begin = str(folder)
        if name == _STORE_URL:  # which SQLAlchemy decodes
            begin = begin.replace("%", "%25").replace("?", "%3F")
        found = f"{parts[1]}{begin}/{parts[2]}"
    elif name == "base_model_path" and found and os.path.isdir(folder / found):  # else a hub's name
        found = str(folder / found)
    kept: Anchored = found
    return kept


def _with_rubrics(settings: Settings, folder: Path) -> Settings:
    """Put the text of the file that a rubric names in its place. folder: where relative paths
    begin. Raises: SettingsError."""

    def read(table: str, one: Rubric) -> Rubric:
        if not one.rubric.startswith(FILE):
            return one
        path = folder / one.rubric.removeprefix(FILE)
        return one.model_copy(update={"rubric": _read_rubric(f"{table}.rubric", path)})

    judge = read("judge", settings.judge)
    projects = {name: read(f"judge.projects.{name}", one) for name, one in judge.projects.items()}
    judge = judge.model_copy(update={"projects": projects})
    gate_judge = read("gate_judge", settings.gate_judge)
    return settings.model_copy(update={"judge": judge, "gate_judge": gate_judge})


def _read_rubric(key: str, path: Path) -> str:
    text, why = "", ""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_RUBRIC_BYTES + 1).decode()
    except OSError as error:
        why = f"cannot be read ({error.strerror}); name a file of plain text"
    except UnicodeDecodeError:
        why = (
            f"is not UTF-8, or ends within a character after {MAX_RUBRIC_BYTES} bytes; save a "
            "shorter plain text as UTF-8"
        )
    else:
        if len(text.encode()) > MAX_RUBRIC_BYTES:
            why = (
                f"is longer than {MAX_RUBRIC_BYTES} bytes; every judge call sends it, so give a "
                "shorter one"
            )
        elif not text.strip():
            why = "is empty; write the rubric into it, or leave the setting out"
    if why:
        raise SettingsError(f"setting {key}: {visible(str(path))} {why}")
    return text


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        # A copy that was cut short would start with an empty store and no rules.
        why = "" if values else "holds no setting; write one, or leave --config out"
    except OSError as error:
        why = f"cannot be read ({error.strerror}); name it with --config"
    except UnicodeDecodeError:
        why = "is not UTF-8; save it as that"
    except tomllib.TOMLDecodeError as error:
        why = f"is not TOML ({error}); correct that line"
    except (ValueError, RecursionError):  # an integer of 4,300 digits, lists in lists
        why = "is not readable as settings (a number too long, or nested too deep)"
    if why:
        raise SettingsError(f"{path}: {why}")
    return values


def _refuse_unknown_env(env: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for name in env:
        upper = name.upper()
        ours = upper.startswith(ENV_PREFIX) and not upper.startswith(f"{ENV_PREFIX}TEST_")
        if not ours or name in NOT_SETTINGS:
            continue
        said = shown(name)
        if upper in NOT_SETTINGS:
            raise SettingsError(f"unknown environment variable {said}; did you mean {upper}?")
        if upper in seen:
            raise SettingsError(
                f"environment variables {shown(seen[upper])} and {said} are one setting; "
                "unset one of them"
            )
        seen[upper] = name
        _refuse_unknown_name(said, name[len(ENV_PREFIX) :].split("__"))


def _refuse_unknown_name(said: str, parts: Sequence[str]) -> None:
    """parts: the parts of the variable's name, without the prefix."""
    where = [part.lower() for part in parts]
    if is_removed(".".join(where[:-1]), where[-1]):
        return
    if len(where) == 3 and where[2] in known(*where[:2]) and not _holds(where[0], where[1]):
        return
    for length in (1, 2):
        if len(where) >= length and where[length - 1] not in known(*where[: length - 1]):
            raise SettingsError(f"unknown environment variable {said}; {nearest(where[:length])}")
    if len(where) <= 2:
        return
    table = f"{ENV_PREFIX}{where[0]}__{where[1]}".upper()
    if not _holds(where[0], where[1]):
        raise SettingsError(f"unknown environment variable {said}; did you mean {table}?")
    # Letter case and type of such a value would be guesses: TEMPERATURE=0.2 became the text "0.2",
    # CUDA_VISIBLE_DEVICES became cuda_visible_devices.
    inner = shown(json.dumps("__".join(parts[2:])))
    raise SettingsError(
        f"environment variable {said} goes into the table {where[0]}.{where[1]}, which is one "
        f"JSON value in the environment; give {table}='{{{inner}: ...}}'"
    )


def _holds(section: str, key: str, kinds: tuple[object, ...] = (dict, Mapping)) -> bool:
    """Tell whether a setting is of one of these kinds: a table."""
    model: Any = Settings.model_fields[section].annotation  # `key` is known to be of it
    kind = model.model_fields[key].annotation
    return any(get_origin(one) in kinds for one in (kind, *get_args(kind)))


def _no_json(env: Mapping[str, str]) -> str:
    """Return the variable whose list or table is no JSON. The names are known to be settings."""
    for name, value in env.items():
        section, _, key = name[len(ENV_PREFIX) :].lower().partition("__")
        keys = known(section) if name.upper().startswith(ENV_PREFIX) else ()
        # Another key than those is removed, or of a table.
        if not keys or (key and key not in keys):
            continue
        if key and not _holds(section, key, (dict, Mapping, tuple, list)):
            continue
        try:
            json.loads(value)
        except ValueError:
            return name
    return f"{ENV_PREFIX}..."


def _too_deep(env: Mapping[str, str]) -> str:
    """Return the variable whose JSON nests too deeply for Python."""
    for name, value in env.items():
        try:
            json.loads(value if name.upper().startswith(ENV_PREFIX) else "0")
        except RecursionError:
            return name
        except ValueError:  # a text, no JSON
            continue
    return f"{ENV_PREFIX}..."


def with_workers(settings: Settings, count: int) -> Settings:
    """Return the settings with another `proxy.workers`. Raises: SettingsError when it is out of
    range."""
    try:
        proxy = Proxy.model_validate({**settings.proxy.model_dump(), "workers": count})
    except ValidationError as error:
        raise SettingsError(explain(error).replace("workers", "proxy.workers", 1)) from None
    return settings.model_copy(update={"proxy": proxy})

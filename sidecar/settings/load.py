"""Read the settings: one TOML file, each value overridable from the environment.

`SIDECAR_<SECTION>__<KEY>` wins over the file, the file over the defaults. Unknown keys are refused
with the nearest known name, in the file and in the environment.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import SettingsError as UnreadableSettingError

from sidecar.errors import SettingsError
from sidecar.settings.safety import refuse_unsafe
from sidecar.settings.sections import ENV_PREFIX, Proxy, Settings

DEFAULT_FILE = Path("sidecar.toml")
NOT_SETTINGS = frozenset({"SIDECAR_ADMIN_TOKEN", "SIDECAR_COMPILE"})
"""Variables of the same prefix that are read elsewhere: by the `sidecar` command, by setup.py."""


def load_settings(path: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    path: the TOML file; None takes `./sidecar.toml` if it is there.
    env: for the check of unknown names; the values are read from the process environment.
    Raises: SettingsError, one line: what, why, what to do.
    """
    values = _read_file(path)
    _refuse_unknown_env(os.environ if env is None else env)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise SettingsError(_explain(error)) from error
    except UnreadableSettingError as error:  # a list or a mapping that is not JSON
        raise SettingsError(f"environment: {error}; lists and mappings are JSON there") from error
    refuse_unsafe(settings)
    return settings


def _read_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        if not DEFAULT_FILE.exists():
            return {}
        path = DEFAULT_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror}); name it with --config"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: is not TOML ({error}); correct that line") from error


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        return f"unknown setting {'.'.join(where)}; {_nearest(where)}"
    return f"setting {'.'.join(where)}: {first['msg']}"


def _known(section: str | None) -> list[str]:
    if section is None:
        return list(Settings.model_fields)
    field = Settings.model_fields.get(section)
    model = field.annotation if field is not None else None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []


def _nearest(where: list[str]) -> str:
    section = where[0] if len(where) > 1 else None
    matches = difflib.get_close_matches(where[-1], _known(section), n=1, cutoff=0.0)
    prefix = f"{section}." if section else ""
    return f"did you mean {prefix}{matches[0]}?" if matches else "remove it"


def _refuse_unknown_env(env: Mapping[str, str]) -> None:
    for name in env:
        if not name.startswith(ENV_PREFIX) or name.startswith(f"{ENV_PREFIX}TEST_"):
            continue
        if name in NOT_SETTINGS:
            continue
        where = name.removeprefix(ENV_PREFIX).lower().split("__")
        if where[0] not in _known(None):
            raise SettingsError(f"unknown environment variable {name}; {_nearest(where[:1])}")
        # Deeper than two levels is a free-form mapping (engine.env, judge.params).
        if len(where) >= 2 and where[1] not in _known(where[0]):
            raise SettingsError(f"unknown environment variable {name}; {_nearest(where[:2])}")


def with_workers(settings: Settings, count: int) -> Settings:
    """The settings with another `proxy.workers`. Raises SettingsError when it is out of range."""
    try:
        proxy = Proxy.model_validate({**settings.proxy.model_dump(), "workers": count})
    except ValidationError as error:
        raise SettingsError(_explain(error).replace("workers", "proxy.workers", 1)) from error
    return settings.model_copy(update={"proxy": proxy})

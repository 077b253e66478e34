"""The settings file that `sidecar config init` writes: every setting, its meaning and its default.

It is made from the settings classes, so it lacks none and names no other. A line that starts with
`# ` and holds `=` is a setting with its default; lines that start with `#:` explain.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sidecar.settings import Section, Settings

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
        kind: type[BaseModel] = Settings.model_fields[name].annotation  # type: ignore[assignment]
        about = _comment(inspect.cleandoc(kind.__doc__ or ""))
        lines = [f"[{name}]", *about, *_lines(kind, name, list(kind.model_fields))]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


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
            where = f"; a secret: set it by {_variable(section, name)}" if secret else ""
            yield f"#: {name}: not set{where}."
        else:
            live = (section, name) in LIVE
            yield f"{'' if live else '# '}{name} = {_toml(value)}"


def _comment(text: str) -> list[str]:
    return [f"#: {line}" for line in textwrap.wrap(" ".join(text.split()), WIDTH - 3)]


def _variable(section: str, name: str) -> str:
    return f"SIDECAR_{section.upper()}__{name.upper()}"


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

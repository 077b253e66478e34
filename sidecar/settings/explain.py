"""Say in one line what is wrong with a value, and which name was probably meant.

Every sentence is our own: pydantic's are about Python's types, and its errors quote values. A name
is guessed among those of the same section only, and only a near one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sidecar.hiding import (
    HIDDEN,
    hide_beside_path,
    hide_in_command,
    hide_in_params,
    hide_in_url,
    is_secret_name,
)
from sidecar.settings.judge import KINDS
from sidecar.settings.sections import ENV_PREFIX, Settings
from sidecar.visible import visible

NEAR = 0.7
"""Least similarity (`difflib`, 0 to 1) of a name that is offered: one wrong, missing or swapped
letter in a word of five, and not another word."""
VERIFIERS = ["reward", "verifiers"]
"""A table by name; each entry has the keys of its kind, which pydantic names behind the name."""
LISTED = "docs/settings.md lists them"
_CLIP = "the losses that clip do so from 0.8 to 1.28, which is fixed"
_TARGETS = "an adapter is on all linear layers, which is fixed"
_ONCE = "each group is used once, in steps of learner.groups_per_step"
ELSEWHERE: Mapping[tuple[str, ...], str] = {
    ("learner", "beta"): "the weight of the divergence from the base is learner.advanced.kl_coef",
    ("learner", "lr"): "did you mean learner.learning_rate?",
    ("learner", "epochs"): _ONCE,
    ("learner", "num_train_epochs"): _ONCE,
    ("learner", "num_iterations"): _ONCE,
    ("learner", "num_generations"): "the number of answers in a group is groups.size",
    ("learner", "epsilon"): _CLIP,
    ("learner", "epsilon_high"): _CLIP,
    ("learner", "batch_size"): "give learner.groups_per_step",
    ("learner", "target_modules"): _TARGETS,
    ("learner", "lora_rank"): "did you mean learner.rank?",
    ("learner", "lora_alpha"): "did you mean learner.alpha?",
}
"""What other trainers call a setting -> what it is here. docs/losses.md has the whole table."""
WRONG: Mapping[str, str] = {
    "bool": "must be true or false",
    "int": "must be a whole number",
    "float": "must be a number",
    "finite": "must be a finite number",
    "string": "must be text; write it between quotes",
    "path": "must be the path of a file or folder; write it between quotes",
    "tuple": "must be a list; write it between [ and ]",
    "list": "must be a list; write it between [ and ]",
    "dict": "must be a table, such as {name = value}",
    "mapping": "must be a table, such as {name = value}",
    "model": "must be a table, such as {name = value}",
}
"""First word of pydantic's type of an error -> what the value must be."""
SAID: Mapping[str, str] = {
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "missing": "is missing; give it a value",
    "union_tag_not_found": f"has no kind; give one of {', '.join(KINDS)}",
    "int_from_float": "must be a whole number, without a fraction",
    "too_long": "has too many entries; give at most {max_length}",
    "too_short": "has too few entries; give at least {min_length}",
}
"""Pydantic's type of an error -> what is said, with words of its context."""


def explain(error: ValidationError) -> str:
    """Return what is wrong with the first refused setting: one line that quotes no value."""
    first = error.errors(include_url=False, include_input=False)[0]
    # Without the place in a list: a person wrote the key.
    where = [str(part) for part in first["loc"] if not isinstance(part, int) and part != "[key]"]
    kind = where.pop(3) if where[:2] == VERIFIERS and len(where) > 3 and where[3] in KINDS else None
    if first["type"] == "extra_forbidden":
        return f"unknown setting {shown('.'.join(where))}; {nearest(where, kind)}"
    if first["type"] in ("model_type", "model_attributes_type") and len(where) == 1:
        return f"setting {written(where)}: must be a table; write [{where[0]}] above its keys"
    return f"setting {written(where)}: {_what_is_wrong(first)}"


def _what_is_wrong(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if (words := SAID.get(kind)) is not None:
        return words.format(**context)
    if kind == "union_tag_invalid":
        tag = str(context["tag"])
        near = difflib.get_close_matches(tag, KINDS, 1, NEAR)
        guess = f"; did you mean {near[0]}?" if near else ""
        return f"kind {shown(tag)} is unknown; there are {', '.join(KINDS)}{guess}"
    said = WRONG.get(kind.partition("_")[0], "has a value that it cannot have")
    return f"{said}; docs/settings.md says what it may be"


def written(where: Sequence[str]) -> str:
    """Return the key as a person wrote it: a variable's name when the value comes from the
    environment."""
    variables = {name.upper(): name for name in os.environ}
    for length in range(len(where), 0, -1):
        name = (ENV_PREFIX + "__".join(where[:length])).upper()
        if name in variables:
            return shown(variables[name])
    return shown(".".join(where))


def shown(text: str) -> str:
    """Return one short line without a terminal's escape codes."""
    return visible(text)[:200]


def known(*where: str) -> list[str]:
    """Return the keys of a section, or of a table in it; without a name, the sections."""
    model: type[BaseModel] = Settings
    names = iter(where)
    for name in names:
        field = model.model_fields.get(name)
        inner = None if field is None else _section_in(field.annotation)
        if field is None or inner is None:
            return []
        if get_origin(field.annotation) is Mapping:
            next(names, None)  # of an entry, which an operator chose
        model = inner
    return list(model.model_fields)


def _section_in(kind: Any) -> type[BaseModel] | None:  # Any: the type of a setting
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    found = (_section_in(inner) for inner in get_args(kind))
    return next((one for one in found if one is not None), None)


def nearest(where: Sequence[str], kind: str | None = None) -> str:
    """Offer the near name of the same section, or say where the names are listed.

    where: the unknown name, its section first. kind: of the verifier that it belongs to.
    """
    if (said := ELSEWHERE.get(tuple(where))) is not None:
        return said
    names = list(KINDS[kind].model_fields) if kind is not None else known(*where[:-1])
    table = ".".join(where[:-1])
    matches = difflib.get_close_matches(where[-1], names, 1, NEAR)
    if matches:
        return f"did you mean {table}{'.' if table else ''}{matches[0]}?"
    if kind is not None:
        own = ", ".join(name for name in names if name != "kind")
        return f"a verifier of kind {kind} has {own}"
    if not table:
        return f"the sections are {', '.join(names)}"
    return f"[{shown(table)}] has no such key, and {LISTED}" if names else "remove it"


# The settings as people may see them, without secrets.

SET = "(set)"
"""Shown instead of a secret that is set."""


def shown_settings(settings: Settings) -> dict[str, Any]:  # Any: JSON
    """Return all sections as JSON, with secrets hidden wherever a person may have put one."""
    shown: dict[str, Any] = _hide(settings.model_dump(mode="json"))
    shown["judge"]["params"] = hide_in_params(settings.judge.params)
    shown["gate_judge"]["params"] = hide_in_params(settings.gate_judge.params)
    for one, fallback in zip(shown["judge"]["fallbacks"], settings.judge.fallbacks, strict=True):
        one["params"] = hide_in_params(fallback.params)
    shown["engine"]["command"] = hide_in_command(settings.engine.command)
    shown["engine"]["env"] = dict.fromkeys(settings.engine.env, SET)
    shown["tasks"]["key"] = settings.tasks.key  # no secret, though its name is like one's
    shown["admin"]["tokens"] = [SET for _ in settings.admin.tokens]
    for name in ("otlp_endpoint", "otlp_metrics_endpoint"):
        shown["telemetry"][name] = hide_beside_path(getattr(settings.telemetry, name))
    return shown


def _hide(value: Any, name: str = "") -> Any:  # Any: JSON
    if isinstance(value, dict):
        return {key: _hide(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_hide(inner, name) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value and is_secret_name(name) else hide_in_url(value)
    return value

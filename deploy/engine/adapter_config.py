"""Check an adapter's `adapter_config.json`. Pure.

vLLM reads `r`, `lora_alpha`, the two patterns and `target_modules` without checking that they are
numbers or fit the weights, and uses the patterns' keys as regular expressions. It refuses some
features that it does not support and ignores others, which would serve another adapter than was
trained; both kinds are refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deploy.engine.strict_json import shown
from deploy.errors import InvalidAdapterError
from learner.adapter_folder import CONFIG
from learner.origin.plain_lora import not_plain_lora

MAX_ALPHA = 65_536.0
"""Largest `lora_alpha`: above it a weight of 1 overflows half precision. In use: below 1,000."""
MAX_NAMES = 4_096
"""Most target modules, or keys of a pattern: a 405B model has 1,764 adapted layers."""
_MODULE = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
"""A module's name. As a regular expression it cannot cause catastrophic backtracking."""
_MAX_NAME = 512
_HEAVY = re.compile(r"\)[*+?{]|\\[1-9]|\(\?")
_REPEATS, _MAX_REPEATS = re.compile(r"[*+{]"), 4
"""What makes a pattern's time exponential, or polynomial of a high degree, in a name's length."""
_ANY_LAYER = re.compile(r"(?:^|.*?\.)[^.]+\.(\d+)\.")
"""Finds a layer's number in a module's name as peft does: the first number of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """The shape that the configuration demands of the weights."""

    rank: int
    rank_pattern: Mapping[str, int]
    """Module-name pattern -> rank; the first pattern that matches a module decides."""
    targets: frozenset[str]
    """Names, or name suffixes, of the adapted modules."""
    excluded: frozenset[str] | re.Pattern[str] = frozenset()
    """Names, or name suffixes, that PEFT does not adapt; or a pattern of their whole names."""
    layers: frozenset[int] | None = None
    """Numbers of the layers that PEFT adapts; None: all."""
    layer_names: tuple[str, ...] = ()
    """Names of the lists whose layers are counted; empty: any."""

    def rank_of(self, module: str) -> int:
        """Return the rank that vLLM and PEFT expect of a module."""
        pattern = self.rank_pattern.items()
        return next((rank for key, rank in pattern if _matches(key, module)), self.rank)

    def targets_of(self, module: str) -> set[str]:
        """Return the targets that match a module."""
        return _ends(module) & self.targets

    def excludes(self, module: str) -> bool:
        """Return True when PEFT would not load matrices of this module."""
        if isinstance(self.excluded, re.Pattern):
            return self.excluded.fullmatch(module) is not None
        return not self.excluded.isdisjoint(_ends(module))

    def passes_over(self, module: str) -> bool:
        """Return True when PEFT would not load matrices of this module for its layer's number."""
        if self.layers is None:
            return False
        patterns = [re.compile(rf"(?:^|.*?\.){re.escape(n)}\.(\d+)\.") for n in self.layer_names]
        found = (pattern.match(module) for pattern in patterns or [_ANY_LAYER])
        match = next((one for one in found if one is not None), None)
        return match is None or int(match[1]) not in self.layers


def _ends(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[place:]) for place in range(len(parts))}


def is_module_name(name: object) -> bool:
    """Return True for a valid name of a model's module."""
    return isinstance(name, str) and len(name) <= _MAX_NAME and bool(_MODULE.fullmatch(name))


def _matches(key: str, module: str) -> bool:
    """Return True when the key, a regular expression in vLLM and PEFT, matches the name's end."""
    start = len(module) - len(key)
    if start < 0 or (start > 0 and module[start - 1] != "."):
        return False
    return all(one in (".", other) for one, other in zip(key, module[start:], strict=True))


def check_config(config: Any, *, max_rank: int, bases: Collection[str]) -> LoraShape:  # Any: JSON
    """Check a parsed `adapter_config.json` and return the shape that it demands.

    max_rank: highest rank that vLLM serves (`serving.max_lora_rank`).
    bases: names that an adapter may give for the served base model; empty: any.
    Raises: InvalidAdapterError with the first defect.
    """
    if not isinstance(config, dict):
        raise InvalidAdapterError(f"{CONFIG}: is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise InvalidAdapterError(
            f"{CONFIG}: peft_type is {shown(config.get('peft_type'))}, not LORA"
        )
    rank = config.get("r")
    rank_pattern = _pattern(config, "rank_pattern")
    for one in (rank, *rank_pattern.values()):
        _check_rank(one, max_rank)
    for key, alpha in (
        ("lora_alpha", config.get("lora_alpha")),
        *(("alpha_pattern", one) for one in _pattern(config, "alpha_pattern").values()),
    ):
        _check_alpha(key, alpha)
    _check_features(config)
    base = config.get("base_model_name_or_path")
    if bases and not _is_base(base, bases):
        raise InvalidAdapterError(
            f"{CONFIG}: was trained on {shown(base)}, vLLM serves {' = '.join(sorted(bases))}; "
            "if these are the same weights, write one of the served names as "
            "base_model_name_or_path there"
        )
    return LoraShape(
        rank=int(rank or 0),
        rank_pattern=rank_pattern,
        targets=_targets(config.get("target_modules")),
        excluded=_excluded(config.get("exclude_modules")),
        layers=_layers(config),
        layer_names=_layer_names(config),
    )


def _pattern(config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict) or len(found) > MAX_NAMES:
        raise InvalidAdapterError(f"{CONFIG}: {key} is not a table of at most {MAX_NAMES} modules")
    for name in found:
        if not is_module_name(name):
            raise InvalidAdapterError(
                f"{CONFIG}: {key} names {shown(name)}; use plain names of modules, vLLM would "
                "run it as a regular expression"
            )
    return found


def _check_rank(rank: Any, max_rank: int) -> None:
    if type(rank) is not int or not 0 < rank <= max_rank:
        raise InvalidAdapterError(
            f"{CONFIG}: rank {shown(rank)} is not in 1..{max_rank} "
            "(serving.max_lora_rank, vLLM's --max-lora-rank)"
        )


def _check_alpha(key: str, alpha: Any) -> None:
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or not 0 < alpha <= MAX_ALPHA:
        raise InvalidAdapterError(
            f"{CONFIG}: {key} holds {shown(alpha)}, which is no number over 0 and up to "
            f"{MAX_ALPHA:g}"
        )


def _check_features(config: dict[str, Any]) -> None:
    found = not_plain_lora(config)
    if found is not None:
        raise InvalidAdapterError(
            f"{CONFIG}: {found.member} is {shown(config.get(found.member))}, {found.why}"
        )


def _layers(config: dict[str, Any]) -> frozenset[int] | None:
    """Read `layers_to_transform`: a number, or a list of them; null and an empty list: all."""
    found = config.get("layers_to_transform")
    if found is None or found == []:
        return None
    numbers = found if isinstance(found, list) else [found]
    if len(numbers) > MAX_NAMES or not all(type(one) is int and one >= 0 for one in numbers):
        raise InvalidAdapterError(
            f"{CONFIG}: layers_to_transform is {shown(found)}, which is no list of at most "
            f"{MAX_NAMES} numbers of layers"
        )
    return frozenset(numbers)


def _layer_names(config: dict[str, Any]) -> tuple[str, ...]:
    """Read `layers_pattern`: names of the lists of layers, which peft takes for patterns."""
    found = config.get("layers_pattern")
    if not found:
        return ()
    names = found if isinstance(found, list) else [found]
    if len(names) > MAX_NAMES or not all(map(is_module_name, names)):
        raise InvalidAdapterError(
            f"{CONFIG}: layers_pattern is {shown(found)}; write plain names of modules"
        )
    if config.get("layers_to_transform") is None:
        raise InvalidAdapterError(
            f"{CONFIG}: layers_pattern is {shown(found)}, and there is no layers_to_transform, "
            "without which PEFT refuses it; remove it there"
        )
    return tuple(names)


def _targets(found: Any) -> frozenset[str]:
    if not isinstance(found, list) or not 0 < len(found) <= MAX_NAMES:
        raise InvalidAdapterError(
            f"{CONFIG}: target_modules is not a list of 1 to {MAX_NAMES} names of modules"
        )
    for name in found:
        if not is_module_name(name):
            raise InvalidAdapterError(
                f"{CONFIG}: target_modules names {shown(name)}, which is no name of a module"
            )
    return frozenset(found)


def _excluded(found: Any) -> frozenset[str] | re.Pattern[str]:
    """Read `exclude_modules`: a list holds names or their ends, a text is a regular expression.

    A pattern that may take long to match is not looked at: an adapter with one was served before,
    and the learner says what it excludes when it loads it.
    """
    if not found:
        return frozenset()
    if isinstance(found, list) and len(found) <= MAX_NAMES and all(map(is_module_name, found)):
        return frozenset(found)
    if isinstance(found, str):
        repeats = len(_REPEATS.findall(found))
        if len(found) > _MAX_NAME or _HEAVY.search(found) or repeats > _MAX_REPEATS:
            return frozenset()
        with suppress(re.error, OverflowError, RecursionError):
            return re.compile(found)
    raise InvalidAdapterError(
        f"{CONFIG}: exclude_modules is {shown(found)}; write a list of at most {MAX_NAMES} plain "
        "names of modules, or a regular expression"
    )


def _is_base(base: Any, bases: Collection[str]) -> bool:
    return isinstance(base, str) and base.rstrip("/") in {name.rstrip("/") for name in bases}

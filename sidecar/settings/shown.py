"""The settings as people may see them, without secrets."""

from __future__ import annotations

from typing import Any

from sidecar.hiding import (
    HIDDEN,
    hide_beside_path,
    hide_in_command,
    hide_in_params,
    hide_in_url,
    is_secret_name,
)
from sidecar.settings.sections import Settings

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

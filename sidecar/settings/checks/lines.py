"""Check `serving.own_adapters`: which projects have a line of adapters of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sidecar.lines import SEPARATOR
from sidecar.settings.checks.problem import DEFAULT_PROJECT, Problem

if TYPE_CHECKING:
    from sidecar.settings.sections import Settings

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

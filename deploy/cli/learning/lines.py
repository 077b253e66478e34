"""The sentences of `sidecar status` about the other lines of adapters. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from sidecar.records import BASE


class OneLine(msgspec.Struct):
    project: str | None
    champion: str
    canary: str | None
    canary_weight_bp: int
    learner_paused: bool


def other_lines(lines: Sequence[OneLine], project: str | None) -> Iterator[str]:
    """Say of each line of adapters but that of `project` what answers it."""
    for one in lines:
        if one.project == project:
            continue
        whose = "All other projects" if one.project is None else f"Project {one.project}"
        text = f"{whose}: {name_of(one.champion)}"
        if one.canary is not None:
            text += f", and the canary {one.canary} for {percent(one.canary_weight_bp)}"
        paused = "; its learner is paused" if one.learner_paused else ""
        more = "" if one.project is None else f" (`sidecar status --project {one.project}`)"
        yield f"{text}{paused}{more}."


def name_of(adapter: str) -> str:
    return "the base model" if adapter == BASE else adapter


def percent(basis_points: int) -> str:
    return f"{basis_points / 100:g}%"

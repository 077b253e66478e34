"""What the doctor found, as lines for people and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deploy.doctor.collect import Diagnosis, Facts
from deploy.doctor.rules import of_tasks, waits_for
from deploy.examiner import examiner_of
from deploy.funnel import Stage
from sidecar.hiding import hide_in_url
from sidecar.visible import counted

SHOWN = 4
"""Reasons of a stage that are shown, the most frequent first."""


def report_lines(facts: Facts, found: Sequence[Diagnosis]) -> list[str]:
    """The stages, then what stops records, the first stage first."""
    lines = []
    if facts.store is None:
        url = hide_in_url(facts.settings.store.url)
        lines.append(f"The store {url} has no records yet, or cannot be read.")
    else:
        lines += ["stage      entered  passed on  ended  waiting", *map(_stage, _stages(facts))]
    lines.append("")
    if found:
        first = found[0]
        lines.append(f"Records stop at the stage `{first.stage}`: {first.text}.")
        lines.append(f"  What to do: {first.to_do}.")
        for one in found[1:]:
            lines.append(f"Also, at `{one.stage}`: {one.text}.")
            lines.append(f"  What to do: {one.to_do}.")
    else:
        lines.append("Nothing stops records.")
    if not found and (waiting := waits_for(facts)):
        lines.append(f"It waits for {waiting}.")
    for of in facts.store.lines if facts.store is not None else ():
        if of.canary:
            whose = "" if of.line.project is None else f" of {of.line.project}"
            lines.append(f"The canary{whose}: {of.canary}.")
    if warning := examiner_of(facts.settings).warning:
        lines.append(f"The gate: {warning}.")
    if words := of_tasks(facts):
        lines.append(f"Whole tasks: {words}.")
    lines += [f"Not checked: {one}." for one in facts.unchecked]
    return lines


def report_json(facts: Facts, found: Sequence[Diagnosis]) -> dict[str, Any]:  # Any: JSON
    return {
        "stops_at": found[0].stage if found else None,
        "cause": found[0].cause if found else None,
        "diagnoses": [asdict(one) for one in found],
        "waits_for": waits_for(facts) or None,
        "stages": [
            {**asdict(one), "ended": dict(one.ended), "waiting": dict(one.waiting)}
            for one in _stages(facts)
        ],
        "running": sorted(facts.running | facts.answering),
        "unchecked": list(facts.unchecked),
        "whole_tasks": of_tasks(facts) or None,
        "gate_warning": examiner_of(facts.settings).warning or None,
    }


def _stages(facts: Facts) -> tuple[Stage, ...]:
    return facts.store.funnel.stages if facts.store is not None else ()


def _stage(stage: Stage) -> str:
    ended, waiting = sum(stage.ended.values()), sum(stage.waiting.values())
    line = f"{stage.name:<9} {stage.entered:>8,}  {stage.passed:>9,} {ended:>6,} {waiting:>8,}"
    # Records that only wait have no reason but that: "117 waiting".
    waits = (one if one.endswith(" waiting") else f"waiting: {one}" for one in _most(stage.waiting))
    why = [*_most(stage.ended), *waits]
    if stage.unreported:
        why.append(f"{stage.unreported:,} not told of yet by a proxy")
    return f"{line}  {stage.unit}; passed: {stage.passed_as}" + (
        f"; {', '.join(why)}" if why else ""
    )


def _most(counts: Mapping[str, int]) -> list[str]:
    ordered = sorted(counts.items(), key=lambda one: -one[1])
    more = [counted(len(ordered) - SHOWN, "more reason")] if len(ordered) > SHOWN else []
    return [f"{number:,} {why}" for why, number in ordered[:SHOWN]] + more

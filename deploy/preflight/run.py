"""Run every check of a preflight, one after the other. Errors come first."""

from __future__ import annotations

import asyncio

from deploy.preflight.bus import check_bus
from deploy.preflight.findings import Finding, warning
from deploy.preflight.judge import check_judges
from deploy.preflight.places import check_places
from deploy.preflight.projects import check_projects
from deploy.preflight.store import check_store
from deploy.preflight.verifiers import check_verifiers
from deploy.preflight.vllm import check_replicas
from learner.ready import why_not_ready
from sidecar.processes.state_lock import holder
from sidecar.settings import Settings

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
    found += await asyncio.to_thread(lambda: list(check_projects(settings)))
    if (bus := await asyncio.to_thread(check_bus, settings)) is not None:
        found.append(bus)
    found += [finding async for finding in check_replicas(settings)]
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
    folder = settings.state_dir
    return any(
        (folder / f"{name}.lock").exists() and holder(folder, name) is not None for name in LOCKS
    )

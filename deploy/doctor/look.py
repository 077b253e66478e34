"""Collect the facts: read the store, ask vLLM, judge and Kafka, and see what runs.

Nothing is made or changed. Every check works without the others, so the doctor says what it can
while processes are down. It reads the store itself, and not by the admin API.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import make_url
from sqlalchemy.orm import Session

from deploy.doctor.bounded import run_checks
from deploy.doctor.facts import Facts, LineFacts, StoreFacts
from deploy.doctor.recent import newest_adapter, newest_run, read_recent
from deploy.funnel.pile_up import read_pile_up
from deploy.funnel.read import read_funnel
from deploy.preflight.bus import check_bus
from deploy.preflight.findings import Finding, error
from deploy.preflight.judge import NO_JUDGE, check_judges
from deploy.preflight.places import check_places
from deploy.preflight.run import LOCKS, learner_findings
from deploy.preflight.store import check_store
from deploy.preflight.verifiers import check_verifiers
from deploy.preflight.vllm import check_replicas
from deploy.registry import canaries
from deploy.registry.pace import sessions_a_day
from ingest.intake.bus_report import read_state
from ingest.judge_watch.state import read_judge_state
from ingest.noise.rubrics import each_series
from ingest.noise.state import NoiseState, read_noise_state
from ingest.sampling.budget import first_spent, read_usage
from ingest.verifiers.state import read_verifiers, waiting_for
from learner.ready import EMPTY
from learner.schedule.cron import read_cron
from learner.schedule.loop import PAUSED_FLAG
from sidecar.errors import SettingsError, StoreError
from sidecar.lines import Line, flag_of
from sidecar.processes.state_lock import holder
from sidecar.settings import Judge, Settings
from sidecar.settings.kinds import base_url
from sidecar.store.database import Database, get_flag, newest_revision

ASK_S = 3.0
"""Longest wait for a process of this machine."""


def look(
    settings: Settings,
    *,
    online: bool = True,
    refused: Callable[[], dict[str, str]] = dict,
    limit_s: float,
) -> Facts:
    """Collect the facts.

    online: False asks neither vLLM, judge, Kafka nor the learner's device; reads the store alone.
    refused: asks control which adapters vLLM refuses to load.
    limit_s: of all checks together; what takes longer is named in `unchecked`. The question to
        the judge may take 30 s, and loading its library some seconds.
    """
    now = time.time()
    running = frozenset(name for name in (*LOCKS, "learn") if _held(settings.state_dir, name))
    checks: dict[str, Callable[[], Any]] = {
        "store": lambda: _store(settings, now),
        "schedule": lambda: _schedule(settings, now),
        "proxy": lambda: _date(base_url(settings.proxy.host, settings.proxy.port)),
        "control": lambda: _date(base_url(settings.admin.host, settings.admin.port)),
    }
    if online:
        checks |= {
            "places": lambda: list(check_places(settings, running=bool(running))),
            "the store's server": lambda: list(check_store(settings.store.url)),
            "Kafka": lambda: _one(check_bus(settings)),
            "vLLM": lambda: asyncio.run(_replicas(settings)),
            "clocks": lambda: {
                url: seconds
                for url in settings.serving.upstreams
                if (seconds := _date(url)) is not None
            },
            "loads": refused,
        }
        if settings.groups.rate > 0 or settings.gate_judge.model:
            checks["judge"] = lambda: asyncio.run(check_judges(settings))
        if settings.judge.model and settings.reward.verifiers:
            checks["verifiers"] = lambda: asyncio.run(check_verifiers(settings))
        if settings.learner.schedule != "manual":
            checks["learner"] = lambda: learner_findings(settings)
    else:
        checks["settings"] = lambda: list(_unset(settings))
    found, failed = run_checks(checks, limit_s)
    answering = {name for name in ("proxy", "control") if name in found}
    findings: list[Finding] = [
        one
        for name in (
            "places",
            "the store's server",
            "Kafka",
            "vLLM",
            "judge",
            "verifiers",
            "learner",
            "settings",
        )
        for one in found.get(name, ())
    ]
    if answering:  # so their ports are taken by themselves
        findings = [one for one in findings if one.setting not in ("proxy.port", "admin.port")]
    if "store" in failed and not any(one.setting == "store.url" for one in findings):
        findings.append(error("store.url", f"{failed['store']}; repair it, or correct the URL"))
    next_run_at, schedule_error = found.get("schedule", (None, ""))
    quiet = ("proxy", "control", "clocks", "loads", "store")
    return Facts(
        now=now,
        settings=settings,
        store=found.get("store"),
        findings=tuple(findings),
        verifiers_tried="verifiers" in found,
        running=running,
        answering=frozenset(answering),
        loads_refused=found.get("loads", {}),
        ahead_s={
            f"the machine of vLLM at {url}": seconds
            for url, seconds in found.get("clocks", {}).items()
        },
        next_run_at=next_run_at,
        schedule_error=schedule_error,
        unchecked=tuple(f"{name}: {why}" for name, why in failed.items() if name not in quiet),
    )


def _store(settings: Settings, now: float) -> StoreFacts | None:
    """Read the store; None when there is none yet. Raises: StoreError."""
    url = settings.store.url
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        return None
    with closing(Database(url)) as database:
        revision = database.revision()
        if revision is None:
            return None
        database.refuse_newer(revision)
        if revision < newest_revision():
            raise StoreError(
                "the store has the tables of an older version: start ingest or control once"
            )
        with database.read() as session:
            lines = [line.name for line in settings.lines]
            funnel = read_funnel(session, *lines)
            most = settings.most_pending_groups
            return StoreFacts(
                funnel=funnel,
                pile_up=read_pile_up(session, lines, funnel, most=most),
                bus=read_state(session),
                spent=first_spent(read_usage(session, now=now), settings.groups, now=now),
                judge=read_judge_state(session) if settings.judge.model else None,
                noise=_noise(session, settings.judge),
                verifiers=read_verifiers(session),
                waiting_for_verifiers=waiting_for(session),
                lines=tuple(_line(session, line, now) for line in settings.lines),
                recent=read_recent(session),
            )


def _line(session: Session, line: Line, now: float) -> LineFacts:
    canary = canaries.active(session, line.name)
    return LineFacts(
        line=line,
        learner_paused=get_flag(session, flag_of(PAUSED_FLAG, line.name)) == "1",
        run=newest_run(session, line.name),
        adapter=newest_adapter(session, line.name),
        canary=(canary.reason or "") if canary is not None else "",
        sessions_a_day=sessions_a_day(session, line, now),
    )


def _noise(session: Session, judge: Judge) -> NoiseState | None:
    """Return what is known of the noise of this judge; None when that is of another, or of a rubric
    that no project has."""
    found = read_noise_state(session)
    if found is None or found.judge_model != judge.model:
        return None
    asked = {one.rubric_hash for one in each_series(judge)}
    return found if found.rubric_hash in asked else None


def _schedule(settings: Settings, now: float) -> tuple[float | None, str]:
    """Return when the clock starts the next run, and why it never will."""
    learner = settings.learner
    if learner.schedule == "interval":
        return now + learner.interval_s, ""
    if learner.schedule != "cron":
        return None, ""
    try:
        trigger = read_cron(learner)
    except SettingsError as problem:
        return None, str(problem)
    due = trigger.get_next_fire_time(None, datetime.fromtimestamp(now, UTC))
    return (due.timestamp() if due is not None else None), ""


def _unset(settings: Settings) -> Iterator[Finding]:
    """Yield what the settings leave empty and a stage needs: no machine is asked."""
    if settings.groups.rate > 0 and not settings.judge.model:
        yield NO_JUDGE
    if settings.learner.schedule != "manual" and not settings.serving.base_model_path:
        yield error("serving.base_model_path", EMPTY)


async def _replicas(settings: Settings) -> list[Finding]:
    return [one async for one in check_replicas(settings)]


def _one(finding: Finding | None) -> Sequence[Finding]:
    return () if finding is None else (finding,)


def _date(url: str) -> float | None:
    """Return by how many seconds a server's clock is ahead; None when it does not say its time.

    Raises: httpx.HTTPError when nothing answers.
    """
    reply = httpx.get(f"{url}/version", timeout=ASK_S, trust_env=False)
    try:
        return parsedate_to_datetime(reply.headers["date"]).timestamp() - time.time()
    except (KeyError, ValueError):
        return None


def _held(folder: Path, name: str) -> bool:
    return (folder / f"{name}.lock").exists() and holder(folder, name) is not None

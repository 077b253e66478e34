"""Collect the facts of the doctor: read the store, ask vLLM, judge and Kafka, and see what runs.

Nothing is made or changed. Every check works without the others, so the doctor says what it can
while processes are down. It reads the store itself, and not by the admin API.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import make_url, select
from sqlalchemy.orm import Session

from deploy.conditions import read_conditions
from deploy.funnel import Funnel, Name, read_funnel
from deploy.preflight.peers import (
    NO_JUDGE,
    Finding,
    check_judges,
    check_replicas,
    check_verifiers,
    error,
)
from deploy.preflight.settings import (
    LOCKS,
    check_bus,
    check_places,
    check_store,
    is_held,
    learner_findings,
)
from deploy.registry import canaries
from deploy.registry.candidates import sessions_a_day
from ingest.store.groups import SET_ASIDE
from learner.ready import EMPTY
from learner.runs.source import DROPPED
from learner.schedule.rule import read_cron
from sidecar.conditions import Condition
from sidecar.errors import SettingsError, StoreError
from sidecar.lines import Line
from sidecar.settings import Settings
from sidecar.settings.kinds import base_url
from sidecar.store.database import Database
from sidecar.store.engines import newest_revision
from sidecar.store.models import AdapterRow, AnswerRow, ExchangeRow, FeedbackRow, GroupRow
from sidecar.upstreams import Upstreams

# What the doctor looks at, as records. `collect` fills them, `rules` judges them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Recent:
    """What became of the newest records: the funnel's counts reach back to the store's beginning,
    and what was wrong last year must not be named today."""

    selections: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest exchanges by `selection`."""
    sessions: int = 0
    """Number of their sessions."""
    in_tasks: int = 0
    """Number of these that name their task (`x-sidecar-task`)."""
    with_outcome: int = 0
    """Number of these whose outcome is known."""
    served: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest groups' served answers by `trainable`, or by why they are masked."""
    ends: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest groups by status; of those that ended without an adapter by reason."""
    detail: str = ""
    """What the newest group that ended says in words."""
    started_ahead_s: float = 0.0
    """Least number of seconds by which the newest exchanges began after they were stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFacts:
    """What the store says of one line of adapters."""

    line: Line
    adapter: tuple[str, str, str] | None = None
    """Name, state and reason of the newest adapter."""
    canary: str = ""
    """What the open canary waits for."""
    sessions_a_day: float = 0.0
    """Of the last week; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What the store says."""

    funnel: Funnel
    conditions: tuple[Condition, ...] = ()
    """Every condition that the store tells of."""
    lines: tuple[LineFacts, ...] = ()
    """The lines of adapters, the default one first."""
    recent: Recent = Recent()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the rules judge."""

    now: float
    """Unix seconds, by this machine's clock."""
    settings: Settings
    store: StoreFacts | None = None
    """None: there is no store yet, or it cannot be read; then `findings` says why."""
    findings: tuple[Finding, ...] = ()
    """What the checks of `config check --online` found."""
    verifiers_tried: bool = False
    """The verifiers were tried just now; then `findings` has those that fail."""
    running: frozenset[str] = frozenset()
    """Processes of this machine that hold a lock in `state_dir`."""
    answering: frozenset[str] = frozenset()
    """Which of `proxy` and `control` answer on their ports."""
    loads_refused: Mapping[str, str] = field(default_factory=dict)
    """Adapter -> why a vLLM refuses to load it, as control saw it."""
    ahead_s: Mapping[str, float] = field(default_factory=dict)
    """Whose clock -> seconds that it is ahead of this machine's."""
    next_run_at: float | None = None
    """When the schedule is due next; None: not by the clock."""
    schedule_error: str = ""
    """Why the schedule never comes."""
    unchecked: tuple[str, ...] = ()
    """Checks that gave no result in time, in words."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A stage at which records stop, and the likely cause."""

    stage: Name
    cause: str
    """A short name, for programs."""
    text: str
    """What is seen, and why that stops records."""
    to_do: str
    project: str | None = None
    """Whose line of adapters it is about; None: the default one, or all."""


# Read what became of the newest records: a fixed number of each, whatever the store holds.

EXCHANGES = 200
GROUPS = 100
CLOCKS = 20
"""Exchanges that are asked for both clocks; all must say the same."""


def read_recent(session: Session) -> Recent:
    exchanges = session.execute(
        select(
            ExchangeRow.selection,
            ExchangeRow.started_at,
            ExchangeRow.stored_at,
            ExchangeRow.session_id,
            ExchangeRow.task,
        )
        .where(ExchangeRow.origin == "user")
        .order_by(ExchangeRow.seq.desc())
        .limit(EXCHANGES)
    ).all()
    groups = session.execute(
        select(GroupRow.group_id, GroupRow.status, GroupRow.reason, GroupRow.detail)
        .order_by(GroupRow.seq.desc())
        .limit(GROUPS)
    ).all()
    served = session.scalars(
        select(AnswerRow.untrainable_reason).where(
            AnswerRow.group_id.in_([one.group_id for one in groups]), AnswerRow.origin == "served"
        )
    )
    sessions = {one.session_id for one in exchanges}
    told = select(FeedbackRow.session_id).where(
        FeedbackRow.session_id.in_(sorted(sessions)), FeedbackRow.kind == "outcome"
    )
    ended = [one for one in groups if one.status in (SET_ASIDE, DROPPED)]
    ahead = [
        one.started_at - one.stored_at
        for one in exchanges[:CLOCKS]
        if isinstance(one.started_at, float) and isinstance(one.stored_at, float)
    ]
    return Recent(
        selections=Counter(str(one.selection) for one in exchanges),
        sessions=len(sessions),
        in_tasks=len({one.session_id for one in exchanges if one.task}),
        with_outcome=len(set(session.scalars(told))),
        served=Counter(str(why or "trainable") for why in served),
        ends=Counter(
            str(one.reason if one.status in (SET_ASIDE, DROPPED) else one.status) for one in groups
        ),
        detail=str(ended[0].detail or "") if ended else "",
        started_ahead_s=max(0.0, min(ahead, default=0.0)),
    )


def newest_adapter(session: Session, model: str) -> tuple[str, str, str] | None:
    """Return name, state and reason of the newest version."""
    row = session.execute(
        select(AdapterRow.name, AdapterRow.state, AdapterRow.reason)
        .where(AdapterRow.model == model)
        .order_by(AdapterRow.version.desc())
        .limit(1)
    ).first()
    return None if row is None else (str(row[0]), str(row[1]), str(row[2] or ""))


# Run checks at the same time, and give up those that take too long.

_unfinished: list[threading.Thread] = []


def are_unfinished() -> bool:
    """Return whether a check that was given up still runs. Python would wait for it at the end: for
    threads of its own that it started, or for a lock that it holds."""
    return any(thread.is_alive() for thread in _unfinished)


def run_checks(
    checks: Mapping[str, Callable[[], Any]], limit_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run each check in a thread of its own. Any: each returns what it likes.

    Returns: results by name; and, for checks without one, why.
    """
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}

    def run(name: str, check: Callable[[], Any]) -> None:
        try:
            results[name] = check()
        except Exception as error:  # noqa: BLE001 - one check must not hide what the others find
            failures[name] = f"{type(error).__name__}: {error}"

    # Daemons: a check that hangs must not keep the command from ending.
    threads = {
        name: threading.Thread(target=run, args=(name, check), daemon=True)
        for name, check in checks.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + limit_s
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _unfinished.append(thread)
            failures.setdefault(name, f"no answer within {limit_s:g} s")
    return dict(results), dict(failures)


FINDERS = (
    "places", "the store's server", "Kafka", "vLLM", "judge", "verifiers", "learner", "settings",
)  # fmt: skip
"""Checks that return findings, the first stage first."""
ASK_S = 3.0
"""Longest wait for a process of this machine."""


def collect(
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
    running = frozenset(name for name in (*LOCKS, "learn") if is_held(settings.state_dir, name))
    checks: dict[str, Callable[[], Any]] = {
        "store": lambda: _store(settings, now),
        "schedule": lambda: _schedule(settings, now),
        "proxy": lambda: _date(base_url(settings.proxy.host, settings.proxy.port)),
        "control": lambda: _date(settings.admin.base_url),
    }
    if online:
        checks |= {
            "places": lambda: list(check_places(settings, running=bool(running))),
            "the store's server": lambda: list(check_store(settings.store.url)),
            "Kafka": lambda: list(check_bus(settings)),
            "vLLM": lambda: asyncio.run(check_replicas(settings)),
            "clocks": lambda: {
                url: seconds
                for url in Upstreams(settings.serving.upstreams).now()
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
    findings: list[Finding] = [one for name in FINDERS for one in found.get(name, ())]
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
        database.check_revision(revision)
        if revision < newest_revision():
            raise StoreError(
                "the store has the tables of an older version: start ingest or control once"
            )
        with database.read() as session:
            lines = [line.name for line in settings.lines]
            funnel = read_funnel(session, *lines)
            found = read_conditions(
                session,
                settings.lines,
                funnel,
                watch=settings.watch,
                most_pending=settings.learner.max_groups,
                now=now,
            )
            return StoreFacts(
                funnel=funnel,
                conditions=tuple(found),
                lines=tuple(_line(session, line, now) for line in settings.lines),
                recent=read_recent(session),
            )


def _line(session: Session, line: Line, now: float) -> LineFacts:
    canary = canaries.active(session, line.name)
    return LineFacts(
        line=line,
        adapter=newest_adapter(session, line.name),
        canary=(canary.reason or "") if canary is not None else "",
        sessions_a_day=sessions_a_day(session, line, now),
    )


def _schedule(settings: Settings, now: float) -> tuple[float | None, str]:
    """Return when the clock starts the next run, and why it never will."""
    learner = settings.learner
    if learner.schedule == "interval":
        return now + learner.interval_s, ""
    if learner.schedule != "cron":
        return None, ""
    try:
        cron = read_cron(learner)
    except SettingsError as problem:
        return None, str(problem)
    due = cron.after(datetime.fromtimestamp(now, UTC))
    return (due.timestamp() if due is not None else None), ""


def _unset(settings: Settings) -> Iterator[Finding]:
    """Yield what the settings leave empty and a stage needs: no machine is asked."""
    if settings.groups.rate > 0 and not settings.judge.model:
        yield NO_JUDGE
    if settings.learner.schedule != "manual" and not settings.serving.base_model_path:
        yield error("serving.base_model_path", EMPTY)


def _date(url: str) -> float | None:
    """Return by how many seconds a server's clock is ahead; None when it does not say its time.

    Raises: httpx.HTTPError when nothing answers.
    """
    reply = httpx.get(f"{url}/version", timeout=ASK_S, trust_env=False)
    try:
        return parsedate_to_datetime(reply.headers["date"]).timestamp() - time.time()
    except (KeyError, ValueError):
        return None

"""Start and stop the control process's loops and its admin server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator

import structlog
import uvicorn
from starlette.types import ASGIApp

from deploy.adapters.prune import KEEP_CHAMPIONS, FolderRule, Pruner
from deploy.admin.context import AdminContext
from deploy.admin.wire import MOST, AdminConnection
from deploy.engine.engines import Engines
from deploy.engine.vllm_control import in_folder_thread
from deploy.examiner import examiner_of
from deploy.line_loops import LineLoops, make_folder_of
from deploy.outside import telling
from deploy.outside.http import Caller
from deploy.outside.telling import Hooks, Sender
from deploy.page.mount import with_page
from deploy.registry import audit, routing_writer
from deploy.registry.leases import BEAT_S, Lease, own_id
from deploy.supervise import Loop
from ingest.judges.build import ProcessJudges
from ingest.ruler.judge import Judge
from ingest.vllm.watch import ReplicaSampler, gate_engine_of
from learner.shared_folders import shared_folders
from sidecar.errors import StoreError
from sidecar.processes import connections_that_fit, tell_ready
from sidecar.settings import Settings
from sidecar.settings.checks import LOADED_OF_A_LINE
from sidecar.settings.kinds import base_url
from sidecar.store.database import Database
from sidecar.upstreams import LOOKUP_S

log = structlog.get_logger()

STREAMS_END_S = 2
"""Longest time that a stop waits for replies: a stream of events may go on for an hour."""
PRUNE_S = 3_600.0
"""Interval of looking for adapter folders that nothing needs any more."""


class _Server(uvicorn.Server):
    """A server that leaves signals to the process: uvicorn would raise them again at its end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def admin_server(app: ASGIApp) -> uvicorn.Server:
    """Build the admin API's server, which trusts no header about a request's source address."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=AdminConnection,
        ws="none",
        timeout_graceful_shutdown=STREAMS_END_S,
        proxy_headers=False,  # any local caller could write another source into the audit
    )
    return _Server(config)


async def serve(settings: Settings, database: Database) -> int:
    """Run until SIGTERM or SIGINT. Returns: 0, or 1 when the admin address cannot be bound."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        listener = _listen(settings.admin.host, settings.admin.port)
    except OSError as error:
        # The errno of a host name that cannot be resolved is negative.
        known = error.errno is not None and error.errno > 0
        why = os.strerror(error.errno or 0) if known else error.strerror
        setting = "admin.port" if error.errno == errno.EADDRINUSE else "admin.host"
        sys.stderr.write(
            f"sidecar control: cannot listen on {settings.admin.host}:{settings.admin.port} "
            f"({why}); set {setting}\n"
        )
        return 1
    with database.write() as session:
        for line in settings.lines:
            routing_writer.initialise(session, line.name, now=time.time(), actor=audit.CONTROL)
    _say_room(settings)
    sampler = gate_engine_of(settings)
    judges = ProcessJudges(settings.judge_of_gate, database)
    _say_examiner(settings)
    try:
        await _run(settings, database, sampler, judges.patient, listener, stop)
    finally:
        await sampler.aclose()
        await judges.aclose()
    return 0


def _say_room(settings: Settings) -> None:
    """Log how many adapters the lines want loaded; a warning when vLLM has less room."""
    lines, room = settings.lines, settings.serving.max_loras
    needed = LOADED_OF_A_LINE * len(lines)
    told = log.warning if room < needed else log.info
    told("adapters_wanted", lines=len(lines), needed=needed, max_loras=room)


def _say_examiner(settings: Settings) -> None:
    """Log who judges the gate; a warning when the reward marks its own exam."""
    examiner = examiner_of(settings)
    log.info(
        "gate_judge",
        judge=examiner.model,
        rubric_hash=examiner.rubric_hash,
        passes=examiner.passes,
    )
    if examiner.warning:
        log.warning("gate_judge_gives_reward", why=examiner.warning)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on the first address of the host, IPv4 before IPv6. Raises: OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server(address, family=family)


async def _run(
    settings: Settings,
    database: Database,
    sampler: ReplicaSampler,
    judge: Judge,
    listener: socket.socket,
    stop: asyncio.Event,
) -> None:
    model = settings.serving.model
    lease = Lease(database, own_id(settings.state_dir))
    folder_of = make_folder_of(settings)
    engines = Engines(settings, database, acts=lambda: lease.acts, folder_of=folder_of)
    await engines.follow()
    fleet, on_change = engines.fleet, engines.wake
    outside = Caller()
    tended = [
        LineLoops(
            settings.of_line(line),
            database,
            engines.controls,
            sampler,
            judge,
            fleet,
            outside,
            on_change,
            acts=lambda: lease.acts,
        )
        for line in settings.lines
    ]

    async def beat() -> None:
        acted = lease.acts
        if await asyncio.to_thread(lease.beat) and not acted:
            on_change()

    sender = Sender(model, outside)
    hooks = Hooks(database, settings.notify, sender)
    pruner = make_pruner(settings, database)

    async def prune() -> None:
        now, loaded = time.time(), engines.loaded()
        done = await in_folder_thread(pruner.prune, now=now, actor=audit.CONTROL, loaded=loaded)
        for one in done.fates:
            if one.goes:
                log.info("adapter_removed", adapter=one.version.name, why=one.why)
            elif one.failed:
                log.warning("adapter_not_removed", adapter=one.version.name, reason=one.why)

    loops = [
        Loop("lease", beat, lambda: BEAT_S),
        *(loop for one in tended for loop in one.loops(lease)),
        Loop("hooks", lease.only_acting(hooks.tick), lambda: telling.EVERY_S),
        Loop("prune", lease.only_acting(prune), lambda: PRUNE_S),
    ]
    if engines.follows_dns:
        loops.append(Loop("vLLMs", engines.follow, lambda: LOOKUP_S))
    context = AdminContext(
        database=database,
        model=model,
        lines=settings.lines,
        rules=settings.canary,
        judge=settings.judge,
        groups=settings.groups,
        rehearsals=settings.rehearsals,
        most_pending_groups=settings.learner.max_groups,
        fleet=fleet,
        watch=settings.watch,
        hooks=tuple(settings.notify.hooks),
        tokens=settings.admin.tokens,
        on_change=on_change,
        learner=settings.learner,
        examiner=examiner_of(settings),
        loops=lambda: {loop.name: loop.view for loop in (*loops, *engines.loops)},
        lease=lambda: (lease.acts, lease.other),
    )
    AdminConnection.most = connections_that_fit(MOST, files_each=1)
    server = admin_server(with_page(context))
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener])),
        *(asyncio.create_task(loop.run()) for loop in loops),
    ]
    host, port = listener.getsockname()[:2]
    log.info("control_ready", admin=base_url(host, port), model=model)
    tell_ready(base_url(host, port))
    waiting = asyncio.create_task(stop.wait())
    # Only the admin server's task may end by itself; the process must not continue without it.
    await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    for task in (waiting, *tasks[1:]):
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    await outside.aclose()
    for one in tended:
        await one.controller.settle()
    await engines.aclose()
    try:
        await asyncio.to_thread(lease.give_back)
    except StoreError as error:  # the next one waits LEASE_S
        log.warning("lease_not_given_back", reason=str(error))
    log.info("control_stopped")


def make_pruner(settings: Settings, database: Database) -> Pruner:
    """Build what removes adapter folders, from the settings."""
    rules = settings.adapters
    rule = FolderRule(folder_days=rules.folder_days, keep_champions=KEEP_CHAMPIONS)
    folders = settings.learner.adapters_dir
    shared = shared_folders(settings)
    return Pruner(database=database, adapters_dir=folders, rule=rule, shared=shared)

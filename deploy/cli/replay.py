"""`sidecar replay`: an adapter answers recorded traffic beside the champion, before any user."""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.context import Project, open_store, settings_of
from deploy.cli.output import Output, note, read_length, say_either
from sidecar.processes import INTERRUPTED

if TYPE_CHECKING:
    from deploy.canary.replay import Load, Prompt, Replay
    from deploy.engine.vllm_control import VllmControl
    from deploy.records import Canary
    from sidecar.settings import Settings
    from sidecar.store.database import Database

Folders = dict[str, tuple[str, str]]
"""Name of an adapter -> its folder, as vLLM reads it, and its digest (SHA-256, hex)."""
EXITS = {"undecided": 3, "worse": 4}
"""Exit codes of verdicts; 1 is of a replay without one."""
FOLDER_NAME = "replay-"
"""Beginning of the name under which vLLM has a folder that is no version."""
TELL_EVERY = 10


def replay(
    context: typer.Context,
    candidate: Annotated[
        str, typer.Argument(help="a version, an alias, `base`, or a PEFT folder that vLLM can read")
    ],
    against: Annotated[str, typer.Option(help="a version, an alias or `base`")] = "champion",
    since: Annotated[str, typer.Option(help="how far back: 12h, 7d, 8w")] = "7d",
    prompts: Annotated[
        int, typer.Option(min=1, max=2_000, help="most prompts; each costs a group of the gate")
    ] = 200,
    project: Project = None,
    output: Output = "text",
) -> None:
    """Ask recorded prompts again, of an adapter and the champion, and judge both blind.

    It runs on a host that reaches the store, vLLM and the judge. Users go before it, and no user
    meets the adapter. It decides nothing. Ctrl-C ends it with what it has."""
    from dataclasses import asdict

    from deploy.canary.replay import ReplayError, lines_of
    from deploy.examiner import examiner_of
    from sidecar.logs import configure_logging

    settings = settings_of(context, project)
    length_s = read_length(since)
    if length_s is None:
        raise typer.BadParameter(f"{since}: give a number and m, h, d or w, such as 7d")
    if settings.tasks_are_examined:
        raise ReplayError(
            "candidates are examined by whole tasks (rehearsals.url): single answers say nothing "
            "of them; see `sidecar canary get`"
        )
    if not examiner_of(settings).model:
        raise ReplayError("no judge is set: name one in judge.model")
    configure_logging(settings.telemetry, "replay")  # to stderr
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, lambda *_: signal.raise_signal(signal.SIGINT))
    begun_at = time.time()
    begins_at = max(0.0, begun_at - length_s)
    with open_store(settings, contents=True) as database:
        drawn, trial, folders = _drawn(settings, database, candidate, against, begins_at, prompts)
        if len(drawn) == prompts:  # older ones were not drawn
            begins_at = max(begins_at, min(one.asked_at for one in drawn))
        made, interrupted = asyncio.run(_play(settings, database, trial, drawn, folders))
    report = made.report(since=begins_at)
    say_either(output, asdict(report), lines_of(report))
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.difference is None:
        raise typer.Exit(1)
    raise typer.Exit(EXITS.get(report.verdict, 0))


def _drawn(
    settings: Settings, database: Database, candidate: str, against: str, since: float, limit: int
) -> tuple[list[Prompt], Canary, Folders]:
    """Draw the prompts. Returns: them, what is compared, and the folders of both.

    Raises: ReplayError; UnknownAdapterError; InvalidAdapterError.
    """
    from deploy.canary.replay import ReplayError, draw
    from deploy.engine.validation import Registered, validate_folder
    from deploy.errors import UnknownAdapterError
    from deploy.line_loops import make_folder_of, serving_limits
    from deploy.records import trial_of
    from deploy.registry import versions
    from learner.adapter_folder import folder_digest
    from sidecar.records import BASE

    line, folders = settings.line, Folders()
    with database.read() as session:
        champion = versions.resolve(session, line.name, against)
        try:
            name = versions.resolve(session, line.name, candidate)
        except UnknownAdapterError:
            folder = Path(candidate).resolve()
            if not candidate or not folder.is_dir():
                raise UnknownAdapterError(f"{candidate!r} is no version, alias or folder") from None
            digest = folder_digest(folder)
            validate_folder(folder, Registered(digest=digest), serving_limits(settings.serving))
            name = f"{FOLDER_NAME}{digest[:12]}"
            folders[name] = str(folder), digest
        for one in {name, champion} - {BASE, *folders}:
            found = versions.find(session, one)
            folders[one] = make_folder_of(settings)(found.digest, found.path), found.digest
        if name == champion or len({digest for _, digest in folders.values()}) < len(folders):
            raise ReplayError(f"{candidate} is {against}: name another version by --against")
        trial = trial_of(line.name, name, champion, secrets.token_hex(16))
        drawn = draw(session, line, trial=trial, since=since, now=time.time(), limit=limit)
    if not drawn:
        raise ReplayError(
            "there is no held-out session of this time: give a longer --since, or raise "
            "groups.held_out_rate"
        )
    if len(drawn) < limit:
        note(f"{len(drawn)} held-out sessions are of this time; --prompts asks for {limit}")
    else:
        note(f"the newest {limit} held-out sessions of this time are asked; see --prompts")
    return drawn, trial, folders


async def _play(
    settings: Settings, database: Database, trial: Canary, drawn: list[Prompt], folders: Folders
) -> tuple[Replay, bool]:
    """Returns: the replay, and whether it was interrupted."""
    from deploy.canary.replay import Replay
    from deploy.line_loops import comparisons_at_once
    from ingest.judges.build import ProcessJudges
    from ingest.privacy.texts import JudgeView
    from ingest.vllm.watch import gate_engine_of

    rules, asked = settings.canary, len(drawn)
    judges = ProcessJudges(settings.judge_of_gate, database)
    sampler = gate_engine_of(settings, max_slowdown=settings.groups.max_slowdown)
    parallel = comparisons_at_once(settings)

    def progress(done: int) -> None:
        if done // TELL_EVERY > (done - parallel) // TELL_EVERY or done == asked:
            note(f"{done} of {asked} prompts asked")

    try:
        async with _loaded(settings, database, folders) as load:
            made = Replay(
                trial,
                sampler=sampler,
                room=sampler,
                judge=judges.patient,
                rules=rules,
                judging=settings.judge_of_gate,
                view=JudgeView(settings.privacy),
                parallel=parallel,
                load=load,
            )
            interrupted = False
            try:
                await made.run(drawn, progress)
            except asyncio.CancelledError:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would cost the report
                note("interrupted: what follows is what was found until now")
                interrupted = True
            return made, interrupted
    finally:
        await sampler.aclose()
        await judges.aclose()


@asynccontextmanager
async def _loaded(settings: Settings, database: Database, folders: Folders) -> AsyncIterator[Load]:
    """Have every vLLM that serves users load both adapters; at the end those that loaded one for
    this alone unload it. Yields: what loads them again where they are lacking.

    A replay that was killed leaves its folder loaded: the next one unloads it. One that runs beside
    this one loads it again.
    """
    from sqlalchemy.exc import SQLAlchemyError

    from deploy.canary.replay import ReplayError
    from deploy.engine.engines import vllm_client
    from deploy.engine.reconcile import read_desired
    from deploy.engine.vllm_control import VllmControl, load_checked
    from deploy.errors import EngineError
    from sidecar.errors import StoreError
    from sidecar.upstreams import Upstreams

    upstreams = Upstreams(settings.serving.upstreams)
    controls: dict[str, VllmControl] = {}
    ours, cleaned = set[tuple[str, str]](), set[str]()
    one_at_a_time, loads = asyncio.Lock(), list[asyncio.Task[None]]()
    async with AsyncExitStack() as clients:

        async def load_into(url: str) -> None:
            if url not in controls:
                client = await clients.enter_async_context(vllm_client(settings, url))
                controls[url] = VllmControl(client)
            loaded = await controls[url].loaded()
            for name in loaded if url not in cleaned else ():
                if name.startswith(FOLDER_NAME) and name not in folders:
                    await controls[url].unload(name)
            cleaned.add(url)
            for name, (path, digest) in folders.items():
                if name not in loaded or name.startswith(FOLDER_NAME):
                    ours.add((url, name))
                if name not in loaded:
                    loading = load_checked(controls[url], name, path, digest)
                    loads.append(asyncio.create_task(loading))
                    await asyncio.shield(loads[-1])  # it can be undone only when it has ended

        async def load() -> None:
            """Raises: EngineError when no vLLM has both; as `load_checked`."""
            async with one_at_a_time:
                errors = list[EngineError]()
                urls = await asyncio.to_thread(upstreams.now)
                for url in urls if folders else ():
                    try:
                        await load_into(url)
                    except EngineError as error:
                        errors.append(error)
                if errors and len(errors) == len(urls):
                    raise errors[0]

        try:
            try:
                await load()
            except EngineError as error:
                raise ReplayError(
                    f"no vLLM can load {' and '.join(folders)} ({error}): see that it answers, and "
                    "that it reads their folders"
                ) from error
            yield load
        finally:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the report is not shown yet
            clients.callback(signal.signal, signal.SIGINT, before)
            await asyncio.gather(*loads, return_exceptions=True)
            own = [line.name for line in settings.lines[1:]]
            wanted: tuple[str, ...] | None = None
            try:
                read = partial(read_desired, database, settings.serving.model, own=own)
                wanted = (await asyncio.to_thread(read)).wanted
            except (StoreError, SQLAlchemyError) as error:  # a version may be another's by now
                note(f"only folders are unloaded: {error}")
            for url, name in ours:
                if name.startswith(FOLDER_NAME) or (wanted is not None and name not in wanted):
                    try:
                        await controls[url].unload(name)
                    except EngineError as error:
                        note(f"{url} still has {name} loaded: {error}")

"""The scoring process, `python -m ingest.score`: sample candidates, have the judge score them.

The workers share one event loop and exchange data only through the store. Without a judge neither
samples nor scores: candidates that are never scored would waste tokens. Groups of whole sessions
are drawn beside (`ingest.tasks`); those that outcomes alone reward need no judge. If best of N is
on, the same judge also chooses among the answers of requests whose users wait.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.processes import ends_in_one_line, missing_packages, raise_open_files

if TYPE_CHECKING:
    from sidecar.settings import Settings

PROCESS = "score"


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Returns: 0 after a signal, 1 when the store cannot be opened, 2 when the settings are wrong.
    """
    with ends_in_one_line("sidecar score"):
        return _main(argv)


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ingest.score", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="default ./sidecar.toml")
    arguments = parser.parse_args(argv)

    from sidecar.errors import SettingsError
    from sidecar.logs import configure_logging
    from sidecar.settings import load_settings
    from sidecar.tracing.telemetry import configure_tracing

    raise_open_files()
    try:
        settings = load_settings(arguments.config)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if settings.judge.model and (lacks := missing_packages("judge")):
        sys.stderr.write(f"sidecar score: {lacks}\n")
        return 1
    configure_logging(settings.telemetry, PROCESS)
    tracing = configure_tracing(settings.telemetry, PROCESS)
    try:
        return asyncio.run(_run(settings))
    finally:
        tracing.shutdown()


async def _run(settings: Settings) -> int:
    import structlog

    from sidecar.processes import tell_ready

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if not settings.judge.model:
        learns = settings.tasks.learn == "outcome" or settings.rehearsals.are_on
        end = "only whole tasks are learned from" if learns else "so nothing is learned"
        structlog.get_logger().warning(
            "score_off",
            why=f"judge.model is empty: no answer will be sampled or scored, {end}",
            to_do="set [judge] model (any LiteLLM name) or SIDECAR_JUDGE__MODEL, and restart",
        )
        if learns:
            from ingest.tasks.worker import draw_until

            return await draw_until(stop, settings)
        tell_ready()
        await stop.wait()
        return 0
    return await score_until(stop, settings)


async def score_until(stop: asyncio.Event, settings: Settings) -> int:
    """Run the workers, and answer best-of-N questions if that is on, until `stop` is set.

    An unexpected error in a worker ends the process; its supervisor restarts it.
    Returns: the process's exit code.
    """
    import structlog

    from ingest.best_of import BestOfJudge, BestOfServer
    from ingest.judge_noise import NoiseWatch, add_judgement
    from ingest.judges.build import ProcessJudges
    from ingest.privacy.screen import Screen
    from ingest.privacy.texts import JudgeView
    from ingest.ruler.judging import JudgingWorker
    from ingest.sampling.worker import SamplingWorker
    from ingest.tasks.judging import TaskJudging
    from ingest.tasks.rehearsals import RehearsalWorker
    from ingest.tasks.worker import TaskWorker
    from ingest.tokens import TokenCheck
    from ingest.verifiers.rewarding import open_rewarding
    from ingest.vllm.sampler import CheckedSampler
    from ingest.vllm.watch import engine_of
    from sidecar.errors import StoreError
    from sidecar.processes import open_report
    from sidecar.scoring import socket_path
    from sidecar.settings import open_keyring
    from sidecar.store.database import Database

    log = structlog.get_logger()
    serving = settings.serving
    try:
        database = Database(settings.store.url, open_keyring(settings.store))
        await asyncio.to_thread(database.upgrade)
    except StoreError as error:
        log.error("store_not_ready", error=str(error))
        return 1
    engine = engine_of(settings)
    judges = ProcessJudges(settings.judge, database, hurry_s=settings.best_of.timeout_s)
    sampling = SamplingWorker(
        database,
        CheckedSampler(engine, TokenCheck(serving.base_model_path)),
        engine,
        settings.groups,
        model=serving.model,
        logprobs_mode=serving.logprobs_mode,
        sampling_defaults=serving.sampling_defaults,
        screen=Screen(settings.privacy),
    )
    report = open_report()
    rewarding = open_rewarding(settings, database, announce=report.say)
    judging = JudgingWorker(
        database,
        judges.patient,
        settings.judge,
        view=JudgeView(settings.privacy),
        announce=report.say,
        rewarding=rewarding,
        on_scored=add_judgement,
        draw_seed=judges.draw_seed,
    )
    noise = NoiseWatch(
        database,
        judges.patient,
        settings.judge,
        view=JudgeView(settings.privacy),
        announce=report.say,
    )
    best_of = BestOfServer(
        socket_path(settings.state_dir), BestOfJudge(database, judges.hurried, settings)
    )
    report.ready()
    log.info("score_ready", judge=settings.judge.model, passes=settings.judge.passes)
    try:
        await judging.begin()  # before sampling, which waits for what the judge says
        async with asyncio.TaskGroup() as workers:
            if rewarding is not None:
                workers.create_task(rewarding.begin())
            workers.create_task(sampling.run(stop))
            workers.create_task(judging.run(stop))
            workers.create_task(noise.run(stop))
            if settings.tasks.learn != "off":
                view = JudgeView(settings.privacy)
                ranking = TaskJudging(database, judges.patient, settings.judge, view=view)
                workers.create_task(TaskWorker(database, settings.tasks, ranking).run(stop))
            if settings.rehearsals.are_on:
                workers.create_task(RehearsalWorker(database, engine, settings).run(stop))
            if settings.best_of.enabled:
                workers.create_task(best_of.run(stop))
    finally:
        if rewarding is not None:
            await rewarding.aclose()
        await judges.aclose()
        await engine.aclose()
        database.close()
        report.close()
    log.info("score_stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

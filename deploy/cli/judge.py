"""`sidecar judge`: how far a judge can be trusted."""

from __future__ import annotations

import asyncio
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.context import open_store, settings_of
from deploy.cli.output import Output, group, note, read_rubric, say_either
from deploy.text import shown_time
from sidecar.visible import counted

if TYPE_CHECKING:
    from ingest.calibration.figures import KnownGroup, Summary
    from ingest.calibration.running import Plan
    from ingest.judges.replies import KeptReplies
    from ingest.ruler.judge import Judge as AskedJudge
    from sidecar.settings import Judge, Privacy, Settings


judge_app = group("The judge.")
AT = "@http"
"""What separates a model from the URL of its server."""


@judge_app.command("calibrate")
def judge_calibrate(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(help="JSON lines with known scores or preferences; default: shipped groups"),
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(help="a LiteLLM model, or MODEL@URL; several times; default judge.model"),
    ] = None,
    rubric: Annotated[
        list[Path] | None,
        typer.Option(help="a file of plain text; several times; default judge.rubric"),
    ] = None,
    project: Annotated[
        list[str] | None, typer.Option(help="the rubric of this project; several times")
    ] = None,
    passes: Annotated[
        int | None, typer.Option(min=1, max=8, help="calls for a score; default judge.passes")
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, max=100, help="how often each group is judged anew")
    ] = 2,
    limit: Annotated[
        int | None, typer.Option(min=1, help="so many groups of the file, drawn at random")
    ] = None,
    seed: Annotated[int, typer.Option(help="draws groups, orders and intervals")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="a folder for the table, the figures and a plot")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="ask also what was asked before: use no kept reply")
    ] = False,
    output: Output = "text",
) -> None:
    """Compare judges and rubrics with known scores: agreement, position bias, noise, cost."""
    from ingest.calibration.running import Plan, draw, table_lines
    from sidecar.logs import configure_logging
    from sidecar.processes import INTERRUPTED

    settings = settings_of(context)
    judges = dict(_named(one, settings.judge) for one in judge or [settings.judge.model])
    rubrics = _rubrics(rubric or [], project or [], settings.judge)
    name, groups, left_out = _groups(file, limit, seed)
    plan = Plan(
        passes=passes or settings.judge.passes,
        repeats=repeat,
        concurrency=settings.judge.concurrency,
        seed=seed,
    )
    if out is not None:
        try:  # before the judge is paid
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(
                f"{out} cannot be made ({error.strerror}); name a folder that can be written",
                param_hint="--out",
            ) from None
    configure_logging(settings.telemetry, "judge")  # to stderr: stdout is the table's
    # With Python's own handler asyncio takes Ctrl-C: it cancels the calls before the command ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with _kept_replies(settings, no_cache) as kept:
            summaries = asyncio.run(_compare(judges, rubrics, groups, plan, settings.privacy, kept))
    except KeyboardInterrupt:
        # LiteLLM makes a coroutine in a thread, and a call that is cancelled never awaits it.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    lines = [
        f"{name}: {counted(len(groups), 'group')}, {repeat} x {plan.passes} calls each; in "
        "brackets 95% bootstrap intervals over groups",
        "",
        *table_lines(summaries),
    ]
    found = {
        "file": name,
        "groups": len(groups),
        "left_out": {why: len(ids) for why, ids in left_out.items()},
        **asdict(plan),
        "judges": [asdict(one) for one in summaries],
    }
    say_either(output, found, lines)
    if out is not None:
        _write(out, "calibration", lines, found, lambda path: draw(summaries, path))
    if any(not one.scored for one in summaries):
        note("a judge scored no group: see the failures, then `sidecar config check --online`")
        raise typer.Exit(1)


def _named(name: str, configured: Judge) -> tuple[str, Judge]:
    """What the table calls a judge of the command line, and its settings.

    The configured key, address and parameters are for the configured model, and for other models at
    the configured address, alone: no key is sent to another provider.
    """
    from pydantic import ValidationError

    from sidecar.hiding import hide_in_url
    from sidecar.settings import Judge

    model, at, address = name.partition(AT)
    url = f"http{address}" if at else None
    if not model:
        raise typer.BadParameter(
            "there is no judge: set judge.model, or name one (`openai/gpt-4.1-mini`, "
            "`hosted_vllm/qwen3@http://127.0.0.1:8000/v1`)",
            param_hint="--judge",
        )
    shown = f"{model}@{hide_in_url(url)}" if url else model
    if model == configured.model and url in (None, configured.api_base):
        return shown, configured
    key = configured.api_key if url is not None and url == configured.api_base else None
    try:
        made = Judge(model=model, api_base=url, api_key=key, timeout_s=configured.timeout_s)
    except ValidationError as error:
        raise typer.BadParameter(
            f"{name}: {error.errors()[0]['msg']}", param_hint="--judge"
        ) from None
    return shown, made


def _of_project(judge: Judge, project: str) -> Judge:
    """The settings with a project's rubric."""
    if project and project not in judge.projects:
        known = ", ".join(judge.projects) or "no project"
        raise typer.BadParameter(
            f"project {project} has no rubric of its own, {known} has: judge.projects",
            param_hint="--project",
        )
    return judge.of(project)


def _rubrics(files: list[Path], projects: list[str], judge: Judge) -> dict[str, str]:
    """The rubrics by the name that the table gives them."""
    if not files and not projects:
        return {"judge.rubric": judge.rubric}
    found = {f"judge.projects.{name}": _of_project(judge, name).rubric for name in projects}
    for path in files:
        found[str(path)] = read_rubric(path)
    return found


def _groups(
    file: Path | None, limit: int | None, seed: int
) -> tuple[str, list[KnownGroup], dict[str, list[str]]]:
    """The name of the file, its groups, and why others are left out: reason -> ids.

    Raises: CalibrationFileError.
    """
    import random

    from ingest.calibration.figures import left_out_lines, split_usable
    from ingest.calibration.running import read_groups
    from ingest.calibration.shipped import NAME, PATH
    from ingest.errors import CalibrationFileError

    path, name = (PATH, NAME) if file is None else (file, str(file))
    try:
        groups = read_groups(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"{path} cannot be read ({error}); name a file of JSON lines", param_hint="FILE"
        ) from None
    groups, left_out = split_usable(groups)
    for line in left_out_lines(left_out):
        note(f"{name}: {line}")
    if not groups:
        raise CalibrationFileError(f"{name}: no group is left; give scores that differ")
    if limit is not None and limit < len(groups):
        groups = random.Random(seed).sample(groups, limit)
    return name, groups, left_out


async def _compare(
    judges: dict[str, Judge],
    rubrics: dict[str, str],
    groups: list[KnownGroup],
    plan: Plan,
    privacy: Privacy,
    kept: KeptReplies | None,
) -> list[Summary]:
    """Ask one judge after the other, so that none slows another down.

    kept: keeps their replies; None: all are asked.
    """
    from ingest.calibration.figures import summarise
    from ingest.calibration.running import judge_groups
    from ingest.judges.replies import CachedJudge
    from ingest.privacy.texts import JudgeView
    from ingest.ruler.judge import LiteLlmJudge
    from ingest.ruler.prompt import rubric_hash

    view = JudgeView(privacy)
    opened = {name: LiteLlmJudge(settings) for name, settings in judges.items()}
    summaries = []
    try:
        for name, real in opened.items():
            asked: AskedJudge = real if kept is None else CachedJudge(real, judges[name], kept)
            for title, rubric in rubrics.items():
                calls = counted(len(groups) * plan.repeats * plan.passes, "call")
                note(f"asking {name} with {title}: {calls}, {plan.concurrency} at once")
                runs = await judge_groups(asked, groups, plan, rubric=rubric, view=view)
                summaries.append(
                    summarise(
                        runs,
                        judge=name,
                        rubric=title,
                        rubric_hash=rubric_hash(rubric),
                        seed=plan.seed,
                    )
                )
    finally:
        if kept is not None:
            await kept.aclose()
        for real in opened.values():
            await real.aclose()
    return summaries


@contextmanager
def _kept_replies(settings: Settings, no_cache: bool) -> Iterator[KeptReplies | None]:
    """Open the judges' replies that the store keeps; None: no store of this version, none made."""
    from sqlalchemy import make_url

    from ingest.judges.replies import open_kept
    from sidecar.errors import StoreError
    from sidecar.settings import open_keyring
    from sidecar.store.database import Database
    from sidecar.store.engines import newest_revision

    url = make_url(settings.store.url)
    missing = url.get_backend_name() == "sqlite" and not Path(url.database or "").exists()
    if no_cache or missing:
        yield None
        return
    database = Database(settings.store.url, open_keyring(settings.store))
    try:
        try:
            usable = database.revision() == newest_revision()
        except StoreError as error:
            note(f"no reply is kept: {error}")
            usable = False
        yield open_kept(database) if usable else None
    finally:
        database.close()


def _write(
    out: Path, name: str, lines: list[str], found: Any, draw: Callable[[Path], None]
) -> None:
    import json

    from sidecar.visible import visible

    try:
        shown = "".join(f"{visible(line)}\n" for line in lines)
        (out / f"{name}.txt").write_text(shown, encoding="utf-8")
        (out / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        try:
            draw(out / f"{name}.png")
        except ImportError:
            note("there is no plot: matplotlib is not installed (`pip install matplotlib`)")
    except OSError as error:
        note(f"{out}: cannot be written ({error.strerror}); the figures are above")
        raise typer.Exit(1) from None
    note(f"wrote {out}/{name}.*")


@judge_app.command("noise")
def judge_noise(
    context: typer.Context,
    accept: Annotated[
        bool, typer.Option("--accept", help="take the judge as it is now for the one to be")
    ] = False,
    project: Annotated[
        str, typer.Option(help="the rubric of this project; default judge.rubric")
    ] = "",
    output: Output = "text",
) -> None:
    """Show the measured noise, position bias and drift of judge.model with a rubric."""
    from time import time

    from deploy.text import table_lines
    from ingest.judge_noise import accept_now, figures_of, noise_by_day, read_noise_state
    from ingest.ruler.prompt import hash_of

    judge = (settings := settings_of(context)).judge
    hashed = hash_of(_of_project(judge, project))
    with open_store(settings) as database:
        if accept:
            at = accept_now(database, judge, now=time())
            if at is None:
                note("the judge has not been checked yet: nothing to accept")
                raise typer.Exit(1)
            note(f"later checks are compared with that of {shown_time(at, time())}")
        with database.read() as session:
            days = noise_by_day(session, judge.model, hashed)
            state = read_noise_state(session)
    drift = state.drift if state is not None and state.judge_model == judge.model else ""
    found = [figures_of(day, sums, judge.passes) for day, sums in days]
    of_judge = {"judge_model": judge.model, "rubric_hash": hashed, "passes": judge.passes}
    of = counted(judge.passes, "pass", "passes")
    lines = [f"{judge.model}, rubric {hashed[:12]}: noise of a score over {of}"]
    if drift:
        lines.append(f"the judge is NOT AS IT WAS: {drift}")
    if days:
        heads = ("day (UTC)", "groups", "noise sd", "of a pass", "position slope", "flips")
        lines += ["", *table_lines(heads, [[*map(str, one.values())] for one in found])]
    else:
        lines.append("nothing is known yet: no group has been scored in two passes")
    say_either(output, {**of_judge, "drift": drift, "days": found}, lines)

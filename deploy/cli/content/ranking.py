"""`sidecar judge sessions`: recorded sessions of one task, ranked by the judge."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.context import settings_of
from deploy.cli.output import Output, note, require_store, say, say_json

if TYPE_CHECKING:
    from ingest.trajectories.recorded import RecordedTrajectory
    from ingest.trajectories.records import TrajectoryScore
    from sidecar.settings import Settings


def judge_sessions(
    context: typer.Context,
    sessions: Annotated[
        list[str],
        typer.Argument(
            help="2 to 16 sessions of one task: ids, or names in `x-sidecar-session` "
            "(PROJECT/NAME; of the project `default` the name alone)"
        ),
    ],
    rubric: Annotated[
        Path | None,
        typer.Option(help="a file of plain text; default: that of the sessions' project"),
    ] = None,
    passes: Annotated[
        int | None, typer.Option(min=1, max=8, help="judge calls; default judge.passes")
    ] = None,
    output: Output = "text",
) -> None:
    """Rank whole recorded sessions of one task against each other, beside their outcomes.

    Stores nothing. The judge sees them as it sees groups: secrets and personal data are hidden.
    """
    from ingest.privacy.judge_view import NotRedactedError
    from ingest.ruler.prompt import rubric_hash
    from ingest.trajectories.functions import GroupSizeWarning, size_advice
    from sidecar.logs import configure_logging

    settings = settings_of(context)
    if not settings.judge.model:
        raise typer.BadParameter("there is no judge: set judge.model", param_hint="SESSIONS")
    given = None if rubric is None else _text(rubric)
    configure_logging(settings.telemetry, "judge")  # to stderr
    found = _load(settings, sessions)
    words = _rubric_of(settings, found) if given is None else given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GroupSizeWarning)  # said below, as a note
        try:
            scores = asyncio.run(_score(settings, found, words, passes or settings.judge.passes))
        except NotRedactedError as error:
            note(f"{error}; nothing was sent (privacy.max_bytes limits how much is searched)")
            raise typer.Exit(1) from None
    if (advice := size_advice(len(found))) is not None:
        note(f"warning: {advice}")
    if not scores[0].judged:
        note(scores[0].explanation)
    order = sorted(range(len(found)), key=lambda at: -scores[at].score)
    rows = [_row(found[at], scores[at]) for at in order]
    if output == "json":
        shown = settings.judge.show_reasoning
        hashed = rubric_hash(words, show_reasoning=shown)
        say_json({"judge": settings.judge.model, "rubric_hash": hashed, "sessions": rows})
        return
    for row in rows:
        outcome = ", ".join(
            f"{name} {row[name]}"
            for name in ("success", "reward", "feedback_score")
            if row[name] is not None
        )
        say(f"{row['score']:.3f}  {row['session']}  {outcome or 'no outcome'}")
        for line in row["explanation"].splitlines():
            say(f"       {line}")


def _load(settings: Settings, names: Sequence[str]) -> list[RecordedTrajectory]:
    from ingest.errors import UnreadableExchangesError
    from ingest.trajectories.recorded import load_trajectory
    from ingest.trajectories.records import TrajectoriesError
    from sidecar.settings import open_keyring
    from sidecar.store.database import Database

    require_store(settings.store.url)
    with closing(Database(settings.store.url, open_keyring(settings.store))) as database:
        database.upgrade_if_behind()
        found = []
        for name in names:
            try:
                with database.read() as session:
                    found.append(load_trajectory(session, name))
            except UnreadableExchangesError as error:
                raise TrajectoriesError(f"session {name} cannot be read: {error}") from None
    known = [one.session_id for one in found]
    if len(set(known)) < len(known):
        raise TrajectoriesError("a session is named twice, or by two of its names; name it once")
    return found


async def _score(
    settings: Settings, found: Sequence[RecordedTrajectory], rubric: str, passes: int
) -> list[TrajectoryScore]:
    from ingest.privacy.judge_view import JudgeView
    from ingest.ruler.judge import LiteLlmJudge
    from ingest.trajectories.functions import merged_tools, ruler_scores

    lists = [one.messages for one in found]
    if len({str(messages[0]) for messages in lists}) > 1:
        note(
            "warning: these sessions begin with different messages; compare those of one task only"
        )
    judge = LiteLlmJudge(settings.judge)
    try:
        return await ruler_scores(
            lists,
            judge,
            rubric=rubric,
            tools=merged_tools([one.tools for one in found]),
            passes=passes,
            show_reasoning=settings.judge.show_reasoning,
            view=JudgeView(settings.privacy),
        )
    finally:
        await judge.aclose()


def _rubric_of(settings: Settings, found: Sequence[RecordedTrajectory]) -> str:
    """Return the rubric of the sessions' projects. Scores by two rubrics would not compare."""
    rubrics = {settings.judge.of(one.project).rubric: one.project for one in found}
    if len(rubrics) > 1:
        one, other, *_ = sorted(rubrics.values())
        raise typer.BadParameter(
            f"the sessions are of projects with different rubrics ({one}, {other}); name one by "
            "--rubric",
            param_hint="SESSIONS",
        )
    return next(iter(rubrics))


def _row(found: RecordedTrajectory, score: TrajectoryScore) -> dict[str, Any]:
    return {
        "session": found.session_id,
        "score": score.score,
        "judged": score.judged,
        "explanation": score.explanation,
        "exchanges": found.exchanges,
        "messages": len(found.messages),
        **found.outcome,
    }


def _text(path: Path) -> str:
    try:
        words = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(
            f"{path} cannot be read ({error}); name a file of plain text", param_hint="--rubric"
        ) from None
    if not words.strip():
        raise typer.BadParameter(f"{path} is empty", param_hint="--rubric")
    return words

"""`sidecar exchanges`: what agents asked and were answered: read from the store, or imported."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from deploy.cli.context import Project, admin_client, open_store, settings_of, show
from deploy.cli.files import new_file
from deploy.cli.output import (
    Output,
    Reason,
    completed_by,
    group,
    note,
    read_length,
    read_rubric,
    refuse_unknown,
    say,
    say_either,
    say_json,
)
from deploy.text import shown_time
from sidecar.errors import OutboxError
from sidecar.replies.parts import answer_text
from sidecar.visible import counted

if TYPE_CHECKING:
    from deploy.forgetting import Report, Target
    from ingest.trajectories.recorded import RecordedTrajectory
    from ingest.trajectories.records import TrajectoryScore
    from sidecar.capture.outbox import OutboxReader
    from sidecar.feedback import Feedback
    from sidecar.records import Exchange
    from sidecar.settings import Settings
    from sidecar.store.database import Database


exchanges_app = group("Recorded exchanges: list, show, export, import.")
FORMS = ("jsonl", "trl-sft", "trl-preference", "art")
SNIPPET = 60
"""Characters of the last message in a listing."""
SessionOption = Annotated[
    str,
    typer.Option(
        "--session",
        help="of this session: its id, or its name in `x-sidecar-session` (PROJECT/NAME; of the "
        "project `default` the name alone), also one that a client gave a part of it only",
    ),
]
UserOption = Annotated[str, typer.Option("--user", help="of this user")]
AdapterOption = Annotated[str, typer.Option("--adapter", help="answered by it; `base` without one")]
SinceOption = Annotated[str, typer.Option("--since", help="not older than this: 12h, 30d, 8w")]


@exchanges_app.command("ls")
def exchanges_ls(
    context: typer.Context,
    session: SessionOption = "",
    user: UserOption = "",
    adapter: AdapterOption = "",
    since: SinceOption = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="how many, the newest first")] = 20,
    output: Output = "text",
) -> None:
    """The newest exchanges, one line each, with the beginning of the last message."""
    from ingest.export import exchange_object
    from ingest.store.listing import newest_exchanges

    with open_store(settings_of(context), contents=True) as database:
        wanted = _wanted(session, user, adapter, since)
        records = list(newest_exchanges(database, wanted, limit=limit))
        whole = output == "json"  # a line of text tells nothing of feedback
        found = [
            exchange_object(one, _told(database, one)) if whole else exchange_object(one)
            for one in _sound(iter(records), Counter())
        ]
    if len(records) == limit:  # whether there is one more may take a search of the whole store
        note(f"the newest {limit} are shown, and there may be more: --limit takes up to 1000")
    if output == "json":
        say_json(found)
        return
    now = time.time()
    for one in found:
        say(
            f"{one['exchange_id']}  {shown_time(one['at'], now)}  session {one['session']} "
            f"turn {one['turn']}  {one['adapter']}  {one['status']} {one['selection']}  "
            f"{_snippet(one['request'])!r}"
        )
    if not found:
        note("no exchange is stored that fits")


@exchanges_app.command("show")
def exchanges_show(context: typer.Context, exchange_id: str, output: Output = "text") -> None:
    """One exchange: its record, what was told of it, the messages, the answers."""
    from ingest.errors import UnreadableExchangesError
    from ingest.export import exchange_object
    from ingest.feedback.signals import in_words, since_answer, tool_results
    from ingest.feedback.store import Annotations, annotations_of
    from ingest.sessions.rows import conversation_of
    from ingest.store.exchanges import load_exchange

    with open_store(settings_of(context), contents=True) as database, database.read() as session:
        try:
            stored = load_exchange(session, exchange_id)
        except UnreadableExchangesError as error:
            note(_unreadable(f"exchange {exchange_id}", "; ".join(error.damage.values())))
            raise typer.Exit(1) from None
        told = annotations_of(session, [exchange_id]).get(exchange_id, Annotations())
    if stored is None:
        note(f"no exchange {exchange_id}; `sidecar exchanges ls` names them")
        raise typer.Exit(1)
    found = exchange_object(stored, told)
    messages = conversation_of(stored.exchange.request).messages
    found["tools"] = in_words(tool_results(since_answer(messages)))
    if output == "json":
        say_json(found)
        return
    request, answers = found.pop("request"), found.pop("answers")
    told_lines = [f"feedback: {_words(one)}" for one in found.pop("feedback")]
    told_lines += [f"outcome: {_words(one)}" for one in found.pop("outcomes")]
    told_lines += [f"signal: {_words(one)}" for one in found.pop("signals")]
    for name, value in found.items():
        if value not in (None, "", {}):
            say(f"{name}: {_words(value) if isinstance(value, dict) else _word(name, value)}")
    for line in told_lines:
        say(line)
    asked = request.get("messages") if isinstance(request, dict) else None
    for message in asked if isinstance(asked, list) else [request]:
        _say_message("asked", message)
    for answer in answers:
        _say_message(f"answer {answer['index']} ({answer['finish_reason']})", answer["message"])


@exchanges_app.command("export")
def exchanges_export(
    context: typer.Context,
    form: Annotated[
        str,
        typer.Option(
            "--form",
            autocompletion=completed_by(*FORMS),
            help="jsonl: exchanges; trl-sft: prompts and answers; trl-preference: best and worst "
            "answer of each scored group; art: scored groups",
        ),
    ] = "jsonl",
    out: Annotated[Path | None, typer.Option(help="a new file; default: standard output")] = None,
    session: SessionOption = "",
    user: UserOption = "",
    adapter: AdapterOption = "",
    since: SinceOption = "",
    limit: Annotated[int | None, typer.Option(min=1, help="at most; default: all")] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="held-out sessions too, in jsonl and trl-sft")
    ] = False,
) -> None:
    """Write exchanges or scored groups as JSON lines, the newest first.

    Held-out sessions are left out: they examine adapters, and must not be trained on elsewhere.
    """
    from ingest import export as forms
    from ingest.store.listing import newest_exchanges, newest_scored_groups

    refuse_unknown("--form", form, FORMS)
    written: Counter[str] = Counter()
    with open_store(settings_of(context), contents=True) as database, _lines(out) as file:
        wanted = _wanted(session, user, adapter, since, held_out=None if held_out else False)
        if form in ("jsonl", "trl-sft"):
            write = forms.exchange_object if form == "jsonl" else forms.prompt_completion
            records = newest_exchanges(database, wanted, limit=limit)
            _export(database, records, write, file, written)
        else:
            if user:
                note("--user is of exchanges; a group is found by its session")
                raise typer.Exit(2)
            write_group = forms.preference if form == "trl-preference" else forms.art_group
            groups = newest_scored_groups(database, wanted, limit=limit)
            _export(database, groups, write_group, file, written)
    left = f", {written['left_out']} left out (not in this form)" if written["left_out"] else ""
    if written["locked"]:
        left += f", {written['locked']} left out (their key is missing)"
    note(f"wrote {counted(written['lines'], 'line')}{left}")
    if written["locked"]:
        raise typer.Exit(1)


LOGS = ("litellm", "langfuse", "tensorzero")
"""Keys of `ingest.importing.FORMS`, which is loaded with the command alone."""
RENDERED = ("messages", "tools", "chat_template_kwargs")
"""Members of a chat request that its prompt is made of."""
RENDER_S = 30.0
BATCH, WAITING = 50, 100
"""Records that are written before those that wait on the bus are counted, and how many may wait: an
import must not take the room of the proxy's."""
UNREAD_S = 60.0
"""How long a bus is waited for that nothing reads."""


@exchanges_app.command("import")
def exchanges_import(
    context: typer.Context,
    log: Annotated[str, typer.Argument(help=" | ".join(LOGS), autocompletion=completed_by(*LOGS))],
    files: Annotated[list[Path], typer.Argument(help="JSON lines, or one array of objects")],
    project: Annotated[str, typer.Option(help="whose exchanges they become")] = "default",
    score: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME=BAD:GOOD: a score of the log that becomes feedback, and the values "
            "that mean -1 and 1 (0:1 if not given); repeat it for more"
        ),
    ] = None,
) -> None:
    """Import the log of another gateway: its prompts start groups, its sessions are held out.

    What its models answered is shown, and never trained on. Rows that are no chat are left out and
    counted. The same row imported again has no effect. It goes through the bus of this host, as the
    proxy's records do: ingest must run here, or with Kafka a proxy.
    """
    from ingest.importing import Import
    from sidecar.bounds import PROJECT

    settings = settings_of(context)
    refuse_unknown("LOG", log, LOGS)
    if not PROJECT.fullmatch(project):
        raise typer.BadParameter(
            "letters, digits, '.', '_' and '-', 64 at most", param_hint="--project"
        )
    with _renderer(settings) as render:
        work = Import(
            log,
            public_model=settings.serving.model,
            project=project,
            scores=dict(map(_score_range, score or ())),
            render=render,
        )
        try:
            rows = work.read(files)
            imported = _to_bus(settings, map(work.record, rows))
        except OSError as error:  # an OutboxError too
            note(f"{error}; what is imported stays; run the command again to go on")
            raise typer.Exit(1) from None
    exchanges, scores = imported["exchanges"], imported["scores"]
    sent = f"{counted(exchanges, 'exchange')}, {counted(scores, 'score')}"
    say(f"sent to ingest, which stores each row once: {sent}")
    for reason, number in sorted(work.left_out.items()):
        say(f"left out: {number} {reason}")
    if work.left_out and not imported:
        raise typer.Exit(1)


def _score_range(text: str) -> tuple[str, tuple[float, float]]:
    name, given, values = text.partition("=")
    low, _, high = values.partition(":")
    try:
        found = (float(low), float(high)) if given else (0.0, 1.0)
    except ValueError:
        found = (0.0, 0.0)
    if found[0] == found[1] or not all(map(math.isfinite, found)):
        raise typer.BadParameter(f"{text}: NAME=BAD:GOOD, two numbers", param_hint="--score")
    return name, found


@contextmanager
def _renderer(
    settings: Settings,
) -> Iterator[Callable[[dict[str, Any]], tuple[Sequence[int], int] | None]]:
    """Yield a function that asks a vLLM for the token ids of a chat request's prompt, and how many
    more it takes; it returns None for a request that vLLM refuses, and raises OSError when no vLLM
    answers."""
    import httpx

    from sidecar.upstreams import Upstreams

    key = settings.serving.api_key
    headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
    urls = deque(Upstreams(settings.serving.upstreams).now())
    with httpx.Client(headers=headers, timeout=RENDER_S) as client:

        def ask(request: dict[str, Any]) -> httpx.Response:
            asked = {name: request[name] for name in RENDERED if name in request}
            body = {"model": settings.serving.model, **asked}
            return client.post(f"{urls[0]}/tokenize", json=body)

        def render(request: dict[str, Any]) -> tuple[Sequence[int], int] | None:
            why = "serving.upstreams has no vLLM now"
            for _ in range(len(urls)):
                try:
                    reply = ask(request)
                    if reply.status_code in (400, 413, 422):
                        return None
                    found = reply.raise_for_status().json()
                    room = found["max_model_len"] - found["count"]
                    return (tuple(found["tokens"]), room) if room > 0 else None
                except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                    status = isinstance(error, httpx.HTTPStatusError) and error.response.status_code
                    why = (
                        f"vLLM at {urls[0]} renders no prompt (POST /tokenize: "
                        f"{status or repr(error)}); a router before it must pass that path on"
                    )
                try:  # is it the prompt, or vLLM?
                    ask({"messages": [{"role": "user", "content": "hi"}]}).raise_for_status()
                    return None
                except httpx.HTTPError:
                    urls.rotate(-1)
            raise OSError(why)

        yield render


def _to_bus(settings: Settings, records: Iterable[Exchange | Feedback | None]) -> Counter[str]:
    """Write records to the bus, in batches, as fast as it is read. Raises: OutboxError."""
    from sidecar.capture.outbox import Outbox, OutboxReader, outbox_path
    from sidecar.feedback import Feedback, encode_feedback
    from sidecar.records import encode_exchange
    from sidecar.settings import open_keyring

    path = outbox_path(settings.bus.url, settings.state_dir)
    keyring = open_keyring(settings.store)
    outbox = Outbox(path, max_bytes=settings.bus.max_bytes, keyring=keyring)
    written: Counter[str] = Counter()
    with closing(outbox), closing(OutboxReader(path)) as reader:
        for record in records:
            if record is None:
                continue
            if sum(written.values()) % BATCH == 0:
                _wait_for_room(reader)
            if isinstance(record, Feedback):
                kind, name, packed = "scores", record.feedback_id, encode_feedback(record)
            else:
                kind, name, packed = "exchanges", record.exchange_id, encode_exchange(record)
            if not outbox.append([(name, packed)]):
                raise OutboxError("full", "the bus is full")
            written[kind] += 1
    return written


def _wait_for_room(reader: OutboxReader) -> None:
    """Wait until few records wait on the bus: the proxy's need the room. Raises: OutboxError."""
    waiting, since = reader.count(), time.monotonic()
    while (now := reader.count()) > WAITING:
        if now < waiting:
            waiting, since = now, time.monotonic()
        elif time.monotonic() - since > UNREAD_S:
            raise OutboxError("full", f"{now} records wait on the bus, and nothing reads it")
        time.sleep(0.2)


def _export(
    database: Any,
    records: Iterator[Any],
    form: Callable[[Any, Any], dict[str, Any] | None],
    file: TextIO,
    written: Counter[str],
) -> None:
    for record in _sound(records, written):
        line = form(record, _told(database, record))
        if line is None:
            written["left_out"] += 1
            continue
        file.write(json.dumps(line) + "\n")
        written["lines"] += 1


def _told(database: Any, record: Any) -> Any:
    """What was told of an exchange, or of the exchange of a scored group."""
    from ingest.feedback.store import Annotations, annotations_of

    of = record.group if hasattr(record, "group") else record.exchange
    with database.read() as session:
        return annotations_of(session, [of.exchange_id]).get(of.exchange_id, Annotations())


def _words(one: dict[str, Any]) -> str:
    """The members that say something, in one line."""
    return ", ".join(
        f"{name} {_word(name, value)}" for name, value in one.items() if value not in (None, "", {})
    )


def _word(name: str, value: Any) -> str:  # Any: JSON
    if name == "at" or name.endswith("_at"):
        return shown_time(value, time.time())
    return value if isinstance(value, str) else json.dumps(value)


def _sound(records: Iterator[Any], left_out: Counter[str]) -> Iterator[Any]:
    """Leave records out that cannot be read; each is named on stderr. left_out: counts under
    `locked` those whose key is missing."""
    from ingest.store.listing import Unreadable
    from sidecar.store.keyring import missing_key

    for record in records:
        if isinstance(record, Unreadable):
            left_out["locked"] += bool(missing_key(record.why))
            note(f"left out: {_unreadable(record.name, record.why)}")
        else:
            yield record


def _unreadable(name: str, why: str) -> str:
    from sidecar.store.keyring import missing_key

    if said := missing_key(why):
        return f"{name} {said}; add it to store.encryption_key_file"
    return f"{name} is damaged: {why}"


@contextmanager
def _lines(out: Path | None) -> Iterator[TextIO]:
    """Open a new file that only its owner can read: it holds what users wrote."""
    if out is None:
        yield sys.stdout
        return
    try:
        with new_file(out) as file:
            yield file
    except OSError as error:
        note(
            f"{out} cannot be written ({error.strerror or error}), and no part of it is kept; name "
            "a new file in a writable folder that has room"
        )
        raise typer.Exit(1) from None


def _wanted(
    session: str, user: str, adapter: str, since: str, *, held_out: bool | None = None
) -> Any:
    from ingest.store.listing import Wanted

    length_s = read_length(since) if since else 0
    if length_s is None:
        raise typer.BadParameter(f"{since}: give a number and m, h, d or w, such as 30d")
    return Wanted(
        session=session or None,
        user=user or None,
        adapter=adapter or None,
        since=time.time() - length_s if since else None,
        held_out=held_out,
    )


def _snippet(request: Any) -> str:  # Any: JSON
    messages = request.get("messages") if isinstance(request, dict) else None
    last = messages[-1] if isinstance(messages, list) and messages else request
    content = last.get("content") if isinstance(last, dict) else last
    text = content if isinstance(content, str) else json.dumps(content)
    return text if len(text) <= SNIPPET else f"{text[: SNIPPET - 1]}…"


def _say_message(title: str, message: Any) -> None:  # Any: JSON
    known = message if isinstance(message, dict) else {"content": message}
    say(f"--- {title}: {known.get('role', 'request')}")
    content = known.get("content")
    plain = content is None or isinstance(content, str)
    for line in (answer_text(known) if plain else json.dumps(content)).splitlines():
        say(line)
    calls = known.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        say(f"tool call: {json.dumps(call)}")


# `sidecar forget`: remove what a user, a session or an exchange said. Works with and without the
# processes, on the store itself and on the files of this machine.


def forget(
    context: typer.Context,
    user: Annotated[str, typer.Option(help="as the agent named it in `x-sidecar-user`")] = "",
    session: Annotated[
        str,
        typer.Option(
            help="its id, of any project; or its name in `x-sidecar-session`, as PROJECT/NAME; of "
            "the project `default` NAME is enough where it holds no `/`"
        ),
    ] = "",
    exchange: Annotated[str, typer.Option(help="id of one exchange")] = "",
    retire: Annotated[
        bool,
        typer.Option("--retire", help="go back to the newest champion that did not learn from it"),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    all_callers: Annotated[
        bool,
        typer.Option("--all-callers", help="also when several keys or users share the session"),
    ] = False,
    vacuum: Annotated[
        bool, typer.Option("--vacuum", help="rewrite a large file too; writers wait meanwhile")
    ] = False,
    output: Output = "text",
) -> None:
    """Remove content for good, and name the adapters that learned from it.

    Exit codes: 0 done, also when nothing was found; 1 something is left, run it again; 2 bad use.
    """
    from deploy.forgetting import forget as forget_target
    from sidecar.errors import OutboxError

    target = _target(user=user, session=session, exchange=exchange)
    settings = settings_of(context)
    with open_store(settings, contents=True) as database:
        if target.kind == "session" and not all_callers:
            _refuse_shared(database, target)
        if not yes:
            _ask(database, settings, target)
        try:
            report = forget_target(
                database, settings, target, now=time.time(), retire=retire, vacuum=vacuum
            )
        except (OutboxError, OSError) as error:
            note(f"not finished: {error}; run the command again, it does what is left")
            raise typer.Exit(1) from None
    say_either(output, report.as_json(), _forget_lines(report, target, retire=retire))
    if report.traces:
        raise typer.Exit(1)


def _target(*, user: str, session: str, exchange: str) -> Target:
    from deploy.forgetting import Target

    if sum(map(bool, (user, session, exchange))) != 1:
        note("name one of --user, --session and --exchange")
        raise typer.Exit(2)
    if user:
        return Target("user", user)
    return Target("session", session) if session else Target("exchange", exchange)


def _refuse_shared(database: Database, target: Target) -> None:
    """End the command when the session holds what several callers said: they may have nothing to
    do with each other."""
    from deploy.forgetting import callers_of

    callers, exchanges = callers_of(database, target)
    if callers > 1:
        note(
            f"the session {target.name} holds {exchanges} exchanges of {callers} callers (keys or "
            "users); name one user (--user) or exchange (--exchange), or say --all-callers"
        )
        raise typer.Exit(2)


def _ask(database: Database, settings: Settings, target: Target) -> None:
    """Say what would go, lines of others that only hold the name too, and ask."""
    from deploy.forgetting import count_mentions, exchanges_of, files_with_lines

    if not sys.stdin.isatty():
        note("this cannot be undone; say --yes")
        raise typer.Exit(2)
    number = sum(len(page) for page in exchanges_of(database, target))
    found = counted(number, "stored exchange")
    say(f"{found} of the {target.kind} {target.name}. This cannot be undone.")
    for path in files_with_lines(settings.state_dir, settings.telemetry.spans_file):
        if lines := count_mentions(path, target.mention):
            hold = "holds the name: it is blanked, whoever it is about"
            if lines > 1:
                hold = "hold the name: they are blanked, whoever they are about"
            say(f"{counted(lines, 'line')} of {path} {hold}.")
    if not typer.confirm("Forget them?"):
        raise typer.Exit(1)


def _forget_lines(report: Report, target: Target, *, retire: bool) -> Iterator[str]:
    if not report.anything:
        yield (
            f"Nothing was found of the {target.kind} {target.name}: it was forgotten before, or "
            "the name is written otherwise."
        )
    yield (
        f"Removed: {counted(report.exchanges, 'exchange')}, {counted(report.groups, 'group')}, "
        f"{counted(report.feedback, 'record')} of feedback, "
        f"{counted(report.on_the_bus, 'record')} on the bus of this machine, "
        f"{counted(report.dead_letters, 'record')} set aside."
    )
    for path, lines in report.lines.items():
        yield f"Blanked {counted(lines, 'line')} of {path}."
    if not report.adapters:
        yield "No adapter has learned from it."
    for name in report.adapters:
        yield f"Learned from it: {name}"
    if report.rolled_back_to is not None:
        yield f"Rolled back to {report.rolled_back_to}."
    elif report.adapters and not retire:
        yield "They are marked and serve on; --retire takes them out of the traffic."
    for why in report.traces:
        yield f"Not removed yet: {why}."
    for what in report.notes:
        yield f"Note: {what}."


# `sidecar judge sessions`: recorded sessions of one task, ranked by the judge.


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
    from ingest.privacy.texts import NotRedactedError
    from ingest.ruler.prompt import rubric_hash
    from ingest.trajectories.scoring import GroupSizeWarning, size_advice
    from sidecar.logs import configure_logging

    settings = settings_of(context)
    if not settings.judge.model:
        raise typer.BadParameter("there is no judge: set judge.model", param_hint="SESSIONS")
    given = None if rubric is None else read_rubric(rubric)
    configure_logging(settings.telemetry, "judge")  # to stderr
    found = _load(settings, sessions)
    words = _rubric_of(settings, found) if given is None else given
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GroupSizeWarning)  # said below, as a note
        try:
            scores = asyncio.run(_score(settings, found, words, passes or settings.judge.passes))
        except NotRedactedError as error:
            note(f"{error}; nothing was sent")
            raise typer.Exit(1) from None
    if (advice := size_advice(len(found))) is not None:
        note(f"warning: {advice}")
    if not scores[0].judged:
        note(scores[0].explanation)
    order = sorted(range(len(found)), key=lambda at: -scores[at].score)
    rows = [_ranking_row(found[at], scores[at]) for at in order]
    if output == "json":
        hashed = rubric_hash(words)
        say_json({"judge": settings.judge.model, "rubric_hash": hashed, "sessions": rows})
        return
    for row in rows:
        outcome = ", ".join(
            f"{name} {row[name]}"
            for name in ("success", "reward", "feedback_score", "tools")
            if row[name] is not None
        )
        say(f"{row['score']:.3f}  {row['session']}  {outcome or 'no outcome'}")
        for line in row["explanation"].splitlines():
            say(f"       {line}")


def _load(settings: Settings, names: Sequence[str]) -> list[RecordedTrajectory]:
    from ingest.errors import UnreadableExchangesError
    from ingest.trajectories.recorded import load_trajectory
    from ingest.trajectories.records import TrajectoriesError

    with open_store(settings, contents=True) as database:
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
    from ingest.privacy.texts import JudgeView
    from ingest.ruler.judge import LiteLlmJudge
    from ingest.trajectories.scoring import merged_tools, ruler_scores

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


def _ranking_row(found: RecordedTrajectory, score: TrajectoryScore) -> dict[str, Any]:
    return {
        "session": found.session_id,
        "score": score.score,
        "judged": score.judged,
        "explanation": score.explanation,
        "exchanges": found.exchanges,
        "messages": len(found.messages),
        **found.outcome,
    }


# `sidecar groups`: the groups of answers, their scores, and why some were set aside.

groups_app = group("Groups of answers, and their scores.")


def _statuses() -> list[str]:
    from deploy.admin.paging import GROUP_STATUSES

    return list(GROUP_STATUSES)


@groups_app.command("ls")
def groups_ls(
    context: typer.Context,
    status: Annotated[
        str, typer.Option(help="such as sampled, scored or set_aside", autocompletion=_statuses)
    ] = "",
    reason: Annotated[str, typer.Option(help="such as judge_rejected")] = "",
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many, the newest first")] = 50,
    project: Project = None,
    output: Output = "text",
) -> None:
    """The newest groups of all lines, one a row; `groups show` has all that is known of one."""
    if status:
        refuse_unknown("--status", status, _statuses())
    wanted: dict[str, str | int] = {"status": status, "reason": reason, "limit": limit}
    given = {name: value for name, value in wanted.items() if value}
    show(admin_client(context, project), output, "/groups", params=given)


@groups_app.command("show")
def groups_show(
    context: typer.Context, group_id: str, project: Project = None, output: Output = "text"
) -> None:
    """One group: what was asked, and each answer with its score, explanation and checks."""
    show(admin_client(context, project), output, "/groups", group_id)


# `sidecar tasks`: the groups of whole sessions.

tasks_app = group("Groups of whole sessions, and their rewards.")


@tasks_app.command("ls")
def tasks_ls(
    context: typer.Context,
    status: Annotated[str, typer.Option(help="such as waiting, scored or set_aside")] = "",
    limit: Annotated[int, typer.Option(min=1, max=200, help="how many, the newest first")] = 50,
    project: Project = None,
    output: Output = "text",
) -> None:
    """The newest groups of whole sessions of all lines, one a row."""
    given: dict[str, str | int] = {"limit": limit, **({"status": status} if status else {})}
    show(admin_client(context, project), output, "/task-groups", params=given)


@tasks_app.command("show")
def tasks_show(
    context: typer.Context, group_id: str, project: Project = None, output: Output = "text"
) -> None:
    """One group of whole sessions: each session with its reward, and how many turns it has."""
    show(admin_client(context, project), output, "/task-groups", group_id)


@groups_app.command("retry")
def groups_retry(
    context: typer.Context,
    group_ids: Annotated[list[str] | None, typer.Argument(help="ids of groups")] = None,
    every: Annotated[
        str,
        typer.Option("--all", metavar="WHY", help="up to 500 of this, such as judge_rubbish"),
    ] = "",
    reason: Reason = None,
    output: Output = "text",
) -> None:
    """Give groups that the judge or a verifier gave up back to it, by id or the newest of a reason.

    One whose prompt or adapter is gone is refused. Exit code 1: every one of them is."""
    if bool(group_ids) == bool(every):
        raise typer.BadParameter("name groups, or --all of a reason", param_hint="GROUP_IDS")
    body: dict[str, Any] = {"of_reason": every} if every else {"groups": group_ids}
    given = {} if reason is None else {"reason": reason}
    show(admin_client(context), output, "/groups", "retry", method="POST", body={**body, **given})

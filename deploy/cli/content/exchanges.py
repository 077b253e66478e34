"""`sidecar exchanges`: what agents asked and were answered, read from the store itself."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from deploy.cli.context import settings_of
from deploy.cli.files.whole_file import new_file
from deploy.cli.output import (
    Output,
    completed_by,
    note,
    refuse_unknown,
    require_store,
    say,
    say_json,
)
from deploy.cli.times import read_length, shown_time
from sidecar.plurals import counted
from sidecar.replies.parts import answer_text

exchanges_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Recorded exchanges: list, show, export."
)
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
    from ingest.export.forms import exchange_object
    from ingest.store.listing import newest_exchanges

    with _store(context) as database:
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
    from ingest.export.forms import exchange_object
    from ingest.feedback.reading import Told, told_of
    from ingest.store.exchanges import load_exchange

    with _store(context) as database, database.read() as session:
        try:
            stored = load_exchange(session, exchange_id)
        except UnreadableExchangesError as error:
            note(_unreadable(f"exchange {exchange_id}", "; ".join(error.damage.values())))
            raise typer.Exit(1) from None
        told = told_of(session, [exchange_id]).get(exchange_id, Told())
    if stored is None:
        note(f"no exchange {exchange_id}; `sidecar exchanges ls` names them")
        raise typer.Exit(1)
    found = exchange_object(stored, told)
    if output == "json":
        say_json(found)
        return
    request, answers = found.pop("request"), found.pop("answers")
    told_lines = [f"feedback: {_words(one)}" for one in found.pop("feedback")]
    told_lines += [f"outcome: {_words(one)}" for one in found.pop("outcomes")]
    told_lines += [f"signal: {_words(one)}" for one in found.pop("signals")]
    for name, value in found.items():
        say(f"{name}: {shown_time(value, time.time()) if name == 'at' else value}")
    for line in told_lines:
        say(line)
    messages = request.get("messages") if isinstance(request, dict) else None
    for message in messages if isinstance(messages, list) else [request]:
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
    from ingest.export import forms
    from ingest.store.listing import newest_exchanges, newest_scored_groups

    refuse_unknown("--form", form, FORMS)
    written: Counter[str] = Counter()
    with _store(context) as database, _lines(out) as file:
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
    from ingest.feedback.reading import Told, told_of

    of = record.group if hasattr(record, "group") else record.exchange
    with database.read() as session:
        return told_of(session, [of.exchange_id]).get(of.exchange_id, Told())


def _words(one: dict[str, Any]) -> str:
    """The members that say something, in one line."""
    return ", ".join(
        f"{name} {shown_time(value, time.time()) if name.endswith('at') else value}"
        for name, value in one.items()
        if value not in (None, "", {})
    )


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


@contextmanager
def _store(context: typer.Context) -> Iterator[Any]:
    from sidecar.settings import open_keyring
    from sidecar.store.database import Database

    store = settings_of(context).store
    require_store(store.url)
    database = Database(store.url, open_keyring(store))
    try:
        database.upgrade_if_behind()
        yield database
    finally:
        database.close()


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

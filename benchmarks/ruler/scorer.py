"""The real scoring process, a store of sampled groups for it, and an account of what it did."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.ruler.material import MadeGroup
from benchmarks.ruler.server import ROOT, Json
from ingest.records import Answer, Group
from ingest.store.exchanges import save_exchange
from ingest.store.groups import mark_sampled, save_group
from sidecar.records import Choice, Exchange, Sampling, Timings
from sidecar.store.database import Database

BATCH = 100
TOKENS = 120
"""Token ids and log-probabilities of an answer, about as its text has."""
WRITTEN = """
CREATE TABLE bench_written (group_id TEXT, place INTEGER);
CREATE TRIGGER bench_scored AFTER UPDATE OF score ON answer WHEN NEW.score IS NOT NULL
BEGIN INSERT INTO bench_written VALUES (NEW.group_id, NEW."index"); END;
"""
"""Notes each score that is written, whatever the product counts itself."""


def fill(folder: Path, made: Sequence[MadeGroup]) -> Path:
    """Make a store with these groups, sampled and waiting for the judge. Returns: its file."""
    path = folder / "store.db"
    database = Database(f"sqlite:///{path}")
    database.upgrade()
    for at in range(0, len(made), BATCH):
        with database.write() as session:
            for number, one in enumerate(made[at : at + BATCH], start=at):
                exchange, group = _records(number, one)
                save_exchange(session, exchange, held_out=False, now=1.0)
                save_group(session, group, now=1.0)
                mark_sampled(session, group.group_id)
    database.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(WRITTEN)
    return path


def _records(number: int, made: MadeGroup) -> tuple[Exchange, Group]:
    request = {"model": "m", "messages": list(made.context)}
    if made.tools:
        request["tools"] = list(made.tools)
    body = json.dumps(request).encode()
    messages = [json.dumps(answer).encode() for answer in made.answers]
    ids, logprobs = tuple(range(TOKENS)), (-0.25,) * TOKENS
    exchange = Exchange(
        exchange_id=f"x{number}",
        surface="chat",
        public_model="m",
        adapter="base",
        arm="champion",
        propensity=1.0,
        replica="http://127.0.0.1:1",
        session_key=f"m:{number}",
        request=body,
        choices=(Choice(index=0, message=messages[0], token_ids=ids, logprobs=logprobs),),
        prompt_token_ids=ids,
        sampling=Sampling(),
        stream=False,
        status=200,
        outcome="ok",
        timings=Timings(started_at=1.0),
    )
    answers = tuple(
        Answer(
            index=place,
            origin="sampled" if place else "served",
            message=message,
            token_ids=ids,
            logprobs=logprobs,
        )
        for place, message in enumerate(messages)
    )
    group = Group(
        group_id=f"g{number}",
        exchange_id=exchange.exchange_id,
        session_key=exchange.session_key,
        adapter="base",
        request=body,
        prompt_token_ids=ids,
        answers=answers,
    )
    return exchange, group


@contextmanager
def scoring(
    folder: Path, judge_url: str, *, concurrency: int, timeout_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m ingest.score` with the settings as shipped but these. No vLLM is there."""
    config = folder / "sidecar.toml"
    lines = [
        f"state_dir = {json.dumps(str(folder))}",
        "[serving]",
        'upstreams = ["http://127.0.0.1:1"]',
        f'[store]\nurl = "sqlite:///{folder}/store.db"',
        '[judge]\nmodel = "openai/plain--score"',
        f'api_base = "{judge_url}"\napi_key = "none-is-asked"',
        f"concurrency = {concurrency}\ntimeout_s = {timeout_s}",
    ]
    config.write_text("\n".join(lines) + "\n")
    with (folder / "score.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ingest.score", "--config", str(config)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def highest_mb(pid: int) -> float:
    """Return the highest resident memory that the process had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} tells no VmHWM")


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process, its own and the kernel's for it."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def scored(store: Path) -> int:
    """Count the groups with scores."""
    with closing(sqlite3.connect(store)) as connection:
        rows = connection.execute("SELECT COUNT(*) FROM answer_group WHERE status = 'scored'")
        number: int = rows.fetchone()[0]
        return number


def claimed(store: Path, since: float) -> int:
    """Count the groups that the judge is asked about since then (Unix seconds), or was."""
    with closing(sqlite3.connect(store)) as connection:
        query = "SELECT COUNT(*) FROM answer_group WHERE status = 'sampled' AND judging_since >= ?"
        number: int = connection.execute(query, (since,)).fetchone()[0]
        return number


def account(store: Path) -> Json:
    """Count groups without scores, scores written more than once, and what the product counted."""
    with closing(sqlite3.connect(store)) as connection:

        def number(query: str) -> int:
            found: int = connection.execute(query).fetchone()[0] or 0
            return found

        repeated = "SELECT COUNT(*) AS n FROM bench_written GROUP BY group_id, place"
        return {
            "groups": number("SELECT COUNT(*) FROM answer_group"),
            "lost": number("SELECT COUNT(*) FROM answer_group WHERE status != 'scored'")
            + number("SELECT COUNT(*) FROM answer WHERE score IS NULL"),
            "doubled": number(f"SELECT SUM(n - 1) FROM ({repeated})"),
            "counted": number(
                "SELECT SUM(count) FROM counter WHERE stage = 'judging' AND reason = 'scored'"
            ),
        }

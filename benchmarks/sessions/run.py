"""`python -m benchmarks sessions`: how right session finders are on streams with known truth.

`session` and `parent` are shares of requests, with equal requests exchanged (`twins.py`); `by_name`
is the same without that, which has chance in it where conversations begin alike. `leak` is the
share of conversations partly held out and partly trained on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks import results
from benchmarks.results import Target, at_least, at_most
from benchmarks.sessions.finders import REFERENCES
from benchmarks.sessions.mixes import BY_NAME, MIXES, Mix
from benchmarks.sessions.product import by_ingest
from benchmarks.sessions.records import Finder
from benchmarks.sessions.scoring import Score, score
from benchmarks.sessions.streams import Data, at_once
from benchmarks.sessions.twins import twins_of

DATA = Path(__file__).resolve().parents[2] / ".bench" / "data"
COLUMNS = (
    "mix", "finder", "session", "parent", "session_by_name", "parent_by_name", "leak", "cpu_us",
    "conversations", "at_once", "requests",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sessions", description=__doc__)
    parser.add_argument("--mix", help=f"mixes, by comma: {', '.join(BY_NAME)}")
    parser.add_argument(
        "--finder",
        action="append",
        default=[],
        help="MODULE:NAME of a finder, which the targets judge in place of the product's own",
    )
    parser.add_argument("--seed", default="1")
    parser.add_argument("--data", type=Path, default=DATA, help="where the packages' data lie")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="where the JSON goes")
    chosen = parser.parse_args(argv)
    names = chosen.mix.split(",") if chosen.mix else list(BY_NAME)
    if unknown := [name for name in names if name not in BY_NAME]:
        parser.error(f"unknown mix {unknown[0]!r}; there are: {', '.join(BY_NAME)}")
    judged = {name: _finder(name) for name in chosen.finder} or {"ingest": by_ingest}
    try:
        data = Data.read(chosen.data)
    except OSError as error:
        print(f"bench sessions: no data ({error}); run benchmarks/sessions/setup", file=sys.stderr)
        return 1
    rows: list[results.Row] = []
    targets: list[Target] = []
    for mix in MIXES:
        if mix.name not in names:
            continue
        for name, row, got in _scores(mix, data, chosen.seed, {**REFERENCES, **judged}):
            rows.append(row)
            if name in judged:
                targets += _targets(mix, got)
        print(results.table(rows[-len(REFERENCES) - len(judged) :], COLUMNS), flush=True)
    if judged:
        print(results.targets_table(targets))
    partial = len(names) < len(BY_NAME)
    path = results.write(
        "sessions-part" if partial else "sessions",
        rows,
        targets,
        machine=results.machine(),
        folder=chosen.out,
    )
    print(f"\nwritten to {path}")
    return results.exit_code(targets)


def _finder(name: str) -> Finder:
    module, _, attribute = name.partition(":")
    finder: Finder = getattr(import_module(module), attribute)
    return finder


def _scores(
    mix: Mix, data: Data, seed: str, finders: dict[str, Finder]
) -> list[tuple[str, results.Row, Score]]:
    """Each finder's score on a mix."""
    stream = mix.make(data, f"{mix.name}-{seed}")
    twins = twins_of(stream)
    size = {
        "conversations": len({one.true_session for one in stream}),
        "at_once": at_once(stream),
        "requests": len(stream),
    }
    found: list[tuple[str, results.Row, Score]] = []
    for name, finder in finders.items():
        got = score(finder, stream, twins)
        row: results.Row = {
            "mix": mix.name,
            "finder": name,
            **{field: round(getattr(got, field), 4) for field in Score.__slots__},
            **size,
        }
        found.append((name, row, got))
    return found


def _targets(mix: Mix, got: Score) -> list[Target]:
    return [
        at_least(f"{mix.name}: right session", got.session, mix.target),
        at_least(f"{mix.name}: right parent", got.parent, mix.target),
        at_most(f"{mix.name}: leak", got.leak, 0.0),
    ]

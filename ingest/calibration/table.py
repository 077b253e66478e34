"""Show summaries side by side, as text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ingest.calibration.agreement import Interval
from ingest.calibration.summary import Summary
from sidecar.plurals import counted

Cell = Callable[[Summary], str]
Row = tuple[str, Cell]
Named = Callable[[Summary], Mapping[str, Interval]]
FEW = 5
"""Groups below which a bootstrap over groups says nothing: their number stands for the interval."""
FIGURES: Sequence[Row] = (
    ("runs with scores", lambda one: f"{one.scored} of {one.runs}"),
    ("rank agreement (tau-b)", lambda one: _interval(one.tau)),
    ("pairs right", lambda one: _interval(one.pairs_right, "{:.0%}")),
    ("first minus last position", lambda one: _interval(one.first_minus_last, "{:+.2f}")),
    ("pairs flipped by order", lambda one: _interval(one.flips, "{:.0%}")),
    ("agreement of repeats (tau-b)", lambda one: _interval(one.repeat_tau)),
    ("noise of a score (sd)", lambda one: _number(one.noise_sd, "{:.3f}")),
    ("unusable replies", lambda one: str(one.unusable_replies)),
    ("cost per group (USD)", lambda one: _number(one.usd_per_group, "{:.5f}")),
    ("tokens per group", lambda one: _number(one.tokens_per_group, "{:.0f}")),
    ("seconds per group", lambda one: _number(one.seconds_per_group, "{:.2f}")),
)


def table_lines(summaries: Sequence[Summary]) -> list[str]:
    """Return which column is which judge and rubric, the table, then what failed and why."""
    columns = [f"[{number}]" for number in range(1, len(summaries) + 1)]
    rows = [
        ["", *columns],
        *_cells(summaries, FIGURES),
        *_part(
            "pairs right, by the fault of the worse answer",
            _cells(summaries, _shares(summaries, lambda one: one.by_kind)),
        ),
        *_part(
            "pairs right, by task",
            _cells(summaries, _shares(summaries, lambda one: one.by_task)),
        ),
    ]
    widths = [max(len(row[k]) for row in rows if len(row) > 1) for k in range(len(columns) + 1)]
    named = list(zip(columns, summaries, strict=True))
    return [
        *(f"{column} {one.judge}, {one.rubric}" for column, one in named),
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        *(
            f"{column} {one.replayed} replies were paid for before and are not asked for again; "
            "cost, tokens and seconds are those of the other runs (--no-cache asks anew)"
            for column, one in named
            if one.replayed
        ),
        *(
            f"{column} {counted(failure.count, 'run')} failed: {failure.reason}"
            + (f": {failure.example}" if failure.example else "")
            for column, one in named
            for failure in one.failures
        ),
    ]


def _part(heading: str, rows: list[list[str]]) -> list[list[str]]:
    """Return rows under their heading; nothing without rows."""
    return [[heading], *rows] if rows else []


def _cells(summaries: Sequence[Summary], rows: Sequence[Row]) -> list[list[str]]:
    return [[name, *(cell(one) for one in summaries)] for name, cell in rows]


def _shares(summaries: Sequence[Summary], of: Named) -> list[Row]:
    names = sorted({name for one in summaries for name in of(one)})
    return [(f"  {name}", _share_of(name, of)) for name in names]


def _share_of(name: str, of: Named) -> Cell:
    def cell(one: Summary) -> str:
        found = of(one).get(name)
        return "-" if found is None else f"{found.value:.0%}"

    return cell


def _interval(found: Interval | None, form: str = "{:.2f}") -> str:
    if found is None:
        return "-"
    value, low, high = (form.format(one) for one in (found.value, found.low, found.high))
    if found.groups < FEW:
        return f"{value} ({'1 group' if found.groups == 1 else f'{found.groups} groups'})"
    return f"{value} [{low}, {high}]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)

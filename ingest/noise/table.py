"""The windows of a judge's noise as a text table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from sidecar.store.models import JudgeNoiseRow

HEAD = ("window", "until (UTC)", "passes", "groups", "noise sd", "of a pass", "position slope",
        "first - last", "shift", "flips", "drift")  # fmt: skip


def table_lines(rows: Sequence[JudgeNoiseRow]) -> list[str]:
    """Return the table's lines, one window a line, in the order of `rows`."""
    cells = [HEAD, *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def as_dict(row: JudgeNoiseRow) -> dict[str, object]:
    """Return a window by the names of its columns."""
    return {column.key: getattr(row, column.key) for column in JudgeNoiseRow.__table__.columns}


def _cells(row: JudgeNoiseRow) -> tuple[str, ...]:
    marks = ("" if row.whole else "+") + ("*" if row.reference else "")
    return (
        f"{row.window_number}{marks}",
        f"{datetime.fromtimestamp(row.at, UTC):%Y-%m-%d %H:%M}",
        str(row.passes),
        str(row.groups),
        f"{row.sd:.3f} [{row.sd_low:.3f}, {row.sd_high:.3f}]",
        f"{row.pass_sd:.3f}",
        f"{row.slope:+.3f} [{row.slope_low:+.3f}, {row.slope_high:+.3f}]",
        f"{row.first_minus_last:+.3f} "
        f"[{row.first_minus_last_low:+.3f}, {row.first_minus_last_high:+.3f}]",
        f"{row.shift:+.3f} [{row.shift_low:+.3f}, {row.shift_high:+.3f}]",
        f"{row.flips:.0%} [{max(0.0, row.flips_low):.0%}, {row.flips_high:.0%}]",
        row.drift or "",
    )

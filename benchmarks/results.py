"""What every benchmark leaves behind: rows, targets, one JSON file, one exit code."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("results")
Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that must hold."""

    what: str
    value: float | None
    """None: it could not be measured; `why` says the reason."""
    target: str
    """The bound in words and figures, such as "<= 1.6"."""
    holds: bool
    why: str = ""


def at_most(what: str, value: float | None, bound: float, why: str = "") -> Target:
    """A target that holds when the value is known and not over the bound."""
    holds = value is not None and value <= bound
    shown = None if value is None else round(value, 4)
    return Target(what=what, value=shown, target=f"<= {bound:g}", holds=holds, why=why)


def at_least(what: str, value: float | None, bound: float, why: str = "") -> Target:
    """A target that holds when the value is known and not under the bound."""
    holds = value is not None and value >= bound
    shown = None if value is None else round(value, 4)
    return Target(what=what, value=shown, target=f">= {bound:g}", holds=holds, why=why)


def exit_code(targets: Sequence[Target]) -> int:
    """1 when a target does not hold, else 0."""
    return 0 if all(target.holds for target in targets) else 1


def machine() -> dict[str, object]:
    """What ran it: enough to know whether two results may be compared."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def write(
    name: str,
    rows: Sequence[Row],
    targets: Sequence[Target],
    *,
    machine: Mapping[str, object],
    folder: Path = FOLDER,
) -> Path:
    """Write `<folder>/<name>.json`, whole or not at all. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {
        "name": name,
        "machine": dict(machine),
        "rows": [dict(row) for row in rows],
        "targets": [asdict(target) for target in targets],
    }
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)
    return path


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """The rows as text, one line each; a column that no row fills is left out."""
    shown = [column for column in columns if any(row.get(column) is not None for row in rows)]
    cells = [shown, *([_cell(row.get(column)) for column in shown] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(shown))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def targets_table(targets: Sequence[Target]) -> str:
    """The targets as text, the failed ones marked."""
    return "\n".join(
        f"{'holds' if target.holds else 'FAILS':5}  {_cell(target.value):>9}  "
        f"{target.target:>9}  {target.what}{f'  ({target.why})' if target.why else ''}"
        for target in targets
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)

"""The evidence of a canary, read as it comes: figures in rows, and e-values on a log axis. Pure.

The evidence is JSON whose entries the data dictionary lists (`canary.evidence`). Nothing here knows
which there are: a new one is shown without a change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.page.shown.charts import Chart, Line, number
from deploy.page.shown.times import clock
from deploy.page.shown.words import percent

CLAIMS = {
    "quality no worse": "no worse than the champion",
    "quality anchored": "no worse than the anchor",
    "quality better": "better than the champion",
    "quality over anchor": "better than the anchor",
    "quality champion over anchor": "the champion is better than the anchor",
    "quality harm": "worse than the champion",
    "guards failed": "guard: more failed replies than the champion",
    "guards cut": "guard: more replies cut by the client",
    "guards short": "guard: more short replies",
    "guards invalid": "guard: more invalid replies",
    "guards evasive": "guard: more evasive replies",
    "guards split": "guard: sessions are not split by the weight",
    "flaws short": "guard: more short answers in judged groups",
    "flaws invalid": "guard: more invalid answers in judged groups",
    "flaws evasive": "guard: more evasive answers in judged groups",
    "flaws narrow": "guard: more narrow answers in judged groups",
    "flaws long": "guard: more answers of twice the length in judged groups",
}
"""Last two parts of an e-value's path -> what it is evidence for; another one keeps its path."""
MOST_ROWS = 300
MOST_DEPTH = 4
_LONGEST = 500
"""Characters of a text that are shown."""
_FIRST_TIME = 1e9
"""2001 in Unix seconds: what is less is no time of a canary."""


def evidence_rows(evidence: Mapping[str, Any], now: float) -> list[tuple[str, str]]:
    """Return (name, value) of every figure, reason and list, names as paths: `gate / scored`."""
    found = []
    for path, value in _leaves(evidence, (), 0):
        found.append((" / ".join(map(_words, path)), _text(path[-1], value, now)))
        if len(found) == MOST_ROWS:
            break
    return found


def _leaves(value: Any, path: tuple[str, ...], depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and depth < MOST_DEPTH:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, str(name)), depth + 1)
    elif value is not None and value != {} and value != []:
        yield path, value


def _words(name: str) -> str:
    """A name of the evidence as words; the unit of a weight stands at its value."""
    return name.removesuffix("_bp").replace("_", " ")


def _text(name: str, value: Any, now: float, depth: int = 0) -> str:
    """name: the last part of the value's path, which tells times and weights from other numbers."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, int | float):
        return _number(name, value, now)
    if depth >= MOST_DEPTH:
        return "more, which is not shown"
    if isinstance(value, Mapping):
        parts = (
            f"{_words(str(key))} {_text(str(key), inner, now, depth + 1)}"
            for key, inner in value.items()
            if inner not in (None, "", {}, [])
        )
        return ", ".join(parts)[:_LONGEST]
    if isinstance(value, list):
        between = "; " if any(isinstance(one, Mapping) for one in value) else ", "
        return between.join(_text(name, one, now, depth + 1) for one in value)[:_LONGEST]
    return str(value)[:_LONGEST]


def _number(name: str, value: float, now: float) -> str:
    if name == "steps" or name.endswith("_bp"):
        return percent(value)
    # A count of groups ends with `_at` too (`reached_at`), and none is as large as a time.
    if (name in ("at", "since") or name.endswith("_at")) and value >= _FIRST_TIME:
        return f"{clock(value, now)} UTC"
    if name in ("at", "known_at") and value == 0.0:
        return "never"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def proof_chart(evidence: Mapping[str, Any]) -> Chart | None:
    """Return the e-values of the evidence as bars on a log axis, with their thresholds.

    An e-value of E refutes what it was made against at the level 1 / E. None while the evidence has
    none.
    """
    found = list(_e_values(evidence, (), 0))
    if not found:
        return None
    thresholds = sorted({limit for _, _, limit in found if limit is not None})
    return Chart(
        title="Evidence: how strongly each claim is proven (e-value, log axis)",
        x_label="claim",
        x=tuple(float(i) for i in range(len(found))),
        names=tuple(CLAIMS.get(name, name) for name, _, _ in found),
        series={"e-value": tuple(max(value, 1e-6) for _, value, _ in found)},
        lines=tuple(Line(label=f"proven at {limit:.4g}", y=limit) for limit in thresholds),
        beside={
            "proven at": tuple("–" if limit is None else f"{limit:.4g}" for _, _, limit in found)
        },
        log=True,
        bars=True,
    )


def _e_values(
    value: Any, path: tuple[str, ...], depth: int
) -> Iterator[tuple[str, float, float | None]]:
    """Yield (name, e-value, threshold) of every object that has an `e` (or its log, `nats`)."""
    if not isinstance(value, Mapping) or depth > MOST_DEPTH:
        return
    found = number(value.get("e"))
    nats = number(value.get("nats"))
    if found is None and nats is not None:
        found = math.exp(min(nats, 300.0))
    if found is not None and found >= 0.0:
        yield " ".join(path[-2:]), found, number(value.get("threshold"))
    for name, inner in value.items():
        yield from _e_values(inner, (*path, str(name).replace("_", " ")), depth + 1)

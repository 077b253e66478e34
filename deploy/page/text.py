"""Texts, rows and charts of the status page, made of replies of the admin API. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from deploy.admin.models import AuditOut, CanaryOut, StatusOut
from deploy.admin.out import ConditionOut, CostOut, FunnelOut, ProgressOut, StageOut
from deploy.admin.text import cost_words, killed_words, progress_words, running_words
from deploy.engine.reconcile import NOT_ASKED
from deploy.evidence.quality import CHART_LEVEL, EMPTY, bounds, observe
from deploy.records import comes_next, nobody_has, short
from deploy.registry.audit import CONTROL
from deploy.text import capital, moment, percent
from sidecar.hiding import hide_in_url
from sidecar.lines import Line, learner_of, line_of_adapter
from sidecar.visible import counted

# Figures as charts: series for the browser, and the same numbers for a table beside it. Pure.

MOST_POINTS = 2_000
"""A longer series is thinned out: no screen shows more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A threshold, drawn over the whole width."""

    label: str
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    x_label: str
    x: tuple[float, ...]
    series: Mapping[str, tuple[float | None, ...]]
    """Label -> a value for each x; None: not known."""
    lines: tuple[Threshold, ...] = ()
    log: bool = False
    bars: bool = False
    """Each x is a series of its own kind, named by `names`."""
    names: tuple[str, ...] = ()
    """Long ones would cover each other below the bars, so those have numbers there."""
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further columns of the table, which are not drawn."""

    @property
    def data(self) -> str:
        """JSON for the script that draws it. It stands in an attribute, which escapes it."""
        return json.dumps(
            {
                "x": self.x,
                "xLabel": self.x_label,
                "series": [{"label": label, "y": y} for label, y in self.series.items()],
                "lines": [{"label": line.label, "y": line.y} for line in self.lines],
                "log": self.log,
                "names": [str(place) for place, _ in enumerate(self.names, start=1)],
            }
        )

    def rows(self) -> list[tuple[str, ...]]:
        """The numbers as a table: x, then each series."""
        bars = tuple(f"{place}: {name}" for place, name in enumerate(self.names, start=1))
        names = bars or tuple(f"{x:g}" for x in self.x)
        more = self.beside.values()
        return [
            (
                name,
                *(shown(series[i]) for series in self.series.values()),
                *(column[i] for column in more),
            )
            for i, name in enumerate(names)
        ]


def shown(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def number(value: object) -> float | None:
    """A finite number of stored JSON; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


CURVES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Reward of each step's groups, sampled before the run",
        (("reward_mean", "mean reward"), ("reward_spread", "spread within groups")),
    ),
    ("Divergence, nats a token", (("approx_kl", "from the sampler"), ("kl_base", "from the base"))),
    ("Entropy, nats a token", (("entropy", "entropy"),)),
    ("Loss", (("loss", "loss"),)),
    ("Length, tokens an answer", (("answer_tokens", "tokens"),)),
    ("Share of tokens that the clip removes", (("clip_share", "share"),)),
)
"""Title -> (figure of a step, its label)."""


def run_charts(steps: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return the curves of a run. steps: the figures of each step, the first first."""
    kept = steps[:: max(1, math.ceil(len(steps) / MOST_POINTS))]
    x = tuple(number(one.get("step")) or float(i + 1) for i, one in enumerate(kept))
    found = []
    for title, figures in CURVES:
        series = {
            label: tuple(number(one.get(key)) for one in kept)
            for key, label in figures
            if any(number(one.get(key)) is not None for one in kept)
        }
        if series:
            found.append(Chart(title=title, x_label="step", x=x, series=series))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One comparison of a canary, as far as the chart needs it."""

    place: int | None
    """Its number in the order in which it counts; None in comparisons of older versions."""
    difference: float | None
    """The candidate's mean score minus the champion's, -1..1; None: not scored."""
    fault: str | None
    """Whose answers kept it from being scored."""

    @property
    def counts_as(self) -> float | None:
        """What the interval takes it for (`deploy.evidence.quality.add_group`); None: nothing."""
        return {"candidate": -1.0, "champion": 1.0}.get(self.fault or "", self.difference)


def difference_chart(
    compared: Iterable[Compared], margin: float, *, made: int, whole: tuple[object, object]
) -> Chart | None:
    """The mean judged difference after each comparison, in the order in which they count, with the
    interval that holds at every look; None without any.

    margin: loss that is accepted. made: number of all comparisons, of which these may be the
    newest. whole: the interval over all of them, which the evidence has.
    """
    ordered = sorted(compared, key=lambda one: -1 if one.place is None else one.place)
    known = [(i, one) for i, one in enumerate(ordered, start=1) if one.counts_as is not None]
    if not known:
        return None
    # An interval over a part of them would not be the one that the canary is judged by.
    cut = made > len(ordered)
    x, means, lows, highs = [], [], [], []
    total, sequence = 0.0, EMPTY
    for number_of, (i, one) in enumerate(known, start=1):
        value = one.counts_as or 0.0
        total += value
        sequence = observe(sequence, (1.0 + value) / 2.0, CHART_LEVEL)
        low, high = bounds(sequence, CHART_LEVEL)
        x.append(float(i if one.place is None else one.place))
        means.append(total / number_of)
        lows.append(2.0 * low - 1.0)
        highs.append(2.0 * high - 1.0)
    lines = [Threshold(label="equal", y=0.0), Threshold(label=f"margin {-margin:g}", y=-margin)]
    title = "Judged score of the candidate minus the champion's, mean so far"
    if cut:
        title += f": only the newest {len(ordered)} of {made} comparisons"
        for word, end in zip(("low", "high"), map(number, whole), strict=True):
            if end is not None:
                lines.append(Threshold(label=f"{word} end of the interval, by all {made}", y=end))
    series = {"mean difference": means}
    if not cut:
        series |= {"low end of the interval": lows, "high end of the interval": highs}
    step = max(1, math.ceil(len(known) / MOST_POINTS))
    return Chart(
        title=title,
        x_label="comparison",
        x=tuple(x[::step]),
        series={label: tuple(values[::step]) for label, values in series.items()},
        lines=tuple(lines),
    )


# Times for people who look at the page: short, in UTC, which the page says once. Pure.

UNITS = ((86_400.0, "day"), (3_600.0, "hour"), (60.0, "minute"), (1.0, "second"))


def clock(at: object, now: float) -> str:
    """`03:10`, `22 Nov 03:10`, `22 Nov 2025 03:10`: as short as it is clear. at: Unix seconds."""
    found, today = moment(at), moment(now)
    if found is None or today is None:
        return "an unreadable time"
    if found.date() == today.date():
        return f"{found:%H:%M}"
    if found.year == today.year:
        return f"{found.day} {found:%b %H:%M}"
    return f"{found.day} {found:%b %Y %H:%M}"


def iso(at: object) -> str:
    """The `datetime` attribute of a time; empty for what is none."""
    found = moment(at)
    return "" if found is None else f"{found:%Y-%m-%dT%H:%M:%SZ}"


def length(seconds: float) -> str:
    """`1 second`, `45 seconds`, `3 minutes`, `26 hours`, `2 days`. Hours go on to two days."""
    for unit_s, unit in UNITS:
        number = int(max(0.0, seconds) // unit_s)
        if number >= (2 if unit == "day" else 1):
            return f"{number} {unit}" if number == 1 else f"{number} {unit}s"
    return "less than a second"


def short_length(seconds: float) -> str:
    """A measured time: `412 ms`, `1.8 s`, `3 minutes`."""
    if (milliseconds := round(max(0.0, seconds) * 1000)) < 1000:
        return f"{milliseconds} ms"
    tenths = round(seconds, 1)
    return f"{tenths:.1f} s" if tenths < 60.0 else length(max(seconds, tenths))


# The first screen in words: what serves, what the candidate has, and what it waits for. Pure.


def share(part: float) -> str:
    """A share of 0..1; never 100.0% when something is missing."""
    return f"{min(part, 0.999):.1%}" if part < 1.0 else "100%"


def serves_since(champion: str, newest: Iterable[AuditOut]) -> float | None:
    """Return when the champion became champion; None when that is longer ago than the audit rows
    at hand. newest: the newest first."""
    for row in newest:
        if row.action == "alias.champion":
            return row.at if row.after.get("adapter") == champion else None
    return None


def champion_of(status: StatusOut) -> tuple[str, bool]:
    """Return whom the routing table names as champion, and whether no vLLM has loaded it."""
    champion = status.champion if status.routing is None else status.routing.champion
    replicas = status.engine.replicas.values()
    return champion, nobody_has(champion, (None if one.away else one.loaded for one in replicas))


def is_down(status: StatusOut) -> bool:
    """Return True when nobody answers users."""
    return status.engine.away not in (None, NOT_ASKED)


def waits_for(status: StatusOut) -> str:
    """Return what the canary waits for, in a headline's words; empty: nothing but the clock."""
    canary_id = "" if status.canary is None else status.canary.canary_id
    holds = (one for one in status.conditions if one.kind == "canary")
    return next((one.data["brief"] for one in holds if is_hold(one, canary_id)), "")


def is_hold(one: ConditionOut, canary_id: str) -> bool:
    return one.data.get("canary_id") == canary_id and "brief" in one.data


def headline(
    status: StatusOut, since: float | None, waits: str, now: float, next_step_at: float | None
) -> str:
    """Say in one sentence what users get. waits: what the canary waits for; empty: the clock."""
    champion, missing = champion_of(status)
    from_when = "" if since is None else f" since {clock(since, now)} UTC"
    first = f"{_upper(short(champion))} serves{from_when}"
    if missing:
        first = f"No vLLM has {short(champion)}, the champion: the base model answers in its place"
    canary, waiting = status.canary, status.queued
    after = "" if waiting is None else f" {_upper(short(waiting.candidate))} waits in the queue."
    silent = (one for one in status.conditions if one.code in SILENT)
    after += "".join(f" {capital(one.message)}." for one in silent)
    if is_down(status):
        told = "No vLLM can be reached, so users may get no answer"
        return f"{told}. {_upper(short(champion))} serves again when one answers.{after}"
    if canary is None:
        return f"{first}. No candidate is being tried.{after}"
    return f"{first}; {_candidate(canary, waits, now, next_step_at)}.{after}"


def _candidate(canary: CanaryOut, waits: str, now: float, next_step_at: float | None) -> str:
    name = short(canary.candidate)
    if canary.paused:
        return f"{name} is paused at {percent(canary.weight_bp)}"
    parts = [f"{name} gets {percent(canary.weight_bp)}"]
    if canary.state == "loading":
        since = clock(canary.step_started_at, now)
        parts = [f"{name} is being loaded into vLLM since {since} UTC"]
    elif canary.state == "gating":
        parts = [f"{name} is at the gate and gets no users yet"]
    elif next_step_at is not None and next_step_at > now:
        what = comes_next(canary.state, canary.step, canary.steps)
        parts.append(f"{what} {clock(next_step_at, now)} UTC at the earliest")
    if waits:
        parts.append(waits)
    return ", ".join(parts)


SILENT = ("ingest_down", "learner_away", "score_down")
"""Codes of processes that have not been heard of: what the page says of the rest may be old."""


def _upper(text: str) -> str:
    """`The base model`, but `v12` stays."""
    return text[:1].upper() + text[1:] if text.startswith("the ") else text


AWAY_S = 15 * 60.0
"""A visitor who looks again within this has not been away."""
KEPT_S = 90 * 86_400
"""How long the cookie keeps the last visit."""
_TIME, _NUMBER = r"([0-9]{1,12}\.[0-9]{1,17})", r"([0-9]{1,15})"
_COOKIE = re.compile("_".join((_TIME, _TIME, _NUMBER, _NUMBER)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """When the visitor looked, and what had been lost then."""

    before: float = 0.0
    """The end of the visit before this one; 0: there was none."""
    last: float = 0.0
    """The newest look."""
    lost_before: int = 0
    lost_last: int = 0
    """Captures lost since the store was made, as the proxies had told at those times."""

    def again(self, now: float, lost: int) -> Visits:
        """A look now. After some time away it begins a new visit."""
        before, lost_before = self.before, self.lost_before
        if self.last <= 0.0:
            before, lost_before = 0.0, lost
        elif now - self.last > AWAY_S:
            before, lost_before = self.last, self.lost_last
        return Visits(before=before, last=now, lost_before=lost_before, lost_last=lost)

    def seen(self, now: float, lost: int) -> Visits:
        """All of it has been seen."""
        return Visits(before=now, last=now, lost_before=lost, lost_last=lost)

    def cookie(self) -> str:
        """Both times are exact: rounded up, a look would be in the future, and what happened right
        behind it would count as seen; rounded down, what was seen would be news again."""
        return f"{self.before!r}_{self.last!r}_{self.lost_before}_{self.lost_last}"


def read_looked(cookie: str | None, now: float) -> Visits:
    """Read the cookie, which anybody may have written."""
    found = _COOKIE.fullmatch(cookie or "")
    if found is None:
        return Visits()
    before, last = float(found[1]), float(found[2])
    if max(before, last) > now:
        return Visits()
    return Visits(before=before, last=last, lost_before=int(found[3]), lost_last=int(found[4]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that an operator wants to know of."""

    at: float
    kind: str
    """good, bad or plain."""
    text: str
    reason: str
    by: str


def changes(rows: Iterable[AuditOut], candidates: Mapping[str, str], since: float) -> list[Change]:
    """Return promotions, rollbacks, rejections and the like since then, the newest first.

    rows: the newest first. candidates: canary id -> its candidate.
    """
    found = [row for row in rows if row.at > since]
    # Written right behind the end of the canary: where that one is listed, the rollback is too.
    undone = {row.before.get("canary") for row in found if row.action == "rollback"}
    return [one for row in found for one in _of(row, candidates, undone)]


def is_of_line(row: AuditOut, line: Line, candidates: Mapping[str, str]) -> bool:
    """Return True if an audit row is about a line of adapters, or about no line.

    candidates: canary id -> its candidate, of the line.
    """
    subject: str = row.subject
    if row.action.startswith("canary."):
        return subject in candidates
    if row.action.startswith("adapter."):
        return line_of_adapter(subject) == line.name
    if row.action == "rollback" or row.action.startswith("alias."):
        return subject == line.name
    if row.action.startswith("learner."):
        return subject == learner_of(line.name)
    return True


def _of(
    row: AuditOut, candidates: Mapping[str, str], undone: Container[object]
) -> Iterator[Change]:
    """undone: ids of canaries that a rollback ended."""
    candidate = short(candidates.get(row.subject, row.subject))
    texts = {
        "canary.promoted": ("good", f"{candidate} was promoted"),
        "canary.inconclusive": ("bad", f"the trial of {candidate} ended without a result"),
        "canary.paused": ("plain", f"the trial of {candidate} was paused"),
        "canary.resumed": ("plain", f"the trial of {candidate} went on"),
        "canary.queued": ("plain", f"{candidate} waits for its trial"),
        "canary.withdrawn": ("plain", f"{candidate} left the queue without a trial"),
        "canary.step_skipped": ("plain", f"a step of the trial of {candidate} was skipped"),
        "canary.taken_out": ("bad", f"a proxy took {candidate} out of traffic"),
        "adapter.registered": ("plain", f"{short(row.subject)} was made"),
        "adapter.retired": ("plain", f"{short(row.subject)} was retired without a trial"),
        "adapter.altered": ("bad", f"the files of {short(row.subject)} were altered"),
        "adapter.sound": ("plain", f"the files of {short(row.subject)} were restored"),
        "learner.pause": ("plain", "the learner was paused"),
        "learner.resume": ("plain", "the learner went on"),
        "learner.override": ("plain", "an operator let the held learner go on"),
    }
    if row.action == "canary.rolled_back":
        gave = row.before.get("weight_bp")
        had = row.before.get("phase") == "ramping"
        at = f" at {percent(gave)}" if had and isinstance(gave, int) else ""
        text = f"{candidate} was rolled back{at}" if had else f"{candidate} was rejected"
        kind = "bad"
        if row.subject in undone or row.actor != CONTROL:  # no verdict on the candidate
            who = "the rollback" if row.subject in undone else row.actor
            kind, text = "plain", f"the trial of {candidate}{at} was ended by {who}"
    elif row.action == "rollback":
        before, after = short(row.before.get("champion")), short(row.after.get("champion"))
        kind, text = "bad", f"rollback from {before} to {after}"
    elif row.action in texts:
        kind, text = texts[row.action]
    else:
        return
    yield Change(at=row.at, kind=kind, text=text, reason=row.reason, by=row.actor)


def differences(row: AuditOut) -> str:
    """What an audit row changed: `phase: gating → ramping; weight: 0% → 20%`."""
    found = []
    for name, value in row.after.items():
        before = row.before.get(name)
        if before == value or name == "canary_id":
            continue
        label = name.removesuffix("_bp").replace("_", " ")
        was = "" if before is None else f"{_said(name, before)} → "
        found.append(f"{label}: {was}{_said(name, value)}")
    return "; ".join(found)


def names_in(value: object) -> list[str]:
    """Return the names of adapters of an audit row, which keeps several as one text."""
    if isinstance(value, str):
        return value.split(", ")
    return list(map(str, value)) if isinstance(value, list) else []


def _said(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if name.endswith("_bp") and isinstance(value, int | float):
        return percent(value)
    return ", ".join(map(short, names_in(value))) or str(value)


# The evidence of a canary, read as it comes: figures in rows, and e-values on a log axis. Pure.

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
    "guards outcome": "guard: worse outcomes than the champion",
    "guards feedback": "guard: worse feedback than the champion",
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
    return [
        (" / ".join(map(_words, path)), _text(path[-1], value, now))
        for path, value in islice(_leaves(evidence, (), 0), MOST_ROWS)
    ]


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
        lines=tuple(Threshold(label=f"proven at {limit:.4g}", y=limit) for limit in thresholds),
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


# The figures of the four blocks of the first screen. Pure.

LOST, SKIPPED = "lost_", "skipped_"
_COUNTED = (
    ("replies", "replies"),
    ("errors", "failed"),
    ("cuts", "cut by the client"),
    ("short", "cut short or empty"),
)
"""Key of an arm's counts in the evidence -> how the page calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """One figure of a block."""

    what: str
    figure: str
    good: bool | None = None
    """None: nothing to judge it by."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRow:
    """One kind of reply, in both arms."""

    what: str
    candidate: str
    champion: str


def lost_captures(funnel: FunnelOut) -> int:
    """Captures lost since the store was made."""
    stage = _stage(funnel, "requests")
    return sum(number for why, number in stage.ended.items() if why.startswith(LOST))


def serving(funnel: FunnelOut, status: StatusOut, now: float, *, lost: int) -> list[Sight]:
    """Say what users got, who serves them, and whether it is recorded.

    lost: captures lost since the visitor looked; older losses are no news."""
    return [
        *_users(status, now),
        *_replicas(status),
        *_captures(_stage(funnel, "requests"), lost),
        _ingest(status, now),
    ]


MANY_FAIL = 0.02
"""Share of failed requests from which on it is marked as bad."""


def _users(status: StatusOut, now: float) -> Iterator[Sight]:
    users = status.users
    if users is None or not users.requests:
        return
    since = "" if users.since is None else f"since {clock(users.since, now)}"
    yield Sight(
        what="Users",
        figure=f"{users.failed:,} of {counted(users.requests, 'request')} failed",
        good=None if is_down(status) else users.failed < MANY_FAIL * users.requests,
        note=since,
    )
    if users.first_byte_s is not None and users.first_byte_slow_s is not None:
        slow = f"one in ten waits {short_length(users.first_byte_slow_s)} or more"
        figure = f"{short_length(users.first_byte_s)} (median)"
        yield Sight(what="First byte", figure=figure, note=slow)


def _replicas(status: StatusOut) -> Iterator[Sight]:
    for url, one in status.engine.replicas.items():
        loaded = f"answers; {counted(len(one.loaded), 'adapter')} loaded"
        figure = loaded if one.away is None else "away"
        yield Sight(what="vLLM", figure=figure, good=one.away is None, note=hide_in_url(url))


def progressing(found: ProgressOut) -> list[Sight]:
    """Say how far the candidate is, and what learning has cost."""
    rows = []
    if found.running is not None:
        figure = running_words(found.running.model_dump())
        rows.append(Sight(what="Candidate", figure=figure, note=found.pace))
    cost = found.cost
    if cost and (cost.judge_tokens or cost.candidate_tokens or cost.run_minutes):
        rows.append(Sight(what="Cost so far", figure=cost_words(cost.model_dump())))
    if found.cost_of_a_point:
        rows.append(Sight(what="A gain of 0.01", figure=found.cost_of_a_point))
    return rows


GROUPS = {"sampling": "being sampled", "sampled": "wait for the judge", "scored": "are scored"}
"""Status of a group that waits -> its words."""


def learning(status: StatusOut, cost: CostOut | None, now: float) -> list[Sight]:
    """Say what waits to be learned from, what runs, what runs next, and what today has cost."""
    learner = status.learner
    waiting = [
        f"{n:,} {words}" for one, words in GROUPS.items() if (n := status.groups.get(one, 0))
    ]
    rows = [Sight(what="Groups", figure=", ".join(waiting) or "none waits")]
    run = learner.last_run
    if run is None:
        rows.append(Sight(what="Run", figure="none yet"))
    elif run.ended_at is None:
        doing = progress_words(run.progress) or str(run.status)
        killed = killed_words(run.model_dump(), now)
        note = f"since {clock(run.started_at, now)}"
        rows.append(Sight(what="Run", figure=killed or doing, good=not killed, note=note))
    else:
        made = "" if run.adapter is None else f" and made {short(run.adapter)}"
        failed = run.status in ("failed", "held")
        figure = f"{run.status} at {clock(run.ended_at, now)}{made}"
        why = str(run.reason or "")
        rows.append(Sight(what="Last run", figure=figure, good=not failed, note=why))
    rows.append(_next_run(status, now))
    spent = [f"${cost.judge_usd_today:,.2f} of judging"] if cost else []
    spent += [f"{cost.candidate_tokens_today:,} tokens of candidates"] if cost else []
    limits = [f"{one.used / one.limit:.0%} of {one.setting}" for one in status.budgets if one.limit]
    rows.append(Sight(what="Today", figure=", ".join(spent), note="; ".join(limits)))
    for one in status.conditions:
        if one.kind == "judge":
            good = one.code == "judge_works" or (None if one.state == "ok" else False)
            rows.append(Sight(what="Judge", figure=one.message, good=good))
    return rows


def _next_run(status: StatusOut, now: float) -> Sight:
    learner = status.learner
    told = learner.schedule
    why = "" if told is None or told.kind in ("start", "running") else told.why
    if learner.paused:
        return Sight(what="Next run", figure="the learner is paused")
    if learner.run_requested:
        figure = "as soon as the learner looks: it was asked for"
    elif learner.next_run_at is not None:
        figure = f"{clock(learner.next_run_at, now)} UTC"
    else:
        figure = "when it is asked for" if status.by_hand else "when there is enough to learn from"
    return Sight(what="Next run", figure=figure, note=why)


def _captures(stage: StageOut, lost_now: int) -> Iterator[Sight]:
    meant = stage.passed + sum(stage.ended.values())
    if not meant:
        yield Sight(what="Captured", figure="no request yet")
        return
    lost = sum(number for why, number in stage.ended.items() if why.startswith(LOST))
    skipped = sum(number for why, number in stage.ended.items() if why.startswith(SKIPPED))
    yield Sight(
        what="Captured",
        figure=f"{share(stage.passed / meant)} of {counted(meant, 'request')}",
        good=lost_now == 0,
        note=f"{lost:,} lost, {skipped:,} left out on purpose, since the store was made",
    )


def _ingest(status: StatusOut, now: float) -> Sight:
    bus = next((one for one in status.conditions if one.kind == "bus"), None)
    if bus is None:
        return Sight(what="Ingest", figure="not heard of yet")
    ago = "" if bus.at is None or bus.state == "ok" else f"{length(now - bus.at)} ago"
    return Sight(what="Ingest", figure=bus.message, good=bus.state == "ok", note=ago)


def arm_rows(canary: CanaryOut | None, evidence: Mapping[str, Any]) -> list[ArmRow]:
    """What the two arms' users got in the present step; empty while there is no ramp."""
    if canary is None or canary.state != "ramping":
        return []
    step = evidence.get(f"step_{canary.step + 1}")
    if not isinstance(step, dict):
        return []
    arms = [step.get(name) for name in ("candidate", "champion")]
    found = [one if isinstance(one, dict) else {} for one in arms]
    return [
        ArmRow(what=what, candidate=_share(found[0], key), champion=_share(found[1], key))
        for key, what in _COUNTED
        if any(key in one for one in found)
    ]


def _share(arm: Mapping[str, Any], key: str) -> str:
    number, replies = arm.get(key), arm.get("replies")
    if not isinstance(number, int):
        return "not counted"
    if key == "replies" or not isinstance(replies, int) or replies <= 0:
        return f"{number:,}"
    return f"{number:,} ({number / replies:.1%})"


def _stage(funnel: FunnelOut, name: str) -> StageOut:
    return next(stage for stage in funnel.stages if stage.name == name)

"""Prometheus metrics of the control process, read from the store at each scrape.

The store's values survive a restart and include the counts of every process. Requests that the
admin API refused are the exception: they are counted in memory, because a refusal must not cost a
write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deploy.admin.auth import RefusalReason
from deploy.admin.out import ProfileOut
from deploy.admin.progress import ProgressReader
from deploy.engine.reconcile import EngineView
from deploy.evidence.progress import Point
from deploy.funnel import Counters, Stage, exchanges_by_selection, read_funnel
from deploy.judging import judge_metrics
from deploy.records import version_of
from deploy.registry import canaries, routing_writer, switches as learner_switches
from deploy.supervise import LoopView
from ingest.intake.bus import KIND as BUS
from ingest.judge_noise import read_noise_state
from ingest.retention.sweep import read_state as read_retention
from ingest.reward_watch.store import stored_profile
from sidecar import conditions
from sidecar.conditions import Condition
from sidecar.lines import Line, project_of
from sidecar.records import BASE
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AliasRow, CanaryRow, GroupRow, RunRow


class StoreCollector(Collector):
    """Collects the metrics of one model."""

    def __init__(
        self,
        database: Database,
        model: str,
        engine: Callable[[], EngineView],
        admin_refused: Mapping[RefusalReason, int] = MappingProxyType({}),
        loops: Callable[[], Mapping[str, LoopView]] = dict,
        judge: JudgeSettings | None = None,
        lines: Sequence[Line] = (),
        conditions: Callable[[Session], Sequence[Condition]] = lambda session: (),
        progress: ProgressReader | None = None,
    ) -> None:
        """lines: of adapters; those of projects have metrics of their own.
        admin_refused: refused requests of the admin API by reason; read at each scrape.
        loops: returns the state of control's loops, by name. judge: has the budgets.
        conditions: reads all conditions."""
        self._conditions = conditions
        self._progress = progress or ProgressReader()
        self._judge = judge or JudgeSettings()
        self._database = database
        self._model = model
        self._engine = engine
        self._admin_refused = admin_refused
        self._loops = loops
        self._own = {line.project: line.name for line in lines if line.project is not None}

    def collect(self) -> Iterator[Metric]:
        with self._database.read() as session:
            found = read_funnel(session, self._model)
            yield from self._tallies(session)
            selected = exchanges_by_selection(found.stages).items()
            samples = [([selection], number) for selection, number in selected]
            yield _labelled("exchanges", "Exchanges, by selection.", ["selection"], samples)
            yield from _funnel(found.stages)
            yield from self._singles(session)
            yield from _of_projects(session, self._own)
            yield _needy(self._conditions(session))
            yield from _bus(session)
            yield _counters(found.counters)
            yield from _store(session)
            yield from _judge_noise(session)
            yield from _watch(session, self._model)
            yield from _gains(self._progress.points(session, self._model))
            yield from judge_metrics(session, found.counters, self._judge)
        refused = CounterMetricFamily(
            "sidecar_admin_refused",
            "Admin API requests refused before routing, by reason, since control started.",
            labels=["reason"],
        )
        for reason in get_args(RefusalReason):
            refused.add_metric([reason], self._admin_refused.get(reason, 0))
        yield refused

    def _tallies(self, session: Session) -> Iterator[Metric]:
        tallies = (
            ("groups", "Groups, by status.", GroupRow.status, None),
            ("runs", "Training runs, by status.", RunRow.status, RunRow.model),
            ("adapters", "Adapter versions, by state.", AdapterRow.state, AdapterRow.model),
            ("canaries", "Canaries, by state.", CanaryRow.state, CanaryRow.model),
        )
        for name, help_text, column, line in tallies:
            where = () if line is None else (line == self._model,)
            rows = session.execute(select(column, func.count()).where(*where).group_by(column))
            samples = (([str(value)], number) for value, number in rows)
            yield _labelled(name, help_text, [column.key], samples)

    def _singles(self, session: Session) -> Iterator[Metric]:
        engine, line = self._engine(), _figures(session, self._model)
        singles = (
            (
                "canary_weight",
                "Share of sessions routed to the candidate of the active canary, 0..1.",
                line["canary_weight"],
            ),
            (
                "canary_paused",
                "Whether the active canary is paused (1) or not (0).",
                line["canary_paused"],
            ),
            (
                "canary_in_both_arms",
                "Share of the ramp's conversations whose turns met both arms, 0..1.",
                _in_both_arms(session, self._model),
            ),
            (
                "routing_generation",
                "Generation of the routing table; 0: there is none, or it is damaged.",
                line["routing_generation"],
            ),
            (
                "learner_paused",
                "Whether the learner is paused (1) or not (0).",
                line["learner_paused"],
            ),
            (
                "engine_reachable",
                "Whether at least one vLLM replica is reachable (1) or none (0).",
                float(engine.away is None),
            ),
            (
                "adapters_loaded",
                "Adapters loaded in every reachable vLLM replica.",
                float(len(engine.loaded)),
            ),
            (
                "adapters_refused",
                "Wanted adapters that a vLLM replica refuses or whose folder was altered.",
                float(len(engine.refused)),
            ),
        )
        for name, help_text, value in singles:
            yield _single(name, help_text, value)
        yield _labelled(
            "engine_replica_reachable",
            "Whether the vLLM replica is reachable (1) or not (0).",
            ["replica"],
            (([url], float(view.away is None)) for url, view in engine.replicas.items()),
        )
        yield _labelled(
            "control_loop_failures",
            "Consecutive failed iterations of a loop of control, by loop.",
            ["loop"],
            (([name], float(loop.failures)) for name, loop in self._loops().items()),
        )


def _in_both_arms(session: Session, model: str) -> float:
    row = canaries.active_row(session, model)
    step = {} if row is None else canaries.entry(row, f"step_{canaries.to_canary(row).step + 1}")
    both, conversations = step.get("in_both_arms"), step.get("conversations")
    if isinstance(both, int) and isinstance(conversations, int) and conversations > 0:
        return both / conversations
    return 0.0


def _of_projects(session: Session, own: Mapping[str, str]) -> Iterator[Metric]:
    """What the metrics of the same names without `project_` say, of each project's own line."""
    found = {project: _figures(session, line) for project, line in own.items()}
    for name in ("canary_weight", "canary_paused", "routing_generation", "learner_paused"):
        said = f"As sidecar_{name}, of a project's own adapters."
        samples = [([project], figures[name]) for project, figures in found.items()]
        yield _labelled(f"project_{name}", said, ["project"], samples)


def _figures(session: Session, line: str) -> dict[str, float]:
    """Return the figures that each line of adapters has."""
    canary, routing = canaries.active(session, line), routing_writer.current(session, line)
    return {
        "canary_weight": canary.weight_bp / 10_000 if canary is not None else 0.0,
        "canary_paused": float(canary is not None and canary.paused),
        "routing_generation": float(routing.generation if routing else 0),
        "learner_paused": float(learner_switches.read(session, line).paused),
    }


def _single(name: str, text: str, value: float | None) -> Metric:
    """Return a gauge; without a value it has no sample."""
    return GaugeMetricFamily(f"sidecar_{name}", text, value=value)


def _labelled(
    name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return a gauge. samples: the labels' values, and the value."""
    family = GaugeMetricFamily(f"sidecar_{name}", text, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _needy(found: Sequence[Condition]) -> Metric:
    return _labelled(
        "condition",
        "Conditions that a person should know of (state look) or has to act on (act): 1 each.",
        ["kind", "code", "state", "project"],
        (
            ([one.kind, one.code, one.state, project_of(one.line) or ""], 1.0)
            for one in found
            if one.state != "ok"
        ),
    )


def _bus(session: Session) -> Iterator[Metric]:
    state = conditions.read(session, BUS)
    lag, reachable, at = None, None, None
    if state is not None:
        lag, reachable, at = state.data.get("lag"), float(state.state == "ok"), state.at
    yield _single("bus_lag", "Records on the bus that wait to be stored.", lag)
    yield _single("bus_reachable", "Whether ingest reaches the bus (1) or not (0).", reachable)
    yield _single("bus_reported_timestamp_seconds", "When ingest last looked at the bus.", at)


def _store(session: Session) -> Iterator[Metric]:
    state = read_retention(session)
    figures = (
        ("used_bytes", "Bytes of the store that hold something.", "used_bytes"),
        ("free_bytes", "Free bytes in the file of the store.", "free_bytes"),
        ("oldest_timestamp_seconds", "When the oldest exchange was stored.", "oldest_at"),
    )
    for name, text, field in figures:
        yield _single(f"store_{name}", text, getattr(state, field, None))


def _judge_noise(session: Session) -> Iterator[Metric]:
    state = read_noise_state(session)
    figures = (
        ("noise_sd", "Standard deviation of the noise of a judge's score, 0..1.", "sd"),
        ("position_slope", "Score of the last position shown above the first.", "slope"),
        ("flips", "Share of pairs that two passes put in opposite order, 0..1.", "flips"),
        ("noise_groups", "Scored groups that the judge's noise comes from.", "groups"),
    )
    for name, text, field in figures:
        yield _single(f"judge_{name}", text, getattr(state, field, None))
    drift = None if state is None else float(bool(state.drift))
    yield _single("judge_drift", "Whether the judge is not as it was (1) or is (0).", drift)


def _watch(session: Session, model: str) -> Iterator[Metric]:
    """What the reward watch knows of the champion and the base; a damaged profile shows nothing."""
    newest = session.scalars(
        select(RunRow.status)
        .where(RunRow.model == model)
        .order_by(RunRow.started_at.desc())
        .limit(1)
    ).first()
    held = "Whether the reward watch held the newest run (1) or not (0)."
    yield _single("learner_held", held, float(newest == "held"))
    shares = GaugeMetricFamily(
        "sidecar_watch_share",
        "Share of an adapter's newest served answers that are of a kind, 0..1.",
        labels=["adapter", "kind"],
    )
    tokens = GaugeMetricFamily(
        "sidecar_watch_mean_tokens",
        "Geometric mean of the tokens of an adapter's newest served answers.",
        labels=["adapter"],
    )
    taste = GaugeMetricFamily(
        "sidecar_watch_length_correlation",
        "Correlation of reward and log length within an adapter's newest scored groups.",
        labels=["adapter"],
    )
    alias = session.get(AliasRow, (model, "champion"))
    for adapter in dict.fromkeys((BASE if alias is None else alias.adapter, BASE)):
        found = stored_profile(session, model, adapter)
        if found is None:
            continue
        known = ProfileOut.known(adapter, found)
        for kind, share in known.shares.items():
            shares.add_metric([adapter, kind], share)
        if known.mean_tokens is not None:
            tokens.add_metric([adapter], known.mean_tokens)
        if known.length_correlation is not None:
            taste.add_metric([adapter], known.length_correlation)
    yield from (shares, tokens, taste)


MOST_GAINS = 20
"""Newest promoted versions with metrics: each is a label that Prometheus keeps."""


def _gains(points: Sequence[Point]) -> Iterator[Metric]:
    ends = (
        ("", "Judged gain of a promoted version over the first champion, -1..1.", "mean"),
        ("_low", "Low end of the 95% interval of sidecar_gain.", "low"),
        ("_high", "High end of the 95% interval of sidecar_gain.", "high"),
    )
    for end, help_text, name in ends:
        shown = [one for one in points[-MOST_GAINS:] if one.gain is not None]
        samples = [([version_of(one.adapter)], getattr(one.gain, name)) for one in shown]
        yield _labelled(f"gain{end}", help_text, ["version"], samples)


def _funnel(stages: tuple[Stage, ...]) -> Iterator[Metric]:
    entered = GaugeMetricFamily(
        "sidecar_funnel_entered", "Records that entered a stage.", labels=["stage"]
    )
    records = GaugeMetricFamily(
        "sidecar_funnel_records",
        "Records that entered a stage, by where they are or ended.",
        labels=["stage", "end"],
    )
    for stage in stages:
        entered.add_metric([stage.name], stage.entered)
        records.add_metric([stage.name, "passed"], stage.passed)
        for end, number in (*stage.ended.items(), *stage.waiting.items()):
            records.add_metric([stage.name, end], number)
        if stage.unreported:
            records.add_metric([stage.name, "unreported"], -stage.unreported)
    yield entered
    yield records


def _counters(counters: Counters) -> Metric:
    family = CounterMetricFamily(
        "sidecar_records", "Records, by stage and outcome.", labels=["stage", "reason"]
    )
    for stage, counts in counters.items():
        for reason, number in counts.items():
            family.add_metric([stage, reason], number)
    return family


def render(collector: Collector) -> bytes:
    """Render the metrics as Prometheus text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)

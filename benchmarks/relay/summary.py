"""From samples to rows, and from samples to targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from benchmarks.relay.histogram import percentile_us
from benchmarks.relay.measure import Sample
from benchmarks.results import Row, Target, at_least, at_most

DIRECT = "upstream"
NGINX, ROUTER, LITELLM = "nginx", "vllm-router", "litellm"
OFF, ON = "ours-off", "ours-on"
Number = float | None
Figure = Callable[[Sample], Number]
COLUMNS = (
    "contender",
    "rps",
    "rps_per_core",
    "cpu_us_per_request",
    "cpu_us_per_event",
    "p50_us",
    "p99_us",
    "added_p50_us",
    "added_p99_us",
    "first_byte_p50_us",
    "added_first_byte_p50_us",
    "own_core",
    "proxy_core",
    "ends_core",
    "rss_mb",
    "peak_rss_mb",
    "captures_kept",
    "captures_lost",
    "refused",
    "broken",
)


def p50(sample: Sample) -> Number:
    return percentile_us(sample.report.latency, 0.50)


def p99(sample: Sample) -> Number:
    return percentile_us(sample.report.latency, 0.99)


def first_byte_p50(sample: Sample) -> Number:
    return percentile_us(sample.report.first_byte, 0.50)


def cpu_per_request(sample: Sample) -> Number:
    return sample.cpu_us_per_request


def cpu_per_event(sample: Sample) -> Number:
    return sample.cpu_us_per_event


class Samples:
    """All samples of a run, looked up by contender, scenario and round."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = {(one.contender, one.scenario, one.round): one for one in samples}

    def of(self, contender: str, scenario: str) -> list[Sample]:
        """One a round, in order."""
        found = [one for key, one in self._samples.items() if key[:2] == (contender, scenario)]
        return sorted(found, key=lambda one: one.round)

    def other_work(self) -> Number:
        """Share of the proxy's core that others had, the median of all windows."""
        return _median(
            max(0.0, one.proxy_core - one.cpu_share)
            for one in self._samples.values()
            if one.cpu_share is not None
        )

    def middle(self, contender: str, scenario: str, figure: Figure) -> Number:
        """The median over the rounds; None when no round has the figure."""
        return _median(figure(one) for one in self.of(contender, scenario))

    def added(self, contender: str, scenario: str, figure: Figure) -> Number:
        """Median over the rounds of what the contender has over the upstream alone."""
        pairs = self._pairs(contender, DIRECT, scenario, figure)
        return _median(mine - direct for mine, direct in pairs)

    def ratio(self, mine: str, theirs: str, scenario: str, figure: Figure) -> Number:
        """Median over the rounds of mine / theirs, both of one round: drift of the machine between
        rounds falls out."""
        pairs = self._pairs(mine, theirs, scenario, figure)
        return _median(one / other for one, other in pairs if other > 0)

    def _pairs(
        self, mine: str, theirs: str, scenario: str, figure: Figure
    ) -> list[tuple[float, float]]:
        pairs = []
        for one in self.of(mine, scenario):
            other = self._samples.get((theirs, scenario, one.round))
            if other is None:
                continue
            a, b = figure(one), figure(other)
            if a is not None and b is not None:
                pairs.append((a, b))
        return pairs


def row(samples: Samples, contender: str, scenario: str, *, streams: bool) -> Row:
    """One line of the result: medians over the rounds, sums for what must be 0."""
    found = samples.of(contender, scenario)

    def middle(figure: Figure) -> Number:
        return _rounded(samples.middle(contender, scenario, figure))

    def added(figure: Figure) -> Number:
        if contender == DIRECT:
            return None
        return _rounded(samples.added(contender, scenario, figure))

    cpu = samples.middle(contender, scenario, cpu_per_request)
    values: dict[str, object] = {
        "scenario": scenario,
        "contender": contender,
        "rounds": len(found),
        "rps": middle(lambda one: one.report.requests / one.report.seconds),
        "rps_per_core": None if streams or not cpu else _rounded(1e6 / cpu),
        "cpu_us_per_request": None if streams else _rounded(cpu),
        "cpu_us_per_event": middle(cpu_per_event) if streams else None,
        "events_per_s": middle(lambda one: one.report.events / one.report.seconds)
        if streams
        else None,
        "events_per_stream": sorted(
            {n for one in found for n in (one.report.fewest_events, one.report.most_events)}
        )
        if streams
        else None,
        "first_byte_p50_us": middle(first_byte_p50) if streams else None,
        "added_first_byte_p50_us": added(first_byte_p50) if streams else None,
        "p50_us": None if streams else middle(p50),
        "p99_us": None if streams else middle(p99),
        "added_p50_us": None if streams else added(p50),
        "added_p99_us": None if streams else added(p99),
        "own_core": middle(lambda one: one.cpu_share),
        "proxy_core": middle(lambda one: one.proxy_core),
        "ends_core": middle(lambda one: one.ends_core),
        "rss_mb": middle(lambda one: one.rss_mb),
        "peak_rss_mb": _rounded(max((one.peak_rss_mb or 0.0 for one in found), default=0.0))
        or None,
        "captures_kept": _sum(one.captures_kept for one in found),
        "captures_lost": _sum(one.captures_lost for one in found),
        "refused": sum(one.report.refused for one in found),
        "broken": sum(one.report.broken for one in found),
    }
    return values


def targets(samples: Samples, *, why_missing: Mapping[str, str] | None = None) -> list[Target]:
    """The targets of speed, as ratios of one run.

    why_missing: contender -> why it could not be started, for targets that need it.
    """
    missing = why_missing or {}
    found: list[Target] = []

    def judge(what: str, value: Number, bound: float, *needs: str) -> None:
        reasons = [f"{name}: {missing[name]}" for name in needs if name in missing]
        why = "; ".join(reasons) if value is None and reasons else ""
        found.append(
            at_most(what, value, bound, why or ("" if value is not None else "not measured"))
        )

    for mine, theirs, bound in (
        (OFF, NGINX, 2.0),
        (OFF, ROUTER, 0.5),
        (ON, ROUTER, 1.5),
        (ON, LITELLM, 1 / 60),
    ):
        value = samples.ratio(mine, theirs, "small32", cpu_per_request)
        judge(f"CPU per request, {mine} / {theirs}, 32 connections", value, bound, mine, theirs)
    for scenario, what in (("sse8", "8 streams"), ("sse100", "100 streams")):
        for mine, bound in ((OFF, 1.5), (ON, 2.0)):
            value = samples.ratio(mine, NGINX, scenario, cpu_per_event)
            judge(f"CPU per SSE event, {mine} / {NGINX}, {what}", value, bound, mine, NGINX)
    for mine in (OFF, ON):
        value = samples.added(mine, "small1", p99)
        in_ms = None if value is None else value / 1000
        judge(f"added p99 in ms, {mine}, 1 connection", in_ms, 1.0, mine)
    value = samples.middle(NGINX, "small32", lambda one: one.proxy_core)
    what = "nginx's core is full at 32 connections, so the load is not what is measured"
    found.append(at_least(what, value, 0.95, "" if value is not None else "not measured"))
    return found


def _median(values: Iterable[Number]) -> Number:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _sum(values: Iterable[Number]) -> Number:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rounded(value: Number) -> Number:
    return None if value is None else float(f"{value:.4g}")


def rows(
    samples: Samples,
    contenders: Sequence[str],
    scenarios: Sequence[tuple[str, bool]],
    why_missing: Mapping[str, str],
) -> list[Row]:
    """One row for each scenario and contender; a contender that did not start says why.

    scenarios: (name, whether it streams).
    """
    found: list[Row] = []
    for scenario, streams in scenarios:
        for contender in contenders:
            if contender in why_missing:
                found.append(
                    {"scenario": scenario, "contender": contender, "why": why_missing[contender]}
                )
            else:
                found.append(row(samples, contender, scenario, streams=streams))
    return found

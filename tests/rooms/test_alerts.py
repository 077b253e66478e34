"""Each alert rule of docs/monitoring/alerts.yml fires when it should, and not when it need not:
Prometheus' own promtool plays both."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.install_tools import ROOT, output, tool

RULES = ROOT / "docs" / "monitoring" / "alerts.yml"
Series = Mapping[str, str]
"""Series -> a value a minute, as promtool writes them: `0x3` is four zeros, `0+2x3` counts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    fires: Series
    quiet: Series
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the alert, without its severity."""
    after_m: int = 10
    """Minutes until it is looked at."""


DAY_M = 24 * 60
CASES = {
    "SidecarNoVllm": Case(
        fires={"sidecar_engine_reachable": "0x10"},
        quiet={
            'sidecar_engine_reachable{instance="a"}': "0x10",
            'sidecar_engine_reachable{instance="b"}': "1x10",
        },
    ),
    "SidecarProxySeesNoVllm": Case(
        fires={
            'sidecar_replica_up{instance="a",replica="x"}': "1x10",
            'sidecar_replica_up{instance="b",replica="x"}': "0x10",
            'sidecar_replica_up{instance="b",replica="y"}': "0x10",
        },
        labels={"instance": "b"},
        quiet={
            'sidecar_replica_up{instance="b",replica="x"}': "0x10",
            'sidecar_replica_up{instance="b",replica="y"}': "1x10",
        },
    ),
    "SidecarNoProxy": Case(
        fires={'sidecar_replica_up{instance="a"}': "1x2 stale"},
        quiet={'sidecar_replica_up{instance="a"}': "0x10"},
    ),
    "SidecarNoControl": Case(
        fires={"sidecar_engine_reachable": "1x2 stale"},
        quiet={"sidecar_engine_reachable": "0x10"},
        after_m=15,
    ),
    "SidecarReplicaDown": Case(
        fires={
            'sidecar_engine_replica_reachable{replica="a"}': "1x10",
            'sidecar_engine_replica_reachable{replica="b"}': "0x10",
        },
        labels={"replica": "b"},
        quiet={'sidecar_engine_replica_reachable{replica="b"}': "1x5 0x5"},
    ),
    "SidecarErrors": Case(
        fires={
            'sidecar_exchanges_total{outcome="ok"}': "0+94x15",
            'sidecar_exchanges_total{outcome="upstream_error"}': "0+6x15",
        },
        after_m=15,
        quiet={
            'sidecar_exchanges_total{outcome="ok"}': "0+95x15",
            'sidecar_exchanges_total{outcome="upstream_error"}': "0+4x15",
        },
    ),
    "SidecarWrongModel": Case(
        fires={"sidecar_model_mismatch_total": "0x5 1x5"},
        quiet={"sidecar_model_mismatch_total": "1x10"},
    ),
    "SidecarProxyBehind": Case(
        fires={
            'sidecar_routing_generation{instance="a"}': "7x10",
            'sidecar_routing_generation{instance="b"}': "6x10",
        },
        quiet={
            'sidecar_routing_generation{instance="a"}': "6x8 7x2",
            'sidecar_routing_generation{instance="b"}': "6x9 7x1",
        },
    ),
    "SidecarRoutingUnreadable": Case(
        fires={'sidecar_routing_failures_total{instance="a",reason="busy"}': "0+3x10"},
        labels={"instance": "a", "reason": "busy"},
        quiet={'sidecar_routing_failures_total{instance="a",reason="busy"}': "0+2x10"},
    ),
    "SidecarNeedsAct": Case(
        fires={
            'sidecar_condition{state="act",kind="judge",code="key",project="",instance="a"}': "1x15"
        },
        labels={"kind": "judge", "code": "key"},
        after_m=15,
        quiet={'sidecar_condition{state="wait",kind="judge",code="key",instance="a"}': "1x15"},
    ),
    "SidecarCanaryTakenOut": Case(
        fires={'sidecar_breaker_trips_total{kind="errors"}': "0x5 1x5"},
        labels={"kind": "errors"},
        quiet={'sidecar_breaker_trips_total{kind="errors"}': "1x10"},
    ),
    "SidecarCanaryPaused": Case(
        fires={"sidecar_canary_paused": "1x1500"},
        after_m=1500,
        quiet={"sidecar_canary_paused": "0 1x1400 0x100"},
    ),
    "SidecarCanaryLong": Case(
        fires={"sidecar_canary_weight": f"0x60 0.05x{8 * DAY_M}"},
        quiet={"sidecar_canary_weight": f"0.05x{5 * DAY_M} 0x60 0.05x{3 * DAY_M}"},
        after_m=8 * DAY_M + 60,
    ),
    "SidecarAdapterRefused": Case(
        fires={"sidecar_adapters_refused": "1x10"},
        quiet={"sidecar_adapters_refused": "1x3 0x6"},
    ),
    "SidecarControlFails": Case(
        fires={'sidecar_control_loop_failures{loop="canary"}': "4x10"},
        labels={"loop": "canary"},
        quiet={'sidecar_control_loop_failures{loop="canary"}': "3x10"},
    ),
    "SidecarCapturesLost": Case(
        fires={'sidecar_captures_lost_total{reason="outbox_full"}': "0x5 1x5"},
        labels={"reason": "outbox_full"},
        quiet={'sidecar_captures_lost_total{reason="outbox_full"}': "9x10"},
    ),
    "SidecarIngestDead": Case(
        fires={"sidecar_bus_reported_timestamp_seconds": "0+60x7 420x3"},
        quiet={"sidecar_bus_reported_timestamp_seconds": "0+60x8 480x2"},
    ),
    "SidecarBusAway": Case(
        fires={"sidecar_bus_reachable": "0x10"},
        quiet={"sidecar_bus_reachable": "1x5 0x5"},
    ),
    "SidecarBehind": Case(
        fires={"sidecar_bus_lag": "10001x20"},
        after_m=20,
        quiet={"sidecar_bus_lag": "10000x20"},
    ),
    "SidecarLearnerHeld": Case(
        fires={"sidecar_learner_held": "1x10"},
        quiet={"sidecar_learner_held": "0x10"},
    ),
    "SidecarJudgeOpen": Case(
        fires={
            'sidecar_judge_breaker{model="a",state="closed"}': "0x20",
            'sidecar_judge_breaker{model="a",state="open"}': "1x20",
        },
        after_m=20,
        quiet={
            'sidecar_judge_breaker{model="a",state="closed"}': "0x20",
            'sidecar_judge_breaker{model="b",state="closed"}': "1x20",
        },
    ),
    "SidecarJudgeDrift": Case(
        fires={"sidecar_judge_drift": "1x10"},
        quiet={"sidecar_judge_drift": "0x10"},
    ),
}


def rules() -> dict[str, dict[str, str]]:
    """Alert -> its severity, summary and description, as they stand in the file."""
    parts = re.split(r"^      - alert: (\w+)$", RULES.read_text(), flags=re.MULTILINE)
    return {
        name: {
            key: re.findall(rf'\b{key}: "?(.+?)[}}"]?$', text, flags=re.MULTILINE)[0]
            for key in ("severity", "summary", "description")
        }
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def played(name: str, series: Series, *, fires: bool) -> dict[str, object]:
    """One test of promtool."""
    case, rule = CASES[name], rules()[name]
    texts = {
        key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: case.labels[found[1]], rule[key])
        for key in ("summary", "description")
    }
    labels = {**case.labels, "severity": rule["severity"]}
    alerts = [{"exp_labels": labels, "exp_annotations": texts}] if fires else []
    looked_at = {"eval_time": f"{case.after_m}m", "alertname": name, "exp_alerts": alerts}
    played = [{"series": one, "values": values} for one, values in series.items()]
    return {"interval": "1m", "input_series": played, "alert_rule_test": [looked_at]}


def promtool(folder: Path, *tests: dict[str, object]) -> tuple[int, str]:
    path = folder / "tests.json"
    asked = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    path.write_text(json.dumps(asked))
    return output(tool("promtool"), "test", "rules", path)


def test_every_alert_is_played() -> None:
    assert list(CASES) == list(rules())


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_when_it_should_and_else_is_quiet(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    both = (played(name, case.fires, fires=True), played(name, case.quiet, fires=False))

    code, said = promtool(tmp_path, *both)

    assert code == 0, said


def test_promtool_sees_what_is_wrong(tmp_path: Path) -> None:
    name = "SidecarLearnerHeld"

    assert promtool(tmp_path, played(name, CASES[name].quiet, fires=True))[0] == 1
    assert promtool(tmp_path, played(name, CASES[name].fires, fires=False))[0] == 1

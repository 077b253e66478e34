"""install/helm: the chart renders, and Kubernetes' own schemas take what it renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidecar.settings.load import load_settings
from support.install_tools import ROOT, output, own_python, tool

CHART = ROOT / "install" / "helm" / "learning-sidecar"
MINORS = ("1.33", "1.35", "1.37")
"""Of Kubernetes."""
EVERYTHING = {
    "learn": {"queue": "gpus", "processes": 2},
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "tokenSecret": {"name": "sidecar-metrics"},
    },
    "vllm": {"podLabels": {"app.kubernetes.io/name": "vllm"}},
}
HELM = """
import json, sys, yaml
import helm_python as helm

folder, values = sys.argv[1], json.loads(sys.argv[2])
name = values.pop("release", "s")
try:
    with helm.Chart.load(folder) as chart:
        files = chart.render(values, name=name, namespace="prod")
    found = helm.lint(folder)
    manifests = [one for text in files.values() for one in yaml.safe_load_all(text) if one]
    print(json.dumps({"made": manifests, "errors": found["errors"], "said": found["messages"]}))
except helm.HelmError as error:
    sys.exit(f"refused: {error}")
"""
Manifest = dict[str, Any]
"""Any: YAML."""


def helm(values: dict[str, Any]) -> tuple[int, str]:
    """What Helm makes of the chart with these values, or why it refuses them."""
    return output(own_python(), "-c", HELM, CHART, json.dumps(values))


@pytest.fixture(scope="module")
def rendered() -> list[Manifest]:
    code, said = helm(EVERYTHING)
    assert code == 0, said
    answer = json.loads(said.splitlines()[-1])  # the linter says what it let pass
    assert answer["errors"] == []
    assert [one["error"] for one in answer["said"]] == ["icon is recommended"]
    made: list[Manifest] = answer["made"]
    return made


def named(rendered: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (
        one for one in rendered if (one["kind"], one["metadata"]["name"]) == (kind, f"s-{name}")
    )
    return found


def pod_specs(rendered: list[Manifest]) -> dict[str, Manifest]:
    specs = {}
    for one in rendered:
        spec = one.get("spec", {})
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template is not None:
            specs[one["metadata"]["name"]] = template["spec"]
    return specs


@pytest.mark.parametrize("minor", MINORS)
def test_kubernetes_takes_what_the_chart_renders(
    rendered: list[Manifest], minor: str, tmp_path: Path
) -> None:
    known = [one for one in rendered if one["kind"] != "ServiceMonitor"]  # Prometheus operator's
    manifests = tmp_path / "all.yaml"
    manifests.write_text("\n---\n".join(map(json.dumps, known)))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(json.dumps({**named(rendered, "Deployment", "score"), "spec": {}}))
    validate = (tool("kubernetes-validate"), "--strict", "-k", minor)

    code, said = output(*validate, manifests)

    assert code == 0, said
    assert output(*validate, wrong)[0] != 0
    assert len(known) == 12


def test_every_pod_runs_without_rights_and_with_its_own_disk(rendered: list[Manifest]) -> None:
    specs = pod_specs(rendered)

    assert set(specs) == {"s-proxy", "s-ingest", "s-score", "s-control", "s-learn"}
    for spec in specs.values():
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False  # a release named sidecar has Services sidecar-*
        assert spec["securityContext"]["runAsNonRoot"] is True
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {one["name"] for one in container["volumeMounts"]}
        claims = {"state"} if spec is specs["s-proxy"] else set()
        assert mounted == {one["name"] for one in spec["volumes"]} | claims
        assert container["envFrom"] == [{"secretRef": {"name": "learning-sidecar"}}]
        (secrets,) = (one for one in container["volumeMounts"] if one["name"] == "secrets")
        assert (secrets["mountPath"], secrets["readOnly"]) == ("/run/secrets/sidecar", True)


def test_an_outbox_outlives_its_pod_and_no_two_proxies_are_evicted_at_once(
    rendered: list[Manifest],
) -> None:
    proxy = named(rendered, "StatefulSet", "proxy")["spec"]
    budget = named(rendered, "PodDisruptionBudget", "proxy")["spec"]

    assert [one["metadata"]["name"] for one in proxy["volumeClaimTemplates"]] == ["state"]
    assert proxy["template"]["spec"]["terminationGracePeriodSeconds"] >= 55
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == proxy["selector"]
    assert named(rendered, "Deployment", "control")["spec"]["replicas"] == 2


def test_agents_do_not_reach_vllm(rendered: list[Manifest]) -> None:
    policy = named(rendered, "NetworkPolicy", "vllm")["spec"]
    labels = [
        named(rendered, kind, name)["spec"]["template"]["metadata"]["labels"]
        for kind, name in (
            ("StatefulSet", "proxy"),
            *(("Deployment", one) for one in ("ingest", "score", "control")),
        )
    ]
    ours, theirs = policy["ingress"]
    (allowed,) = ours["from"]

    assert policy["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "vllm"}}
    assert theirs == {"from": [{"podSelector": policy["podSelector"]}]}
    for one in labels:
        assert allowed["podSelector"]["matchLabels"].items() <= one.items()


def test_a_run_waits_in_a_queue_of_kueue_and_never_beside_another(
    rendered: list[Manifest],
) -> None:
    learn = named(rendered, "CronJob", "learn")["spec"]
    (container,) = pod_specs(rendered)["s-learn"]["containers"]

    assert learn["concurrencyPolicy"] == "Forbid"
    labels = learn["jobTemplate"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
    assert container["command"][:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]


def test_prometheus_finds_the_ports(rendered: list[Manifest]) -> None:
    for name in ("proxy", "control"):
        monitor = named(rendered, "ServiceMonitor", name)["spec"]
        service = named(rendered, "Service", name)
        wanted = monitor["selector"]["matchLabels"]
        labels = named(rendered, "ServiceMonitor", name)["metadata"]["labels"]
        assert labels["release"] == "prometheus"
        assert wanted.items() <= service["metadata"]["labels"].items()
        assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_the_settings_are_sound(
    rendered: list[Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sidecar.toml"
    (text,) = (one["data"]["sidecar.toml"] for one in rendered if one["kind"] == "ConfigMap")
    path.write_text(text)
    (container,) = pod_specs(rendered)["s-proxy"]["containers"]
    for one in container["env"]:
        monkeypatch.setenv(one["name"], one["value"])
    monkeypatch.setenv("SIDECAR_ADMIN__TOKENS", json.dumps(["0" * 64]))  # of the Secret

    settings = load_settings(path)

    assert (settings.proxy.host, settings.proxy.port) == ("0.0.0.0", 8080)
    assert str(settings.learner.adapters_dir) == "/adapters"
    assert str(settings.state_dir) == "/state"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"proxy": {"replicas": "two"}}, "replicas"),
        ({"proxies": {}}, "proxies"),
        ({"secret": ""}, "secret"),
        ({}, "vllm.podLabels"),
        ({"vllm": {"policy": None, "podLabels": {"app": "vllm"}}}, "policy"),
        ({"learn": {"processes": None}}, "processes"),
        ({"release": "s" * 41, "vllm": {"policy": False}}, "the release's name"),
        ({"release": "1a", "vllm": {"policy": False}}, "the release's name"),
        (
            {"serviceMonitor": {"enabled": True}, "vllm": {"policy": False}},
            "serviceMonitor.tokenSecret.name",
        ),
    ],
)
def test_values_that_are_wrong_are_refused(values: dict[str, Any], said: str) -> None:
    code, answer = helm(values)

    assert code == 1
    assert said in answer


def test_names_and_settings_are_text_whatever_yaml_would_read() -> None:
    settings = " \n[a]\n\u2028---\r\nb = '{{ x }}'  "
    code, said = helm({"release": "null", "settings": settings, "vllm": {"policy": False}})

    assert code == 0, said
    made = json.loads(said.splitlines()[-1])["made"]
    assert [one["data"] for one in made if "data" in one] == [{"sidecar.toml": settings}]
    for named in (one["metadata"] for one in made):
        assert isinstance(named["name"], str)
        assert set(map(type, named["labels"].values())) == {str}

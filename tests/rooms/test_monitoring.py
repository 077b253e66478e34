"""The dashboard and the alert rules of docs/monitoring/ ask for metrics and labels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deploy.admin.metrics import StoreCollector
from deploy.cli.main import main
from deploy.engine.reconcile import EngineView
from sidecar.metrics.proxy import Metrics
from sidecar.store.database import Database

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "monitoring"
FILES = sorted(FOLDER.iterdir())
PARTS = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}
"""Kind of a metric -> what its series are called after its name."""
OF_PROMETHEUS = {"job", "instance", "le"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of each series that proxy and control export -> its metric in docs/metrics.md."""
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('store')}/store.db")
    database.upgrade()
    families = [
        *Metrics().registry.collect(),
        *StoreCollector(database, "any", EngineView).collect(),
    ]
    database.close()
    return {
        one.name + part: one.name + ("_total" if one.type == "counter" else "")
        for one in families
        for part in PARTS[one.type]
    }


def expressions(path: Path) -> list[str]:
    """Every query of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        panels = json.loads(text)["panels"]
        return [target["expr"] for panel in panels for target in panel.get("targets", ())]
    found = re.findall(r"^ +expr: (?:>-\n)?((?:.+)(?:\n +>.+)?)", text, flags=re.MULTILINE)
    return [one.strip() for one in found]


def test_the_command_writes_the_dashboard_and_the_rules(tmp_path: Path) -> None:
    assert main(["dashboards", str(tmp_path / "new")]) == 0

    written = {one.name: one.read_bytes() for one in (tmp_path / "new").iterdir()}
    assert written == {one.name: one.read_bytes() for one in FILES}
    assert {"alerts.yml", "grafana.json"} <= written.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_metric_that_is_asked_for_is_exported(path: Path, exported: dict[str, str]) -> None:
    named = set(re.findall(r"\bsidecar_\w+", path.read_text(encoding="utf-8")))

    assert len(named) > 12
    assert named - set(exported) == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_label_that_is_asked_for_is_one_of_its_metric(
    path: Path, exported: dict[str, str]
) -> None:
    listed = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    wrong = []
    for expression in expressions(path):
        for name in set(re.findall(r"\bsidecar_\w+", expression)):
            found = re.search(rf"^- `{exported[name]}(?:\{{(.*)\}})?`", listed, flags=re.MULTILINE)
            assert found, exported[name]
            known = set((found[1] or "").split(", "))
            labels = set(re.findall(r"(?:by|without) \(([^)]+)\)", expression))
            asked = {one.strip() for part in labels for one in part.split(",")}
            asked |= set(re.findall(rf"{name}\{{(?:[^}}]*?\b)?(\w+)=", expression))
            wrong += [(name, one) for one in asked - OF_PROMETHEUS - known]

    assert wrong == []

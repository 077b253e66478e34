"""`sidecar adapters push`: by the hub's own client to a scripted hub, and to MLflow."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from deploy.adapters.export import MirrorError, open_mirror
from learner.adapter_folder import CARD, CONFIG, LINEAGE, WEIGHTS
from sidecar.store.models import AliasRow, AuditRow
from support.scripted_hub import ScriptedHub, scripted_hub
from tests.deploy.adapters.test_copies import Shop

FILES = {CARD, CONFIG, LINEAGE, WEIGHTS}


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedHub]:
    with scripted_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield served


def push(shop: Shop, version: str, to: str) -> int:
    return shop.run("adapters", "push", version, "--to", to, "--reason", "shared")


def pushed(shop: Shop) -> list[dict[str, Any]]:
    with shop.database.read() as session:
        rows = session.query(AuditRow).order_by(AuditRow.seq)
        return [row.after for row in rows if row.action == "adapter.pushed"]


def test_a_version_is_a_commit_and_a_tag_of_a_private_repository(
    shop: Shop, hub: ScriptedHub
) -> None:
    shop.add("one")
    shop.add("two", values=(0.5, 0.25))
    assert push(shop, "v1", "hub:o/n") == 0
    hub.files["left over"] = b"x"

    assert push(shop, "v2", "hub:o/n") == 0

    assert hub.created[0] == {"name": "n", "organization": "o", "visibility": "private"}
    assert set(hub.files) == FILES
    assert hub.files[WEIGHTS] == (Path(shop.version(2).path) / WEIGHTS).read_bytes()
    assert list(hub.tags) == ["v1", "v2"]
    assert [one["title"] for one in hub.commits] == [shop.version(1).name, shop.version(2).name]
    assert shop.version(2).digest in hub.commits[1]["message"]
    assert hub.tokens <= {"", "Bearer hf_secret"}
    assert [one["already"] for one in pushed(shop)] == [False, False]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the hub's client
def test_weights_that_a_hub_wants_by_lfs_come_whole_and_are_verified(
    shop: Shop,
    hub: ScriptedHub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    shop.add("one")
    capsys.readouterr()
    weights = (Path(shop.version(1).path) / WEIGHTS).read_bytes()
    hub.by_lfs, hub.storage_fails = {WEIGHTS}, 403
    assert push(shop, "v1", "hub:o/n") == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1, said
    assert "cannot be pushed to hub:o/n" in said
    assert "403" in said
    assert (hub.commits, hub.tags, pushed(shop)) == ([], {}, [])

    hub.storage_fails = 0
    assert push(shop, "v1", "hub:o/n") == 0

    digest = hashlib.sha256(weights).hexdigest()
    assert hub.objects == {digest: weights}
    assert hub.verified == [{"oid": digest, "size": len(weights)}]
    assert set(hub.files) == FILES
    assert hub.files[WEIGHTS] == weights


def test_a_second_push_sends_nothing_and_anothers_tag_is_refused(
    shop: Shop, hub: ScriptedHub, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.add("one")
    push(shop, "v1", "hub:o/n")

    assert push(shop, "v1", "hub:o/n") == 0
    assert len(hub.commits) == 1
    assert pushed(shop)[-1]["already"] is True

    hub.commits[0]["message"] = "digest of something else"
    assert push(shop, "v1", "hub:o/n") == 1
    assert "has a tag v1 that is not m--v1" in capsys.readouterr().err
    assert len(pushed(shop)) == 2


def test_a_hub_that_refuses_is_one_line_and_no_audit_row(
    shop: Shop, hub: ScriptedHub, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.add("one")
    hub.fails = 403

    assert push(shop, "v1", "hub:o/n") == 1

    said = capsys.readouterr().err
    assert "cannot be pushed to hub:o/n" in said
    assert "403" in said
    assert "hf_secret" not in said
    assert pushed(shop) == []


def test_what_is_not_what_was_registered_goes_nowhere(shop: Shop, hub: ScriptedHub) -> None:
    shop.add("one")
    weights = Path(shop.version(1).path) / WEIGHTS
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")

    assert push(shop, "v1", "hub:o/n") == 1

    assert (hub.created, hub.commits) == ([], [])


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("o/n", "hub:OWNER/NAME or mlflow:URI"),
        ("hub:", "hub:OWNER/NAME or mlflow:URI"),
        ("hub:../x", "OWNER/NAME"),
        ("hub:https://me:secret@h/o/n", "OWNER/NAME"),
    ],
)
def test_a_place_that_is_none_is_refused(to: str, words: str) -> None:
    with pytest.raises(MirrorError, match=words) as caught:
        open_mirror(to, "m")
    assert "secret" not in str(caught.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)

    with pytest.raises(MirrorError, match="pip install mlflow"):
        open_mirror("mlflow:http://tracking", "m")


@dataclass
class FakeMlflow:
    """The client calls that a push makes."""

    models: dict[str, dict[str, str]] = field(default_factory=dict)
    """Name -> its tags."""
    versions: list[SimpleNamespace] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    artifacts: list[set[str]] = field(default_factory=list)

    def search_model_versions(self, query: str) -> list[SimpleNamespace]:
        return [one for one in self.versions if one.tags["sidecar.digest"] in query]

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "1"

    def create_run(self, experiment: str, *, run_name: str, tags: Any) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id="r", artifact_uri="file:/a"))

    def log_artifacts(self, run: str, folder: str, path: str) -> None:
        self.artifacts.append({one.name for one in Path(folder).iterdir()})

    def set_terminated(self, run: str) -> None:
        pass

    def search_registered_models(self, query: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(tags=t) for name, t in self.models.items() if f"'{name}'" in query]

    def create_registered_model(self, name: str, *, tags: dict[str, str]) -> None:
        assert name not in self.models
        self.models[name] = tags

    def create_model_version(
        self, name: str, source: str, run: str, *, tags: dict[str, str]
    ) -> SimpleNamespace:
        made = SimpleNamespace(version=str(len(self.versions) + 1), tags=tags, source=source)
        self.versions.append(made)
        return made

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self.aliases[alias] = version


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    client, module = FakeMlflow(), ModuleType("mlflow")
    module.MlflowClient = lambda **_: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return client


def test_mlflow_gets_one_version_for_a_digest_and_the_aliases(
    shop: Shop, mlflow: FakeMlflow
) -> None:
    client = mlflow
    shop.add("one")
    shop.add("two", values=(0.5, 0.25))

    codes = [push(shop, one, "mlflow:http://tracking") for one in ("v1", "v2", "v1")]

    assert codes == [0, 0, 0]
    assert [one.tags["sidecar.version"] for one in client.versions] == ["1", "2"]
    assert client.versions[0].source == "file:/a/adapter"
    assert client.artifacts == [FILES, FILES]
    assert [one["where"] for one in pushed(shop)] == ["models:/m/1", "models:/m/2", "models:/m/1"]


def test_a_projects_line_has_a_registered_model_of_its_own_in_mlflow(
    shop: Shop, mlflow: FakeMlflow, tmp_path: Path
) -> None:
    shop.add("one")
    version = shop.version(1)
    for line in ("a/b", "a/b@@shop"):
        open_mirror("mlflow:http://t", line).push(Path(version.path), version, ())

    assert mlflow.models == {
        "a-b": {"sidecar.line": "a/b"},
        "a-b-shop": {"sidecar.line": "a/b@@shop"},
    }
    with pytest.raises(MirrorError, match="versions of a/b@@shop, not of a/b-shop"):
        open_mirror("mlflow:http://t", "a/b-shop").push(Path(version.path), version, ())


def test_a_registered_model_that_names_no_line_takes_versions(
    shop: Shop, mlflow: FakeMlflow
) -> None:
    """An older release made such models."""
    shop.add("one")
    version = shop.version(1)
    mlflow.models["a-b"] = {}

    open_mirror("mlflow:http://t", "a/b").push(Path(version.path), version, ())

    assert [one.tags["sidecar.version"] for one in mlflow.versions] == ["1"]


@pytest.mark.filterwarnings("ignore")  # of a package whose version is not pinned
@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="needs mlflow: pip install mlflow"
)
def test_a_real_mlflow_has_it(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # without a server the artifacts go to ./mlruns
    shop.add("one")
    with shop.database.write() as session:
        session.add(AliasRow(model="m", alias="anchor", adapter=shop.version(1).name, generation=1))
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    assert [push(shop, "v1", f"mlflow:{uri}") for _ in range(2)] == [0, 0]

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    (found,) = client.search_model_versions("name = 'm'")
    assert found.tags["sidecar.digest"] == shop.version(1).digest
    assert client.get_model_version_by_alias("m", "anchor").version == found.version
    folder = Path(client.download_artifacts(found.run_id, "adapter", str(tmp_path)))
    assert {one.name for one in folder.iterdir()} == FILES
    assert json.loads((folder / LINEAGE).read_text())["model"] == "m"

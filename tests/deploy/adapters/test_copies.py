"""`sidecar adapters diff`, `export` and `prune`, and what brings a removed folder back."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.adapters.diff import compare_weights, open_lora, total
from deploy.adapters.export import ExportError, export_version
from deploy.cli.main import main
from deploy.errors import InvalidAdapterError
from deploy.records import AdapterVersion
from deploy.registry import versions
from learner.adapter_folder import CARD, CONFIG, LINEAGE, WEIGHTS, folder_digest
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AuditRow, GroupDigestRow
from support.finished_run import finished_run
from tests.deploy.conftest import write_adapter

NOT_COMPARED = "\nIt was not compared with the version that it should replace.\n"
"""Last words of the model card of an exported version that had no canary."""


class Shop:
    """A store with imported versions, and the command that reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "sidecar.toml"
        url = f"sqlite:///{folder}/store.db"
        self.database = Database(url)
        self.database.upgrade()
        self.config.write_text(
            f'[serving]\nmodel = "m"\n[store]\nurl = "{url}"\n'
            f'[learner]\nadapters_dir = "{folder}/adapters"\n'
        )

    def run(self, *words: str) -> int:
        return main(["--config", str(self.config), *words])

    def add(self, name: str, **given: object) -> Path:
        write_adapter(self.folder / name, **given)  # type: ignore[arg-type]
        assert self.run("adapters", "import", str(self.folder / name), "--reason", name) == 0
        return self.folder / name

    def version(self, number: int) -> AdapterVersion:
        with self.database.read() as session:
            return versions.find(session, versions.resolve(session, "m", str(number)))

    def change(self, number: int, **values: object) -> None:
        with self.database.write() as session:
            row = session.get_one(AdapterRow, self.version(number).name)
            for name, value in values.items():
                setattr(row, name, value)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_the_norms_and_the_cosine_of_two_adapters_by_hand(tmp_path: Path) -> None:
    # A is [[1, 1]], B is [[1], [1]]: B A is all ones, of norm 2. The scale is 8 / 1.
    write_adapter(tmp_path / "a", rank=1, values=(1.0,))
    write_adapter(tmp_path / "b", rank=1, values=(-0.5,), dtype="F32")

    (one,) = compare_weights(open_lora(tmp_path / "a"), open_lora(tmp_path / "b"))

    # of b: A is [[-.5, -.5]], B the same upright: B A is all 0.25, of norm 0.5.
    assert (one.module, one.norm_a, one.norm_b) == ("layers.0.q_proj", 16.0, 4.0)
    assert (one.norm_difference, one.cosine) == (12.0, 1.0)


def test_an_adapter_that_adds_nothing_has_no_cosine(tmp_path: Path) -> None:
    # a: A = B = [[1, 1], [-1, -1]], so B A = 0. b: A = B = [[-1, 1], [1, -1]], so
    # B A = [[2, -2], [-2, 2]], of norm 4. The scale is 8 / 2.
    write_adapter(tmp_path / "a", rank=2, values=(1.0, 1.0, -1.0, -1.0), dtype="F16")
    write_adapter(tmp_path / "b", rank=2, values=(-1.0, 1.0, 1.0, -1.0), dtype="F64")

    (one,) = compare_weights(open_lora(tmp_path / "a"), open_lora(tmp_path / "b"))

    assert (one.norm_a, one.norm_b, one.cosine) == (0.0, 16.0, None)
    assert total([one]).norm_difference == 16.0


def test_opposite_adapters_have_a_cosine_of_minus_one(tmp_path: Path) -> None:
    # b: A = [[1, -1]], B = [[1], [-1]]: B A = [[1, -1], [-1, 1]], which is orthogonal to all ones.
    write_adapter(tmp_path / "ones", rank=1, values=(1.0,))
    write_adapter(tmp_path / "b", rank=1, values=(1.0, -1.0))
    ones = open_lora(tmp_path / "ones")
    opposite = replace(ones, scales={name: -one for name, one in ones.scales.items()})

    assert compare_weights(ones, open_lora(tmp_path / "b"))[0].cosine == 0.0
    assert compare_weights(ones, opposite)[0].cosine == -1.0
    assert compare_weights(ones, opposite)[0].norm_difference == 32.0


def test_a_module_that_one_adapter_leaves_alone_counts_as_zero(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", rank=1, values=(1.0,))
    other = write_adapter(tmp_path / "b", rank=1, values=(1.0,))
    weights = tmp_path / "b" / WEIGHTS
    weights.write_bytes(weights.read_bytes().replace(b"layers.0.", b"layers.1."))
    assert other

    found = compare_weights(open_lora(tmp_path / "a"), open_lora(tmp_path / "b"))

    assert [(one.norm_a, one.norm_b, one.cosine) for one in found] == [
        (16.0, 0.0, None),
        (0.0, 16.0, None),
    ]


def test_diff_says_descent_config_data_and_weights(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.add("one", values=(0.5,))
    shop.add("two", values=(0.25,), config={"lora_alpha": 16})
    shop.change(1, run_id="r1")
    shop.change(2, run_id="r2", parent=shop.version(1).name)
    with shop.database.write() as session:
        for run, lr in (("r1", 1e-4), ("r2", 2e-4)):
            session.add(finished_run(run, settings={"lr": lr}))
        for seq, (group, run, status) in enumerate(
            [("g1", "r1", "trained"), ("g2", "r2", "trained"), ("g3", "r2", "dropped")]
        ):
            session.add(
                GroupDigestRow(
                    group_id=group, group_seq=seq, run_id=run, exchange_id="e", adapter="base",
                    status=status, reason=None, scores=[], rewards=[], judge_model="j",
                    rubric_hash="h", content_digest="", user_digest="", session_digest="",
                    forgotten=False, deleted_at=1.0,
                )
            )  # fmt: skip
    capsys.readouterr()

    assert shop.run("adapters", "diff", "1", "2") == 0
    text = capsys.readouterr().out
    assert shop.run("adapters", "diff", "v2", "v1", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)

    assert shop.run("adapters", "diff", "1", "1") == 0
    assert "Descent: A and B are the same version\n" in capsys.readouterr().out
    assert "Descent: B descends from A, 1 version later" in text
    assert "  lora_alpha: 8 in A, 16 in B" in text
    assert "  lr: 0.0001 in A, 0.0002 in B" in text
    assert "Trained on: 0 groups in A alone, 1 in B alone, 1 in both" in text
    assert "layers.0.q_proj" in text
    assert found["data"]["only_a"] == ["g2"]
    assert found["config"] == {"lora_alpha": [16, 8]}
    # rank 4, all x: B A is 4 x^2 everywhere, norm 8 x^2; scales 16/4 and 8/4.
    assert [found["modules"][0][key] for key in ("norm_a", "norm_b")] == [2.0, 4.0]


@pytest.mark.parametrize("words", [("1", "base"), ("1", "v9")])
def test_diff_refuses_what_has_no_files(
    shop: Shop, capsys: pytest.CaptureFixture[str], words: tuple[str, str]
) -> None:
    shop.add("one")
    capsys.readouterr()

    assert shop.run("adapters", "diff", *words) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_exported_folder_is_the_registered_one_and_can_be_imported_elsewhere(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.add("one")

    assert shop.run("adapters", "export", "v1", str(tmp_path / "out")) == 0

    assert "digest: " + shop.version(1).digest in capsys.readouterr().out
    assert folder_digest(tmp_path / "out") == shop.version(1).digest
    assert {one.name for one in (tmp_path / "out").iterdir()} == {CONFIG, WEIGHTS, LINEAGE, CARD}
    assert (tmp_path / "out" / CARD).read_text().endswith(NOT_COMPARED)
    (tmp_path / "b").mkdir()
    other = Shop(tmp_path / "b")
    assert other.run("adapters", "import", str(tmp_path / "out"), "--reason", "copy") == 0
    assert other.version(1).digest == shop.version(1).digest


def test_an_exported_tar_holds_the_same_files(shop: Shop, tmp_path: Path) -> None:
    shop.add("one")

    assert shop.run("adapters", "export", "1", str(tmp_path / "v1.tar")) == 0

    with tarfile.open(tmp_path / "v1.tar") as archive:
        archive.extractall(tmp_path / "again", filter="data")
    assert folder_digest(tmp_path / "again") == shop.version(1).digest
    card = (Path(shop.version(1).path) / CARD).read_text()
    assert (tmp_path / "again" / CARD).read_text() == card + NOT_COMPARED


def test_an_export_of_changed_files_writes_nothing(shop: Shop, tmp_path: Path) -> None:
    shop.add("one")
    weights = Path(shop.version(1).path) / WEIGHTS
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")

    with pytest.raises(InvalidAdapterError, match="the folder was changed"):
        export_version(shop.version(1), tmp_path / "out", compared="")

    assert not (tmp_path / "out").exists()


def test_an_export_replaces_nothing(shop: Shop, tmp_path: Path) -> None:
    shop.add("one")
    (tmp_path / "mine").mkdir()

    with pytest.raises(ExportError, match="is there already"):
        export_version(shop.version(1), tmp_path / "mine", compared="")
    with pytest.raises(ExportError, match="make it first"):
        export_version(shop.version(1), tmp_path / "no" / "folder", compared="")


def test_prune_says_what_goes_and_why_the_rest_stays(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.add("one", values=(0.5,))
    shop.add("two", values=(0.25,))
    shop.change(1, state="rejected", created_at=1.0)
    capsys.readouterr()

    assert shop.run("adapters", "prune", "--dry-run") == 0
    text = capsys.readouterr().out
    assert Path(shop.version(1).path).is_dir()
    assert shop.run("adapters", "prune", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)

    assert "1 folder would go" in text
    assert "stays v2 [registered]: is registered" in text
    assert [one["version"] for one in found["removed"]] == [1]
    assert [one["version"] for one in found["kept"]] == [2]
    assert not Path(shop.version(1).path).exists()


def test_a_copy_of_its_weights_brings_a_removed_version_back(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shop.add("one")
    lineage = (Path(shop.version(1).path) / LINEAGE).read_text()
    shop.change(1, state="rejected", created_at=1.0)
    assert shop.run("adapters", "prune") == 0
    assert shop.version(1).removed_at is not None

    assert shop.run("adapters", "import", str(copy), "--reason", "wanted again") == 0

    back = shop.version(1)
    assert (back.removed_at, back.state) == (None, "rejected")
    assert folder_digest(Path(back.path)) == back.digest
    assert (Path(back.path) / LINEAGE).read_text() == lineage
    with shop.database.read() as session:
        actions = [row.action for row in session.query(AuditRow).order_by(AuditRow.seq)]
        assert session.query(AdapterRow).count() == 1
    assert actions == ["adapter.registered", "adapter.removed", "adapter.restored"]

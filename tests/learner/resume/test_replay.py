"""A run is trained again from its lineage, and the lineage has all that the dictionary lists."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest
from sqlalchemy import delete, func, select, update

from learner.adapter_folder import CONFIG, LINEAGE
from learner.grpo.trainer import GrpoTrainer
from learner.origin import ids_digest
from learner.replay import replay
from sidecar.settings import Settings
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AnswerRow, GroupRow, RunRow
from tests.learner.conftest import put_noise
from tests.learner.resume.conftest import FOREIGN, SCORES, Start, World

pytestmark = pytest.mark.timeout(1800)
DICTIONARY = Path(__file__).resolve().parents[3] / "docs" / "data-dictionary.md"


@dataclass
class Trained:
    """A finished run, and its store."""

    settings: Settings
    database: Database
    shown: list[str] = field(default_factory=list)
    """What a replay showed on a terminal."""

    @property
    def folder(self) -> Path:
        with self.database.read() as session:
            first = select(AdapterRow.path).where(AdapterRow.version == 1)
            return Path(session.scalars(first).one())

    @property
    def lineage(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / LINEAGE).read_text()))

    def change_lineage(self, **changes: Any) -> None:
        path = self.folder / LINEAGE
        path.chmod(0o644)
        path.write_text(json.dumps({**self.lineage, **changes}))

    def replay(self, reference: str = "r1") -> tuple[int, list[str]]:
        out = io.StringIO()
        code = replay(
            self.settings,
            self.database,
            reference,
            trainer=lambda _: GrpoTrainer(),
            out=out,
            show=self.shown.append,
        )
        return code, out.getvalue().splitlines()


@pytest.fixture
def trained(start: Start, world: World) -> Iterator[Trained]:
    """By a judge that uses a fifth of its scale, and is sure of it."""
    settings = world("one", loss="dppo_tv")
    database = Database(settings.store.url)
    with database.write() as session:
        session.execute(update(AnswerRow).values(score=0.4 + 0.2 * AnswerRow.score))
        wide = 0.2 + 3 * (AnswerRow.score - 0.4)  # that of the group which is left out for drift
        session.execute(update(AnswerRow).where(AnswerRow.group_id == FOREIGN).values(score=wide))
    put_noise(database, 0.001)
    start(settings, "r1")
    yield Trained(settings, database)
    database.close()


def test_the_same_weights_come_out_and_nothing_is_left(trained: Trained) -> None:
    before = sorted(trained.settings.learner.adapters_dir.rglob("*"))

    code, said = trained.replay("v1")

    digest = trained.folder.name
    references = [group["reference_spread"] for group in trained.lineage["groups"]]
    typical = 0.2 * pstdev(SCORES) * ((6 + 3**2) / 7) ** 0.5
    assert references == pytest.approx([typical] * 6)
    assert (code, said[-1]) == (
        0,
        f"the same weights: digest {digest}",
    )
    assert said[0].startswith(f"replaying run r1, which made m--v1-{digest[:12]}: 6 groups")
    shown = trained.shown
    assert shown[0] == "loading"
    assert shown[-2:] == ["measuring how far the policy is from the base", "saving the adapter"]
    assert [line for line in shown if line.startswith("step 1 of ")]
    assert [line for line in shown if line.endswith(" left")]
    assert sorted(trained.settings.learner.adapters_dir.rglob("*")) == before
    with trained.database.read() as session:
        assert session.scalar(select(func.count()).select_from(RunRow)) == 1


def test_other_weights_are_told_with_what_differs(trained: Trained) -> None:
    """As if another release of torch had trained it, with another rate."""
    lineage = trained.lineage
    trained.change_lineage(
        settings={**lineage["settings"], "learning_rate": 0.01},
        libraries={**lineage["libraries"], "torch": "1.0"},
    )

    code, said = trained.replay()

    assert code == 1
    assert "lineage.json was changed after m--v1-" in said[0]
    assert said[2].startswith("other weights: digest ")
    assert said[2].endswith(f"the version has {trained.folder.name}")
    assert re.fullmatch(r"  torch was 1\.0 and is [\d.]+\S*", said[3])


def delete_a_group(one: Trained) -> None:
    with one.database.write() as session:
        session.execute(delete(AnswerRow).where(AnswerRow.group_id == "2"))
        session.execute(delete(GroupRow).where(GroupRow.group_id == "2"))


def change_a_score(one: Trained) -> None:
    with one.database.write() as session:
        answers = select(AnswerRow).where(AnswerRow.group_id == "2", AnswerRow.index == 0)
        session.scalars(answers).one().score = 0.9


def change_the_base(one: Trained) -> None:
    one.change_lineage(base={**one.lineage["base"], "digest": "0" * 64})


def lose_the_base(one: Trained) -> None:
    one.change_lineage(base={**one.lineage["base"], "model": "/nowhere"})


def lose_the_parent(one: Trained) -> None:
    one.change_lineage(parent={**one.lineage["parent"], "name": "m--v0-gone"})


def damage(one: Trained) -> None:
    one.change_lineage(groups=[{}])


def age(one: Trained) -> None:
    one.change_lineage(format=1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (delete_a_group, "1 of its groups cannot be read any more (group 2: scores are missing)"),
        (change_a_score, "the content of its groups was changed in the store"),
        (change_the_base, "were changed (digest 000000000000, now "),
        (lose_the_base, "its base /nowhere is not there"),
        (lose_the_parent, "its parent m--v0-gone is not in the store any more"),
        (damage, "its lineage.json is damaged (KeyError: 'group_id')"),
        (age, "is of an older release, whose lineage lacks what a replay needs"),
    ],
)
def test_what_cannot_be_replayed_says_why(
    trained: Trained, change: Callable[[Trained], None], why: str
) -> None:
    change(trained)

    code, said = trained.replay()

    assert code == 1
    assert said[-1].startswith("not possible: ")
    assert why in said[-1]
    in_store = change in (delete_a_group, change_a_score)
    assert len(said) == (1 if in_store else 2), "a lineage that was changed is told first"


def test_a_run_that_is_not_there(trained: Trained) -> None:
    for name in ("v7", "nowhere", "9" * 30, ""):
        said = f"there is no run and no version {name}; `sidecar runs ls` has the runs"
        assert trained.replay(name) == (1, [f"not possible: {said}"])


def test_the_lineage_has_every_key_of_the_dictionary_and_no_other(trained: Trained) -> None:
    lineage = trained.lineage

    documented = keys_of("### `lineage.json`")
    assert list(lineage) == [key for key in documented if key != "imported"]
    assert lineage["format"] == 3
    assert lineage["base"]["model"] == trained.settings.serving.base_model_path
    assert re.fullmatch(r"[0-9a-f]{64}", lineage["base"]["digest"])
    assert lineage["parent"] == {
        "name": "base",
        "version": 0,
        "digest": "",
    }
    window = lineage["window"]
    ids = [group["group_id"] for group in lineage["groups"]]
    assert (window["groups"], window["group_ids_sha256"]) == (6, ids_digest(ids))
    assert window["first_exchange"]["started_at"] <= window["last_exchange"]["started_at"]
    assert window["filters"]["min_groups"] == 2
    assert lineage["reward"] == {"before": pytest.approx(0.5), "after": None}
    assert lineage["kl"]["to_base"] == lineage["algorithm"]["kl_to_base"]
    assert lineage["curves"] == "curves.png"
    assert (trained.folder / lineage["curves"]).is_file()
    assert (trained.folder / CONFIG).is_file()
    assert set(lineage["code"]) == {"commit", "dirty"}
    assert set(lineage["hardware"]) == {"system", "processor", "device"}
    assert lineage["resumed"] == []


def keys_of(heading: str) -> list[str]:
    """Return the keys of the list below a heading of the dictionary."""
    _, _, after = DICTIONARY.read_text(encoding="utf-8").partition(f"{heading}\n")
    listed = after.partition("\n#")[0]
    return re.findall(r"^- `([^`]+)`", listed, flags=re.MULTILINE)

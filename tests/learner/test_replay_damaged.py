"""A lineage that is damaged is told in one line; nothing is trained."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from learner.adapter_folder import LINEAGE
from learner.replay import replay
from learner.runs.lineage import FORMAT
from sidecar.settings import Learner, Serving, Settings, Store
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow

WHOLE: dict[str, Any] = {
    "format": FORMAT,
    "run_id": "r1",
    "settings": Learner().model_dump(mode="json"),
    "judge_noise": [],
    "groups": [],
    "algorithm": {"quiet_groups": 0},
    "code": {},
    "parent": {"name": "base"},
    "base": {"model": "/nowhere", "digest": None},
}


def without(name: str) -> str:
    return json.dumps({key: value for key, value in WHOLE.items() if key != name})


def with_value(name: str, value: object) -> str:
    return json.dumps({**WHOLE, name: value})


def no_trainer(_: Learner) -> NoReturn:
    raise AssertionError("there is nothing to train")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps(WHOLE), "its base /nowhere is not there"),
        ("[" * 200_000, "cannot be read: maximum recursion depth exceeded"),
        (without("run_id"), "is damaged (KeyError: 'run_id')"),
        (with_value("algorithm", None), "is damaged (AttributeError: "),
        (with_value("algorithm", {"quiet_groups": -1}), "is damaged (ValidationError: "),
        (with_value("algorithm", {"quiet_groups": 10**300}), "is damaged ("),
        (with_value("code", [1]), "is damaged (ValidationError: "),
        (with_value("parent", {"name": [1]}), "is damaged (ValidationError: "),
        (with_value("base", {"model": "a\0b"}), ""),
    ],
)
def test_a_damaged_lineage_is_told_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / LINEAGE).write_text(text)
    url = f"sqlite:///{tmp_path}/store.db"
    settings = Settings(serving=Serving(model="m"), store=Store(url=url), state_dir=tmp_path)
    database = Database(url)
    database.upgrade()
    with database.write() as session:
        row = AdapterRow(name="m--v1-x", model="m", version=1, digest="d", path=str(tmp_path))
        row.parent, row.state, row.created_at = "base", "retired", 1.0
        session.add(row)
    out = io.StringIO()

    code = replay(settings, database, "v1", trainer=no_trainer, out=out)

    database.close()
    said = out.getvalue()
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("not possible: ")
    assert why in said

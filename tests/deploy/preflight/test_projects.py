"""Rubrics of projects that no key names are warned of, where keys name the projects."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from deploy.preflight.settings import check_projects
from deploy.registry import api_keys
from sidecar.access.keys import ApiKey, FreshKey
from sidecar.settings import Settings
from sidecar.store.database import Database


def settings(folder: Path, **access: Any) -> Settings:
    rubrics = {"projects": {"shop": {"rubric": "a"}, "shpo": {"rubric": "b"}}}
    return Settings(
        access={"mode": "keys", **access},
        store={"url": f"sqlite:///{folder}/store.db"},
        judge={"model": "x/y", **rubrics},
    )


def make_key(folder: Path, project: str) -> str:
    def wanted(fresh: FreshKey) -> ApiKey:
        return ApiKey(key_id=fresh.key_id, project=project, secret_hash=fresh.secret_hash)

    with closing(Database(f"sqlite:///{folder}/store.db")) as database:
        database.upgrade()
        key, _ = api_keys.create(database, wanted, randomness=os.urandom, actor="t", now=1.0)
    return key.key_id


def test_a_rubric_of_a_project_without_a_key_is_warned_of(tmp_path: Path) -> None:
    make_key(tmp_path, "shop")
    revoked = make_key(tmp_path, "desk")
    with closing(Database(f"sqlite:///{tmp_path}/store.db")) as database:
        api_keys.revoke(database, revoked, reason="r", actor="t", now=2.0)

    found = list(check_projects(settings(tmp_path)))

    assert [(one.level, one.setting) for one in found] == [
        ("warning", "judge.projects.shpo"),
    ]
    assert found[0].text.endswith("the projects of the keys: shop")


def test_nothing_is_said_where_no_project_is_known_and_no_store_is_made(tmp_path: Path) -> None:
    assert list(check_projects(settings(tmp_path))) == []
    assert not (tmp_path / "store.db").exists()
    make_key(tmp_path, "bank")
    assert list(check_projects(settings(tmp_path, mode="open"))) == []
    assert len(list(check_projects(settings(tmp_path)))) == 2

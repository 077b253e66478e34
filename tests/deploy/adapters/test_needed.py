"""What is said of a folder's age."""

from __future__ import annotations

import pytest

from deploy.adapters.prune import DAY_S, FolderRule, decide_fates
from deploy.records import AdapterVersion

VERSION = AdapterVersion(
    name="m--v1-0123456789ab",
    model="m",
    version=1,
    digest="0" * 64,
    path="/a",
    parent="base",
    run_id=None,
    state="retired",
    reason=None,
    created_at=0.0,
)


@pytest.mark.parametrize(
    ("days", "goes", "why"),
    [
        (29.6, False, "used 29 days ago, adapters.folder_days is 30"),
        (30.0, True, "unused for 30 days"),
        (0.99, False, "used 23 h ago, adapters.folder_days is 30"),
    ],
)
def test_an_age_below_the_rule_does_not_look_as_if_it_had_reached_it(
    days: float, goes: bool, why: str
) -> None:
    rule = FolderRule(folder_days=30, keep_champions=0)

    [fate] = decide_fates([VERSION], {}, {}, rule, now=days * DAY_S)

    assert (fate.goes, fate.why) == (goes, why)

"""Each time of a reply stands there in Unix seconds and in ISO 8601."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from deploy.iso_times import deep, iso, sibling, with_siblings

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("at", "time"),
        ("created_at", "created_time"),
        ("since", "since_time"),
        ("until", "until_time"),
        ("cat", None),
        ("step", None),
        ("created_time", None),
    ],
)
def test_the_name_of_the_sibling(name: str, other: str | None) -> None:
    assert sibling(name) == other


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (1_764_000_000.25, "2025-11-24T16:00:00.250Z"),
        (0, "1970-01-01T00:00:00.000Z"),
        (None, None),
        (True, None),
        ("yesterday", None),
        (1e300, None),
        (float("nan"), None),
    ],
)
def test_a_time_in_iso_8601(at: object, text: str | None) -> None:
    assert iso(at) == text


def test_a_sibling_that_is_there_stays() -> None:
    assert with_siblings({"at": 0.0, "time": "mine"}) == {"at": 0.0, "time": "mine"}
    assert deep({"a": [{"at": 0.0}]})["a"] == [{"at": 0.0, "time": "1970-01-01T00:00:00.000Z"}]


async def test_the_description_says_date_time(api: Api) -> None:
    document = (await api.client.get("/admin/openapi.json")).json()

    adapter = document["components"]["schemas"]["AdapterOut"]
    assert adapter["properties"]["created_at"]["type"] == "number"
    assert adapter["properties"]["created_time"]["anyOf"][0] == {
        "type": "string",
        "format": "date-time",
    }
    assert {"created_at", "created_time", "forgotten_time"} <= set(adapter["required"])


async def test_replies_have_both(world: World, api: Api) -> None:
    name = world.register(1)
    world.promote(name)
    for path in ("/adapters", "/canaries", "/audit"):
        items = (await api.get(path)).json()["items"]
        times = list(_times(items))
        assert times, path
        for at, text in times:
            if at is None:
                assert text is None
            else:
                assert datetime.fromisoformat(text).timestamp() == pytest.approx(at, abs=1e-3)


def _times(value: Any) -> Iterator[tuple[Any, Any]]:
    for one in value:
        for key, found in one.items():
            other = sibling(key)
            if other is not None:
                yield found, one[other]

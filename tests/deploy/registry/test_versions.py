"""Versions, references and aliases."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deploy.errors import UnknownAdapterError
from deploy.registry import versions

if TYPE_CHECKING:
    from tests.deploy.conftest import World


def move(world: World, alias: str, to: str) -> bool:
    with world.database.write() as session:
        return versions.move_alias(
            session, model="m", alias=alias, to=to, now=5.0, actor="me", reason="because"
        )


@pytest.mark.both_stores
def test_every_way_to_name_a_version(world: World) -> None:
    first, second = world.register(1), world.register(2)
    move(world, "champion", second)
    move(world, "previous", first)

    with world.database.read() as session:
        found = {
            reference: versions.resolve(session, "m", reference)
            for reference in ("base", "champion", "previous", "1", "v2", first)
        }

    assert found == {
        "base": "base",
        "champion": second,
        "previous": first,
        "1": first,
        "v2": second,
        first: first,
    }


@pytest.mark.parametrize("reference", ["3", "v3", "m--v3-abc", "anchor", "", "latest", "-1", "vv1"])
@pytest.mark.both_stores
def test_an_unknown_reference_is_refused(world: World, reference: str) -> None:
    world.register(1)

    with world.database.read() as session, pytest.raises(UnknownAdapterError):
        versions.resolve(session, "m", reference)


@pytest.mark.both_stores
def test_a_version_of_another_model_is_not_found(world: World) -> None:
    name = world.register(1)

    with world.database.read() as session, pytest.raises(UnknownAdapterError):
        versions.resolve(session, "other", name)


@pytest.mark.both_stores
def test_a_moved_alias_has_a_generation_and_an_audit_row(world: World) -> None:
    name = world.register(1)

    assert move(world, "champion", name)
    assert not move(world, "champion", name)

    assert world.aliases()["champion"] == name
    assert world.actions()[2:] == ["alias.champion"]  # the first two are of the first start
    from sidecar.store.models import AuditRow

    row = world.rows(AuditRow)[-1]
    assert (row.actor, row.reason, row.subject) == ("me", "because", "m")
    assert row.before == {"adapter": "base"}
    assert row.after == {"adapter": name, "generation": 2}


@pytest.mark.both_stores
def test_versions_are_listed_the_newest_first(world: World) -> None:
    names = [world.register(version) for version in (1, 2, 10)]

    with world.database.read() as session:
        assert [one.name for one in versions.versions(session, "m")] == names[::-1]


@pytest.mark.both_stores
def test_ancestors_lead_to_the_base(world: World) -> None:
    first = world.register(1)
    second = world.register(2, parent=first)
    world.register(3)

    with world.database.read() as session:
        chain = versions.ancestors(session, second)

    assert [one.name for one in chain] == [second, first]
    assert chain[-1].parent == "base"


@pytest.mark.both_stores
def test_ancestors_end_at_a_parent_that_is_not_known(world: World) -> None:
    name = world.register(2, parent="m--v1-from-elsewhere")

    with world.database.read() as session:
        assert [one.name for one in versions.ancestors(session, name)] == [name]
        assert versions.ancestors(session, "base") == []


@pytest.mark.both_stores
def test_only_promoted_versions_have_been_champion(world: World) -> None:
    promoted, other = world.register(1), world.register(2)
    world.promote(promoted)

    with world.database.read() as session:
        assert versions.has_been_champion(session, "base")
        assert versions.has_been_champion(session, promoted)
        assert not versions.has_been_champion(session, other)

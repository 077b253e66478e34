"""Who was champion when, and a past that cannot be edited unseen."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from deploy.errors import UnknownAdapterError
from deploy.registry import versions
from deploy.registry.aliases import START, Held, Verified, add, held_at, verify
from deploy.registry.rollback import rollback
from tests.deploy.conftest import World


@pytest.fixture
def served(world: World) -> tuple[str, str]:
    """v1 promoted at 1,100 s, v2 at 1,200, rolled back at 1,300."""
    names = world.register(1), world.register(2, values=(0.3, 0.1))
    for name, at in zip(names, (1_100.0, 1_200.0), strict=True):
        world.clock.now = at
        world.promote(name)
    rollback(world.database, "m", reason="rude", actor="me", now=1_300.0)
    return names


def champion_at(world: World, at: float) -> str | None:
    with world.database.read() as session:
        held = {one.alias: one.adapter for one in held_at(session, "m", at)}
    return held.get("champion")


def verified(world: World) -> Verified:
    with world.database.read() as session:
        return verify(session)


@pytest.mark.both_stores
def test_who_was_champion_at_any_time(world: World, served: tuple[str, str]) -> None:
    first, second = served

    found = [champion_at(world, at) for at in (-1.0, 0.0, 1_099.9, 1_100.0, 1_250.0, 1_300.0)]

    assert found == [None, "base", "base", first, second, first]


@pytest.mark.both_stores
def test_of_two_moves_the_later_made_holds_also_when_the_clock_was_set_back(world: World) -> None:
    moves = [("m", "first", 2_000.0, 7), ("m", "second", 1_900.0, 8), ("other", "x", 1_900.0, 1)]
    with world.database.write() as session:
        for model, after, at, generation in moves:
            add(
                session,
                at=at,
                model=model,
                alias="anchor",
                before=None,
                after=after,
                generation=generation,
                actor="me",
                reason="",
            )

    with world.database.read() as session:
        found = [held_at(session, "m", at) for at in (1_899.0, 1_900.0, 2_000.0)]

    anchors = [[one for one in held if one.alias == "anchor"] for held in found]
    assert anchors == [[], [Held("anchor", "second", 8)], [Held("anchor", "second", 8)]]


def test_the_canary_alias_points_at_a_candidate_while_it_is_tried(world: World) -> None:
    name = world.register(1)
    world.clock.now = 2_000.0
    world.promote(name)

    assert "canary" not in world.aliases()
    assert verified(world).broken == ()


@pytest.mark.both_stores
def test_a_whole_history_is_whole(world: World, served: tuple[str, str]) -> None:
    found = verified(world)

    assert found.broken == ()
    # 2 at the first start; v1: canary, champion, canary gone (`previous` stays base); v2: the same
    # and `previous`; the rollback: champion (`previous` is v1 already)
    assert found.events == 2 + 3 + 4 + 1


EDITS = {
    "changed": ("UPDATE alias_event SET after = 'x' WHERE seq = 4", "move 4: it was changed"),
    "removed": ("DELETE FROM alias_event WHERE seq = 4", "move 5: the one before it"),
    "end removed": (
        "DELETE FROM alias_event WHERE seq = (SELECT max(seq) FROM alias_event)",
        "alias champion of m: points to",
    ),
    "hash anew": (
        f"UPDATE alias_event SET hash = '{START}' WHERE seq = 4",
        "move 5: the one before it",
    ),
    "alias": ("UPDATE alias SET adapter = 'x' WHERE alias = 'champion'", "alias champion of m"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_past_is_seen(world: World, served: tuple[str, str], edit: str) -> None:
    statement, words = EDITS[edit]
    with world.database.write() as session:
        session.execute(text(statement))

    assert any(words in one for one in verified(world).broken)


async def test_the_api_shows_a_time_and_moves_the_anchor_by_its_etag(
    world: World, served: tuple[str, str], api: Any
) -> None:
    first, second = served
    then = (await api.get("/aliases", at=1_250.0)).json()["items"]
    nowhere = await api.get("/aliases/anchor")
    path, body = "/admin/v1/aliases/anchor", {"adapter": "v1", "reason": "known good"}

    without = await api.client.put(path, json=body)
    moved = await api.client.put(path, json=body, headers={"if-match": nowhere.headers["etag"]})
    stale = await api.client.put(path, json=body, headers={"if-match": nowhere.headers["etag"]})

    assert {"alias": "champion", "adapter": second, "generation": 3} in then
    assert (nowhere.json()["adapter"], nowhere.headers["etag"]) == (None, '"g0"')
    assert (without.status_code, moved.status_code, stale.status_code) == (428, 200, 412)
    assert (moved.json()["adapter"], moved.headers["etag"]) == (first, '"g1"')
    assert world.aliases()["anchor"] == first


async def test_a_banned_version_is_no_anchor_until_its_ban_is_lifted(
    world: World, served: tuple[str, str], api: Any
) -> None:
    first, second = served  # the second one was rolled back
    path, headers = "/admin/v1/aliases/anchor", {"if-match": "*"}

    refused = await api.client.put(path, json={"adapter": second}, headers=headers)
    await api.post("/adapters/2/allow")
    allowed = await api.client.put(path, json={"adapter": second}, headers=headers)

    assert refused.status_code == 409
    said = refused.json()
    assert said["detail"].startswith(f"{second} cannot be what candidates are held to: these files")
    assert "`sidecar adapters allow" in said["detail"]
    assert said["allowed_actions"] == [first, "base"]
    assert (allowed.status_code, world.aliases()["anchor"]) == (200, second)


async def test_the_champion_is_put_by_the_rules_of_a_rollback(
    world: World, served: tuple[str, str], api: Any
) -> None:
    third = world.register(3, values=(0.2, 0.2))

    async def put(name: str, adapter: str) -> Any:
        etag = (await api.get(f"/aliases/{name}")).headers["etag"]
        return await api.client.put(
            f"/admin/v1/aliases/{name}", json={"adapter": adapter}, headers={"if-match": etag}
        )

    never, done = await put("champion", third), await put("champion", "base")
    previous, canary = await put("previous", "base"), await put("canary", "v1")

    assert [one.status_code for one in (never, done, previous, canary)] == [409, 200, 409, 409]
    assert world.table().champion == "base"
    assert world.adapter(served[0]).state == "rolled_back"
    assert (await api.get("/aliases/latest")).status_code == 422


@pytest.mark.both_stores
def test_a_move_at_a_whole_second_given_as_an_integer_is_no_edit(world: World) -> None:
    with world.database.write() as session:
        add(
            session,
            at=2_000,
            model="m",
            alias="anchor",
            before=None,
            after=None,
            generation=0,
            actor="me",
            reason="test",
        )

    assert verified(world).broken == ()


# Versions, references and aliases.


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


@pytest.mark.parametrize("reference", ["3", "v3", "m--v3-abc", "anchor", "", "-1", "vv1"])
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
def test_ancestors_end_at_a_parent_that_is_not_known(world: World) -> None:
    name = world.register(2, parent="m--v1-from-elsewhere")

    with world.database.read() as session:
        assert [one.name for one in versions.ancestors(session, name)] == [name]
        assert versions.ancestors(session, "base") == []

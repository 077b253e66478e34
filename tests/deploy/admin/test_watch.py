"""The reward watch by the admin API: what it says, and an override."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from deploy.admin.text import watch_lines
from ingest.reward_watch.store import read_override
from ingest.reward_watch.traits import Profile, RateOf, write_body
from sidecar.store.models import AdapterProfileRow, AdapterRow, AliasRow, AuditRow
from support.adapter_endpoints import MODEL

if TYPE_CHECKING:
    from tests.deploy.conftest import Api, World


CHAMPION = "v7"


def put_profile(world: World, adapter: str, share: float) -> None:
    rates: dict[Any, RateOf] = {
        "refusal": RateOf(n=1_000, hits=round(1_000 * share), weight=1_000.0, sessions=1_000)
    }
    body = write_body(Profile(answers=1_000, sessions=1_000, newest=9, rates=rates))
    with world.database.write() as session:
        session.merge(AdapterProfileRow(model=MODEL, adapter=adapter, at=1.0, body=body))


@pytest.fixture
def refusing(world: World) -> None:
    """A champion that refuses ten times as often as the base."""
    with world.database.write() as session:
        session.add(
            AdapterRow(
                name=CHAMPION,
                model=MODEL,
                version=7,
                digest="d",
                path="/p",
                parent="base",
                state="champion",
                created_at=1.0,
            )
        )
        session.merge(AliasRow(model=MODEL, alias="champion", adapter=CHAMPION, generation=1))
    put_profile(world, "base", 0.02)
    put_profile(world, CHAMPION, 0.2)


@pytest.mark.usefixtures("refusing")
async def test_it_tells_what_holds_and_the_figures_of_each_adapter(api: Api) -> None:
    found = (await api.get("/watch")).json()

    assert (found["champion"], found["held"], found["waived"]) == (CHAMPION, True, [])
    (finding,) = found["findings"]
    assert (finding["check"], finding["reference"]) == ("refusal", "base")
    assert finding["figures"]["share"] == 0.2
    shares = {one["adapter"]: one["shares"] for one in found["adapters"]}
    assert shares == {CHAMPION: {"refusal": 0.2}, "base": {"refusal": 0.02}}
    assert "length" in found["unknown"]


@pytest.mark.usefixtures("refusing")
async def test_an_override_is_audited_with_what_was_found_and_asks_for_a_run(
    world: World, api: Api
) -> None:
    etag = (await api.get("/learner")).headers["etag"]

    missing = await api.post("/learner/override", {"reason": "wanted"})
    done = await api.post("/learner/override", {"reason": "wanted"}, if_match=etag)

    assert missing.status_code == 428
    assert done.status_code == 200
    assert done.json()["run_requested"] is True
    found = (await api.get("/watch")).json()
    assert (found["held"], found["waived"]) == (False, ["refusal"])
    with world.database.read() as session:
        kept = read_override(session, MODEL)
        row = session.query(AuditRow).order_by(AuditRow.seq.desc()).first()
    assert kept is not None
    assert (kept.champion, kept.checks) == (CHAMPION, ("refusal",))
    assert row is not None
    assert (row.action, row.reason) == ("learner.override", "wanted")
    assert row.after["override"]["checks"] == ["refusal"]
    assert "20.0%" in row.after["found"]


async def test_without_a_finding_there_is_nothing_to_override(world: World, api: Api) -> None:
    etag = (await api.get("/learner")).headers["etag"]

    refused = await api.post("/learner/override", if_match=etag)

    assert refused.status_code == 409
    assert "does not hold the learner" in refused.text
    assert "learner.override" not in world.actions()


@pytest.mark.usefixtures("refusing")
async def test_a_paused_learner_is_resumed_before_it_is_overridden(api: Api) -> None:
    paused = await api.post("/learner/pause")

    refused = await api.post("/learner/override", if_match=paused.headers["etag"])

    assert refused.status_code == 409


@pytest.mark.usefixtures("refusing")
async def test_the_metrics_have_champion_and_base(world: World, api: Api) -> None:
    text = (await api.client.get("/metrics")).text

    assert f'sidecar_watch_share{{adapter="{CHAMPION}",kind="refusal"}} 0.2' in text
    assert "sidecar_learner_held 0.0" in text


@pytest.mark.usefixtures("refusing")
async def test_the_command_shows_it_in_lines(api: Api) -> None:
    lines = list(watch_lines((await api.get("/watch")).json()))

    assert lines[0] == f"The reward watch holds the learner; {CHAMPION} is champion."
    assert lines[1].startswith("  refusal: 20.0% of the champion's answers are refusals")
    (row,) = [line for line in lines if line.endswith(f"  {CHAMPION}")]
    assert row.split()[:3] == ["1,000", "20.0%", "-"]
    (heads,) = [line for line in lines if line.endswith("  adapter")]
    assert "clarifying  invalid_call  repetition" in heads
    assert len(heads) - len("adapter") == len(row) - len(CHAMPION)  # one column
    status = (await api.get("/status")).json()
    (one,) = [one for one in status["conditions"] if one["code"] == "would_hold"]
    assert "20.0% of the champion's answers are refusals" in one["message"]
    assert any(line.startswith("Not checked: length: ") for line in lines)


async def test_a_store_without_versions_shows_the_base(api: Api) -> None:
    found = (await api.get("/watch")).json()

    assert (found["champion"], found["held"], found["findings"]) == ("base", False, [])
    assert next(watch_lines(found)) == (
        "The reward watch does not hold the learner; base is champion."
    )

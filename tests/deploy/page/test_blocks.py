"""The four blocks of the first screen: the drawing, the figures, and each state of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from deploy.admin.out import ProgressOut
from deploy.page.curve import HEIGHT, TOP, WIDTH, draw_curve
from deploy.registry import tallies
from sidecar.store.models import ExchangeRow
from support import page_history
from support.finished_run import finished_run

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser


def estimate(mean: float, half: float) -> dict[str, Any]:
    return {"mean": mean, "low": mean - half, "high": mean + half, "groups": 20}


def progress(gains: list[dict[str, Any] | None], **changed: Any) -> ProgressOut:
    points = [
        {"adapter": f"m--v{n}-0123456789ab", "promoted_at": 1.0, "gain": one, "links": 1}
        for n, one in enumerate(gains, start=1)
    ]
    cost = dict.fromkeys(("judge_tokens", "candidate_tokens", "user_tokens"), 0) | dict.fromkeys(
        ("judge_usd", "candidate_share", "judge_usd_today", "run_minutes"), 0.0
    )
    fields: dict[str, Any] = {
        "sentence": "yes",
        "origin": "base",
        "champion": points[-1]["adapter"] if points else "base",
        "gain": gains[-1] if gains else None,
        "points": points,
        "kinds": [],
        "running": None,
        "pace": "",
        "cost": {**cost, "candidate_tokens_today": 0},
        "cost_of_a_point": "",
    }
    return ProgressOut.model_validate({**fields, **changed})


@pytest.mark.parametrize("number", [1, 2, 40])
@pytest.mark.parametrize("size", [0.001, 0.2, 1.0])
def test_every_mark_is_inside_and_stands_where_its_gain_is(number: int, size: float) -> None:
    gains = [estimate(size * (1 if n % 2 else -0.5), size / 4) for n in range(number)]

    found = draw_curve(progress(list(gains)))

    assert found is not None
    marks = found.marks[1:]
    for mark in marks:
        assert TOP <= mark.high <= mark.y <= mark.low <= HEIGHT
        assert 0.0 <= mark.x <= WIDTH
    up = [mark.y < found.zero for mark in marks]
    assert up == [one["mean"] > 0 for one in gains]
    assert found.marks[0].y == found.zero
    assert found.zero in [tick.y for tick in found.ticks]
    assert sum(mark.label for mark in found.marks) <= 9
    assert found.marks[-1].label


def test_a_mark_says_whether_its_interval_holds_zero_and_what_is_only_a_candidate() -> None:
    running = {
        "adapter": "m--v4-0123456789ab",
        "champion": "m--v3-0123456789ab",
        "difference": estimate(0.1, 0.3),
        "evidence": 3.0,
        "wanted": 20.0,
    }
    found = draw_curve(progress([estimate(0.3, 0.1), None, estimate(-0.2, 0.1)], running=running))

    assert found is not None
    assert [(one.name, one.kind) for one in found.marks] == [
        ("base", "origin"),
        ("v1", "better"),
        ("v3", "worse"),
        ("v4", "candidate"),
    ]
    # -0.2 + 0.1, and the half of the interval is 0.1 + 0.3.
    assert [one.name for one in found.marks if one.serves] == ["v3"]
    assert found.marks[-1].words == "v4: -0.100 (-0.500 to +0.300)"
    assert len(found.path.split()) == 3, "the candidate is not on the line"
    assert draw_curve(progress([None])) is None
    assert draw_curve(progress([])) is None


def blocks(html: str) -> dict[str, str]:
    """The text of each block by its heading, in the order of the page."""
    found = {}
    for part in html.split('<section class="block')[1:]:
        text = " ".join(
            re.sub(r"<[^>]+>", " ", part.split("</section>")[0].split(">", 1)[1]).split()
        )
        heading = re.search(r"<h2[^>]*>([^<]*)", part)
        assert heading is not None
        found[heading[1]] = text.removeprefix(f"{heading[1]} ")
    return found


async def test_the_four_blocks_have_their_places_in_each_state(
    world: World, browser: Browser
) -> None:
    await browser.reconciler.reconcile()
    nothing = blocks((await browser.get("/")).text)
    page_history.tell(world)
    trial = blocks((await browser.get("/")).text)
    with world.database.write() as session:
        run = finished_run("run-9", started_at=world.clock.now, ended_at=None, status="running")
        run.heartbeat_at = world.clock.now
        run.progress = {"phase": "learning", "answers_done": 1, "answers": 9, "step": 1, "steps": 8}
        session.add(run)
    learning = blocks((await browser.get("/")).text)
    world.control.away = True
    await browser.reconciler.reconcile()
    away = (await browser.get("/")).text

    assert list(nothing) == list(trial) == ["Serves", "Better?", "Learning", "Do"]
    assert nothing["Do"].startswith("Nothing has come yet. Set your agent's base_url")
    assert "Groups none waits" in nothing["Learning"]
    assert nothing["Better?"] == "Not known yet: no candidate was promoted."
    assert "Run none yet" in nothing["Learning"]
    assert (
        "v5 scored 0.084 higher than v3 (95% interval +0.021 to +0.147, 12 comparisons"
        in trial["Better?"]
    )
    assert "Bold: it serves. Open circle: the candidate so far." in trial["Better?"]
    assert "2 things to do" in trial["Serves"]
    assert "Last run finished" in trial["Learning"]
    assert "503 from the judge" in trial["Do"]
    assert "Run learning: step 1 of 8, 1 of 9 answers" in learning["Learning"]
    assert 'class="block down" aria-labelledby="serves"' in away
    assert blocks(away)["Serves"].startswith(
        "No vLLM can be reached, so users may get no answer. v3 serves again when one answers. 3"
    ), "and no candidate gets anybody"
    assert 'class="plain"><dt>Users' in away, "what was answered before is no good news"


async def test_the_users_figures_are_of_users_alone(world: World, browser: Browser) -> None:
    for number in range(10):
        world.serve(f"s-{number}", adapter="base")
    with world.database.write() as session:
        rows = session.query(ExchangeRow).order_by(ExchangeRow.seq).all()
        for number, row in enumerate(rows):
            row.timings = {"first_byte_s": 0.1 * (number + 1)}
        rows[0].outcome, rows[1].status = "upstream_error", 503
        rows[2].status, rows[2].timings = 400, {"first_byte_s": "?"}
        rows[3].origin, rows[4].public_model = "rehearsal", "other"

    with world.database.read() as session:
        found = tallies.users(session, world.line)
    page = blocks((await browser.get("/")).text)["Serves"]

    assert (found.requests, found.failed) == (8, 2)
    # 0.1, 0.2, 0.6, 0.7, 0.8, 0.9, 1.0
    assert found.first_byte_s == pytest.approx(0.7)
    assert found.first_byte_slow_s == pytest.approx(1.0)
    assert "2 of 8 requests failed" in page
    assert "700 ms (median) one in ten waits 1.0 s or more" in page

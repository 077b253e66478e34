"""The evidence of a canary on its page: the judged differences in order, figures in human units."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from deploy.canary.controller import quality_facts
from deploy.evidence.quality import Group, Quality, add_group
from deploy.page.text import Chart, Compared, difference_chart, evidence_rows
from deploy.registry.proof_rule import limits_of
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import CanaryRow, GateComparisonRow
from support import page_history
from tests.deploy.page.test_pages import words_of
from tests.deploy.page.test_shown import NOON

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.page.conftest import Browser, MakeBrowser

MEAN, LOW, HIGH = "mean difference", "low end of the interval", "high end of the interval"


def compared(place: int | None, difference: float | None, fault: str | None = None) -> Compared:
    return Compared(place=place, difference=difference, fault=fault)


def drawn(*given: Compared, made: int = 0, whole: tuple[Any, Any] = (None, None)) -> Chart:
    found = difference_chart(given, 0.05, made=made or len(given), whole=whole)
    assert found is not None
    return found


def test_the_judged_difference_is_the_mean_so_far_in_the_order_in_which_they_count() -> None:
    found = drawn(
        compared(4, 0.5), compared(3, -0.1), compared(2, None, "unknown"), compared(1, 0.2)
    )

    assert found.x == (1.0, 3.0, 4.0)
    assert found.series[MEAN] == pytest.approx((0.2, 0.05, 0.2))
    assert [(line.label, line.y) for line in found.lines] == [
        ("equal", 0.0),
        ("margin -0.05", -0.05),
    ]
    assert difference_chart([compared(1, None, "unknown")], 0.05, made=1, whole=(0, 0)) is None


def test_the_interval_that_is_drawn_ends_where_the_evidence_has_it() -> None:
    random_of = random.Random(7)
    rules, quality, given = CanarySettings(), Quality(), []
    for place in range(1, 61):
        fault = {5: "candidate", 9: "champion"}.get(place)
        difference = None if fault else random_of.uniform(-0.2, 0.4)
        given.append(compared(place, difference, fault))
        group = Group(champion=difference, anchor=difference, fault=fault)  # type: ignore[arg-type]
        quality = add_group(quality, group, limits_of(rules))
    facts = quality_facts(quality, frozenset(), rules)

    found = drawn(*reversed(given))

    lows, highs = found.series[LOW], found.series[HIGH]
    assert (lows[-1], highs[-1]) == pytest.approx((facts["low"], facts["high"]))
    assert lows[0] is not None
    assert lows[0] < lows[-1] < found.series[MEAN][-1] < highs[-1]  # type: ignore[operator]


def test_a_chart_that_lacks_the_first_comparisons_says_so_and_has_the_interval_of_all() -> None:
    newest = [compared(place, 0.1) for place in range(312, 112, -1)]

    found = drawn(*newest, made=312, whole=(0.05, 0.15))

    assert found.title.endswith("only the newest 200 of 312 comparisons")
    assert (found.x[0], found.x[-1]) == (113.0, 312.0)
    assert list(found.series) == [MEAN]
    assert [line.y for line in found.lines] == [0.0, -0.05, 0.05, 0.15]
    assert found.lines[-1].label == "high end of the interval, by all 312"


@pytest.mark.parametrize("promote_on", ["no_worse", "quick"])
async def test_the_page_draws_the_margin_of_its_rule_and_counts_the_newest(
    world: World, make_browser: MakeBrowser, promote_on: str
) -> None:
    page_history.tell(world)
    rules = {"promote_on": promote_on, "margin": 0.05}
    world.rules = world.rules.model_copy(update=rules)
    canary = next(row.canary_id for row in world.rows(CanaryRow) if row.state == "ramping")
    with world.database.write() as session:
        session.add_all(
            GateComparisonRow(
                comparison_id=f"c{place}", canary_id=canary, exchange_id=f"x{place}",
                status="set_aside" if place == 40 else "scored",
                difference=None if place == 40 else 0.1, place=place, answers=[],
            )
            for place in range(1, 41)
        )  # fmt: skip

    found = words_of((await make_browser().get(f"/canaries/{canary}")).text)

    assert "margin -0.05" in found
    assert "40: set aside" in found
    assert "21: scored, candidate minus champion +0.100" in found
    assert "20: scored" not in found
    assert "The newest 20 of 40." in found


def test_figures_are_times_shares_and_words_and_never_an_object_of_python() -> None:
    check = {"at": NOON - 60.0, "outcome": "ok", "value": 0.04, "why": ""}
    rows = dict(
        evidence_rows(
            {
                "metrics": {"errors": {"known_at": NOON - 60.0, "history": [check, check]}},
                "silent": {"known_at": 0.0},
                "queued": {"at": NOON - 3_600.0},
                "approval": {"since": NOON, "at": 0.0},
                "steps": [2_000, 5_000],
                "step_1": {"weight_bp": 2_000},
                "quality": {"harm": {"reached_at": 40, "threshold": 20.0}},
                "deep": {"a": {"b": {"c": {"d": {"e": [{"f": None, "g": True}]}}}}},
            },
            NOON,
        )
    )

    assert rows == {
        "metrics / errors / known at": "11:59 UTC",
        "metrics / errors / history": (
            "at 11:59 UTC, outcome ok, value 0.04; at 11:59 UTC, outcome ok, value 0.04"
        ),
        "silent / known at": "never",
        "queued / at": "11:00 UTC",
        "approval / since": "12:00 UTC",
        "approval / at": "never",
        "steps": "20%, 50%",
        "step 1 / weight": "20%",
        "quality / harm / reached at": "40",
        "quality / harm / threshold": "20",
        "deep / a / b / c": "d e g yes",
    }


async def test_an_ended_canary_names_no_next_step(world: World, browser: Browser) -> None:
    page_history.tell(world)
    states = {row.state: row.canary_id for row in world.rows(CanaryRow)}

    ended = words_of((await browser.get(f"/canaries/{states['promoted']}")).text)
    runs = words_of((await browser.get(f"/canaries/{states['ramping']}")).text)

    assert "Next step" not in ended
    assert "Promotion" not in ended
    assert "Next step" in runs


@pytest.mark.parametrize(
    ("low", "high", "good"),
    [(None, 20.0, "20 or less"), (0.5, None, "0.5 or more"), (0.5, 20.0, "0.5 to 20")],
)
async def test_the_limits_of_a_metric_read_as_a_sentence(
    world: World, browser: Browser, low: float | None, high: float | None, good: str
) -> None:
    page_history.tell(world)
    check = {"at": NOON, "outcome": "ok", "value": 1.0, "why": ""}
    state = {"mode": "signal", "min": low, "max": high, "history": [check], "known_at": NOON}
    with world.database.write() as session:
        row = next(one for one in session.query(CanaryRow) if one.state == "ramping")
        row.evidence = {**row.evidence, "metrics": {"errors": state}}
        canary_id = row.canary_id

    found = words_of((await browser.get(f"/canaries/{canary_id}")).text)

    assert f"ok 1 {good} 0 of" in found

"""A site with few sessions: the doctor names how long a canary takes there."""

from __future__ import annotations

import pytest

from deploy.doctor.collect import Diagnosis, LineFacts
from deploy.doctor.rules import of_lines
from sidecar.lines import Line
from sidecar.settings import Canary as CanarySettings

RETIRED = ("m--v5", "retired", "step 1: 16 of 20 exchanges and 4 of 20 sessions in 86400 s")


def found(
    a_day: float, *, canary: str = "", adapter: tuple[str, str, str] | None = RETIRED
) -> list[Diagnosis]:
    facts = LineFacts(line=Line(name="m"), adapter=adapter, canary=canary, sessions_a_day=a_day)
    return list(of_lines([facts], {}, CanarySettings()))


def test_a_canary_of_days_is_named_with_traffic_and_settings() -> None:
    (one,) = found(20.0)

    assert (one.stage, one.cause) == ("serving", "little_traffic")
    assert one.text == (
        "a canary wants 20 sessions in each step (20%, 50%): about 7 days at today's 20 sessions a "
        "day"
    )
    assert "canary.step_min_sessions" in one.to_do


def test_a_step_that_never_ends_is_called_so() -> None:
    (one,) = found(2.0)

    assert one.text.endswith(
        "about 70 days at today's 2 sessions a day, and a step ends after 28 at the latest"
    )


@pytest.mark.parametrize(
    ("a_day", "adapter"),
    [(100.0, RETIRED), (0.0, RETIRED), (20.0, None), (20.0, ("m--v5", "champion", "good"))],
)
def test_traffic_that_suffices_or_no_candidate_is_no_fault(
    a_day: float, adapter: tuple[str, str, str] | None
) -> None:
    assert found(a_day, adapter=adapter) == []


def test_a_canary_that_runs_is_enough_to_say_it() -> None:
    assert [one.cause for one in found(20.0, canary="step 1", adapter=None)] == ["little_traffic"]

"""Which requests are captured, and why the others are not."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.capture.sampling_rule import SamplingRule


def _never() -> float:
    raise AssertionError("no chance is needed here")


@pytest.mark.parametrize(
    ("rates", "asked", "reason"),
    [
        ({}, {}, None),
        ({}, {"header": "off"}, "header"),
        ({}, {"header": " OFF "}, "header"),
        ({}, {"header": "on"}, None),
        ({}, {"surface": "embeddings"}, "surface"),
        ({"surfaces": {"embeddings": 1.0}}, {"surface": "embeddings"}, "surface"),
        ({"surfaces": {"messages": 0.0}}, {"surface": "messages"}, "surface"),
        ({"surfaces": {"messages": 0.0}}, {}, None),
        ({"projects": {"a": 0.0}}, {"project": "a"}, "project"),
        ({"projects": {"a": 0.0}}, {"project": "b"}, None),
    ],
)
def test_rates_of_nought_and_one_need_no_chance(
    rates: dict[str, Any], asked: dict[str, str], reason: str | None
) -> None:
    rule = SamplingRule(1.0, **rates, chance=_never)

    asked = {"surface": "chat", "project": "default", "header": "", **asked}
    assert rule.skip_reason(**asked) == reason


@pytest.mark.parametrize(
    ("project", "surface", "rate"),
    [
        ("other", "chat", 0.5),
        ("a", "chat", 0.25),
        ("other", "completions", 0.1),
        ("a", "completions", 0.05),
    ],
)
def test_the_rates_are_multiplied(project: str, surface: str, rate: float) -> None:
    for drawn, reason in ((rate - 1e-9, None), (rate + 1e-9, "not_sampled")):
        rule = SamplingRule(
            0.5, projects={"a": 0.5}, surfaces={"completions": 0.2}, chance=iter([drawn]).__next__
        )

        assert rule.skip_reason(surface=surface, project=project, header="") == reason


def test_a_rate_of_nought_takes_nothing() -> None:
    rule = SamplingRule(0.0, chance=lambda: 0.0)

    assert rule.skip_reason(surface="chat", project="default", header="") == "not_sampled"

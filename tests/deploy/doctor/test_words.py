"""What the doctor says of one record, and of several."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.doctor.collect import Facts, Recent, StoreFacts
from deploy.doctor.report import report_lines
from deploy.doctor.rules import diagnose, of_tasks, waits_for
from deploy.funnel import STAGES, Funnel, Name, Stage
from sidecar.settings import Settings


def facts(*, passed: int, waiting: int) -> Facts:
    """passed: the first stages that passed a record; as many records wait in each."""

    def stage(name: Name) -> Stage:
        return Stage(
            name=name,
            unit="records",
            passed_as="passed",
            entered=waiting,
            passed=int(STAGES.index(name) < passed),
            ended={},
            waiting={"new": waiting},
            unreported=0,
        )

    funnel = Funnel(stages=tuple(map(stage, STAGES)), counters={})
    settings = Settings(groups={"settle_s": 60.0}, learner={"min_groups": waiting})
    return Facts(now=1_000.0, settings=settings, store=StoreFacts(funnel=funnel))


@pytest.mark.parametrize(
    ("selections", "cause"),
    [
        ({"held_out": 61, "chosen": 39}, "held_out"),
        ({"held_out": 60, "chosen": 40}, None),
        ({"session_cap": 50, "near_prompt_cap": 15, "chosen": 35, "new": 90}, "capped"),
        ({"session_cap": 50, "held_out": 50}, None),
        ({"held_out": 2}, None),
    ],
)
def test_most_exchanges_held_out_or_capped_is_what_stops_learning(
    selections: dict[str, int], cause: str | None
) -> None:
    found = facts(passed=7, waiting=1)
    assert found.store is not None
    store = replace(found.store, recent=Recent(selections=selections, sessions=1))

    causes = {one.cause: one.text for one in diagnose(replace(found, store=store))}

    assert causes.keys() & {"held_out", "capped"} == ({cause} if cause else set())
    if cause == "capped":
        assert causes[cause] == (
            "65 of the newest 100 decided exchanges do not teach: 50 session_cap, 15 "
            "near_prompt_cap; the newest 190 exchanges are of 1 session"
        )


def test_what_is_waited_for_agrees_with_its_number() -> None:
    assert "; 1 is decided 60 s " in waits_for(facts(passed=2, waiting=1))
    assert "; 2 are decided 60 s " in waits_for(facts(passed=2, waiting=2))
    assert waits_for(facts(passed=5, waiting=1)) == (
        "1 scored group for a run (learner.min_groups); 1 waits"
    )


def test_records_that_wait_for_no_stated_reason_wait_once() -> None:
    stage = Stage(
        name="bus", unit="records", passed_as="stored", entered=120, passed=0,
        ended={"lost": 2}, waiting={"waiting": 117, "new": 1}, unreported=0,
    )  # fmt: skip
    found = Facts(
        now=1_000.0,
        settings=Settings(),
        store=StoreFacts(funnel=Funnel(stages=(stage,), counters={})),
    )

    lines = [line for line in report_lines(found, []) if line.startswith("bus ")]

    assert [line.partition("stored; ")[2] for line in lines] == [
        "2 lost, 117 waiting, waiting: 1 new"
    ]


def test_it_says_what_a_runner_lacks() -> None:
    found = facts(passed=7, waiting=1)

    def said(**sections: dict[str, object]) -> str:
        settings = Settings.model_validate({"tasks": {"learn": "outcome"}, **sections})
        return of_tasks(replace(found, settings=settings))

    assert "rehearsals.tokens_per_day is not" in said(rehearsals={"runner": "http://127.0.0.1:1"})
    assert "rehearsals.runner is not" in said(rehearsals={"tokens_per_day": 9})
    assert not said(rehearsals={"runner": "http://127.0.0.1:1", "tokens_per_day": 9})


@pytest.mark.parametrize(
    ("tasks", "recent", "words"),
    [
        ({}, Recent(sessions=9), "0 have an outcome; send both"),
        ({}, Recent(sessions=9, in_tasks=4, with_outcome=3), 'set tasks.learn = "outcome"'),
        ({"learn": "outcome"}, Recent(sessions=9, in_tasks=4), "nothing to learn from"),
        ({"learn": "outcome", "key": "prompt"}, Recent(sessions=9, with_outcome=3), ""),
        ({"learn": "ruler"}, Recent(sessions=9, in_tasks=4), ""),
        ({"learn": "outcome"}, Recent(), ""),
    ],
)
def test_it_says_what_whole_tasks_lack(tasks: dict[str, str], recent: Recent, words: str) -> None:
    found = facts(passed=7, waiting=1)
    assert found.store is not None
    found = replace(
        found,
        settings=found.settings.model_copy(update={"tasks": Settings(tasks=tasks).tasks}),
        store=replace(found.store, recent=recent),
    )

    said = [line for line in report_lines(found, []) if line.startswith("Whole tasks: ")]

    assert bool(said) == bool(words)
    assert all(words in line for line in said)


def test_a_store_that_cannot_be_read_is_named_without_its_password() -> None:
    url = "postgresql://127.0.0.1:1/db?user=x&password=s3cret"

    said = report_lines(Facts(now=1.0, settings=Settings(store={"url": url})), ())

    assert "has no records yet" in said[0]
    assert "s3cret" not in said[0]
